"""Chunks' KV, each computed after its context, several documents in one pass (docs/adr/006-contextual-chunk-kv.md).

A document follows the prefix and filler passages, its chunks in order; each chunk's slice of the pass is its KV.

Shapes: H KV heads, N rows of a pass, T tokens of a chunk, D head size.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import TYPE_CHECKING

from cacheblend.base.threads import in_groups

from .config import DOCUMENT_TOKENS

if TYPE_CHECKING:
    from cacheblend.store import LayerPair

    from .interfaces import ModelRunner
    from .layer_passes import SharedPrefix

# Tokens that make a pass full; a longer one is no faster, since its activations leave the processor's caches.
PASS_TOKENS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkContext:
    """Context of chunks' KV, after the prefix that all chunks share.

    Args:
        filler_ids: token ids of the filler passages that every chunk follows; they end as a chunk does.
        document_tokens: tokens of the windows in which a document is read, so that a chunk follows its document's earlier text;
            with 0 a chunk follows the filler only.
    """

    filler_ids: tuple[int, ...] = ()
    document_tokens: int = DOCUMENT_TOKENS

    def windows(self, chunks: Sequence[Sequence[int]]) -> Iterator[Window]:
        """The windows in which a document's chunks are read, `document_tokens` at most; every chunk is new in one window.

        Consecutive windows overlap by up to half: the overlap is context, its KV is not stored again. A chunk longer than a
        window has one to itself.
        """
        tokens, limit = [len(chunk) for chunk in chunks], self.document_tokens
        first = new = 0
        while new < len(tokens):
            last = first + 1
            while last < len(tokens) and sum(tokens[first : last + 1]) <= limit:
                last += 1
            if last <= new:
                first += 1
                continue
            yield Window(first, new, last)
            new = last
            while first < new and sum(tokens[first:new]) > limit // 2:
                first += 1

    def earlier(self, chunks: Sequence[Sequence[int]]) -> list[tuple[Sequence[int], ...]]:
        """For each chunk of a document, the earlier chunks that its KV is computed after."""
        return [tuple(chunks[window.first : at]) for window in self.windows(chunks) for at in range(window.new, window.last)]


@dataclass(frozen=True, slots=True)
class Window:
    """Chunks `first` to `last` (excluded) of a document, read together; those before `new` are context only."""

    first: int
    new: int
    last: int


@dataclass(frozen=True, slots=True)
class Reading:
    """Consecutive chunks of a document, up to the last wanted one, and the ascending indexes of those to compute."""

    chunks: Sequence[Sequence[int]]
    wanted: Sequence[int]

    @property
    def token_ids(self) -> list[int]:
        """The token ids of all chunks."""
        return list(chain.from_iterable(self.chunks))

    def __len__(self) -> int:
        return sum(map(len, self.chunks))


def readings(chunks: Sequence[Sequence[int]], which: Collection[int], context: ChunkContext) -> Iterator[Reading]:
    """The readings that compute the chunks `which` of a document."""
    for window in context.windows(chunks):
        wanted = [index - window.first for index in range(window.new, window.last) if index in which]
        if wanted:
            yield Reading(chunks[window.first : window.first + wanted[-1] + 1], wanted)


def passes(every: Iterable[Reading], prefix_tokens: int) -> Iterator[list[Reading]]:
    """Group readings until a pass has `PASS_TOKENS` tokens, counting `prefix_tokens` per reading."""
    return in_groups(every, lambda group: sum(len(reading) + prefix_tokens for reading in group) >= PASS_TOKENS)


def run_pass(
    runner: ModelRunner, together: Sequence[Reading], prefix_ids: Sequence[int], shared: SharedPrefix | None
) -> list[tuple[Reading, int, list[LayerPair]]]:
    """The KV of the wanted chunks, reading by reading, from one pass through the model; views of the pass's tensors.

    `prefix_ids` run before every reading, and after the prefix of `shared`. Returns the reading, the chunk's index in it, and
    its layers.
    """
    order = sorted(range(len(together)), key=lambda index: len(together[index]))  # equal lengths side by side
    sequences = [[*prefix_ids, *together[index].token_ids] for index in order]
    starts = dict(zip(order, accumulate(map(len, sequences), initial=len(prefix_ids)), strict=False))
    chunks: list[tuple[Reading, int, list[LayerPair]]] = []
    edges: list[list[int]] = []  # of each chunk, its first row and the row after it
    for at, reading in enumerate(together):
        rows = list(accumulate(map(len, reading.chunks), initial=starts[at]))
        chunks += [(reading, index, []) for index in reading.wanted]
        edges += [rows[index : index + 2] for index in reading.wanted]
    for k_1HND, v_1HND in runner.run_isolated(sequences, shared):
        k_HND, v_HND = k_1HND[0].cpu(), v_1HND[0].cpu()
        for (_, _, layers), (start, stop) in zip(chunks, edges, strict=True):
            layers.append((k_HND[:, start:stop], v_HND[:, start:stop]))
    return chunks
