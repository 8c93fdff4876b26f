"""Ingest: documents into the index, their chunks' KV into the store."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from cacheblend.base.errors import BudgetTooSmallError, CacheBlendError, InputError
from cacheblend.retriever import Document

from .document_encoder import Check, DocumentEncoder, EncodingWatch, Progress

if TYPE_CHECKING:
    from cacheblend.retriever import Retriever
    from cacheblend.store import KVStore

    from .chunk_contexts import ChunkEncoder
    from .document_encoder import EncodedDocuments
    from .documents import DocumentWriter, PutReport

logger = logging.getLogger(__name__)
StreamProgress = Callable[[int, int], None]
BATCH_DOCUMENTS = 64
BATCH_CHARACTERS = 2**20  # a batch ends with the document that reaches it


@dataclass(frozen=True, slots=True, kw_only=True)
class IngestReport:
    """Counts of an ingest.

    Args:
        documents: documents given.
        added: new ones.
        replaced: ones whose text changed.
        unchanged: ones that were there.
        chunks: chunks of all of them.
        computed: chunks whose KV was computed now.
        already_stored: chunks whose KV was stored before.
        evicted: chunks whose KV is not stored all the same, since the budget has no room for all; of a stream, all that were
            evicted meanwhile.
        dropped: chunks of replaced documents that no document has any more; their KV was removed.
        tokens: tokens of the chunks computed now.
        seconds: wall clock of it all.
    """

    documents: int
    added: int
    replaced: int
    unchanged: int
    chunks: int
    computed: int
    already_stored: int
    evicted: int
    dropped: int
    tokens: int
    seconds: float

    @classmethod
    def of(cls, encoded: EncodedDocuments, put: PutReport, *, evicted: int, seconds: float) -> IngestReport:
        """Of a batch whose documents are in the index."""
        chunks = len(encoded.distinct_keys)
        return cls(
            documents=len(encoded.documents),
            added=len(encoded.embedded) - put.replaced,
            replaced=put.replaced,
            unchanged=len(encoded.documents) - len(encoded.embedded),
            chunks=chunks,
            computed=len(encoded.computed),
            already_stored=chunks - len(encoded.computed),
            evicted=evicted,
            dropped=put.dropped,
            tokens=encoded.tokens,
            seconds=seconds,
        )

    @classmethod
    def empty(cls) -> IngestReport:
        """Of no documents."""
        return cls(**dict.fromkeys((each.name for each in dataclasses.fields(cls)), 0))

    def __add__(self, other: IngestReport) -> IngestReport:
        """Both in one; a chunk that both have counts twice."""
        names = [each.name for each in dataclasses.fields(self)]
        return IngestReport(**{name: getattr(self, name) + getattr(other, name) for name in names})

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return dataclasses.asdict(self)


class Ingester:
    """Splits, indexes and precomputes documents.

    Args:
        encoder: names and computes chunks' KV.
        retriever: splits and indexes.
        store: keeps the KV.
        writer: of both.
    """

    def __init__(self, encoder: ChunkEncoder, retriever: Retriever, store: KVStore, writer: DocumentWriter) -> None:
        self._retriever, self._store, self._writer = retriever, store, writer
        self._encoder = DocumentEncoder(encoder, retriever, store)

    def ingest(
        self, documents: Iterable[Mapping[str, object]], on_progress: Progress | None = None, check: Check | None = None
    ) -> IngestReport:
        """See `Engine.ingest`."""
        given = [Document.of(document) for document in documents]
        if not given:
            raise InputError("no documents to ingest; give at least one")
        watch = EncodingWatch(on_progress=on_progress or (lambda *_: None), check=check or (lambda: None))
        report = self._ingest(given, watch)
        if report.evicted:
            raise BudgetTooSmallError(
                f"the KV of {report.evicted} of {report.chunks} chunks is not stored: they do not fit the store's byte budget "
                "at once, or others took their place; the texts are in the index and can be asked about; "
                "raise nvme_budget_bytes, unpin or delete documents, or ingest fewer at once"
            )
        return report

    def ingest_stream(
        self,
        documents: Iterable[Document | Mapping[str, object]],
        on_progress: StreamProgress | None = None,
        check: Check | None = None,
        on_batch: Progress | None = None,
    ) -> IngestReport:
        """See `Engine.ingest_stream`."""
        started, evictions = time.perf_counter(), self._store.stats().nvme.evictions
        report, note = on_progress or (lambda *_: None), on_batch or (lambda *_: None)
        total, tokens = IngestReport.empty(), 0

        def count(chunk_tokens: int) -> None:
            nonlocal tokens
            tokens += chunk_tokens
            report(total.documents, tokens)

        watch = EncodingWatch(
            on_progress=lambda stage, done, of: note(stage, done, of) if stage == "precompute" else None,
            on_embedded=lambda done, of: note("embed", done, of),
            on_computed=count,
            check=check or (lambda: None),
        )
        for batch in batches(map(Document.of, documents)):
            total += self._ingest(batch, watch)
            report(total.documents, tokens)
        evicted = self._store.stats().nvme.evictions - evictions
        if evicted:
            budget_bytes = self._store.config.nvme_budget_bytes
            logger.warning(
                "the KV of %d chunks did not stay within nvme_budget_bytes=%d; raise it to keep all", evicted, budget_bytes
            )
        return replace(total, evicted=evicted, seconds=time.perf_counter() - started)

    def _ingest(self, documents: Sequence[Document], watch: EncodingWatch) -> IngestReport:
        started, encoder, store = time.perf_counter(), self._encoder, self._store
        # 1. Split and embed. Nothing is written before all KV is there: who gives up leaves the documents as they were.
        versions = {document.id: self._retriever.version(document.id) for document in documents}
        encoded = encoder.split(documents, self._retriever.changed(documents), watch)
        try:
            # 2. Compute and store chunks' KV that is stored neither here nor in the remote tier.
            encoder.compute(encoded, set(encoded.distinct_keys) - encoded.found, watch)
            # 3. Change the documents, all at once. KV that was there and is evicted by now is computed first.
            needed = set(encoded.found)
            while (put := self._writer.put(encoded, versions, needed)) is None:
                gone = {key for key in needed if key not in store}
                encoder.compute(encoded, gone, watch)
                needed -= gone  # once each: where the budget is below the corpus, they may go again
        except CacheBlendError:  # given up by client or service, a full disk, a changed document: as if it never came
            try:
                store.documents.drop_unowned(encoded.computed)
            except CacheBlendError as error:
                stay = len(encoded.computed)
                logger.warning("the KV of %d chunks of an ingest that was given up stays until it is evicted: %s", stay, error)
            raise
        evicted = sum(key not in store for key in encoded.distinct_keys)
        return IngestReport.of(encoded, put, evicted=evicted, seconds=time.perf_counter() - started)


def batches(documents: Iterable[Document], batch_documents: int | None = None) -> Iterator[list[Document]]:
    """Groups that are ingested at once: so many documents, `BATCH_DOCUMENTS` by default, or `BATCH_CHARACTERS`.

    Raises:
        InputError: two documents of one id have different texts.
    """
    batch_documents = batch_documents or BATCH_DOCUMENTS
    versions: dict[str, str] = {}
    batch: list[Document] = []
    for document in documents:
        if versions.setdefault(document.id, document.version) != document.version:
            raise InputError(f"two documents have the id {document.id!r} and different texts; give each its own id")
        batch.append(document)
        if len(batch) == batch_documents or sum(len(one.text) for one in batch) >= BATCH_CHARACTERS:
            yield batch
            batch = []
    if batch:
        yield batch
