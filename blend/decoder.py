"""A Hugging Face decoder run layer by layer on chosen rows: the one file that knows transformers' internals.

Nothing of an architecture is copied here. A second module tree shares the model's parameters but has its own config, whose
attention implementation is ours; decoder layers, rotary function, embedding and head are the model's own code. Stand-ins in
the place of its layers note what the decoder gives to each, and hand it the last layer's output. The model itself is not
changed, so it serves as the reference and for decoding while the tree runs in other threads.

Shapes: H KV heads, S rows, N tokens, D head size, M hidden size, V vocabulary.
"""

from __future__ import annotations

import copy
import sys
import threading
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache, partial
from typing import Any

import torch
import transformers
from torch import nn

from .anatomy import PROBED, Attended, LayerAnatomy, LayerCall, Probe, Projection, UnblendableError, examine, find_layers
from .attention import ChunkWindow, Rows
from .cpu_modules import PackedLinear, RowPieces, is_worth_packing, packed, with_fused_norms, with_modules
from .families import RotaryOfRows, max_positions_of, rope_border, turn_rows_alone
from .generation import DecodeKernel, DecodePass, OneSequencePass, SequenceKV, decode_kernel
from .interfaces import CosSin, KVGeometry, LayerKV, ResidentLayers
from .layer_passes import IsolatedPass, LayerPass, Pair, QuestionPass, RowsPass, Run, SharedPrefix, prefix_mask, runs
from .prompt import FusionResult, Prompt, Segment

IMPLEMENTATION = "cacheblend"
ROWS_AT_ONCE = 4096  # in one attention call; layer 0 is fastest in one from position 0 on


class _Thread(threading.local):
    """State of a thread: the pass whose attention runs, the calls of layers noted, the hidden state for the head."""

    layer_pass: LayerPass
    calls: list[GivenCall]
    order: list[int]  # of the layers called
    hidden: torch.Tensor
    examines = False


_THREAD = _Thread()
GivenCall = tuple[tuple[Any, ...], dict[str, Any]]  # a layer's arguments


def _attention(module: nn.Module, query: Any, key: Any, value: Any, attention_mask: Any = None, **kw: Any) -> tuple[Any, None]:
    return _THREAD.layer_pass.attend(module, query, key, value, attention_mask, **kw), None


def _mask(*_: Any, local_size: int | None = None, **__: Any) -> torch.Tensor | None:
    """No mask: the passes make their own. While a model is examined, the window in its place, which layers are given."""
    return torch.full((1, 1, 1, 1), local_size or 0) if _THREAD.examines else None


@cache
def _register_attention() -> None:
    """Make `IMPLEMENTATION` known to transformers, whose modules take seconds to import: not before a model is there."""
    transformers.AttentionInterface.register(IMPLEMENTATION, _attention)
    transformers.AttentionMaskInterface.register(IMPLEMENTATION, _mask)


class _Entered(Exception):  # noqa: N818  # a signal, no error
    """The decoder has given their inputs to as many layers as were asked about."""


class _StandIn(nn.Module):
    """Stands in for a layer, whose attributes it has."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self._of = (layer,)  # in a tuple: no submodule

    def __getattr__(self, name: str) -> Any:
        return getattr(super().__getattribute__("_of")[0], name)


class _Entrance(_StandIn):
    """Notes its layer's call; the last one ends the forward."""

    def __init__(self, layer: nn.Module, index: int, *, is_last: bool) -> None:
        super().__init__(layer)
        self._index, self._is_last = index, is_last

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        _THREAD.calls.append((args, kwargs))
        _THREAD.order.append(self._index)
        if self._is_last:
            raise _Entered
        hidden: torch.Tensor = args[0] if args else kwargs["hidden_states"]
        return hidden


class _Exit(_StandIn):
    """Stands in for all layers: returns the thread's hidden state, for norm and head."""

    def __init__(self, layer: nn.Module, *, as_tuple: bool) -> None:
        super().__init__(layer)
        self._as_tuple = as_tuple

    def forward(self, *_: Any, **__: Any) -> Any:
        return (_THREAD.hidden,) if self._as_tuple else _THREAD.hidden


