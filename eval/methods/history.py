"""What is cached when a request comes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

Chunk = tuple[int, ...]


class CacheHistory(Protocol):
    """Tells which chunks and which prefixes earlier requests left in the cache."""

    def cached(self, chunks: Sequence[Chunk]) -> tuple[tuple[bool, ...], int]:
        """Per chunk whether its KV is there, and how many leading chunks a prefix cache has."""

    def remember(self, chunks: Sequence[Chunk]) -> None:
        """A request over these chunks is done."""


class EverythingCached:
    """Every chunk was computed before, and some other request began with the same first chunk: the paper's set-up.

    That flatters prefix caching, as the paper does: its first chunk always hits. What stands behind the first chunk never
    does, since no other request has the same two chunks in the same order.
    """

    def cached(self, chunks: Sequence[Chunk]) -> tuple[tuple[bool, ...], int]:
        """All of them, and the first."""
        return (True,) * len(chunks), min(1, len(chunks))

    def remember(self, chunks: Sequence[Chunk]) -> None:
        """Nothing to add."""


class SeenBefore:
    """What earlier requests of the run had, as if the cache had room for all of it; only token ids are held here."""

    def __init__(self) -> None:
        self._chunks: set[Chunk] = set()
        self._prefixes: set[tuple[Chunk, ...]] = set()

    def cached(self, chunks: Sequence[Chunk]) -> tuple[tuple[bool, ...], int]:
        """Chunks seen anywhere, and the longest run of leading chunks that a request began with."""
        prefix = 0
        while prefix < len(chunks) and tuple(chunks[: prefix + 1]) in self._prefixes:
            prefix += 1
        return tuple(chunk in self._chunks for chunk in chunks), prefix

    def remember(self, chunks: Sequence[Chunk]) -> None:
        """Add a request's chunks and prefixes."""
        self._chunks.update(chunks)
        self._prefixes.update(tuple(chunks[:length]) for length in range(1, len(chunks) + 1))
