"""The fusor: blends chunks' stored KV into a prompt's, layer by layer (paper §4, §5.1).

Shapes: H KV heads, N tokens of the prompt, T tokens of a chunk, L layers, D head size.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from cacheblend.base.errors import InputError, PromptTooLongError, UnsupportedModelError
from cacheblend.store import ChunkKV, PrefixRun, context_digest

from .anatomy import UnblendableError
from .attention import row_kernel
from .config import FusionConfig
from .decoder import Decoder
from .families import VERIFIED, check_model, exact_reason, fingerprint_module
from .fidelity import check_against_model
from .fusion import Fusion, FusionSteps
from .generation import NextToken
from .gguf_file import add_end_tokens
from .hybrid import HybridDecoder
from .interfaces import LayerKV, LayerSink, LayerSource, ModelRunner, ResidentLayers
from .layer_passes import SharedPrefix
from .loading import DTypeOption, load_model, load_tokenizer
from .precompute import ChunkContext, passes, readings, run_pass
from .prompt import FusionResult, Prompt, Segment
from .selectors import QuestionAttention
from .widening import WIDE_RATIO, widening_steps

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# A shorter prefix is computed with every sequence after it, which keeps the bits of an unbatched forward.
SHARED_PREFIX_TOKENS = 64
NO_CONTEXT = ChunkContext(document_tokens=0)


class Fusor:
    """Precomputes chunks, blends them, and generates after the blend. Safe to use from several threads.

    Args:
        model: a Hugging Face causal LM of a verified family, put into evaluation mode, and otherwise left as it is. A hybrid
            prefills and generates, and the calls that blend raise UnsupportedModelError with `exact_reason`.
        tokenizer: its tokenizer, for those who want text; the fusor itself works on token ids.
        fingerprint: names the model in the store's keys; computed from the weights where not given.
        allow_unverified: accept a model of another family if ratio 1.0 has the model's own logits on it.

    Attributes:
        exact_reason: why a hybrid is not blended, in a sentence; None for a model that is.
        layer_parameters: of all layers that keep KV; about the multiply-adds of a row.

    Raises:
        UnsupportedModelError: the model's architecture cannot be blended; the message says what is missing.
    """

    def __init__(
        self, model: PreTrainedModel, tokenizer: Any = None, *, fingerprint: str | None = None, allow_unverified: bool = False
    ) -> None:
        check_model(model)
        model.eval()
        fingerprint = fingerprint or fingerprint_module(model, model.dtype)
        if reason := exact_reason(model):
            self._over(HybridDecoder(model), fingerprint, model, tokenizer, reason)
            return
        family = model.config.get_text_config(decoder=True).model_type
        try:
            decoder = Decoder(model)
        except UnblendableError as error:
            raise UnsupportedModelError(f"{family} models cannot be blended: {error}") from error
        if family not in VERIFIED and not allow_unverified:
            raise UnsupportedModelError(
                f"{family} is not among the {len(VERIFIED)} verified families (docs/models.md); pass allow_unverified=True "
                "(--allow-unverified) to use it if the built-in check against its own forward passes"
            )
        self._over(decoder, fingerprint, model, tokenizer)
        if family not in VERIFIED:
            check_against_model(self, family)

    @classmethod
    def from_runner(cls, runner: ModelRunner, fingerprint: str) -> Fusor:
        """Blend over an engine's own model: `precompute`, `fuse` and `fuse_steps` run; prefill and generation are the engine's.

        Engines with equal weights and dtype may share the fingerprint, and so the store's entries.
        """
        fusor = cls.__new__(cls)
        fusor._over(runner, fingerprint, None, None)
        return fusor

    def _over(
        self,
        runner: ModelRunner,
        fingerprint: str,
        model: PreTrainedModel | None,
        tokenizer: Any,
        exact_reason: str | None = None,
    ) -> None:
        self._model, self.tokenizer, self.exact_reason = model, tokenizer, exact_reason
        self._runner, self.fingerprint, self.max_positions = runner, fingerprint, runner.max_positions
        self.rope_border: int | None = getattr(runner, "rope_border", None)
        geometry = runner.geometry
        self.layer_parameters: int = getattr(runner, "layer_parameters", 0) * geometry.layers
        if exact_reason is None:
            for size in {geometry.heads(layer)[1] for layer in range(geometry.layers)}:
                row_kernel(geometry.dtype, geometry.device, size)  # compiled now, not at the first blend
        self._sharing = threading.Lock()
        self._shared: tuple[tuple[int, ...], SharedPrefix | None] | None = None

    @property
    def model(self) -> PreTrainedModel:
        """The Hugging Face model; an UnsupportedModelError if the fusor was made from another engine's runner."""
        if self._model is None:
            raise UnsupportedModelError("this fusor blends over another engine's model, which prefills and generates itself")
        return self._model

    @property
    def runner(self) -> ModelRunner:
        """The runner of the layers, one by one; an UnsupportedModelError for a hybrid."""
        if self.exact_reason is not None:
            raise UnsupportedModelError(self.exact_reason)
        return self._runner

    @property
    def decoder(self) -> Decoder:
        """The runner over the Hugging Face model; raises as `model` does."""
        _ = self.model  # refuses another engine's runner
        assert isinstance(self._runner, Decoder)
        return self._runner

    @classmethod
    def from_pretrained(
        cls,
        path_or_hub_id: str,
        device: str | torch.device = "cpu",
        dtype: DTypeOption = torch.float32,
        *,
        allow_unverified: bool = False,
        **kwargs: Any,
    ) -> Fusor:
        """Load a model from a directory, a GGUF file or the hub, or a known one by its name.

        See `locate_model` for the name, and `choose_dtype` for "auto"; `kwargs` (quantisation, attention) are for transformers.

        Raises:
            InputError: no model there, or a GGUF file that cannot be used.
            UnsupportedModelError: see the class.
        """
        model, fingerprint = load_model(path_or_hub_id, device, dtype, **kwargs)
        tokenizer = load_tokenizer(path_or_hub_id, **kwargs)
        add_end_tokens(model, tokenizer)
        return cls(model, tokenizer, fingerprint=fingerprint, allow_unverified=allow_unverified)

    def exact_fingerprint(self, tokens: int) -> str:
        """Names the model in KV that is exact in a prompt of so many tokens: a longrope turns long ones by other factors."""
        return f"long-{self.fingerprint}" if tokens > (self.rope_border or tokens) else self.fingerprint

    def precompute(self, token_ids: Sequence[int], prefix_ids: Sequence[int] = ()) -> ChunkKV:
        """The KV of a chunk computed after a prefix, position-free, on the CPU; the prefix's KV is not in it.

        The prefix (BOS, or a prompt's beginning) holds the attention sink that a chunk's first tokens would become.

        Raises:
            InputError: no tokens.
            PromptTooLongError: prefix and chunk are longer than the model's positions.
        """
        (kv,) = self.precompute_document([token_ids], prefix_ids)
        return kv

    def precompute_document(
        self,
        chunks: Sequence[Sequence[int]],
        prefix_ids: Sequence[int] = (),
        which: Collection[int] | None = None,
        context: ChunkContext = NO_CONTEXT,
    ) -> Iterator[ChunkKV]:
        """The KV of a document's chunks, each computed after the prefix and its context; raises as `precompute` does.

        `which` are indexes of the chunks to compute, None for all; `context` stands between the prefix and each chunk.
        """
        wanted = range(len(chunks)) if which is None else which
        return map(_apart, self.precompute_documents([(chunks, wanted)], prefix_ids, context))

    @torch.no_grad()
    def precompute_documents(
        self,
        documents: Iterable[tuple[Sequence[Sequence[int]], Collection[int]]],
        prefix_ids: Sequence[int] = (),
        context: ChunkContext = NO_CONTEXT,
    ) -> Iterator[ChunkKV]:
        """`precompute_document` for many, with chunks of several documents in one pass through the model.

        Documents in one pass do not see each other, nor are they padded; what they share is matrix products, whose results
        differ by float rounding with the number of rows. The KV of prefix and filler is computed once.

        Args:
            documents: token ids of a document's chunks, and indexes of the chunks to compute; read as they are needed.
            prefix_ids: see `precompute`.
            context: see `precompute_document`.

        Returns:
            The chunks' KV, document by document, in ascending order of index. Its tensors are views of the pass's, and each
            holds all of them in memory: to be stored, not collected.
        """
        prefix = tuple(prefix_ids)
        stands_after = (*prefix, *context.filler_ids)
        shared = self._share(stands_after)
        own = () if shared is not None else stands_after
        every = (reading for chunks, which in documents for reading in readings(chunks, which, context))
        for together in passes(every, len(own)):
            for reading in together:
                if not all(map(len, reading.chunks)):
                    raise InputError("a chunk needs at least one token")
                self._check_tokens([*stands_after, *reading.token_ids])
            for reading, index, layers in run_pass(self.runner, together, own, shared):
                digest = context_digest(context.filler_ids, reading.chunks[:index])
                yield ChunkKV(layers, reading.chunks[index], prefix, self.fingerprint, digest)

    def _share(self, prefix_ids: tuple[int, ...]) -> SharedPrefix | None:
        """The KV of a long prefix, cached for the next call; None below SHARED_PREFIX_TOKENS: recomputing is as fast."""
        if len(prefix_ids) < SHARED_PREFIX_TOKENS:
            return None
        self._check_tokens(prefix_ids)
        with self._sharing:
            if self._shared is None or self._shared[0] != prefix_ids:
                self._shared = prefix_ids, self.runner.share(prefix_ids)
            return self._shared[1]

    def fuse(
        self, segments: Iterable[Segment], config: FusionConfig | None = None, source: LayerSource | None = None
    ) -> FusionResult:
        """Blend the segments into one prompt's KV cache.

        Args:
            segments: the prompt, in order; see `Segment`.
            config: ratio and selector.
            source: brings the stored KV layer by layer; by default the segments' `ChunkKV`s are taken from memory.

        Raises:
            InputError: an empty or ill-formed prompt, or one beyond the model's positions (`PromptTooLongError`).
            IncompatibleKVError: KV of another model, prefix, dtype or text.
        """
        return self.fuse_steps(segments, config, source).run()

    def fuse_steps(
        self,
        segments: Iterable[Segment],
        config: FusionConfig | None = None,
        source: LayerSource | None = None,
        sink: LayerSink | None = None,
    ) -> FusionSteps:
        """`fuse`, one layer a step: a server puts decode steps between layers, and stops a cancelled request by closing it.

        A `sink` receives each finished layer; where a blend may be widened, all at the end. The result then has no logits.
        """
        prompt = Prompt.of(segments)
        self._check_tokens(prompt.token_ids)
        prompt.check_kv(self.fingerprint, self.runner.geometry, self.exact_fingerprint(len(prompt)))
        config, source = config or FusionConfig(), source or ResidentLayers()
        selector, nats = config.resolve_selector(), config.max_loss_nats
        if nats is not None and isinstance(selector, QuestionAttention) and 0 < selector.ratio < WIDE_RATIO:
            return FusionSteps(widening_steps(self.runner, prompt, selector.ratio, nats, source, sink))
        return FusionSteps(Fusion(self.runner, prompt, selector, source, sink).steps())

    def prefix_steps(self, token_ids: Sequence[int], device: torch.device | None = None) -> tuple[FusionSteps, PrefixRun]:
        """Compute the KV of a prompt's first tokens, one layer a step, on the model's device or another.

        Returns:
            The steps, and the KV for an exact segment, which is complete once the steps have ended.
        """
        geometry, tokens = self.runner.geometry, len(token_ids)
        shapes = [(2, heads, tokens, size) for heads, size in map(geometry.heads, range(geometry.layers))]
        sink = _PrefixSink([torch.empty(shape, dtype=geometry.dtype, device=device or geometry.device) for shape in shapes])
        steps = self.fuse_steps([Segment(token_ids)], sink=sink)
        model = self.exact_fingerprint(tokens)
        return steps, PrefixRun(tuple(token_ids), (), model, (None,) * geometry.layers, {None: [sink.layers]})

    @torch.no_grad()
    def prefill(self, token_ids: Sequence[int]) -> FusionResult:
        """Full prefill by the model's own forward: the reference that blending is held against.

        Raises:
            InputError: no tokens, or more than the model has positions (`PromptTooLongError`).
        """
        token_ids = [int(token) for token in token_ids]
        if not token_ids:
            raise InputError("the prompt is empty: give at least one token")
        self._check_tokens(token_ids)
        cache = self.decoder.empty_cache()
        ids_1N = torch.tensor([token_ids], device=self.decoder.device)
        output: Any = self.model(ids_1N, past_key_values=cache, use_cache=True, logits_to_keep=1)
        everywhere = (torch.arange(len(token_ids)),) * self.decoder.geometry.layers
        none = torch.zeros(len(token_ids))
        cache = output.past_key_values
        return FusionResult(output.logits[0, -1].float(), cache, tuple(token_ids), everywhere, everywhere, none, 0, 0)

    def generate(self, fused: FusionResult, max_new_tokens: int = 32, **kwargs: Any) -> list[int]:
        """Continue a prompt, whose cache is not changed: the first token from `fused.logits`.

        Args:
            fused: a fused or prefilled prompt.
            max_new_tokens: at least 1.
            kwargs: options of sampling, for `NextToken`.
        """
        drawn = NextToken(self.model, fused.token_ids, max_new_tokens, **kwargs)
        sequence = self.decoder.sequence(fused)
        drawn.draw(fused.logits)
        while drawn.finish_reason is None:
            drawn.draw(self.decoder.decode(drawn.token_ids[-1:], [sequence])[0])
        return drawn.token_ids

    def _check_tokens(self, token_ids: Sequence[int]) -> None:
        if self.max_positions is not None and len(token_ids) > self.max_positions:
            raise PromptTooLongError(
                f"{len(token_ids)} tokens are more than the model's {self.max_positions} positions; "
                "retrieve fewer or shorter chunks"
            )
        vocabulary = self._runner.vocab_size
        if wrong := [token for token in (min(token_ids), max(token_ids)) if not 0 <= token < vocabulary]:
            raise InputError(f"token id {wrong[0]} is not one of the model's {vocabulary}; use the model's own tokenizer")


@dataclass(frozen=True, slots=True, eq=False)
class _PrefixSink:
    """A sink that copies each layer to its place (2, H, T, D) as it is finished."""

    layers: list[torch.Tensor]

    def put(self, layer: int, layer_kv: LayerKV) -> None:
        self.layers[layer].copy_(layer_kv.kv_21HND[:, 0])


def _apart(kv: ChunkKV) -> ChunkKV:
    """Copy of the KV that does not reference the pass's larger tensors."""
    own = torch.contiguous_format
    return replace(kv, layers=[(k.clone(memory_format=own), v.clone(memory_format=own)) for k, v in kv.layers])
