"""Attention of neighbouring rows by vLLM's own kernel for CPUs.

Prompts at ratio 1.0 are all neighbours: with the kernel their KV is vLLM's own, bit for bit. The kernel computes a sequence
with its last tokens as queries: here one that ends with the last row, so that each row sees just what stands before it.

Shapes: H KV heads, Q query heads, S rows, N positions, T of them, D head size.
"""

from collections.abc import Mapping
from typing import Any, Self

import torch
from vllm.v1.attention.backend import CommonAttentionMetadata

from cacheblend.blend.attention import Rows
from cacheblend.blend.interfaces import LayerKV
from cacheblend.blend.layer_passes import RowsPass

BACKEND = "CPU_ATTN"


class CpuAttention:
    """vLLM's CPU attention over one layer of a prompt at a time, in pages of its own.

    Attentions are in the order of the layers, `builders` make a batch's metadata, by the layer's name.
    """

    def __init__(self, attentions: list[Any], builders: Mapping[str, Any]) -> None:
        self._attentions, self._builders = attentions, builders
        self._pages: dict[tuple[int, ...], torch.Tensor] = {}  # by a layer's shape
        self._rows: Rows | None = None
        self._metadata: dict[int, Any] = {}

    @classmethod
    def of(cls, worker: Any, attentions: list[Any]) -> Self | None:
        """That of a worker with vLLM's CPU backend and plain pages; None for others."""
        groups = [group for every in worker.model_runner.attn_groups for group in every]
        is_plain = all(attention.impl.kv_cache_dtype == "auto" for attention in attentions)
        if not is_plain or not all(group.backend.get_name() == BACKEND for group in groups):
            return None
        builders = {name: group.get_metadata_builder() for group in groups for name in group.layer_names}
        return cls(attentions, builders)

    def attend(self, layer: int, q_1QSD: torch.Tensor, k_1HND: torch.Tensor, v_1HND: torch.Tensor, rows: Rows) -> torch.Tensor:
        """Attention output (1, S, Q, D) of the rows, whose own keys and values are among the layer's."""
        attention, positions = self._attentions[layer], int(rows.positions_S[-1]) + 1
        own = attention.kv_cache
        pages, shape = -(-positions // own.shape[2]), tuple(own.shape[1:])
        if shape not in self._pages or len(self._pages[shape]) < pages:  # like the layer's own: (pages, H, positions, 2 D)
            self._pages[shape] = torch.zeros((pages, *shape), dtype=own.dtype)
        cache = self._pages[shape]
        k_THD, v_THD = (x_1HND[0, :, :positions].transpose(0, 1) for x_1HND in (k_1HND, v_1HND))
        attention.impl.do_kv_cache_update(attention, k_THD, v_THD, cache, torch.arange(positions))
        q_SQD = q_1QSD[0].transpose(0, 1).contiguous()
        out_SQD = torch.empty_like(q_SQD)
        attention.impl.forward(
            attention, q_SQD, q_SQD, q_SQD, cache, self._batch(attention.layer_name, rows, len(cache)), out_SQD
        )
        return out_SQD[None]

    def _batch(self, layer_name: str, rows: Rows, pages: int) -> Any:
        """The metadata of the rows as a batch of one; made once for the layers that run the same rows."""
        if rows is not self._rows:
            self._rows, self._metadata = rows, {}
        builder = self._builders[layer_name]
        if id(builder) not in self._metadata:
            end, starts = int(rows.positions_S[-1]) + 1, torch.tensor([0, len(rows)], dtype=torch.int32)
            common = CommonAttentionMetadata(
                query_start_loc=starts,
                query_start_loc_cpu=starts,
                seq_lens=torch.tensor([end], dtype=torch.int32),
                num_reqs=1,
                num_actual_tokens=len(rows),
                max_query_len=len(rows),
                max_seq_len=end,
                block_table_tensor=torch.arange(pages, dtype=torch.int32)[None],
                slot_mapping=rows.positions_S,
            )
            self._metadata[id(builder)] = builder.build(0, common)
        return self._metadata[id(builder)]


class CpuRowsPass(RowsPass):
    """Rows of a prompt through one layer; see `RowsPass`. Attention and window are the kernel's."""

    def __init__(self, kernel: CpuAttention, layer: int, layer_kv: LayerKV, rows: Rows, *, scatter: bool) -> None:
        super().__init__(layer_kv, rows, None, scatter=scatter)
        self._kernel, self._layer = kernel, layer

    def attend(self, module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, **kw: Any) -> torch.Tensor:
        return self._kernel.attend(self._layer, q, k, v, self._rows)
