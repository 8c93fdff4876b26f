"""A Hugging Face decoder run layer by layer on chosen rows: the one file that knows transformers' internals.

Nothing of an architecture is copied here. A second module tree shares the model's parameters but has its own config, whose
attention implementation is ours; decoder layers, rotary function, embedding and head are the model's own code. The model
itself is not changed, so it serves as the reference and for decoding while the tree runs in other threads.

Shapes: H KV heads, S rows, N tokens, D head size, M hidden size, V vocabulary.
"""

from __future__ import annotations

import copy
import functools
import inspect
import sys
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import nn

from .attention import Rows
from .cpu_modules import PackedLinear, is_worth_packing, packed, with_fused_norms
from .generation import DecodePass, SequenceKV, decode_kernel
from .interfaces import CosSin, KVGeometry, LayerKV, ModelRunner
from .layer_passes import IsolatedPass, LayerPass, QuestionPass, RowsPass, Run, SharedPrefix, prefix_mask, runs

if TYPE_CHECKING:
    from transformers import DynamicCache, PreTrainedModel
    from transformers.modeling_outputs import MoeModelOutputWithPast

IMPLEMENTATION = "cacheblend"
# Rows of layer 0 in one attention call, and in one MLP call: attention is fastest in one call from position 0 on, the MLP in
# pieces whose activations fit the processor's caches.
ROWS_AT_ONCE = 4096
MLP_ROWS_AT_ONCE = 1024


def _attention(module: nn.Module, q: Any, k: Any, v: Any, mask: Any, *, layer_pass: LayerPass, **kw: Any) -> tuple[Any, None]:
    return layer_pass.attend(module, q, k, v, mask, **kw), None


@functools.cache
def _register_attention() -> None:
    """Make `IMPLEMENTATION` known to transformers, whose modules take seconds to import: not before a model is there."""
    transformers.AttentionInterface.register(IMPLEMENTATION, _attention)
    transformers.AttentionMaskInterface.register(IMPLEMENTATION, lambda *_, **__: None)


class _RowPieces(nn.Module):
    """An MLP that runs on at most `MLP_ROWS_AT_ONCE` rows at a time; its rows are independent."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.mlp = mlp

    def forward(self, hidden_RSM: torch.Tensor) -> torch.Tensor:
        if hidden_RSM.shape[1] <= MLP_ROWS_AT_ONCE:
            output: torch.Tensor = self.mlp(hidden_RSM)
            return output
        return torch.cat([self.mlp(piece) for piece in hidden_RSM.split(MLP_ROWS_AT_ONCE, dim=1)], dim=1)


class _GivenHidden(nn.Module):
    """Replaces the decoder, so that the causal-LM class's own forward turns a hidden state into logits."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, inputs_embeds: torch.Tensor, **_: object) -> MoeModelOutputWithPast:
        from transformers.modeling_outputs import MoeModelOutputWithPast

        return MoeModelOutputWithPast(last_hidden_state=self.norm(inputs_embeds))


