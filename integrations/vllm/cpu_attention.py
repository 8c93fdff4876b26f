"""Attention of chosen rows by vLLM's own kernel for CPUs: of neighbours always, of scattered ones where it is faster.

Prompts at ratio 1.0 are all neighbours: with the kernel their KV is vLLM's own, bit for bit. The kernel computes
a batch of sequences, with the last tokens of each as queries. So every run of neighbouring rows becomes a sequence
of its own that ends with the run's last row, and all have the same pages: a row then sees just what stands before it.

Shapes: H KV heads, Q query heads, S rows, R runs of neighbours, N positions, T of them, D head size.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Mapping
from functools import partial
from timeit import repeat
from typing import Any

import torch
from vllm.v1.attention.backend import CommonAttentionMetadata

from cacheblend.blend.attention import Rows, attend
from cacheblend.blend.interfaces import LayerKV
from cacheblend.blend.layer_passes import RowsPass

logger = logging.getLogger(__name__)
BACKEND = "CPU_ATTN"
# The trial: so many rows, in runs of four, of so many positions; each way so often, the median counts. In bfloat16 1,024
# positions are nearly a tie of PyTorch and vLLM's kernel, and 3,072 take them 27 and 41 ms.
TRIAL_ROWS, TRIAL_POSITIONS, TRIAL_REPEATS = 768, 3072, 3
ALLOWED = {torch.float32: 1e-4}
ALLOWED_16_BITS = 5e-2


class CpuAttention:
    """vLLM's CPU attention over one layer of a prompt at a time, in pages of its own.

    Attentions are in the order of the layers, `builders` make a batch's metadata, by the layer's name.
    """

    def __init__(self, attentions: list[Any], builders: Mapping[str, Any]) -> None:
        self._attentions, self._builders = attentions, builders
        self._pages: dict[tuple[int, ...], torch.Tensor] = {}  # by a layer's shape
        self._rows: Rows | None = None
        self._metadata: dict[int, Any] = {}
        self.is_faster = False  # than `attend` with scattered rows, here

    @classmethod
    def of(cls, worker: Any, attentions: list[Any]) -> CpuAttention | None:
        """That of a worker with vLLM's CPU backend and plain pages; None for others, and where `attend` gives other numbers."""
        groups = [group for every in worker.model_runner.attn_groups for group in every]
        is_plain = all(attention.impl.kv_cache_dtype == "auto" for attention in attentions)
        if not is_plain or not all(group.backend.get_name() == BACKEND for group in groups):
            return None
        builders = {name: group.get_metadata_builder() for group in groups for name in group.layer_names}
        kernel = cls(attentions, builders)
        return kernel if kernel._try() else None

    def takes(self, rows: Rows) -> bool:
        """Whether the rows are run by it; else by `attend`."""
        return self.is_faster or (rows.is_contiguous and len(rows) > 1)

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
        """The metadata of the rows as a batch; made once for the layers that run the same rows."""
        if rows is not self._rows:
            self._rows, self._metadata = rows, {}
        builder = self._builders[layer_name]
        if id(builder) not in self._metadata:
            positions_S = rows.positions_S
            gaps = (positions_S.diff() > 1).nonzero()[:, 0] + 1
            bounds = torch.cat([torch.tensor([0]), gaps, torch.tensor([len(positions_S)])])
            ends_R = (positions_S[bounds[1:] - 1] + 1).int()
            common = CommonAttentionMetadata(
                query_start_loc=bounds.int(),
                query_start_loc_cpu=bounds.int(),
                seq_lens=ends_R,
                num_reqs=len(ends_R),
                num_actual_tokens=len(positions_S),
                max_query_len=int(bounds.diff().max()),
                max_seq_len=int(ends_R[-1]),
                block_table_tensor=torch.arange(pages, dtype=torch.int32).expand(len(ends_R), -1).contiguous(),
                slot_mapping=positions_S,
            )
            self._metadata[id(builder)] = builder.build(0, common)
        return self._metadata[id(builder)]

    def _try(self) -> bool:
        """Time both ways on the first layer, with scattered rows like a blend's; return whether their outputs are equal."""
        attention = self._attentions[0]
        own, dtype = attention.impl, attention.kv_cache.dtype
        generator = torch.Generator().manual_seed(0)

        def draw(heads: int, tokens: int) -> torch.Tensor:
            return torch.randn(1, heads, tokens, own.head_size, generator=generator).to(dtype)

        positions_S = torch.arange(TRIAL_POSITIONS).view(-1, 4)[:: TRIAL_POSITIONS // TRIAL_ROWS].flatten()
        rows = Rows.of(positions_S, torch.device("cpu"))
        k_1HND, v_1HND = (draw(own.num_kv_heads, TRIAL_POSITIONS) for _ in "kv")
        q_1QSD = draw(own.num_heads, len(rows))
        window = None if own.sliding_window == -1 else int(own.sliding_window)

        softcap, drawn = own.logits_soft_cap or None, (q_1QSD, k_1HND, v_1HND, rows)
        by_attend = partial(attend, *drawn, scaling=own.scale, window=window, softcap=softcap, sinks_Q=own.sinks)
        by_kernel = partial(self.attend, 0, *drawn)
        off = float((by_attend() - by_kernel()).abs().max())
        attend_s, kernel_s = (statistics.median(repeat(way, number=1, repeat=TRIAL_REPEATS)) for way in (by_attend, by_kernel))
        self.is_faster = kernel_s < attend_s
        took = "attention of %d rows: ours %.2f ms, vLLM's kernel %.2f ms (off by %.2g)"
        logger.info(took, len(rows), attend_s * 1e3, kernel_s * 1e3, off)
        return off <= ALLOWED.get(dtype, ALLOWED_16_BITS)


class CpuRowsPass(RowsPass):
    """Rows of a prompt through one layer; see `RowsPass`. Attention and window are the kernel's."""

    def __init__(self, kernel: CpuAttention, layer: int, layer_kv: LayerKV, rows: Rows, *, scatter: bool) -> None:
        super().__init__(layer_kv, rows, None, scatter=scatter)
        self._kernel, self._layer = kernel, layer

    def attend(self, module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, **kw: Any) -> torch.Tensor:
        return self._kernel.attend(self._layer, q, k, v, self._rows)
