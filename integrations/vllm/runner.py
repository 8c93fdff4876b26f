"""The model runner over vLLM's own loaded layers: one file that knows the shape of vLLM's models, as of 0.32.

Decoder layers are shallow copies whose attention module is ours, wherever it stands; projections, norms, rotary embedding and
MLP are vLLM's own modules, tensor-parallel and quantised ones included. Two copies of each: one with the layer's rotary
embedding, one with none, which yields keys before RoPE whatever a family's projections and norms look like. Both run up to the
attention once, at start-up, which tells whether and where the layer rotates.

A hidden state is a pair (2, S, M): a layer's output, and the residual that vLLM's next norm adds to it. That norm goes on from
the sum in float32, so that one rounded to 16 bits in between would give other tokens than vLLM's own prefill. Behind the output
stand a row's further inputs of all layers, where a family has such (Gemma 4 E).

Shapes: H KV heads and Q query heads of this rank, S rows, N tokens, D head size, M hidden size, V vocabulary, R latent and P
position key of latent attention.
"""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import DynamicCache
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size, get_tp_group
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.linear import LinearBase

from cacheblend.base.errors import UnsupportedModelError
from cacheblend.blend import KVGeometry, LayerKV
from cacheblend.blend.anatomy import PROBED, Attended, Probe, Projection, UnblendableError
from cacheblend.blend.attention import Rows
from cacheblend.blend.cpu_modules import with_fused_norms, with_modules
from cacheblend.blend.decoder import ROWS_AT_ONCE
from cacheblend.blend.families import max_positions_of
from cacheblend.blend.interfaces import CosSin
from cacheblend.blend.layer_passes import AsCached, IsolatedPass, QuestionPass, RowsPass, Run, SharedPrefix, prefix_mask, runs
from cacheblend.store import LayerPair

from .cpu_attention import CpuAttention, CpuRowsPass


class _Attention(AsCached, nn.Module):
    """Stands where vLLM's `Attention` was: (S, Q * D), (S, H * D), (S, H * D) -> (S, Q * D), by the pass that is set.

    It is the `KVForm` of its layer, too.
    """

    def __init__(self, own: Any, layer: int, shape: tuple[int, int] | None = None) -> None:
        super().__init__()
        self._own, self.layer = (own,), layer  # in a tuple: no submodule
        self.kv_heads, self.head_dim = shape or (int(own.num_kv_heads), int(own.head_size))
        softcap, sinks_Q = (getattr(own.impl, name, None) for name in ("logits_soft_cap", "sinks"))
        self.scores = {"scaling": float(own.impl.scale), "softcap": softcap or None, "s_aux": sinks_Q}
        self.layer_pass: Any = None

    @property
    def own(self) -> Any:
        """The layer's attention in vLLM."""
        return self._own[0]

    @contextmanager
    def running(self, layer_pass: Any) -> Iterator[None]:
        """Set the pass, and let go of it and its tensors afterwards, whatever the layer raises."""
        self.layer_pass = layer_pass
        try:
            yield
        finally:
            self.layer_pass = None

    def forward(self, *qkv: Any, **_: Any) -> torch.Tensor:
        q_SX, k_SX, v_SX = qkv[:3]
        if k_SX is None:  # the layer reads an earlier one's
            k, v = self.layer_pass[self.layer]
        else:
            k, v = self.layer_pass.update(self._heads(k_SX), self._heads(v_SX), self.layer)
        out: torch.Tensor = self.layer_pass.attend(self, self._heads(q_SX), k, v, None, **self.scores)
        return out[0].flatten(1)

    def _heads(self, x_SX: torch.Tensor) -> torch.Tensor:
        return x_SX.view(len(x_SX), -1, self.head_dim).transpose(0, 1)[None]

    def write(self, k_THD: torch.Tensor, v_THD: torch.Tensor, slots_T: torch.Tensor) -> None:
        """Write rotated keys and values to the layer's pages."""
        self.own.impl.do_kv_cache_update(self.own, k_THD, v_THD, self.own.kv_cache, slots_T)


