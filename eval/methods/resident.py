"""A request whose stored KV lies in RAM when the question comes: what was computed before is not part of any TTFT."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from cacheblend.blend import Fusor, Segment
from cacheblend.eval.data import Request
from cacheblend.service.prompt import PromptPieces
from cacheblend.store import ChunkKV


class ResidentRequest:
    """KV for one request, computed when a method first asks for it and dropped with the request.

    Args:
        fusor: the model.
        request: the request.
        chunk_prefix_ids: what every chunk is computed behind.
        cached_chunks: per chunk whether its KV was there before the request came.
        cached_prefix_chunks: how many leading chunks a prefix cache has, as some other request left them.
    """

    def __init__(
        self,
        fusor: Fusor,
        request: Request,
        chunk_prefix_ids: Sequence[int],
        cached_chunks: Sequence[bool],
        cached_prefix_chunks: int,
    ) -> None:
        self.request = request
        self._fusor, self._chunk_prefix_ids = fusor, tuple(chunk_prefix_ids)
        self._cached_chunks, self._cached_prefix_chunks = tuple(cached_chunks), cached_prefix_chunks

    @property
    def pieces(self) -> PromptPieces:
        """The prompt's token ids."""
        return self.request.pieces

    @cached_property
    def chunk_kv(self) -> tuple[ChunkKV | None, ...]:
        """Each chunk's KV, computed alone, with what its document's chunks before it do to it; None where not cached."""
        found: list[ChunkKV | None] = [None] * len(self.pieces.chunks)
        documents: dict[str, list[int]] = {}
        for index in range(len(found)):
            documents.setdefault(self.pieces.document_ids[index] if self.pieces.document_ids else str(index), []).append(index)
        for own in documents.values():
            which = [place for place, index in enumerate(own) if self._cached_chunks[index]]
            chunks = [self.pieces.chunks[index] for index in own]
            for place, kv in zip(which, self._fusor.precompute_document(chunks, self._chunk_prefix_ids, which), strict=True):
                found[own[place]] = kv
        return tuple(found)

    @cached_property
    def head_kv(self) -> ChunkKV | None:
        """KV of what every prompt begins with; None where that is nothing."""
        return self._fusor.precompute(self.pieces.head) if self.pieces.head else None

    @cached_property
    def prefix_kv(self) -> ChunkKV | None:
        """KV of the head and the cached leading chunks together, as full prefill gives it."""
        prefix = self._prefix(self._cached_prefix_chunks)
        return self._fusor.precompute(prefix) if prefix else None

    @cached_property
    def lone_kv(self) -> tuple[ChunkKV | None, ...]:
        """Per chunk the KV of the head and that chunk, for methods that read every chunk alone; None where not cached."""
        return tuple(
            self._fusor.precompute((*self.pieces.head, *chunk)) if cached else None
            for chunk, cached in zip(self.pieces.chunks, self._cached_chunks, strict=True)
        )

    def blend_segments(self) -> list[Segment]:
        """Head exact, every cached chunk with its own KV, the rest fresh."""
        head = [] if self.head_kv is None else [Segment(self.pieces.head, self.head_kv, exact=True)]
        chunks = [Segment(chunk, kv) for chunk, kv in zip(self.pieces.chunks, self.chunk_kv, strict=True)]
        return [*head, *chunks, Segment(self.pieces.tail)]

    def prefix_segments(self) -> list[Segment]:
        """The cached prefix exact, the rest fresh."""
        prefix = self._prefix(self._cached_prefix_chunks)
        cached = [] if self.prefix_kv is None else [Segment(prefix, self.prefix_kv, exact=True)]
        return [*cached, Segment(self.pieces.token_ids[len(prefix) :])]

    def _prefix(self, chunks: int) -> tuple[int, ...]:
        return (*self.pieces.head, *(token for chunk in self.pieces.chunks[:chunks] for token in chunk))
