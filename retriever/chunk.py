"""A chunk: the piece of a document that is embedded, found, and whose KV is cached."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Chunk:
    """One piece of a document with its token ids, which are final: nobody tokenises it again.

    Args:
        document_id: the document it was cut from.
        version: the version of that document.
        position: its number within the document, from 0.
        title: the document's title (part of `text` in chunk 0 only).
        text: the piece of the document, without the separator.
        token_ids: `text` and its trailing separator, tokenised once, alone, without special tokens.

    """

    document_id: str
    version: str
    position: int
    title: str
    text: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ScoredChunk:
    """A chunk found for a question, and the squared L2 distance between their vectors (nearest is 0)."""

    chunk: Chunk
    distance: float


def in_reading_order(found: Sequence[ScoredChunk]) -> list[ScoredChunk]:
    """Chunks of one document together and in its order, for a later one may refer back; documents by their nearest chunk."""
    rank = {id_: place for place, id_ in enumerate(dict.fromkeys(scored.chunk.document_id for scored in found))}
    return sorted(found, key=lambda scored: (rank[scored.chunk.document_id], scored.chunk.position))
