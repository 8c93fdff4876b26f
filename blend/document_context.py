"""Which tokens of a chunk need the text before it in its document, measured when the document is precomputed.

The KV deviation at layer 1 (paper §4.1) shows what layer 0 saw of other chunks. Whom "she" means, and what is then said of her,
shows in later layers only, when most tokens have long been left out. But a chunk's nearest context is its own document, and
that is at hand beforehand: the document read once more as a whole shows every layer's deviation.

Shapes: H KV heads, N rows of a pass, R rows that are compared, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Window:
    """Chunks of a document that are read together: those from `new` to `last` (excluded), behind the ones from `first` on."""

    first: int
    new: int
    last: int


def windows(tokens: Sequence[int], most: int) -> Iterator[Window]:
    """Windows of at most `most` tokens over chunks of so many tokens each, every chunk new in one of them.

    A window begins with up to half its size of the chunks before the new ones. A chunk that is longer stands in one alone.
    """
    first = new = 0
    while new < len(tokens):
        last = first + 1
        while last < len(tokens) and sum(tokens[first : last + 1]) <= most:
            last += 1
        if last <= new:
            first += 1
            continue
        yield Window(first, new, last)
        new = last
        while first < new and sum(tokens[first:new]) > most // 2:
            first += 1


class ContextDeviation:
    """How far tokens' KV computed alone is from their KV behind the text before them, layer after layer of one pass.

    Args:
        alone: rows of the tokens computed alone, R of them.
        behind: their rows in the documents.
        device: where the pass runs.
    """

    def __init__(self, alone: Sequence[int], behind: Sequence[int], device: torch.device) -> None:
        self._alone_R, self._behind_R = (torch.tensor(rows, dtype=torch.long, device=device) for rows in (alone, behind))
        self._total_R = torch.zeros(len(alone), device=device)
        self._layers = 0

    def add(self, k_1HND: torch.Tensor, v_1HND: torch.Tensor) -> None:
        """Take one more layer's keys and values into account; layer 0 is the same in both."""
        self._layers += 1
        if self._layers == 1 or not len(self._total_R):
            return
        for x_HND in (k_1HND[0], v_1HND[0]):
            behind_HRD = x_HND[:, self._behind_R].float()
            difference_R = (x_HND[:, self._alone_R].float() - behind_HRD).square().sum(dim=(0, 2))
            self._total_R += difference_R / behind_HRD.square().sum(dim=(0, 2)).clamp_min(torch.finfo(torch.float32).tiny)

    def values(self) -> list[float]:
        """See `DocumentContext.deviation`; R numbers, of four digits, as they are stored."""
        return [float(f"{value:.4g}") for value in (self._total_R / max(1, self._layers - 1)).tolist()]
