"""Hybrids: models with state-space or linear-attention layers, run by their own forward from states that are held.

A state is of all tokens before it, and not of one of them, so it is not put together from chunks. It is exact after the very
tokens that it was computed from: a prompt that begins with those goes on from there.

Shapes: H KV heads, S new tokens, T tokens of a run, W numbers of a token's keys and values in a layer, V vocabulary.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from cacheblend.base.errors import UnsupportedModelError
from cacheblend.store import BLOCK_TOKENS, STATE, BlockChain, LayerPair, PrefixBlocks, PrefixRun

from .decoder import Decoder
from .families import max_positions_of, rope_border
from .generation import SequenceKV, branch_cache
from .interfaces import KVGeometry

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from .prompt import FusionResult

PIECE_TOKENS = 256  # of a prompt in one forward; between two of them a server decodes
CHECKED_TOKENS = BLOCK_TOKENS + 8


@dataclass(frozen=True, slots=True, eq=False)
class State:
    """The model's cache after some tokens, on the CPU, without the keys and values of its layers of full attention."""

    cache: Any
    nbytes: int


class HybridSequence(SequenceKV):
    """A sequence in the model's own cache; None before its first token."""

    def __init__(self, cache: Any, tokens: int) -> None:
        self.cache, self.tokens, self.layers = cache, tokens, []


