"""Documents into the index, and their chunks' KV into the store."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

from cacheblend.blend import Fusor
from cacheblend.retriever import Document, Retriever
from cacheblend.store import ChunkKey, ChunkKV, KVStore
from cacheblend.store.errors import InputError

from .answer import IngestReport
from .lengths import check_chunks

logger = logging.getLogger(__name__)
Progress = Callable[[str, int, int], None]
StreamProgress = Callable[[int, int], None]
FLUSH_EVERY = 256  # chunks; each flush waits for the writer
BATCH_DOCUMENTS = 64
BATCH_CHARACTERS = 2**20  # a batch ends with the document that reaches it


class Ingester:
    """Splits, indexes and precomputes documents.

    Args:
        fusor: computes chunks' KV.
        retriever: splits and indexes.
        store: keeps the KV.
        key: names a chunk's KV by its token ids.
        prefix_ids: what chunks are computed behind.
        document_context: see `EngineConfig`.
        changing: held while documents change in index and catalogue; see `Documents`.
    """

    def __init__(
        self,
        fusor: Fusor,
        retriever: Retriever,
        store: KVStore,
        key: Callable[[Sequence[int]], ChunkKey],
        prefix_ids: Sequence[int],
        *,
        document_context: bool,
        changing: AbstractContextManager[object],
    ) -> None:
        self._changing = changing
        self._fusor, self._retriever, self._store, self._key = fusor, retriever, store, key
        self._prefix_ids, self._document_context = prefix_ids, document_context

    def ingest(self, documents: Iterable[Mapping[str, object]], on_progress: Progress | None = None) -> IngestReport:
        """See `Engine.ingest`."""
        given = [Document.of(document) for document in documents]
        if not given:
            raise InputError("no documents to ingest; give at least one")
        report = self._ingest(given, on_progress or (lambda *_: None))
        self._warn_of_evictions(report)
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
        check_chunks(given, self._retriever.splitter, self._fusor.max_positions, len(self._prefix_ids))
        chunks: dict[ChunkKey, Sequence[int]] = {}
        keys: dict[tuple[str, str], list[ChunkKey]] = {}
        with self._changing:
            added = self._retriever.add(given, lambda done, total: report("index", done, total))
            for document in {document.id: document for document in given}.values():
                own = {self._key(chunk.token_ids): chunk.token_ids for chunk in self._retriever.chunks(document.id)}
                chunks |= own
                keys[document.id, document.version] = list(own)
            dropped = self._store.documents.put((*document, own) for document, own in keys.items())
        missing = {key for key in chunks if key not in self._store}
        wanted: list[tuple[list[ChunkKey], list[int]]] = []
        for document_keys in keys.values():
            which = [index for index, key in enumerate(document_keys) if key in missing]
            missing -= {document_keys[index] for index in which}  # the next document that has them need not bring them
            wanted.append((document_keys, which))
        to_compute = [document_keys[index] for document_keys, which in wanted for index in which]
        computed = tokens = 0
        for key, kv in zip(to_compute, self._compute(wanted, chunks), strict=True):
            self._store.put(key, kv, flush=False)
            computed, tokens = computed + 1, tokens + len(kv.token_ids)
            if computed % FLUSH_EVERY == 0:
                self._store.flush()  # a full disk ends the run here, not hours later
            report("precompute", computed, len(to_compute))
            computed_one(len(kv.token_ids))
        self._store.flush()
        return IngestReport(
            documents=len(given),
            added=added.added,
            replaced=added.replaced,
            unchanged=added.unchanged,
            chunks=len(chunks),
            computed=computed,
            already_stored=len(chunks) - computed,
            evicted=sum(key not in self._store for key in chunks),
            dropped=dropped,
            tokens=tokens,
            seconds=time.perf_counter() - started,
        )

    def _compute(
        self, wanted: Iterable[tuple[list[ChunkKey], list[int]]], chunks: Mapping[ChunkKey, Sequence[int]]
    ) -> Iterator[ChunkKV]:
        documents = (([chunks[key] for key in document_keys], which) for document_keys, which in wanted)
        return self._fusor.precompute_documents(documents, self._prefix_ids, context=self._document_context)

    def _warn_of_evictions(self, report: IngestReport) -> None:
        if report.evicted:
            logger.warning(
                "the KV of %d chunks did not stay within nvme_budget_bytes=%d; raise it to keep all",
                report.evicted,
                self._store.config.nvme_budget_bytes,
            )


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
