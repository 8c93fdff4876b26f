"""The model runner over vLLM's own loaded layers: one file that knows the shape of vLLM's models, as of 0.32.

Decoder layers are shallow copies whose `self_attn.attn` is ours; projections, norms, rotary embedding and MLP are vLLM's own
modules, tensor-parallel and quantised ones included. Two copies of each: one with the layer's rotary embedding, one with none,
which yields keys before RoPE whatever a family's projections and norms look like.

A hidden state is a pair (2, S, M): a layer's output, and the residual that vLLM's next norm adds to it. That norm goes on from
the sum in float32, so that one rounded to 16 bits in between would give other tokens than vLLM's own prefill.

Shapes: H KV heads and Q query heads of this rank, S rows, N tokens, D head size, M hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import DynamicCache
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size, get_tp_group

from cacheblend.base.errors import UnsupportedModelError
from cacheblend.blend import KVGeometry, LayerKV
from cacheblend.blend.attention import Rows
from cacheblend.blend.cpu_modules import with_fused_norms
from cacheblend.blend.decoder import ROWS_AT_ONCE, with_modules
from cacheblend.blend.interfaces import CosSin
from cacheblend.blend.layer_passes import IsolatedPass, LayerPass, QuestionPass, RowsPass, Run, SharedPrefix, prefix_mask, runs
from cacheblend.store import LayerPair

from .cpu_attention import CpuAttention, CpuRowsPass


class _Attention(nn.Module):
    """Stands where vLLM's `Attention` was: (S, Q * D), (S, H * D), (S, H * D) -> (S, Q * D), by the pass that is set."""

    def __init__(self, own: Any, layer: int) -> None:
        super().__init__()
        self.kv_heads, self.head_dim, self.layer = int(own.num_kv_heads), int(own.head_size), layer
        self.scaling, self.softcap = float(own.impl.scale), getattr(own.impl, "logits_soft_cap", None) or None
        self.layer_pass: LayerPass | None = None

    @contextmanager
    def running(self, layer_pass: LayerPass) -> Iterator[None]:
        """Set the pass, and let go of it and its tensors afterwards, whatever the layer raises."""
        self.layer_pass = layer_pass
        try:
            yield
        finally:
            self.layer_pass = None

    def forward(self, q_SX: torch.Tensor, k_SX: torch.Tensor, v_SX: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        assert self.layer_pass is not None
        k, v = self.layer_pass.update(self._heads(k_SX), self._heads(v_SX), self.layer)
        out = self.layer_pass.attend(self, self._heads(q_SX), k, v, None, scaling=self.scaling, softcap=self.softcap)
        return out[0].flatten(1)

    def _heads(self, x_SX: torch.Tensor) -> torch.Tensor:
        return x_SX.view(len(x_SX), -1, self.head_dim).transpose(0, 1)[None]


class _NoRotary(nn.Module):
    """Stands where a rotary embedding was."""

    def forward(self, positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
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
        self._all_kv_heads = int(settings.get_total_num_kv_heads())
        layers = list(getattr(self._base, "layers", []))
        family = type(model).__name__
        for index, layer in enumerate(layers):
            if trouble := _trouble(layer):
                raise UnsupportedModelError(f"{family} cannot be blended in vLLM: layer {index} {trouble}")
        if not layers:
            raise UnsupportedModelError(f"{family} cannot be blended in vLLM: it has no model.layers")
        attentions: list[Any] = [layer.self_attn.attn for layer in layers]
        self._stubs = [_Attention(attention, index) for index, attention in enumerate(attentions)]
        shapes = {(stub.kv_heads, stub.head_dim) for stub in self._stubs}
        if len(shapes) > 1:
            raise UnsupportedModelError(f"{family} cannot be blended in vLLM: its layers have (heads, head size) {shapes}")
        self._layers = [
            with_modules(layer, self_attn=with_modules(layer.self_attn, attn=stub))
            for layer, stub in zip(layers, self._stubs, strict=True)
        ]
        # For chosen rows; neighbours have the very bits of vLLM's own norms.
        self._fused_layers = [with_fused_norms(layer, residuals=True) for layer in self._layers]
        none = _NoRotary()
        self._unrotated = [with_modules(x, self_attn=with_modules(x.self_attn, rotary_emb=none)) for x in self._layers]
        self._ropes = {id(layer.self_attn.rotary_emb): layer.self_attn.rotary_emb for layer in layers}
        self.layer_types: list[Hashable] = [id(layer.self_attn.rotary_emb) for layer in layers]
        self.windows: list[int | None] = [_window(attention, self._hf_config) for attention in attentions]
        self.geometry = KVGeometry(len(layers), *shapes.pop(), self._dtype, device)
        self.vocab_size = int(self._hf_config.vocab_size)
        self.max_positions: int | None = getattr(self._hf_config, "max_position_embeddings", None)
        self.cpu_attention: CpuAttention | None = None
        self.ranks, self.rank = int(get_tensor_model_parallel_world_size()), int(get_tensor_model_parallel_rank())

    def empty_cache(self) -> DynamicCache:
        return DynamicCache(config=self._hf_config)

    def embed(self, token_ids_S: torch.Tensor) -> torch.Tensor:
        hidden_SM: torch.Tensor = self._model.embed_input_ids(token_ids_S)
        return torch.stack([hidden_SM, torch.zeros_like(hidden_SM)])

    def logits(self, hidden_2SM: torch.Tensor) -> torch.Tensor:
        logits_1V: torch.Tensor = self._model.compute_logits(_normed(self._base.norm, hidden_2SM[:, -1:]))
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

    def rotary(self, positions_N: torch.Tensor, hidden_2SM: torch.Tensor) -> dict[Hashable, CosSin]:
        """Cosines and sines from the tables of vLLM's rotary modules, in the model's dtype."""
        pairs: dict[Hashable, CosSin] = {}
        for kind, rope in self._ropes.items():
            cos_NX, sin_NX = rope.cos_sin_cache.to(positions_N.device, self._dtype)[positions_N].chunk(2, dim=-1)
            pairs[kind] = torch.cat([cos_NX, cos_NX], dim=-1)[None], torch.cat([sin_NX, sin_NX], dim=-1)[None]
        return pairs

    def rotate(self, layer: int, k_1HSD: torch.Tensor, cos_sin: CosSin) -> torch.Tensor:
        """Rotate the halves of the rotary part of each head; the numbers after it are unchanged.

        In float32 and rounded once, as vLLM's kernels do.
        """
        half = cos_sin[0].shape[-1] // 2
        cos, sin = (x[:, None, :, :half].float() for x in cos_sin)
        first, second = k_1HSD[..., :half].float(), k_1HSD[..., half : 2 * half].float()
        turned = torch.empty_like(k_1HSD)
        turned[..., :half] = (first * cos).addcmul_(second, sin, value=-1)
        turned[..., half : 2 * half] = (second * cos).addcmul_(first, sin)
        turned[..., 2 * half :] = k_1HSD[..., 2 * half :]
        return turned

    def project_kv(self, layer: int, hidden_2SM: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        # Of the attention's output one row is computed, which nobody reads: a projection of no rows at all is a floating point
        # exception in vLLM 0.32's bfloat16 product on CPUs.
        capture = IsolatedPass(_same, _same, _isolated_attention, [(Run(0, 1, 1), None)])
        block, normed_SM = self._unrotated[layer], _normed(self._layers[layer].input_layernorm, hidden_2SM)
        positions_S = torch.zeros(len(normed_SM), dtype=torch.long, device=normed_SM.device)
        with self._stubs[layer].running(capture):
            block.self_attn(positions=positions_S, hidden_states=normed_SM)
        return capture.k_1HND, capture.v_1HND

    def run_rows(
        self, layer: int, hidden_2SM: torch.Tensor, rows: Rows, cos_sin_N: CosSin, layer_kv: LayerKV, *, scatter: bool
    ) -> torch.Tensor:
        pieces: list[torch.Tensor] = []
        for piece, hidden_2PM in zip(rows.split(ROWS_AT_ONCE), hidden_2SM.split(ROWS_AT_ONCE, dim=1), strict=True):
            layer_pass = RowsPass(layer_kv, piece, self.windows[layer], scatter=scatter)
            if self.cpu_attention is not None and self.cpu_attention.takes(piece):
                layer_pass = CpuRowsPass(self.cpu_attention, layer, layer_kv, piece, scatter=scatter)
            block = (self._layers if piece.is_contiguous else self._fused_layers)[layer]
            pieces.append(self._run(block, layer, hidden_2PM, piece.on_device_S, layer_pass))
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)

    def run_question(
        self, layer: int, hidden_2SM: torch.Tensor, rows: Rows, cos_sin_N: CosSin, question: QuestionPass
    ) -> torch.Tensor:
        return self._run(self._fused_layers[layer], layer, hidden_2SM, rows.on_device_S, question)

    def run_isolated(
        self, sequences: Sequence[Sequence[int]], shared: SharedPrefix | None = None
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """A single sequence runs as in vLLM's own prefill."""
        device = self.geometry.device
        together = list(runs([len(ids) for ids in sequences]))
        first = 0 if shared is None else shared.tokens
        positions_N = torch.cat([torch.arange(first, first + len(ids), device=device) for ids in sequences])
        hidden_2NM = self.embed(torch.tensor([token for ids in sequences for token in ids], device=device))
        rotary = self.rotary(positions_N, hidden_2NM)
        kernel = self.cpu_attention if shared is None and len(sequences) == 1 else None
        rows = Rows.of(positions_N.cpu(), device)
        for layer, window in enumerate(self.windows[:-1]):
            masks = [(run, self._mask(run, first, window)) for run in together]
            prefix = None if shared is None else shared.layers[layer]
            turn = partial(self.rotate, layer, cos_sin=rotary[self.layer_types[layer]])
            attention = _isolated_attention if kernel is None else partial(_by_kernel, kernel, layer, rows)
            layer_pass = IsolatedPass(turn, turn, attention, masks, prefix)
            hidden_2NM = self._run(self._unrotated[layer], layer, hidden_2NM, positions_N, layer_pass)
            yield _apart(layer_pass.k_1HND), _apart(layer_pass.v_1HND)
        k_1HND, v_1HND = self.project_kv(len(self._layers) - 1, hidden_2NM)
        yield _apart(k_1HND), _apart(v_1HND)

    def _mask(self, run: Run, prefix_tokens: int, window: int | None) -> torch.Tensor | None:
        """The attention mask of a run after a prefix; None where it is causal."""
        if not prefix_tokens and (window is None or window >= run.tokens):
            return None
        return prefix_mask(run, prefix_tokens, window, self._dtype, self.geometry.device)

    def share(self, prefix_ids: Sequence[int]) -> SharedPrefix:
        positions_P = torch.arange(len(prefix_ids), device=self.geometry.device)
        rotary = self.rotary(positions_P, torch.empty(0))
        every = enumerate(zip(self.layer_types, self.run_isolated([prefix_ids]), strict=True))
        layers = [(self.rotate(layer, k, rotary[kind]), v.clone()) for layer, (kind, (k, v)) in every]
        return SharedPrefix(len(prefix_ids), layers)

    def _run(
        self, block: Any, layer: int, hidden_2SM: torch.Tensor, positions_S: torch.Tensor, layer_pass: LayerPass
    ) -> torch.Tensor:
        """Rows through one layer, by one of its twins; returns (2, S, M)."""
        hidden_SM, residual_SM = hidden_2SM.clone()  # vLLM's fused norms write into both
        with self._stubs[layer].running(layer_pass):
            pair = block(positions=positions_S, hidden_states=hidden_SM, residual=residual_SM)
        return torch.stack(pair)


def _same(x: torch.Tensor) -> torch.Tensor:
    return x


def _apart(x_1HND: torch.Tensor) -> torch.Tensor:
    """Keys or values in memory of their own: they are views of a projection with the queries, two or three times as large."""
    return x_1HND.clone(memory_format=torch.contiguous_format)


def _normed(norm: Any, hidden_2SM: torch.Tensor) -> torch.Tensor:
    """Run a norm of vLLM's on a hidden state; returns (S, M)."""
    normed_SM: torch.Tensor = norm(*hidden_2SM.clone())[0]  # see `VllmRunner._run`
    return normed_SM


def _trouble(layer: Any) -> str:
    """Parts of a layer whose shape is not supported here; empty if all are."""
    attention = getattr(layer, "self_attn", None)
    own, rope = getattr(attention, "attn", None), getattr(attention, "rotary_emb", None)
    if not hasattr(layer, "input_layernorm") or own is None:
        return f"({type(layer).__name__}) is not input_layernorm -> self_attn.attn (Mamba, MLA and linear attention are not)"
    if not hasattr(own, "impl") or not hasattr(own.impl, "do_kv_cache_update"):
        return (
            f"has an attention ({type(own).__name__}, {type(getattr(own, 'impl', None)).__name__}) that writes no KV by itself"
        )
    if not hasattr(rope, "cos_sin_cache") or not getattr(rope, "is_neox_style", False):
        return f"has a rotary embedding ({type(rope).__name__}) without one table of halves"
    if getattr(own.impl, "alibi_slopes", None) is not None or getattr(own, "has_sink", False):
        return "has ALiBi slopes or attention sinks"
    if getattr(own, "kv_sharing_target_layer_name", None) is not None:
        return "has the KV of another layer"
    if getattr(own, "attn_type", "decoder") != "decoder":  # a str, and an enumeration too
        return f"has attention of type {own.attn_type}"
    return ""


def _window(attention: Any, hf_config: Any) -> int | None:
    """The layer's sliding window in tokens; None where it has none, or one that no prompt reaches."""
    window = getattr(attention, "sliding_window", None)
    positions = getattr(hf_config, "max_position_embeddings", None)
    return None if window is None or (positions is not None and window >= positions) else int(window)


def _isolated_attention(
    _module: nn.Module,
    q_BQTD: torch.Tensor,
    k_BHTD: torch.Tensor,
    v_BHTD: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    scaling: float,
    softcap: float | None,
) -> tuple[torch.Tensor, None]:
    """Attention output (B, T, Q, D) of sequences of one length; without a mask, causal."""
    if softcap is None:
        out = scaled_dot_product_attention(
            q_BQTD, k_BHTD, v_BHTD, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=True
        )
        return out.transpose(1, 2), None
    groups = q_BQTD.shape[1] // k_BHTD.shape[1]
    k_BQTD, v_BQTD = k_BHTD.repeat_interleave(groups, 1), v_BHTD.repeat_interleave(groups, 1)
    scores = torch.tanh(torch.matmul(q_BQTD * scaling, k_BQTD.transpose(2, 3)) / softcap) * softcap
    rows, keys = scores.shape[-2:]
    if mask is None:
        mask = torch.full((rows, keys), -torch.inf, dtype=scores.dtype, device=scores.device).triu(1)
    scores = scores + mask
    return torch.matmul(torch.softmax(scores, dim=-1), v_BQTD).transpose(1, 2), None


def _by_kernel(
    kernel: CpuAttention, layer: int, rows: Rows, _: nn.Module, q: Any, k: Any, v: Any, _mask: Any, **__: Any
) -> tuple[torch.Tensor, None]:
    """Attention of one sequence by vLLM's kernel, which knows the layer's window, scale and soft-capping."""
    return kernel.attend(layer, q, k, v, rows), None