class Decoder:
    """The `ModelRunner` over a Hugging Face causal LM, whose parameters it shares; config and modules are not touched.

    A row's state is its hidden state, and behind it the row's other inputs of all layers, where a family has such (Gemma 3n).

    Attributes:
        anatomy: what each layer caches, rotates and reads.
        layers: their modules.
        rows_at_once: rows in one attention call.
        rope_border: see `families.rope_border`.

    Raises:
        UnblendableError: what a layer does with its KV cannot be found out.
    """

    anatomy: list[LayerAnatomy]
    rows_at_once = ROWS_AT_ONCE
    rope_border: int | None = None

    def __init__(self, model: transformers.PreTrainedModel) -> None:
        _register_attention()
        self._reference_config = model.config
        self.config = model.config.get_text_config(decoder=True)
        self.dtype, self.device = model.dtype, next(model.parameters()).device
        weights = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
        tree = copy.deepcopy(model, {**weights})  # of a copy each: deepcopy notes in it what it has copied
        tree.set_attn_implementation(IMPLEMENTATION)
        self.rope_border = rope_border(self.config)
        if self.rope_border is not None:
            turn_rows_alone(tree, self.rope_border)
        owner, name = find_layers(tree, int(self.config.num_hidden_layers))
        layer_list: Any = tree.get_submodule(owner)._modules[name]
        every: list[Any] = list(layer_list)
        tree.get_submodule(owner)._modules[name] = nn.ModuleList()
        exit_tree = copy.deepcopy(tree, {**weights})
        self._entrance, self._entrances = tree, (tree.get_submodule(owner), name)
        with torch.no_grad():
            plain = self._examine(every)
        exit_tree.get_submodule(owner)._modules[name] = nn.ModuleList([_Exit(plain[-1], as_tuple=self._gives_tuples)])
        layers = [with_modules(layer, mlp=RowPieces(layer.mlp)) if hasattr(layer, "mlp") else layer for layer in plain]
        if is_worth_packing(model):
            layers = list(map(packed, layers))
            if type(model.get_output_embeddings()) is nn.Linear:
                exit_tree.set_output_embeddings(PackedLinear(exit_tree.get_output_embeddings()))
        self.layers, self._exit = layers, exit_tree
        # Decoding and chosen rows run fused norms; contiguous rows run the model's own norms, bit for bit.
        self._fused_layers, self._fused_exit = [with_fused_norms(layer) for layer in self.layers], with_fused_norms(exit_tree)
        attention = self.anatomy[0].attention
        eager = vars(sys.modules[type(attention).__module__]).get("eager_attention_forward")
        self._own_attention: Any = transformers.AttentionInterface().get(str(self.config._attn_implementation), eager)
        self.vocab_size = int(self.config.vocab_size)
        self.max_positions = max_positions_of(self.config)
        # About the multiply-adds of a row through a layer, without attention scores; experts that a row does not visit count.
        self.layer_parameters = sum(parameter.numel() for parameter in plain[-1].parameters())
        self._decode_kernels = [self._decode_kernel(layer, anatomy) for layer, anatomy in enumerate(self.anatomy)]

    def _examine(self, every: list[Any]) -> list[Any]:
        """Set `anatomy` and all that follows from it; returns the layers that the decoder runs, in order."""
        positions_S = torch.tensor(PROBED, device=self.device)
        self._stand_in([_Entrance(layer, index, is_last=layer is every[-1]) for index, layer in enumerate(every)])
        token_ids_S = torch.arange(len(PROBED), device=self.device) % int(self.config.vocab_size)
        _THREAD.examines = True
        try:
            with _refusing():
                given = self._enter(positions_S, input_ids=token_ids_S[None])
        finally:
            _THREAD.examines = False
        self._calls = calls = [LayerCall(args, kwargs, len(PROBED)) for args, kwargs in given]
        order = _THREAD.order
        if order != sorted(set(order)):
            raise UnblendableError("its decoder runs a layer more than once")
        plain = [every[index] for index in order]  # a decoder may leave layers out, as those that look at images
        self._parallel = calls[0].hidden.shape[0] if calls[0].hidden.ndim == 4 else 1
        self._hidden_size = self._parallel * calls[0].hidden.shape[-1]
        self._has_extra = calls[0].extra is not None
        state_1SM = self._state(given)
        if not torch.equal(state_1SM, self._state(self._enter(positions_S + 1, input_ids=token_ids_S[None]))):
            raise UnblendableError("positions are in its embeddings, so that stored KV cannot be moved")
        tables: list[tuple[Hashable, CosSin]] = [
            (id(call.tables), call.form.read(call.tables, len(PROBED), self.device)) for call in calls
        ]

        def run(layer: int, cos_sin: CosSin, probe: Any) -> None:
            with suppress(Attended), _refusing():
                self._step(plain[layer], layer, state_1SM, positions_S, cos_sin, probe)

        self.anatomy = examine(run, tables)
        run(0, tables[0][1], Probe({}, stops=False))  # the first that goes on to a layer's end
        self.layer_types: list[Hashable] = [anatomy.kind for anatomy in self.anatomy]
        self._first_of_table = {table: layer for layer, (table, _) in reversed(list(enumerate(tables)))}
        self._table_of_layer = [table for table, _ in tables]
        last = len(plain) - 1 if self._has_extra else max(self._first_of_table.values())
        needed = every[: order[last] + 1]
        self._stand_in([_Entrance(layer, index, is_last=layer is needed[-1]) for index, layer in enumerate(needed)])
        keeping = [anatomy for layer, anatomy in enumerate(self.anatomy) if anatomy.source == layer]
        cache_layers: list[Any] = self.empty_cache().layers
        held = [cache_layers[anatomy.cache_index] for anatomy in keeping]
        self.windows: list[int | None] = [layer.sliding_window if layer.is_sliding else None for layer in held]
        if chunk := getattr(self.config, "attention_chunk_size", None):
            self.windows = [ChunkWindow(chunk) if window == chunk else window for window in self.windows]
        for call, window in zip(calls, self.windows, strict=False):
            if isinstance(call.mask, torch.Tensor) and (int(call.mask) or None) != window:
                raise UnblendableError(
                    f"its config has a sliding window of {window} tokens, and its attention one of {int(call.mask) or None}; "
                    "correct sliding_window and layer_types in config.json"
                )
        heads = tuple((anatomy.key_heads, anatomy.head_dim) for anatomy in keeping)
        of_layers = heads if len(set(heads)) > 1 else ()
        shared = tuple(anatomy.source for anatomy in self.anatomy[len(keeping) :])
        self.geometry = KVGeometry(len(keeping), *heads[0], self.dtype, self.device, heads_of_layers=of_layers, shared=shared)
        return plain

    def _stand_in(self, entrances: list[_Entrance]) -> None:
        owner, name = self._entrances
        owner._modules[name] = nn.ModuleList(entrances)

    def _enter(self, positions_S: torch.Tensor, ends_S: torch.Tensor | None = None, **inputs: torch.Tensor) -> list[GivenCall]:
        """Arguments that the decoder gives to its layers for these tokens; `ends_S`: see `RotaryOfRows`."""
        _THREAD.calls, _THREAD.order, RotaryOfRows.of_thread.ends_S = [], [], ends_S
        with suppress(_Entered):
            self._entrance(**inputs, position_ids=positions_S[None], use_cache=False)
        calls, _THREAD.calls = _THREAD.calls, []
        return calls

    def _state(self, given: list[GivenCall]) -> torch.Tensor:
        """Rows' state (1, S, M) at layer 0."""
        hidden: torch.Tensor = LayerCall.argument(*given[0], self._calls[0].hidden_name)
        if self._parallel > 1:
            hidden = hidden.permute(1, 2, 0, 3).flatten(2)
        if self._has_extra:
            extras = [call.argument(*own, call.extra_name).flatten(2) for call, own in zip(self._calls, given, strict=True)]
            hidden = torch.cat([hidden, *extras], dim=-1)
        return hidden

    def _hidden(self, state_1SM: torch.Tensor) -> torch.Tensor:
        """The hidden state in a state, as layers take it."""
        hidden = state_1SM[..., : self._hidden_size] if self._has_extra else state_1SM
        return hidden.unflatten(-1, (self._parallel, -1)).permute(2, 0, 1, 3) if self._parallel > 1 else hidden

    def _extra(self, state_1SM: torch.Tensor, layer: int) -> torch.Tensor | None:
        if not self._has_extra:
            return None
        size = (state_1SM.shape[-1] - self._hidden_size) // len(self._calls)
        start = self._hidden_size + layer * size
        return state_1SM[..., start : start + size]

    def _decode_kernel(self, layer: int, anatomy: LayerAnatomy) -> DecodeKernel | None:
        is_plain = anatomy.source == layer and anatomy.caches_keys and not anatomy.is_packed
        return decode_kernel(self.geometry, anatomy.query_heads, layer) if is_plain else None

    def empty_cache(self) -> transformers.DynamicCache:
        return transformers.DynamicCache(config=self._reference_config)

    def embed(self, token_ids_S: torch.Tensor) -> torch.Tensor:
        return self._state(self._enter(torch.arange(len(token_ids_S), device=self.device), input_ids=token_ids_S[None]))

    def logits(self, hidden_1SM: torch.Tensor) -> torch.Tensor:
        return self._leave(self._exit, hidden_1SM[:, -1:])[0, -1].float()

    def _leave(self, tree: nn.Module, state_1SM: torch.Tensor) -> torch.Tensor:
        """Logits (1, S, V) of rows after the last layer: the causal LM's own forward, whose layers return them."""
        _THREAD.hidden = self._hidden(state_1SM)
        output: torch.Tensor = tree(input_ids=torch.zeros((1, 1), dtype=torch.long, device=self.device), use_cache=False).logits
        return output

    def rotary(self, positions_N: torch.Tensor) -> dict[Hashable, CosSin]:
        if self._has_extra:
            inputs = {"input_ids": torch.zeros_like(positions_N)[None]}
        else:  # one row of zeros stands for all: no embedding is looked up
            embedding: Any = self._entrance.get_input_embeddings()
            size = int(embedding.weight.shape[-1])
            zeros_11M = torch.zeros(1, 1, size, dtype=self.dtype, device=self.device)
            inputs = {"inputs_embeds": zeros_11M.expand(1, len(positions_N), size)}
        return self._rotary(self._enter(positions_N, **inputs), len(positions_N))

    def _rotary(self, given: list[GivenCall], tokens: int) -> dict[Hashable, CosSin]:
        tables = {
            table: (call := self._calls[layer]).form.read(call.argument(*given[layer], call.tables_name), tokens, self.device)
            for table, layer in self._first_of_table.items()
        }
        return {kind: tables[table] for kind, table in zip(self.layer_types, self._table_of_layer, strict=True)}

    def rotate(self, layer: int, k_1HSD: torch.Tensor, cos_sin: CosSin) -> torch.Tensor:
        return self.anatomy[layer].rotate(k_1HSD, cos_sin)

    def stored(self, layer: int, pair: Pair) -> Pair:
        """A layer's cached pair (H, S, D), (H, S, E) as it is stored."""
        return self.anatomy[layer].pack(*pair)

    def project_kv(self, layer: int, hidden_1SM: torch.Tensor) -> Pair:
        rows = hidden_1SM.shape[1]
        cos_1SX, sin_1SX = self._calls[layer].identity(rows, self.dtype, self.device)
        projection, positions_S = Projection(), torch.zeros(rows, dtype=torch.long, device=self.device)
        with suppress(Attended):
            self._step(self.layers[layer], layer, hidden_1SM, positions_S, (cos_1SX, sin_1SX), projection)
        return self.anatomy[layer].pack(*projection.cached)

    def run_rows(
        self, layer: int, hidden_1SM: torch.Tensor, rows: Rows, cos_sin_N: CosSin, layer_kv: LayerKV, *, scatter: bool
    ) -> torch.Tensor:
        pieces: list[torch.Tensor] = []
        anatomy = self.anatomy[layer]
        for piece, hidden_1PM in zip(rows.split(self.rows_at_once), hidden_1SM.split(self.rows_at_once, dim=1), strict=True):
            layer_pass = RowsPass(layer_kv, piece, self.windows[anatomy.source], anatomy, scatter=scatter)
            cos_sin_S = (cos_sin_N[0][:, piece.on_device_S], cos_sin_N[1][:, piece.on_device_S])
            block = (self.layers if piece.is_contiguous else self._fused_layers)[layer]
            pieces.append(self._step(block, layer, hidden_1PM, piece.on_device_S, cos_sin_S, layer_pass))
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)

    def run_question(
        self, layer: int, hidden_1SM: torch.Tensor, rows: Rows, cos_sin_N: CosSin, question: QuestionPass
    ) -> torch.Tensor:
        question.form = self.anatomy[layer]
        cos_sin_S = (cos_sin_N[0][:, rows.on_device_S], cos_sin_N[1][:, rows.on_device_S])
        return self._step(self._fused_layers[layer], layer, hidden_1SM, rows.on_device_S, cos_sin_S, question)

    def run_isolated(self, sequences: Sequence[Sequence[int]], shared: SharedPrefix | None = None) -> Iterator[Pair]:
        together = list(runs([len(ids) for ids in sequences]))
        first = 0 if shared is None else shared.tokens
        positions_N = torch.cat([torch.arange(first, first + len(ids), device=self.device) for ids in sequences])
        token_ids_N = torch.tensor([token for ids in sequences for token in ids], device=self.device)
        # Sequences after a shared prefix are turned by its factors: its keys are rotated already.
        ends = [] if self.rope_border is None else [(first or len(ids)) - 1 for ids in sequences for _ in ids]
        ends_N = torch.tensor(ends, device=self.device) if ends else None
        given = self._enter(positions_N, ends_N, input_ids=token_ids_N[None])
        hidden_1NM, rotary = self._state(given), self._rotary(given, len(positions_N))
        masks = {
            window: [(run, self._mask(window, run, hidden_1NM, shared)) for run in together] for window in set(self.windows)
        }
        for layer, window in enumerate(self.windows[:-1]):
            anatomy, cos_sin = self.anatomy[layer], rotary[self.layer_types[layer]]
            prefix = None if shared is None else shared.layers[layer]
            turns = partial(anatomy.rotate, cos_sin=cos_sin), partial(anatomy.rotate_queries, cos_sin=cos_sin)
            layer_pass = IsolatedPass(*turns, self._own_attention, masks[window], prefix, anatomy)
            identity = (torch.ones_like(cos_sin[0]), torch.zeros_like(cos_sin[1]))
            hidden_1NM = self._step(self.layers[layer], layer, hidden_1NM, positions_N, identity, layer_pass)
            yield layer_pass.k_1HND, layer_pass.v_1HND
        yield self.project_kv(len(self.windows) - 1, hidden_1NM)  # nobody reads the last layer's output

    def share(self, prefix_ids: Sequence[int]) -> SharedPrefix | None:
        """The KV of a prefix, for sequences that follow it; None if the model's attention accepts no mask of ours."""
        if self.config._attn_implementation not in ("sdpa", "eager") or not all(own.caches_keys for own in self.anatomy):
            return None
        rotary = self.rotary(torch.arange(len(prefix_ids), device=self.device))
        layers = [
            self.anatomy[layer].unpack(self.rotate(layer, k_1HPD, rotary[self.layer_types[layer]]), v_1HPD.clone())
            for layer, (k_1HPD, v_1HPD) in enumerate(self.run_isolated([prefix_ids]))
        ]
        return SharedPrefix(len(prefix_ids), layers)

    def reduce(self, heads_sum_N: torch.Tensor) -> torch.Tensor:
        return heads_sum_N  # one process holds all heads

    def _mask(self, window: int | None, run: Run, hidden_1NM: torch.Tensor, shared: SharedPrefix | None) -> Any:
        own_window = getattr(self.config, "sliding_window", None)
        if shared is not None or window not in (None, own_window):
            return prefix_mask(run, 0 if shared is None else shared.tokens, window, self.dtype, self.device)
        from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

        make = create_causal_mask if window is None else create_sliding_window_causal_mask
        return make(self.config, hidden_1NM[0, run.rows].unflatten(0, (run.sequences, run.tokens)), None, None)

    def sequence(self, fused: FusionResult) -> SequenceKV:
        """A sequence that goes on after a prompt; see `SequenceKV`."""
        return SequenceKV(fused, self.windows)

    @torch.no_grad()
    def decode(self, token_ids: Sequence[int], sequences: Sequence[SequenceKV]) -> torch.Tensor:
        """Append one token to each of R sequences; float32 logits (R, V) of the tokens after them."""
        if self.rope_border in [sequence.tokens for sequence in sequences]:  # never where there is none
            return torch.stack(list(map(self._cross, token_ids, sequences)))
        positions_R = torch.tensor([sequence.tokens for sequence in sequences], device=self.device)
        given = self._enter(positions_R, positions_R, input_ids=torch.tensor([list(token_ids)], device=self.device))
        hidden_1RM, rotary = self._state(given), self._rotary(given, len(sequences))
        for layer, (anatomy, kind) in enumerate(zip(self.anatomy, self.layer_types, strict=True)):
            kv, (cos, sin) = [sequence.layers[anatomy.source] for sequence in sequences], rotary[kind]
            if anatomy.caches_keys:
                layer_pass = DecodePass(kv, self._decode_kernels[layer])
                hidden_1RM = self._step(self._fused_layers[layer], layer, hidden_1RM, positions_R, (cos, sin), layer_pass)
                continue
            rows = []  # what attention reads is expanded from the cache, for each sequence
            for row, own in enumerate(kv):
                at = slice(row, row + 1)
                one = OneSequencePass(own)
                place = (cos[:, at], sin[:, at])
                rows.append(self._step(self._fused_layers[layer], layer, hidden_1RM[:, at], positions_R[at], place, one))
            hidden_1RM = torch.cat(rows, dim=1)
        for token, sequence in zip(token_ids, sequences, strict=True):
            sequence.tokens += 1
            sequence.token_ids.append(token)
        return self._leave(self._fused_exit, hidden_1RM)[0].float()

    def _cross(self, token: int, sequence: SequenceKV) -> torch.Tensor:
        """Append a token, which a longrope's short factors may not reach; float32 logits (V,) of the token after it.

        Then the sequence's KV is computed anew by the long ones, as transformers' `generate` does.
        """
        if sequence.tokens != self.rope_border:
            return self.decode([token], [sequence])[0]
        from .config import FusionConfig
        from .fusion import Fusion, FusionSteps  # which imports this file

        assert len(sequence.token_ids) == sequence.tokens
        prompt = Prompt.of([Segment([*sequence.token_ids, token])])
        fused = FusionSteps(Fusion(self, prompt, FusionConfig().resolve_selector(), ResidentLayers()).steps()).run()
        vars(sequence).update(vars(self.sequence(fused)))
        return fused.logits

    def _step(
        self,
        block: nn.Module,
        layer: int,
        state_1SM: torch.Tensor,
        positions_S: torch.Tensor,
        cos_sin: CosSin,
        layer_pass: LayerPass,
    ) -> torch.Tensor:
        """Run a layer on rows; returns their state after it."""
        extra = self._extra(state_1SM, layer)
        args, kwargs = self._calls[layer].filled(self._hidden(state_1SM), positions_S, cos_sin, layer_pass, extra)
        _THREAD.layer_pass, layer_pass.positions_S = layer_pass, positions_S
        try:
            output = block(*args, **kwargs)
        finally:
            del _THREAD.layer_pass  # and with it the layer's KV
        self._gives_tuples = isinstance(output, tuple)  # as all layers do
        hidden: torch.Tensor = output[0] if self._gives_tuples else output
        if self._parallel > 1:
            hidden = hidden.permute(1, 2, 0, 3).flatten(2)
        return torch.cat([hidden, state_1SM[..., self._hidden_size :]], dim=-1) if self._has_extra else hidden


@contextmanager
def _refusing() -> Iterator[None]:
    """Say of an error in a family's own code that it cannot be blended."""
    try:
        yield
    except (UnblendableError, Attended):
        raise
    except Exception as error:
        why = (str(error).splitlines() or [type(error).__name__])[0]
        raise UnblendableError(f"its layers do not run one by one ({why})") from error
