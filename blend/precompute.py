"""Chunks' KV, each computed alone behind the prefix, several in one pass; beside it what their documents do to them.

Shapes: H KV heads, N rows of a pass, T tokens of a chunk, D head size.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, islice

import torch

from cacheblend.store import ChunkKV, DocumentContext, LayerPair, token_digest

from .decoder import Decoder
from .document_context import ContextDeviation, windows

# More in one pass is no faster: its activations leave the caches (see docs/experiments.md).
PASS_TOKENS = 1536


@dataclass(frozen=True, slots=True)
class Reading:
    """Chunks that follow each other in a document, of which some are to be computed.

    Attributes:
        chunks: token ids of each.
        wanted: indexes of those to compute, ascending.
        in_document: whether they are read as a whole as well, for what the ones before a chunk do to it. A first chunk's KV
            is then taken from there: nothing but the prefix stands before it.
    """

    chunks: Sequence[Sequence[int]]
    wanted: Sequence[int]
    in_document: bool

    @property
    def alone(self) -> Sequence[int]:
        """Indexes of the chunks that are computed in a sequence of their own."""
        return [index for index in self.wanted if index or not self.in_document]

    def tokens(self, prefix_tokens: int) -> int:
        """How many tokens it takes."""
        whole = [sum(map(len, self.chunks)) + prefix_tokens] if self.in_document else []
        return sum([*whole, *(len(self.chunks[index]) + prefix_tokens for index in self.alone)])


def readings(chunks: Sequence[Sequence[int]], which: Collection[int], most_tokens: int | None) -> Iterator[Reading]:
    """How chunks of a document are read.

    Args:
        chunks: token ids of all of them.
        which: indexes of those to compute.
        most_tokens: of a document read as a whole; a longer one is read in windows. None to compute the chunks alone.
    """
    if most_tokens is None:
        yield from (Reading([chunks[index]], [0], in_document=False) for index in sorted(which))
        return
    for window in windows([len(chunk) for chunk in chunks], most_tokens):
        wanted = [index - window.first for index in range(window.new, window.last) if index in which]
        if wanted:
            yield Reading(chunks[window.first : window.last], wanted, in_document=wanted[-1] > 0)


def passes(every: Iterable[Reading], prefix_tokens: int) -> Iterator[list[Reading]]:
    """Readings in groups of up to `PASS_TOKENS` tokens; a larger one stands alone."""
    group: list[Reading] = []
    held = 0
    for reading in every:
        tokens = reading.tokens(prefix_tokens)
        if group and held + tokens > PASS_TOKENS:
            yield group
            group, held = [], 0
        group.append(reading)
        held += tokens
    if group:
        yield group


def run_pass(decoder: Decoder, together: Sequence[Reading], prefix_ids: Sequence[int], model: str) -> Iterator[ChunkKV]:
    """The KV of the chunks wanted, reading by reading, from one pass through the model; views of what it gave.

    Args:
        decoder: the model.
        together: what is read.
        prefix_ids: what every sequence stands behind.
        model: its fingerprint.
    """
    rows = _Rows(together, prefix_ids)
    deviation = ContextDeviation(rows.alone, rows.behind, decoder.device)
    layers: list[list[LayerPair]] = [[] for _ in rows.chunks]
    for k_1HND, v_1HND in decoder.run_alone(rows.sequences):
        deviation.add(k_1HND, v_1HND)
        k_HTDs, v_HTDs = (rows.split(x_1HND[0].cpu()) for x_1HND in (k_1HND, v_1HND))
        for pairs, pair in zip(layers, zip(k_HTDs, v_HTDs, strict=True), strict=True):
            pairs.append(pair)
    found = iter(deviation.values())
    pairs_of = iter(layers)
    for reading in together:
        digests = [token_digest(chunk) for chunk in reading.chunks] if reading.in_document else []
        for index in reading.wanted:
            chunk, context = reading.chunks[index], None
            if reading.in_document and index:
                context = DocumentContext(tuple(digests[:index]), tuple(islice(found, len(chunk))))
            yield ChunkKV(next(pairs_of), chunk, prefix_ids, model, context)


class _Rows:
    """Which rows of a pass are whose.

    Attributes:
        sequences: token ids of what is run, those of one length side by side.
        chunks: where each of the chunks wanted stands, reading by reading.
        alone: the rows of the chunks that have something before them, computed alone; token by token.
        behind: the rows of the same tokens in their documents.
    """

    def __init__(self, together: Sequence[Reading], prefix_ids: Sequence[int]) -> None:
        named: dict[tuple[int, int | None], list[int]] = {}  # by reading and chunk; None is the whole
        for number, reading in enumerate(together):
            for index in reading.alone:
                named[number, index] = [*prefix_ids, *reading.chunks[index]]
            if reading.in_document:
                named[number, None] = [*prefix_ids, *chain.from_iterable(reading.chunks)]
        order = sorted(named, key=lambda name: len(named[name]))
        self.sequences = [named[name] for name in order]
        starts = dict(zip(order, accumulate(map(len, self.sequences), initial=len(prefix_ids)), strict=False))
        self.chunks: list[slice] = []
        self.alone: list[int] = []
        self.behind: list[int] = []
        for number, reading in enumerate(together):
            before = list(accumulate(map(len, reading.chunks), initial=0))
            for index in reading.wanted:
                tokens = len(reading.chunks[index])
                start = starts[number, index if (number, index) in starts else None]
                self.chunks.append(slice(start, start + tokens))
                if reading.in_document and index:
                    self.alone += range(start, start + tokens)
                    behind = starts[number, None] + before[index]
                    self.behind += range(behind, behind + tokens)
        self._edges = sorted({edge for at in self.chunks for edge in (at.start, at.stop)})
        self._parts = [self._edges.index(at.start) + 1 for at in self.chunks]

    def split(self, x_HND: torch.Tensor) -> list[torch.Tensor]:
        """The rows of each of the chunks wanted, views taken in one operation."""
        parts = x_HND.tensor_split(self._edges, dim=1)
        return [parts[part] for part in self._parts]