class Decoder:
    """The `ModelRunner` over a Hugging Face causal LM, whose parameters it shares; config and modules are not touched."""

    def __init__(self, model: PreTrainedModel) -> None:
        _register_attention()
        self._reference_config = model.config
        self.config = model.config.get_text_config(decoder=True)
        shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
        causal_lm = copy.deepcopy(model, shared)
        causal_lm.set_attn_implementation(IMPLEMENTATION)
        base = causal_lm.get_decoder()
        layers: list[Any] = [with_modules(layer, mlp=_RowPieces(layer.mlp)) for layer in base.layers]
        self._rotary: nn.Module = base.rotary_emb
        self.apply_rotary: Callable[..., CosSin] = vars(sys.modules[type(base).__module__])["apply_rotary_pos_emb"]
        # Without layers and norm, the decoder's own forward is its embedding, multipliers included.
        self._embedding = with_modules(base, layers=nn.ModuleList(), norm=nn.Identity())
        head = with_modules(causal_lm, **{causal_lm.base_model_prefix: _GivenHidden(base.norm)})
        if is_worth_packing(model):
            layers, head = list(map(packed, layers)), packed(head)
        self._layers, self._head = layers, head
        # Decoding and chosen rows run fused norms; contiguous rows run the model's own norms, bit for bit.
        self._fused_layers, self._fused_head = [with_fused_norms(layer) for layer in self._layers], with_fused_norms(self._head)
        cache_layers: list[Any] = self.empty_cache().layers
        self.windows: list[int | None] = [layer.sliding_window if layer.is_sliding else None for layer in cache_layers]
        self._accepts_layer_type = "layer_type" in inspect.signature(self._rotary.forward).parameters
        self.layer_types: list[Hashable] = list(self.config.layer_types) if self._accepts_layer_type else [None] * len(layers)
        self.dtype, self.device = model.dtype, next(model.parameters()).device
        attention: Any = layers[0].self_attn
        eager = vars(sys.modules[type(attention).__module__]).get("eager_attention_forward")
        self._own_attention: Any = transformers.AttentionInterface().get(str(model.config._attn_implementation), eager)
        kv_heads = int(self.config.num_key_value_heads)
        self.geometry = KVGeometry(len(layers), kv_heads, int(attention.head_dim), self.dtype, self.device)
        self.vocab_size = int(self.config.vocab_size)
        self.max_positions: int | None = getattr(self.config, "max_position_embeddings", None)
        # About the multiply-adds of a row through a layer, without attention scores; experts that a row does not visit count.
        self.layer_parameters = sum(parameter.numel() for parameter in base.layers[-1].parameters())
        self._decode_kernel = decode_kernel(self.geometry, int(self.config.num_attention_heads))

    def empty_cache(self) -> DynamicCache:
        return transformers.DynamicCache(config=self._reference_config)

    def embed(self, token_ids_S: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self._embedding(input_ids=token_ids_S[None], use_cache=False).last_hidden_state
        return output

    def logits(self, hidden_1SM: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self._head(inputs_embeds=hidden_1SM[:, -1:], use_cache=False).logits
        return output[0, -1].float()

    def rotary(self, positions_N: torch.Tensor, hidden_1SM: torch.Tensor) -> dict[Hashable, CosSin]:
        position_ids_1N = positions_N[None]
        if self._accepts_layer_type:
            return {kind: self._rotary(hidden_1SM, position_ids_1N, kind) for kind in set(self.layer_types)}
        return {None: self._rotary(hidden_1SM, position_ids_1N)}

    def rotate(self, k_1HSD: torch.Tensor, cos_sin: CosSin) -> torch.Tensor:
        return self.apply_rotary(k_1HSD, k_1HSD[:, :0], *cos_sin)[0]

    def project_kv(self, layer: int, hidden_1SM: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        block: Any = self._layers[layer]
        attention, normed = block.self_attn, block.input_layernorm(hidden_1SM)
        if hasattr(attention, "qkv_proj"):
            size = self.geometry.kv_heads * self.geometry.head_dim
            k_1SX, v_1SX = _last_outputs(attention.qkv_proj, normed, 2 * size).split(size, dim=-1)
        else:
            k_1SX, v_1SX = attention.k_proj(normed), attention.v_proj(normed)
        k_1SHD, v_1SHD = (x.unflatten(-1, (-1, self.geometry.head_dim)) for x in (k_1SX, v_1SX))
        if hasattr(attention, "k_norm"):
            k_1SHD = attention.k_norm(k_1SHD)
        return k_1SHD.transpose(1, 2), v_1SHD.transpose(1, 2)

    def run_rows(
        self, layer: int, hidden_1SM: torch.Tensor, rows: Rows, cos_sin_N: CosSin, layer_kv: LayerKV, *, scatter: bool
    ) -> torch.Tensor:
        pieces: list[torch.Tensor] = []
        for piece in rows.split(ROWS_AT_ONCE):
            done = sum(part.shape[1] for part in pieces)
            layer_pass = RowsPass(layer_kv, piece, self.windows[layer], scatter=scatter)
            cos_sin_S = (cos_sin_N[0][:, piece.on_device_S], cos_sin_N[1][:, piece.on_device_S])
            piece_hidden = hidden_1SM[:, done : done + len(piece)]
            block = (self._layers if piece.is_contiguous else self._fused_layers)[layer]
            pieces.append(self._run(block, piece_hidden, piece.on_device_S, cos_sin_S, layer_pass))
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)

    def run_question(
        self, layer: int, hidden_1SM: torch.Tensor, rows: Rows, cos_sin_N: CosSin, question: QuestionPass
    ) -> torch.Tensor:
        cos_sin_S = (cos_sin_N[0][:, rows.on_device_S], cos_sin_N[1][:, rows.on_device_S])
        return self._run(self._fused_layers[layer], hidden_1SM, rows.on_device_S, cos_sin_S, question)

    def run_isolated(
        self, sequences: Sequence[Sequence[int]], shared: SharedPrefix | None = None
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        together = list(runs([len(ids) for ids in sequences]))
        first = 0 if shared is None else shared.tokens
        positions_N = torch.cat([torch.arange(first, first + len(ids), device=self.device) for ids in sequences])
        hidden_1NM = self.embed(torch.tensor([token for ids in sequences for token in ids], device=self.device))
        rotary = self.rotary(positions_N, hidden_1NM)
        masks = {
            window: [(run, self._mask(window, run, hidden_1NM, shared)) for run in together] for window in set(self.windows)
        }
        for layer, window in enumerate(self.windows[:-1]):
            cos, sin = rotary[self.layer_types[layer]]
            prefix = None if shared is None else shared.layers[layer]
            rotate = partial(self.apply_rotary, cos=cos, sin=sin)
            layer_pass = IsolatedPass(rotate, self._own_attention, masks[window], prefix)
            identity = (torch.ones_like(cos), torch.zeros_like(sin))
            hidden_1NM = self._run(self._layers[layer], hidden_1NM, positions_N, identity, layer_pass)
            yield layer_pass.k_1HND, layer_pass.v_1HND
        yield self.project_kv(len(self._layers) - 1, hidden_1NM)  # nobody reads the last layer's output

    def share(self, prefix_ids: Sequence[int]) -> SharedPrefix | None:
        """The KV of a prefix, for sequences that follow it; None if the model's attention accepts no mask of ours."""
        if self._reference_config._attn_implementation not in ("sdpa", "eager"):
            return None
        positions_P = torch.arange(len(prefix_ids), device=self.device)
        rotary = self.rotary(positions_P, self.embed(torch.tensor(prefix_ids[:1], device=self.device)))
        layers = [
            (self.rotate(k_1HPD, rotary[kind]), v_1HPD.clone())
            for kind, (k_1HPD, v_1HPD) in zip(self.layer_types, self.run_isolated([prefix_ids]), strict=True)
        ]
        return SharedPrefix(len(prefix_ids), layers)

    def reduce(self, heads_sum_N: torch.Tensor) -> torch.Tensor:
        return heads_sum_N  # one process holds all heads

    def _mask(self, window: int | None, run: Run, hidden_1NM: torch.Tensor, shared: SharedPrefix | None) -> Any:
        if shared is not None:
            return prefix_mask(run, shared.tokens, window, self.dtype, self.device)
        from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

        make = create_causal_mask if window is None else create_sliding_window_causal_mask
        return make(self._reference_config, hidden_1NM[0, run.rows].unflatten(0, (run.sequences, run.tokens)), None, None)

    @torch.no_grad()
    def decode(self, token_ids: Sequence[int], sequences: Sequence[SequenceKV]) -> torch.Tensor:
        """Append one token to each of R sequences; float32 logits (R, V) of the tokens after them."""
        positions_R = torch.tensor([sequence.tokens for sequence in sequences], device=self.device)
        hidden_1RM = self.embed(torch.tensor(token_ids, device=self.device))
        rotary = self.rotary(positions_R, hidden_1RM)
        for layer, layer_type in enumerate(self.layer_types):
            layer_pass = DecodePass([sequence.layers[layer] for sequence in sequences], self._decode_kernel)
            hidden_1RM = self._run(self._fused_layers[layer], hidden_1RM, positions_R, rotary[layer_type], layer_pass)
        for sequence in sequences:
            sequence.tokens += 1
        output: torch.Tensor = self._fused_head(inputs_embeds=hidden_1RM, use_cache=False).logits
        return output[0].float()

    def _run(
        self,
        layer: nn.Module,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        cos_sin: CosSin,
        layer_pass: LayerPass,
    ) -> torch.Tensor:
        output: torch.Tensor | tuple[torch.Tensor] = layer(
            hidden,
            attention_mask=None,
            position_ids=positions[None],
            past_key_values=layer_pass,
            use_cache=True,
            position_embeddings=cos_sin,
            layer_pass=layer_pass,
        )
        return output[0] if isinstance(output, tuple) else output


class CacheSink:
    """Puts finished layers into a `DynamicCache` without copying them; of a sliding layer only the last window.

    Attributes:
        cache: the prompt's KV cache, complete once all layers were put.
        memory: the layers' buffers, for `FusionResult.memory`.
    """

    def __init__(self, runner: ModelRunner) -> None:
        self._windows, self.cache = runner.windows, runner.empty_cache()
        self.memory: list[torch.Tensor | None] = []

    def put(self, layer: int, layer_kv: LayerKV) -> None:
        """Put a finished layer into the cache."""
        nothing = layer_kv.k_1HND[:, :, :0]
        self.cache.update(nothing, nothing, layer)
        target: Any = self.cache.layers[layer]
        target.keys, target.values = layer_kv.k_1HND, layer_kv.v_1HND
        if target.is_sliding:
            target.cumulative_length = layer_kv.k_1HND.shape[2]
            window_tokens = target.sliding_window - 1
            target.keys, target.values = (
                x[:, :, max(0, x.shape[2] - window_tokens) :].clone() for x in (layer_kv.k_1HND, layer_kv.v_1HND)
            )
        self.memory.append(layer_kv.memory_21HCD if self._windows[layer] is None else None)


def _last_outputs(linear: nn.Module, inputs: torch.Tensor, count: int) -> torch.Tensor:
    """The last `count` outputs of a linear layer; a quantised layer computes the others too."""
    linear = linear.plain if isinstance(linear, PackedLinear) else linear
    if type(linear) is not nn.Linear:
        outputs: torch.Tensor = linear(inputs)
        return outputs[..., -count:]
    return nn.functional.linear(inputs, linear.weight[-count:], None if linear.bias is None else linear.bias[-count:])


def with_modules(module: Any, **replaced: nn.Module) -> Any:
    """A shallow copy of a module with some children replaced."""
    twin = copy.copy(module)
    twin._modules = {**module._modules, **replaced}
    return twin
