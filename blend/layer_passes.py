"""Passes of rows through a layer: a blend's rows, and isolated sequences.

Isolated encoding is a packed batch: sequences that do not see each other, without padding. Everything but attention works token
by token; attention is called once for every run of sequences of equal length. The KV of a prefix that all sequences follow is
computed once, and each sequence attends to it.

Shapes: B sequences of a run, T tokens of each, N tokens of all or of the prompt, P tokens of a shared prefix, H KV heads,
G query heads of a KV head, Q = H x G query heads, S rows of the pass, K keys, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any, Protocol

import torch

from .attention import Rows, attend

if TYPE_CHECKING:
    from torch import nn

    from .layer_source import LayerKV


class LayerPass(Protocol):
    """Keys, values and attention of one pass of rows through one layer; passed down as a keyword argument."""

    def update(self, k_1HSD: torch.Tensor, v_1HSD: torch.Tensor, layer: int, *_: object) -> tuple[torch.Tensor, torch.Tensor]:
        """Stands in for `Cache.update`."""

    def attend(
        self, module: nn.Module, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, **kw: Any
    ) -> torch.Tensor:
        """Attention output (1, S, Q, D)."""


class RowsPass:
    """Rows of a prompt through one layer: fresh KV is scattered into the layer's buffer, attention has the exact mask.

    With `scatter=False` the layer already holds the rows' fresh KV.
    """

    def __init__(self, layer_kv: LayerKV, rows: Rows, window: int | None, *, scatter: bool) -> None:
        self._layer_kv, self._rows, self._window, self._scatter = layer_kv, rows, window, scatter

    def update(self, k_1HSD: torch.Tensor, v_1HSD: torch.Tensor, layer: int, *_: object) -> tuple[torch.Tensor, torch.Tensor]:
        """Scatter the rows' keys and values; return the layer's."""
        if self._scatter:
            self._layer_kv.put(self._rows.on_device_S, k_1HSD, v_1HSD)
        return self._layer_kv.k_1HND, self._layer_kv.v_1HND

    def attend(
        self, module: nn.Module, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, **kw: Any
    ) -> torch.Tensor:
        """Blocked attention of the rows against the layer."""
        return attend(q, k, v, self._rows, scaling=kw["scaling"], window=self._window, softcap=kw.get("softcap"))


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive sequences of equal length, from row `start` on."""

    start: int
    sequences: int
    tokens: int

    @property
    def rows(self) -> slice:
        """The rows of its tokens."""
        return slice(self.start, self.start + self.sequences * self.tokens)

    def part(self, x_1HND: torch.Tensor) -> torch.Tensor:
        """The run's queries, keys or values, (B, H, T, D); a view."""
        kv_heads, _, head_dim = x_1HND.shape[1:]
        return x_1HND[0, :, self.rows].view(kv_heads, self.sequences, self.tokens, head_dim).transpose(0, 1)


def runs(lengths: Sequence[int]) -> Iterator[Run]:
    """The runs of sequences of these lengths; sort by length to have few."""
    start = 0
    for tokens, group in groupby(lengths):
        run = Run(start, len(list(group)), tokens)
        start = run.rows.stop
        yield run


@dataclass(frozen=True, slots=True, eq=False)
class SharedPrefix:
    """KV of the prefix that every sequence of a pass follows: a pair a layer, keys rotated, (1, H, P, D) on the device."""

    tokens: int
    layers: Sequence[tuple[torch.Tensor, torch.Tensor]]


def prefix_mask(run: Run, prefix_tokens: int, window: int | None, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Additive mask (1, 1, T, P + T) of a run's rows: the prefix and a row's own past, within the window."""
    key_K = torch.arange(prefix_tokens + run.tokens, device=device)
    row_T1 = torch.arange(prefix_tokens, prefix_tokens + run.tokens, device=device)[:, None]
    hidden_TK = key_K > row_T1
    if window is not None:
        hidden_TK |= key_K <= row_T1 - window
    mask_TK = torch.zeros(hidden_TK.shape, dtype=dtype, device=device)
    return mask_TK.masked_fill_(hidden_TK, torch.finfo(dtype).min)[None, None]


class IsolatedPass:
    """Sequences through one layer, by the model's own attention; records the keys before RoPE.

    The layer runs with the identity rotation, so that keys arrive here unrotated whatever the family's projections are, and
    queries and keys are rotated just before the attention. x * 1 + rotate_half(x) * 0 is x, bit for bit.

    Args:
        rotate: rotates queries and keys to their positions.
        attention: the attention function of the model's own implementation.
        masks: the runs, and the attention mask of each.
        prefix: the layer's keys and values of a shared prefix; None for no prefix.
    """

    def __init__(
        self,
        rotate: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
        attention: Callable[..., tuple[torch.Tensor, Any]],
        masks: Sequence[tuple[Run, Any]],
        prefix: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> None:
        self._rotate, self._attention, self._masks, self._prefix = rotate, attention, masks, prefix
        self.k_1HND, self.v_1HND = torch.empty(0), torch.empty(0)

    def update(self, k_1HSD: torch.Tensor, v_1HSD: torch.Tensor, layer: int, *_: object) -> tuple[torch.Tensor, torch.Tensor]:
        """Record the position-free keys and the values."""
        self.k_1HND, self.v_1HND = k_1HSD, v_1HSD
        return k_1HSD, v_1HSD

    def attend(
        self, module: nn.Module, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, **kw: Any
    ) -> torch.Tensor:
        """Rotate, then every run's attention; (1, N, Q, D)."""
        q, k = self._rotate(q, k)
        outputs = []
        for run, run_mask in self._masks:
            q_run, k_run, v_run = map(run.part, (q, k, v))
            if self._prefix is not None:
                k_run, v_run = (
                    torch.cat([shared.expand(run.sequences, -1, -1, -1), own], dim=2)
                    for shared, own in zip(self._prefix, (k_run, v_run), strict=True)
                )
            outputs.append(self._attention(module, q_run, k_run, v_run, run_mask, **kw)[0].flatten(0, 1))
        return (outputs[0] if len(outputs) == 1 else torch.cat(outputs))[None]
