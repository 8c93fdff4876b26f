"""Documents into the index, and their chunks' KV into the store."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import replace

from cacheblend.blend import ChunkContext, Fusor
from cacheblend.retriever import Document, Retriever
from cacheblend.store import ChunkKey, DocumentVersion, KVStore
from cacheblend.store.errors import DocumentChangedError, InputError, StoreFullError

from .answer import IngestReport
from .lengths import check_chunks

logger = logging.getLogger(__name__)
Progress = Callable[[str, int, int], None]
StreamProgress = Callable[[int, int], None]
BATCH_DOCUMENTS = 64
BATCH_CHARACTERS = 2**20  # a batch ends with the document that reaches it


class Ingester:
    """Splits, indexes and precomputes documents.

    Args:
        fusor: computes chunks' KV.
        retriever: splits and indexes.
        store: keeps the KV.
        key: names a chunk's KV by its token ids and the chunks of its document that it is computed after.
        prefix_ids: what all chunks are computed after.
        context: what stands between that and a chunk.
        changing: held while documents change in index and catalogue; see `Documents`.
    """

    def __init__(
        self,
        fusor: Fusor,
        retriever: Retriever,
        store: KVStore,
        key: Callable[[Sequence[int], Sequence[Sequence[int]]], ChunkKey],
        prefix_ids: Sequence[int],
        context: ChunkContext,
        *,
        changing: AbstractContextManager[object],
    ) -> None:
        self._changing = changing
        self._fusor, self._retriever, self._store, self._key = fusor, retriever, store, key
        self._prefix_ids, self._context = prefix_ids, context

    def ingest(self, documents: Iterable[Mapping[str, object]], on_progress: Progress | None = None) -> IngestReport:
        """See `Engine.ingest`."""
        given = [Document.of(document) for document in documents]
        if not given:
            raise InputError("no documents to ingest; give at least one")
        report = self._ingest(given, on_progress or (lambda *_: None))
        if report.evicted:
            raise StoreFullError(
                f"the KV of {report.evicted} of {report.chunks} chunks is not stored: they do not fit the store's byte budget "
                "at once, or others took their place; the texts are in the index and can be asked about; "
                "raise nvme_budget_bytes, unpin or delete documents, or ingest fewer at once"
            )
        return report

    def ingest_stream(
        self, documents: Iterable[Document | Mapping[str, object]], on_progress: StreamProgress | None = None
    ) -> IngestReport:
        """See `Engine.ingest_stream`."""
        started, evictions = time.perf_counter(), self._store.stats().nvme.evictions
        report = on_progress or (lambda *_: None)
        total, tokens = IngestReport.nothing(), 0

        def computed(chunk_tokens: int) -> None:
            nonlocal tokens
            tokens += chunk_tokens
            report(total.documents, tokens)

        for batch in _batches(map(Document.of, documents)):
            total += self._ingest(batch, lambda *_: None, computed)
            report(total.documents, tokens)
        evicted = self._store.stats().nvme.evictions - evictions
        total = replace(total, evicted=evicted, seconds=time.perf_counter() - started)
        self._warn_of_evictions(total)
        return total

    def _ingest(
        self, given: Sequence[Document], report: Progress, computed_one: Callable[[int], None] = lambda _: None
    ) -> IngestReport:
        started = time.perf_counter()
        stands_after = len(self._prefix_ids) + len(self._context.filler_ids)
        check_chunks(given, self._retriever.splitter, self._fusor.max_positions, stands_after)
        chunks: dict[tuple[str, str], list[Sequence[int]]] = {}
        keys: dict[tuple[str, str], list[ChunkKey]] = {}
        with self._changing:
            added = self._retriever.add(given, lambda done, total: report("index", done, total))
            for document in {document.id: document for document in given}.values():
                own: list[Sequence[int]] = [chunk.token_ids for chunk in self._retriever.chunks(document.id)]
                chunks[document.id, document.version] = own
                earlier = self._context.earlier(own)
                keys[document.id, document.version] = list(map(self._key, own, earlier))
            with self._store.exclusive():  # deletions and other processes' ingests come before this or after it
                self._check_versions(self._retriever.version, keys)
                dropped = self._store.documents.put((*document, list(dict.fromkeys(own))) for document, own in keys.items())
        every = dict.fromkeys(key for own in keys.values() for key in own)
        missing = {key for key in every if key not in self._store}
        wanted: list[tuple[list[Sequence[int]], list[int]]] = []
        to_compute: list[tuple[ChunkKey, DocumentVersion]] = []
        for versioned, document_keys in keys.items():
            which: list[int] = []
            for index, key in enumerate(document_keys):
                if key in missing:
                    missing.remove(key)  # whoever has it again need not bring it
                    which.append(index)
                    to_compute.append((key, versioned))
            wanted.append((chunks[versioned], which))
        computed = tokens = 0
        writes: deque[tuple[Future[bool], DocumentVersion]] = deque()
        for (key, versioned), kv in zip(
            to_compute, self._fusor.precompute_documents(wanted, self._prefix_ids, self._context), strict=True
        ):
            writes.append((self._store.put(key, kv, flush=False, document=versioned), versioned))
            computed, tokens = computed + 1, tokens + len(kv.token_ids)
            while writes and writes[0][0].done():
                _check_write(*writes.popleft())  # a full disk ends the run here, not hours later
            report("precompute", computed, len(to_compute))
            computed_one(len(kv.token_ids))
        for write in writes:
            _check_write(*write)
        self._check_versions(self._store.documents.version, keys)
        return IngestReport(
            documents=len(given),
            added=added.added,
            replaced=added.replaced,
            unchanged=added.unchanged,
            chunks=len(every),
            computed=computed,
            already_stored=len(every) - computed,
            evicted=sum(key not in self._store for key in every),
            dropped=dropped,
            tokens=tokens,
            seconds=time.perf_counter() - started,
        )

    @staticmethod
    def _check_versions(version_of: Callable[[str], str | None], documents: Iterable[DocumentVersion]) -> None:
        for id_, version in documents:
            if version_of(id_) != version:
                raise DocumentChangedError(id_)

    def _warn_of_evictions(self, report: IngestReport) -> None:
        if report.evicted:
            logger.warning(
                "the KV of %d chunks did not stay within nvme_budget_bytes=%d; raise it to keep all",
                report.evicted,
                self._store.config.nvme_budget_bytes,
            )


def _check_write(stored: Future[bool], document: DocumentVersion) -> None:
    """Wait until a chunk's KV is durable; raises what hindered that."""
    if not stored.result():
        raise DocumentChangedError(document[0])


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """Groups that are ingested at once; raises InputError where two documents of one id have different texts."""
    versions: dict[str, str] = {}
    batch: list[Document] = []
    for document in documents:
        if versions.setdefault(document.id, document.version) != document.version:
            raise InputError(f"two documents have the id {document.id!r} and different texts; give each its own id")
        batch.append(document)
        if len(batch) == BATCH_DOCUMENTS or sum(len(one.text) for one in batch) >= BATCH_CHARACTERS:
            yield batch
            batch = []
    if batch:
        yield batch
