"""A request whose stored KV lies in RAM when the question comes: what was computed before is not part of any TTFT."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

from cacheblend.blend import ChunkContext, Fusor, Segment
from cacheblend.blend.fusor import NO_CONTEXT
from cacheblend.blend.precompute import DOCUMENT_TOKENS
from cacheblend.eval.data import Request
from cacheblend.service.engine.chunk_contexts import chunk_context
from cacheblend.service.engine.prompt import PromptPieces
from cacheblend.store import ChunkKV

CONTEXTS = ("default", "filler", "document", "neighbour", "head", "bos")


class StoredContexts:
    """What chunks' KV is computed after, by name.

    "default": the prompt's head, filler passages, and the document's earlier text, as the service does it; "filler" and
    "document": the head and one of both; "neighbour": the head and the chunk that stands before it in the prompt (the last one
    for the first); "head": that alone; "bos": the beginning-of-sequence token alone, the paper's way.

    Args:
        fusor: the model.
        head: token ids that the prompts begin with.
        filler: see `chunk_context`.
    """

    def __init__(self, fusor: Fusor, head: Sequence[int], filler: str = "auto") -> None:
        context, bos = chunk_context(fusor, filler, DOCUMENT_TOKENS, len(head)), fusor.tokenizer.bos_token_id
        self._known: dict[str, tuple[tuple[int, ...], ChunkContext]] = {
            "default": (tuple(head), context),
            "filler": (tuple(head), replace(context, document_tokens=0)),
            "document": (tuple(head), replace(context, filler_ids=())),
            "neighbour": (tuple(head), replace(context, filler_ids=())),
            "head": (tuple(head), NO_CONTEXT),
            "bos": (() if bos is None else (int(bos),), NO_CONTEXT),
        }

    def __getitem__(self, name: str) -> tuple[tuple[int, ...], ChunkContext]:
        return self._known[name]


class ResidentRequest:
    """KV for one request, computed when a method first asks for it and dropped with the request.

    Args:
        fusor: the model.
        request: the request.
        contexts: what chunks' KV is computed after.
        cached_chunks: per chunk whether its KV was there before the request came.
        cached_prefix_chunks: how many leading chunks a prefix cache has, as some other request left them.
    """

    def __init__(
        self,
        fusor: Fusor,
        request: Request,
        contexts: StoredContexts,
        cached_chunks: Sequence[bool],
        cached_prefix_chunks: int,
    ) -> None:
        self.request = request
        self._fusor, self._contexts = fusor, contexts
        self._cached_chunks, self._cached_prefix_chunks = tuple(cached_chunks), cached_prefix_chunks
        self._chunk_kv: dict[str, tuple[ChunkKV | None, ...]] = {}

    @property
    def pieces(self) -> PromptPieces:
        """The prompt's token ids."""
        return self.request.pieces

    def chunk_kv(self, context: str = CONTEXTS[0]) -> tuple[ChunkKV | None, ...]:
        """Each chunk's KV, computed after a context; None where not cached."""
        if context not in self._chunk_kv:
            self._chunk_kv[context] = self._compute(context)
        return self._chunk_kv[context]

    def _compute(self, name: str) -> tuple[ChunkKV | None, ...]:
        prefix_ids, context = self._contexts[name]
        pieces, found = self.pieces, list[ChunkKV | None]([None] * len(self.pieces.chunks))
        documents: dict[str, dict[int, int]] = {}  # place in its document of each cached chunk, by document
        texts: dict[str, list[tuple[int, ...]]] = {}
        for index, chunk in enumerate(pieces.chunks):
            if not self._cached_chunks[index]:
                continue
            document, earlier = str(index), list(pieces.earlier_of(index))
            if name == "neighbour":
                earlier = [pieces.chunks[index - 1]]
            elif pieces.document_ids and pieces.earlier:
                document = pieces.document_ids[index]
            documents.setdefault(document, {})[index] = len(earlier)
            if len(texts.get(document, ())) <= len(earlier):
                texts[document] = [*earlier, chunk]
        for document, places in documents.items():
            which = sorted(set(places.values()))
            kvs = dict(zip(which, self._fusor.precompute_document(texts[document], prefix_ids, which, context), strict=True))
            for index, place in places.items():
                found[index] = kvs[place]
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

    def blend_segments(self, context: str = CONTEXTS[0]) -> list[Segment]:
        """Head exact, every cached chunk with its own KV, the rest fresh."""
        head = [] if self.head_kv is None else [Segment(self.pieces.head, self.head_kv, exact=True)]
        chunks = [Segment(chunk, kv) for chunk, kv in zip(self.pieces.chunks, self.chunk_kv(context), strict=True)]
        return [*head, *chunks, Segment(self.pieces.tail)]

    def prefix_segments(self) -> list[Segment]:
        """The cached prefix exact, the rest fresh."""
        prefix = self._prefix(self._cached_prefix_chunks)
        cached = [] if self.prefix_kv is None else [Segment(prefix, self.prefix_kv, exact=True)]
        return [*cached, Segment(self.pieces.token_ids[len(prefix) :])]

    def _prefix(self, chunks: int) -> tuple[int, ...]:
        return (*self.pieces.head, *(token for chunk in self.pieces.chunks[:chunks] for token in chunk))
