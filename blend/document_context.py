"""Which tokens of a chunk need the text before it in its document, measured when the document is precomputed.

The KV deviation at layer 1 (paper §4.1) shows what layer 0 saw of other chunks. Whom "she" means, and what is then said of her,
shows in later layers only, when most tokens have long been left out. But a chunk's nearest context is its own document, and
that is at hand beforehand: one more forward, over the whole document, shows every layer's deviation.

Shapes: H KV heads, T tokens of a chunk, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from cacheblend.store import ChunkKV, DocumentContext, LayerPair, token_digest

from .decoder import Decoder


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


def document_contexts(
    decoder: Decoder, chunks: Sequence[Sequence[int]], prefix_ids: Sequence[int], alone: Mapping[int, ChunkKV]
) -> dict[int, DocumentContext]:
    """What the text before them does to the chunks that `alone` has the KV of, from one forward over all chunks.

    Args:
        decoder: the model.
        chunks: token ids of chunks that follow each other in a document.
        prefix_ids: what `alone` was computed behind.
        alone: KV by index in `chunks`.
    """
    behind = sorted(index for index in alone if index > 0)
    if not behind:
        return {}
    whole = [*prefix_ids, *(token for chunk in chunks for token in chunk)]
    layers = [(k[0].cpu(), v[0].cpu()) for k, v in decoder.run_alone(torch.tensor(whole, device=decoder.device))]
    starts = list(accumulate(map(len, chunks), initial=len(prefix_ids)))
    digests = [token_digest(chunk) for chunk in chunks]
    contexts: dict[int, DocumentContext] = {}
    for index in behind:
        here = slice(starts[index], starts[index + 1])
        pairs = [(k_HND[:, here], v_HND[:, here]) for k_HND, v_HND in layers]
        contexts[index] = DocumentContext(tuple(digests[:index]), _deviation(alone[index].layers, pairs))
    return contexts


def _deviation(alone: Sequence[LayerPair], behind: Sequence[LayerPair]) -> tuple[float, ...]:
    total_T = torch.zeros(alone[0][0].shape[1])
    for pairs in zip(alone[1:], behind[1:], strict=True):
        for alone_HTD, behind_HTD in zip(*pairs, strict=True):
            behind_HTD = behind_HTD.float()
            difference_T = (alone_HTD.float() - behind_HTD).square().sum(dim=(0, 2))
            total_T += difference_T / behind_HTD.square().sum(dim=(0, 2)).clamp_min(torch.finfo(torch.float32).tiny)
    mean_T = total_T / max(1, len(alone) - 1)
    return tuple(float(f"{value:.4g}") for value in mean_T.tolist())