class HybridDecoder(Decoder):
    """Runs a hybrid by its own forward. Its layers do not run one by one: `embed`, `run_rows` and the like are not there.

    Attributes:
        carries: whether the model goes on from a state with several tokens at once. Else (Jamba, MiniMax in transformers 5.23)
            it decodes, and a prompt is one forward from its first token on.
        windows: None for each layer of full attention, whose KV is held by block; and `STATE` for all others together.

    Raises:
        UnsupportedModelError: the model does not go on from a state that was held as if it had computed all tokens at once.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model: Any = model
        self.config = model.config.get_text_config(decoder=True)
        self.dtype, self.device = model.dtype, next(model.parameters()).device
        self.vocab_size = int(self.config.vocab_size)
        self.max_positions = rope_border(self.config) or max_positions_of(self.config)
        layers = int(self.config.num_hidden_layers)
        self.geometry = KVGeometry(layers, 0, 0, self.dtype, self.device)  # none of it is stored by chunk
        self.layer_parameters = sum(parameter.numel() for parameter in model.parameters()) // layers
        self._takes_positions = "position_ids" in inspect.signature(model.forward).parameters
        try:
            self._check()
        except (RuntimeError, AttributeError, TypeError, KeyError, IndexError, ValueError) as error:
            raise UnsupportedModelError(f"{self.config.model_type} models do not go on from a state: {error}") from error

    def _check(self) -> None:
        """Find out what the layers hold, and go on from a state once."""
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(self.vocab_size, (CHECKED_TOKENS,), generator=generator).tolist()
        full_V, sequence = self.extend(self.resume(None), ids), self.resume(None)
        self.extend(sequence, ids[:BLOCK_TOKENS])
        held = list(enumerate(sequence.cache.layers))
        self._attention = [at for at, layer in held if getattr(layer, "keys", None) is not None and not layer.is_sliding]
        pairs = [(layer.keys, layer.values) for layer in map(sequence.cache.layers.__getitem__, self._attention)]
        self._shapes = [tuple((x.shape[1], x.shape[3]) for x in pair) for pair in pairs]
        widest = max((sum(heads * size for heads, size in shapes) for shapes in self._shapes), default=0)
        self._width = widest + widest % 2
        self.windows = [*[None] * len(self._attention), STATE]
        state = self.snapshot(sequence)
        token_bytes = len(self._attention) * self._width * self.dtype.itemsize
        self._spacing_tokens = state.nbytes / token_bytes if token_bytes else float("inf")
        chain, blocks = BlockChain(""), PrefixBlocks(2**40, self.windows)
        chain.extend(ids[:BLOCK_TOKENS])
        blocks.insert(chain.digests, 0, self.reader(sequence), state)
        with blocks.match(ids[:BLOCK_TOKENS], chain) as run:
            off = float((self.extend(self.resume(run), ids[BLOCK_TOKENS:]) - full_V).abs().max())
        allowed = (1e-4 if self.dtype == torch.float32 else 2e-2) * max(1.0, float(full_V.abs().max()))
        self.carries = off <= allowed
        if not self.carries:
            last_V = [self.extend(sequence, [token]) for token in ids[BLOCK_TOKENS:]][-1]
            off = float((last_V - full_V).abs().max())
        if not off <= allowed:
            raise ValueError(f"its logits are off by {off:.3g} (allowed: {allowed:.3g})")

    def empty_cache(self) -> Any:
        """None: the model makes its own."""
        return None

    def sequence(self, fused: FusionResult) -> HybridSequence:
        """A sequence that goes on after a prompt, whose own cache is not changed."""
        return HybridSequence(branch_cache(fused.cache), len(fused.token_ids))

    @torch.no_grad()
    def extend(self, sequence: HybridSequence, token_ids: Sequence[int]) -> torch.Tensor:
        """Append S tokens to a sequence; float32 logits (V,) of the token after them."""
        ids_1S = torch.tensor([token_ids], device=self.device)
        positions_1S = torch.arange(sequence.tokens, sequence.tokens + len(token_ids), device=self.device)[None]
        places = {"position_ids": positions_1S} if self._takes_positions else {}
        output = self._model(ids_1S, past_key_values=sequence.cache, use_cache=True, logits_to_keep=1, **places)
        sequence.cache, sequence.tokens = getattr(output, "past_key_values", None), sequence.tokens + len(token_ids)
        if sequence.cache is None:
            raise ValueError("its forward returns no cache under the name past_key_values")
        last_V: torch.Tensor = output.logits[0, -1].float()
        return last_V

    def decode(self, token_ids: Sequence[int], sequences: Sequence[SequenceKV]) -> torch.Tensor:
        """Append one token to each of R sequences, one after the other; float32 logits (R, V) of the tokens after them."""
        own = [sequence for sequence in sequences if isinstance(sequence, HybridSequence)]
        return torch.stack([self.extend(sequence, [token]) for token, sequence in zip(token_ids, own, strict=True)])

    def pieces(self, start: int, head_tokens: int, stop: int) -> Iterator[tuple[int, bool]]:
        """Where the forwards of a prompt end, and whether what is held there is worth its bytes for later prompts.

        It is at the end of the prompt's head and of the prompt, at the last border of a block; and between them where the
        attention layers' KV since the last one has as many bytes as the state.

        Args:
            start: tokens that are held, in full blocks.
            head_tokens: tokens of the prompt that others begin with.
            stop: tokens of the prompt.
        """
        borders = {tokens // BLOCK_TOKENS * BLOCK_TOKENS for tokens in (head_tokens, stop - 1)}
        if not self.carries:
            yield stop, False
            return
        last = start
        for end in sorted({*range(start + PIECE_TOKENS, stop, PIECE_TOKENS), *borders, stop}):
            is_held = end in borders or (end < stop and end - last >= self._spacing_tokens and end % BLOCK_TOKENS == 0)
            if end > start:
                yield end, is_held
            last = max(last, end) if is_held else last

    def reader(self, sequence: HybridSequence) -> Any:
        """A `ReadLayer` over the layers of full attention: a token's keys and values as two rows of one head."""

        def read(layer: int, start: int, stop: int) -> LayerPair:
            held = sequence.cache.layers[self._attention[layer]]
            rows_TW = torch.cat([x[0, :, start:stop].transpose(0, 1).flatten(1) for x in (held.keys, held.values)], dim=1)
            padded_1TW = torch.nn.functional.pad(rows_TW, (0, self._width - rows_TW.shape[1]))[None]
            return padded_1TW[..., : self._width // 2], padded_1TW[..., self._width // 2 :]

        return read

    def snapshot(self, sequence: HybridSequence) -> State:
        """The state after a sequence's tokens, copied to the CPU."""
        layers = map(sequence.cache.layers.__getitem__, self._attention)
        by_block = {id(x) for layer in layers for x in (layer.keys, layer.values)}
        copies = {id(x): x.new_empty(0) if id(x) in by_block else x.to("cpu", copy=True) for x in _tensors(sequence.cache)}
        return State(copy.deepcopy(sequence.cache, {**copies}), sum(x.nbytes for x in copies.values()))

    def resume(self, run: PrefixRun | None) -> HybridSequence:
        """A sequence after the tokens of a run, whose parts are copied; an empty one for None."""
        if run is None:
            return HybridSequence(None, 0)
        state: Any = run.held[STATE][-1]
        cache = copy.deepcopy(state.cache, {id(x): x.to(self.device, copy=True) for x in _tensors(state.cache)})
        for rank, (at, shapes) in enumerate(zip(self._attention, self._shapes, strict=True)):
            rows_TW, first = torch.cat(run.read_layer(rank), dim=-1)[0].to(self.device), 0
            for name, (heads, size) in zip(("keys", "values"), shapes, strict=True):
                x_THD = rows_TW[:, first : first + heads * size].unflatten(1, (heads, size))
                setattr(cache.layers[at], name, x_THD.transpose(0, 1)[None].contiguous())
                first += heads * size
        return HybridSequence(cache, len(run.token_ids))


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """All tensors of a cache, its layers, and the containers in them."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict | list | tuple) or (hasattr(value, "__dict__") and not isinstance(value, type)):
        parts = value if isinstance(value, list | tuple) else (value if isinstance(value, dict) else vars(value)).values()
        for part in parts:
            yield from _tensors(part)