class _LatentAttention(_Attention):
    """Stands where `MLAAttention` was. Position key and latent are stored, in two halves, and expanded a layer at a time."""

    def __init__(self, own: Any, layer: int) -> None:
        self._sizes = int(own.qk_rope_head_dim), int(own.kv_lora_rank)
        super().__init__(own, layer, (1, sum(self._sizes) // 2))

    def forward(self, *qkv: Any, **_: Any) -> torch.Tensor:
        q_SQD, latent_SR, key_S1P = qkv[:3]
        key, latent = self.layer_pass.update(key_S1P.transpose(0, 1)[None], latent_SR[None, None], self.layer)
        sizes = self.own.qk_nope_head_dim, self.own.v_head_dim
        both_NQX = self.own.kv_b_proj(latent[0, 0])[0].view(latent.shape[2], -1, sum(sizes))
        k, v = both_NQX.transpose(0, 1)[None].split(sizes, dim=-1)
        k = torch.cat([k, key.expand(-1, k.shape[1], -1, -1)], dim=-1)
        out: torch.Tensor = self.layer_pass.attend(self, q_SQD.transpose(0, 1)[None], k, v, None, **self.scores)
        return out[0].flatten(1)

    def pack(self, one_11SP: torch.Tensor, other_11SR: torch.Tensor) -> LayerPair:
        k_11SD, v_11SD = torch.cat([one_11SP, other_11SR], dim=-1).chunk(2, dim=-1)
        return k_11SD, v_11SD

    def unpack(self, k_1HSD: torch.Tensor, v_1HSD: torch.Tensor) -> LayerPair:
        key, latent = torch.cat([k_1HSD, v_1HSD], dim=-1).split(self._sizes, dim=-1)
        return key, latent

    def write(self, k_THD: torch.Tensor, v_THD: torch.Tensor, slots_T: torch.Tensor) -> None:
        key_T1P, latent_T1R = self.unpack(k_THD, v_THD)
        own = self.own
        own.impl.do_kv_cache_update(latent_T1R[:, 0], key_T1P, own.kv_cache, slots_T, own.kv_cache_dtype, own._k_scale)


NATIVE_ROTARY = """--compilation-config '{"custom_ops": ["all", "-rotary_embedding"]}'"""
STANDS = {"Attention": _Attention, "MLAAttention": _LatentAttention}  # others, as chunked attention, see something else


class _NoRotary(nn.Module):
    """Stands where a rotary embedding was."""

    def forward(self, positions: torch.Tensor, q: torch.Tensor, k: Any = None, *_: Any) -> tuple[torch.Tensor, Any]:
        return q, k


class VllmRunner:
    """A causal LM that vLLM has loaded, run layer by layer on chosen rows of a prompt; see `ModelRunner`.

    One thread at a time, the worker's own, within vLLM's forward context.

    `settings` are vLLM's configuration of the model, whose `model.layers` it runs; `cpu_attention` is vLLM's own kernel, for
    the attention of rows that it supports, None for `attend`.

    Raises:
        UnsupportedModelError: its layers are not of the shape that can be run on chosen rows; the message names what is not.
    """

    def __init__(self, model: Any, settings: Any, device: torch.device) -> None:
        self._model = getattr(model, "language_model", model)
        self._base: Any = getattr(self._model, "model", None)
        self._hf_config, self._dtype = settings.hf_text_config, settings.dtype
        self._all_kv_heads = 1 if settings.use_mla else int(settings.get_total_num_kv_heads())
        self._refusal = f"{type(model).__name__} cannot be blended in vLLM: "
        self.ranks, self.rank = int(get_tensor_model_parallel_world_size()), int(get_tensor_model_parallel_rank())
        layers = list(getattr(self._base, "layers", []))
        parts = list[tuple[Any, Any]]()
        for index, layer in enumerate(layers):
            try:
                parts.append(_parts(layer, self._hf_config))
            except UnblendableError as error:
                raise UnsupportedModelError(f"{self._refusal}layer {index} {error}") from None
        if not layers:
            raise UnsupportedModelError(f"{self._refusal}it has no model.layers")
        self.attentions: list[Any] = [own for own, _ in parts]
        self._stubs = [STANDS[type(own).__name__](own, index) for index, own in enumerate(self.attentions)]
        self._ropes: dict[Hashable, Any] = {id(rope): rope for _, rope in parts}
        self.layer_types: list[Hashable] = [id(rope) for _, rope in parts]
        self._layers, self._unrotated = [], []
        for layer, stub, (own, rope) in zip(layers, self._stubs, parts, strict=True):
            self._layers.append(_with(layer, {own: stub}))
            self._unrotated.append(_with(layer, {own: stub, rope: _NoRotary()}))
        # For chosen rows; neighbours have the very bits of vLLM's own norms.
        self._fused_layers = [with_fused_norms(layer, residuals=True) for layer in self._layers]
        self.has_sinks = any(stub.scores["s_aux"] is not None for stub in self._stubs)
        self.geometry = self._find_geometry(device)
        self.windows: list[int | None] = [_window(own, self._hf_config) for own in self.attentions[: self.geometry.layers]]
        self.vocab_size = int(self._hf_config.vocab_size)
        self.max_positions = max_positions_of(self._hf_config)
        linear = [part for part in layers[-1].modules() if isinstance(part, LinearBase)]  # whose weights may be packed away
        self.layer_parameters = sum(part.input_size * part.output_size for part in linear)
        self.cpu_attention: CpuAttention | None = None
        self._hidden_size = int(self._hf_config.hidden_size)
        with torch.inference_mode():
            self._starts = [self._find_starts(layer) for layer in range(self.geometry.layers)]
        self._ropes[id(None)] = None  # of layers that rotate nothing, though they share a module with some that do
        for layer, starts in enumerate(self._starts):
            if starts is None:
                self.layer_types[layer] = id(None)

    def _find_geometry(self, device: torch.device) -> KVGeometry:
        """The shape of the KV of the layers that keep some, and whose KV the others read."""
        places = {own.layer_name: layer for layer, own in enumerate(self.attentions)}
        targets = [getattr(own, "kv_sharing_target_layer_name", None) for own in self.attentions]
        layers = sum(target is None for target in targets)
        if any(targets[:layers]):
            raise UnsupportedModelError(f"{self._refusal}layers that keep KV come after layers that read an earlier layer's")
        heads = tuple((stub.kv_heads, stub.head_dim) for stub in self._stubs[:layers])
        if len(set(heads)) > 1 and self.ranks > 1:
            raise UnsupportedModelError(f"{self._refusal}its layers have different shapes; run it without tensor parallelism")
        shared = tuple(places[target] for target in targets[layers:])
        return KVGeometry(layers, *heads[0], self._dtype, device, heads if len(set(heads)) > 1 else (), shared)

    def _find_starts(self, layer: int) -> tuple[int, int] | None:
        """Where in each head of keys, and of queries, the rotated numbers begin; None if the layer rotates none.

        Raises:
            UnsupportedModelError: keys depend on their positions in another way than by the layer's table.
        """
        positions_S = torch.tensor(PROBED, device=self.geometry.device)
        hidden_2SM = self.embed(torch.arange(len(PROBED), device=self.geometry.device) % self.vocab_size)
        probes: list[Any] = []
        for blocks, by in ((self._unrotated, 0), (self._unrotated, 5), (self._layers, 0)):
            probes.append(Probe({}))
            with suppress(Attended):
                self._run(blocks[layer], layer, hidden_2SM, positions_S + by, probes[-1])
        plain, moved, turned = [(*(x.clone() for x in probe.cached), probe.query) for probe in probes]
        is_fixed = all(map(torch.equal, plain[:2], moved[:2])) and torch.equal(plain[1], turned[1])
        if is_fixed and torch.equal(plain[0], turned[0]):
            if isinstance(self._stubs[layer], _LatentAttention) and self._ropes[self.layer_types[layer]] is not None:
                # vLLM 0.32's compiled function turns a copy of what is not contiguous, and drops it.
                raise UnsupportedModelError(f"{self._refusal}vLLM's rotary embedding turns no keys; use {NATIVE_ROTARY}")
            return None
        cos_sin = self.rotary(positions_S)[self.layer_types[layer]]
        starts = [self._find_start(layer, plain[one], turned[one], cos_sin) for one in (0, 2)]
        if not is_fixed or None in starts:
            raise UnsupportedModelError(f"{self._refusal}the keys of layer {layer} are not turned by one table of angles")
        return starts[0] or 0, starts[1] or 0

    def _find_start(self, layer: int, plain: torch.Tensor, turned: torch.Tensor, cos_sin: CosSin) -> int | None:
        allowed = (1e-4 if self._dtype == torch.float32 else 3e-2) * float(turned.abs().max())
        for start in (0, plain.shape[-1] - 2 * cos_sin[0].shape[-1]):
            if float((self._turn(layer, plain, cos_sin, start) - turned).abs().max()) <= allowed:
                return start
        return None

    def empty_cache(self) -> DynamicCache:
        return DynamicCache(config=self._hf_config)

    def embed(self, token_ids_S: torch.Tensor) -> torch.Tensor:
        hidden_SM: torch.Tensor = self._model.embed_input_ids(token_ids_S)
        if getattr(self._base, "hidden_size_per_layer_input", None):
            inputs_SLE = self._base.project_per_layer_inputs(hidden_SM, self._base.get_per_layer_inputs(token_ids_S))
            hidden_SM = torch.cat([hidden_SM, inputs_SLE.flatten(1)], dim=-1)
        return torch.stack([hidden_SM, torch.zeros_like(hidden_SM)])

    def logits(self, hidden_2SM: torch.Tensor) -> torch.Tensor:
        hidden_1M, residual_1M = hidden_2SM[:, -1:, : self._hidden_size].clone()  # see `_run`
        logits_1V: torch.Tensor = self._model.compute_logits(self._base.norm(hidden_1M, residual_1M)[0])
        return logits_1V[0].float()

    def reduce(self, heads_sum_N: torch.Tensor) -> torch.Tensor:
        """Sum over all ranks."""
        total_N: torch.Tensor = get_tp_group().all_reduce(heads_sum_N)
        return total_N

    def agree(self, flags: Sequence[bool]) -> list[bool]:
        """Of each flag, whether it is set on all ranks."""
        if self.ranks == 1 or not flags:
            return list(flags)
        both = torch.tensor(flags, dtype=torch.int32)
        torch.distributed.all_reduce(both, torch.distributed.ReduceOp.MIN, group=get_tp_group().cpu_group)
        return [bool(flag) for flag in both]

    def own_heads(self, pair: LayerPair) -> LayerPair:
        """The rank's own heads of a stored layer; where there are fewer than ranks, some have the same."""
        first = self.rank * self._all_kv_heads // self.ranks
        own = slice(first, first + self.geometry.kv_heads)
        return pair[0][own], pair[1][own]

    def all_heads(self, pair: LayerPair) -> LayerPair:
        """All heads of a layer, from the ranks that hold them."""
        if self.ranks == 1:
            return pair
        kv_2HTD = torch.stack(pair).to(self.geometry.device)
        every_2HTD: torch.Tensor = get_tp_group().all_gather(kv_2HTD.contiguous(), dim=1)
        step = every_2HTD.shape[1] // self._all_kv_heads  # ranks that hold the same head stand side by side
        k_HTD, v_HTD = every_2HTD[:, ::step].cpu()
        return k_HTD, v_HTD

    def rotary(self, positions_N: torch.Tensor) -> dict[Hashable, CosSin]:
        """Cosines and sines (1, N, half) from the tables of vLLM's rotary modules, in the model's dtype."""
        pairs: dict[Hashable, CosSin] = {}
        for kind, rope in self._ropes.items():
            table_NX = torch.empty(len(positions_N), 0) if rope is None else rope.cos_sin_cache[positions_N]
            cos_NX, sin_NX = table_NX.to(positions_N.device, self._dtype)[None].chunk(2, dim=-1)
            pairs[kind] = cos_NX, sin_NX
        return pairs

    def rotate(self, layer: int, k_1HSD: torch.Tensor, cos_sin: CosSin, *, are_queries: bool = False) -> torch.Tensor:
        starts = self._starts[layer]
        return k_1HSD if starts is None else self._turn(layer, k_1HSD, cos_sin, starts[are_queries])

    def _turn(self, layer: int, x_1HSD: torch.Tensor, cos_sin: CosSin, start: int) -> torch.Tensor:
        """Rotate the numbers of each head from `start` on: its halves, or its neighbours. Others are unchanged.

        In float32 and rounded once, as vLLM's kernels do.
        """
        cos, sin = (x_1NX[:, None].float() for x_1NX in cos_sin)
        half, stop = cos.shape[-1], start + 2 * cos.shape[-1]
        turned = torch.empty_like(x_1HSD)
        parts = [x[..., start:stop] for x in (x_1HSD, turned)]
        if self._ropes[self.layer_types[layer]].is_neox_style:
            (first, second), (one, other) = (x.split(half, dim=-1) for x in parts)
        else:
            (first, second), (one, other) = ((x[..., ::2], x[..., 1::2]) for x in parts)
        first, second = first.float(), second.float()
        one[:] = (first * cos).addcmul_(second, sin, value=-1)
        other[:] = (second * cos).addcmul_(first, sin)
        turned[..., :start], turned[..., stop:] = x_1HSD[..., :start], x_1HSD[..., stop:]
        return turned

    def project_kv(self, layer: int, hidden_2SM: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        projection, positions_S = Projection(), torch.zeros(hidden_2SM.shape[1], dtype=torch.long, device=hidden_2SM.device)
        with suppress(Attended):
            self._run(self._unrotated[layer], layer, hidden_2SM, positions_S, projection)
        k_1HSD, v_1HSD = self._stubs[layer].pack(*projection.cached)
        return k_1HSD, v_1HSD

    def run_rows(
        self, layer: int, hidden_2SM: torch.Tensor, rows: Rows, cos_sin_N: CosSin, layer_kv: LayerKV, *, scatter: bool
    ) -> torch.Tensor:
        pieces: list[torch.Tensor] = []
        source = layer if layer < self.geometry.layers else self.geometry.shared[layer - self.geometry.layers]
        for piece, hidden_2PM in zip(rows.split(ROWS_AT_ONCE), hidden_2SM.split(ROWS_AT_ONCE, dim=1), strict=True):
            layer_pass = RowsPass(layer_kv, piece, self.windows[source], self._stubs[layer], scatter=scatter)
            if self.cpu_attention is not None and piece.is_contiguous and len(piece) > 1:
                layer_pass = CpuRowsPass(self.cpu_attention, layer, layer_kv, piece, scatter=scatter)
            block = (self._layers if piece.is_contiguous else self._fused_layers)[layer]
            pieces.append(self._run(block, layer, hidden_2PM, piece.on_device_S, layer_pass))
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)

    def write_pages(self, layer: int, k_THD: torch.Tensor, v_THD: torch.Tensor, slots_T: torch.Tensor) -> None:
        """Write a layer's keys, rotated, and values, as they are stored, to these places of vLLM's pages."""
        self._stubs[layer].write(k_THD, v_THD, slots_T)

    def run_question(
        self, layer: int, hidden_2SM: torch.Tensor, rows: Rows, cos_sin_N: CosSin, question: QuestionPass
    ) -> torch.Tensor:
        question.form = self._stubs[layer]
        return self._run(self._fused_layers[layer], layer, hidden_2SM, rows.on_device_S, question)

    def run_isolated(self, sequences: Sequence[Sequence[int]], shared: SharedPrefix | None = None) -> Iterator[LayerPair]:
        """A single sequence runs as in vLLM's own prefill."""
        device = self.geometry.device
        together = list(runs([len(ids) for ids in sequences]))
        first = 0 if shared is None else shared.tokens
        positions_N = torch.cat([torch.arange(first, first + len(ids), device=device) for ids in sequences])
        hidden_2NM = self.embed(torch.tensor([token for ids in sequences for token in ids], device=device))
        rotary = self.rotary(positions_N)
        kernel = self.cpu_attention if shared is None and len(sequences) == 1 else None
        rows = Rows.of(positions_N.cpu(), device)
        for layer, window in enumerate(self.windows[:-1]):
            masks = [(run, self._mask(run, first, window)) for run in together]
            prefix = None if shared is None else shared.layers[layer]
            cos_sin = rotary[self.layer_types[layer]]
            turns = [partial(self.rotate, layer, cos_sin=cos_sin, are_queries=are) for are in (False, True)]
            attention = _isolated_attention if kernel is None else partial(_by_kernel, kernel, layer, rows)
            layer_pass = IsolatedPass(turns[0], turns[1], attention, masks, prefix, self._stubs[layer])
            hidden_2NM = self._run(self._unrotated[layer], layer, hidden_2NM, positions_N, layer_pass)
            yield _apart(layer_pass.k_1HND), _apart(layer_pass.v_1HND)
        k_1HND, v_1HND = self.project_kv(len(self.windows) - 1, hidden_2NM)
        yield _apart(k_1HND), _apart(v_1HND)

    def _mask(self, run: Run, prefix_tokens: int, window: int | None) -> torch.Tensor | None:
        """The attention mask of a run after a prefix; None where it is causal."""
        if not prefix_tokens and (window is None or window >= run.tokens):
            return None
        return prefix_mask(run, prefix_tokens, window, self._dtype, self.geometry.device)

    def share(self, prefix_ids: Sequence[int]) -> SharedPrefix | None:
        """The KV of a prefix, for sequences that follow it; None if attention reads what is expanded from it."""
        if any(isinstance(stub, _LatentAttention) for stub in self._stubs):
            return None
        positions_P = torch.arange(len(prefix_ids), device=self.geometry.device)
        rotary = self.rotary(positions_P)
        every = enumerate(zip(self.layer_types, self.run_isolated([prefix_ids]), strict=False))
        layers = [(self.rotate(layer, k, rotary[kind]), v.clone()) for layer, (kind, (k, v)) in every]
        return SharedPrefix(len(prefix_ids), layers)

    def _run(
        self, block: Any, layer: int, hidden_2SM: torch.Tensor, positions_S: torch.Tensor, layer_pass: Any
    ) -> torch.Tensor:
        """Rows through one layer, by one of its twins; returns (2, S, M)."""
        more_2SX = hidden_2SM[..., self._hidden_size :]
        given = {}
        if more_2SX.shape[-1]:
            given["per_layer_input"] = more_2SX[0].chunk(len(self._layers), dim=-1)[layer]
        hidden_SM, residual_SM = hidden_2SM[..., : self._hidden_size].clone()  # vLLM's fused norms write into both
        with self._stubs[layer].running(layer_pass):
            hidden_SM, residual_SM = block(positions=positions_S, hidden_states=hidden_SM, residual=residual_SM, **given)
        pair_2SM = torch.stack([hidden_SM, torch.zeros_like(hidden_SM) if residual_SM is None else residual_SM])
        return torch.cat([pair_2SM, more_2SX], dim=-1) if given else pair_2SM


def _apart(x_1HND: torch.Tensor) -> torch.Tensor:
    """Keys or values in memory of their own: they are views of a projection with the queries, two or three times as large."""
    return x_1HND.clone(memory_format=torch.contiguous_format)


def _with(module: Any, stands: Mapping[Any, nn.Module]) -> Any:
    """A shallow copy of a module, some of whose descendants are replaced; itself if none is."""
    if module is None or module in stands:
        return stands.get(module)
    children = {name: _with(child, stands) for name, child in module._modules.items()}
    changed = {name: child for name, child in children.items() if child is not module._modules[name]}
    return with_modules(module, **changed) if changed else module


def _parts(layer: Any, hf_config: Any) -> tuple[Any, Any]:
    """A layer's attention and rotary embedding, None for none.

    Raises:
        UnblendableError: they are not supported here; the message completes "layer 3 ...".
    """
    states = [module for module in layer.modules() if isinstance(module, AttentionLayerBase)]
    kinds = [type(state).__name__ for state in states]
    if len(states) != 1 or kinds[0] not in STANDS:
        found = ", ".join(kinds) or "nothing"
        raise UnblendableError(f"({type(layer).__name__}) has the state of {found}, and not of one {' or '.join(STANDS)}")
    (own,) = states
    for module in layer.modules():
        if (tables := getattr(module, "long_short_cos_sin_cache", None)) is not None:  # a longrope's, of which vLLM reads one
            first = module.original_max_position_embeddings if module.use_long_rope else 0
            module.cos_sin_cache, module.is_neox_style = tables[first:], True
    ropes = [module for module in layer.modules() if hasattr(module, "cos_sin_cache")]
    impl = getattr(own, "impl", None)
    scales_queries = kinds[0] == "MLAAttention" and getattr(hf_config, "llama_4_scaling", None) is not None
    refused = {
        f"has an attention ({type(impl).__name__}) that writes no KV by itself": not hasattr(impl, "do_kv_cache_update"),
        "has several rotary embeddings": len(ropes) > 1,
        "has ALiBi slopes": getattr(impl, "alibi_slopes", None) is not None,
        "has values of another size than its keys": getattr(own, "head_size_v", own.head_size) != own.head_size,
        "has attention of another type than decoders": getattr(own, "attn_type", "decoder") != "decoder",
        "scales queries by their positions": scales_queries,
    }
    for reason, is_so in refused.items():
        if is_so:
            raise UnblendableError(reason)
    return own, ropes[0] if ropes else None


def _window(attention: Any, hf_config: Any) -> int | None:
    """The layer's sliding window in tokens; None where it has none, or one that no prompt reaches."""
    window = getattr(attention, "sliding_window", None)
    positions = max_positions_of(hf_config)
    return None if window is None or (positions is not None and window >= positions) else int(window)


def _isolated_attention(
    _module: nn.Module,
    q_BQTD: torch.Tensor,
    k_BHTD: torch.Tensor,
    v_BHTE: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    scaling: float,
    softcap: float | None,
    s_aux: torch.Tensor | None,
) -> tuple[torch.Tensor, None]:
    """Attention output (B, T, Q, E) of sequences of one length; without a mask, causal."""
    if softcap is None and s_aux is None:
        out = scaled_dot_product_attention(
            q_BQTD, k_BHTD, v_BHTE, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=True
        )
        return out.transpose(1, 2), None
    groups = q_BQTD.shape[1] // k_BHTD.shape[1]
    k_BQTD, v_BQTE = k_BHTD.repeat_interleave(groups, 1), v_BHTE.repeat_interleave(groups, 1)
    scores = torch.matmul(q_BQTD * scaling, k_BQTD.transpose(2, 3))
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    rows, keys = scores.shape[-2:]
    if mask is None:
        mask = torch.full((rows, keys), -torch.inf, dtype=scores.dtype, device=scores.device).triu(1)
    scores = scores + mask
    if s_aux is not None:
        sinks = s_aux.to(scores.dtype)[:, None, None].expand(len(scores), -1, rows, 1)
        scores = torch.cat([scores, sinks], dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., :keys]
    return torch.matmul(weights, v_BQTE).transpose(1, 2), None


def _by_kernel(
    kernel: CpuAttention, layer: int, rows: Rows, _: nn.Module, q: Any, k: Any, v: Any, _mask: Any, **__: Any
) -> tuple[torch.Tensor, None]:
    """Attention of one sequence by vLLM's kernel, which knows the layer's window, scale and soft-capping."""
    return kernel.attend(layer, q, k, v, rows), None
