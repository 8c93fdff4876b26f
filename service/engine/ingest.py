"""Ingest: documents into the index, their chunks' KV into the store, and stores merged into one."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from cacheblend.base.errors import BudgetTooSmallError, CacheBlendError, InputError
from cacheblend.retriever import Document, RetrieverConfig
from cacheblend.retriever.index_folder import merge_indexes
from cacheblend.store.merge import check_stores, merge

from .config import INDEX_FOLDER, KV_FOLDER
from .document_encoder import Check, DocumentEncoder, EncodingWatch, Progress

if TYPE_CHECKING:
    from rich.console import Console

    from cacheblend.retriever import Retriever
    from cacheblend.store import KVStore
    from cacheblend.store.merge import MergeReport

    from .chunk_contexts import ChunkEncoder
    from .document_encoder import EncodedDocuments
    from .document_sources import DocumentStream
    from .documents import DocumentWriter, PutReport
    from .stream_size import StreamSize

logger = logging.getLogger(__name__)
StreamProgress = Callable[[int, int], None]
BATCH_DOCUMENTS = 64
BATCH_CHARACTERS = 2**20  # a batch ends with the document that reaches it
LINE_EVERY_S = 10.0  # of progress, where there is no terminal


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


class IngestProgress:
    """A line that changes on a terminal, else a line every ten seconds, as a log wants it; a context manager.

    The speed is that since the first chunk began to be computed, so that documents which are skipped promise no early end. What
    is done is counted in characters: documents are read a batch at a time, and of a batch the share of its computed chunks is
    done.

    Args:
        console: where to.
        stream: the documents being read; None where others read them, and whole documents are what is known to be done.
        size: of the stream; None where that is not known, and no time left can be shown.
    """

    def __init__(self, console: Console, stream: DocumentStream | None, size: StreamSize | None) -> None:
        self._console, self._stream, self._size = console, stream, size
        self._skipped_characters = self._done_characters = 0
        self._done_documents = self._done_tokens = self._tokens = 0
        self._batch_share, self._embedding = 0.0, ""
        self._started = time.monotonic()
        self._next_line = time.monotonic() + LINE_EVERY_S
        self._opened = ExitStack()
        self._status = self._opened.enter_context(console.status("reading")) if console.is_terminal else None

    def update(self, documents: int, tokens: int) -> None:
        """What was done so far; `StreamProgress`."""
        now, self._tokens = time.monotonic(), tokens
        if not tokens:
            self._skipped_characters, self._started = self._characters * (documents > 0), now
        if documents != self._done_documents:  # a batch ended, and the next one is not read yet
            self._done_documents, self._done_tokens = documents, tokens
            self._done_characters = self._characters
            self._batch_share, self._embedding = 0.0, ""
        self._show(self.line(documents, tokens, now), now)

    def note_batch(self, stage: str, done: int, total: int) -> None:
        """What of the batch is embedded or computed; see `Engine.ingest_stream`."""
        if stage == "precompute":
            self._batch_share = done / total
        else:
            self._embedding = f"embedding {done:,} of {total:,} windows"
            self.check()

    def check(self) -> None:
        """Say that a batch's texts are split and embedded, which comes before the first of its chunks is computed."""
        if self._tokens == self._done_tokens and (characters := self._characters - self._done_characters) > 0:
            now = time.monotonic()
            line = self.line(self._done_documents, self._tokens, now)
            self._show(f"{line}, {self._embedding or f'splitting {characters:,} characters'}", now)

    @property
    def _characters(self) -> int:
        """Characters of the documents that were read."""
        if self._stream is not None:
            return self._stream.characters
        return round(self._size.characters * self._done_documents / max(1, self._size.documents)) if self._size else 0

    def _show(self, line: str, now: float) -> None:
        if self._status is not None:
            self._status.update(line)
        elif now >= self._next_line:
            self._next_line = now + LINE_EVERY_S
            self._console.print(line, highlight=False, markup=False)

    def line(self, documents: int, tokens: int, now: float) -> str:
        """The line, at a time of `time.monotonic`."""
        of = f" of {self._size.documents:,}" if self._size else ""
        parts = [f"{documents:,}{of} documents", f"{tokens:,} tokens"]
        if tokens and (seconds := now - self._started) > 0:
            parts.append(f"{tokens / seconds:,.0f} tokens/s")
            done = self._done_characters + self._batch_share * (self._characters - self._done_characters)
            if self._size is not None and done > self._skipped_characters:
                left_s = seconds * (self._size.characters - done) / (done - self._skipped_characters)
                parts.append(f"{timedelta(seconds=round(left_s))} left")
        return ", ".join(parts)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._opened.close()


class ReadingProgress:
    """How many files were read and which one is: a line that changes on a terminal, else one every ten seconds.

    Args:
        console: where to.

    Attributes:
        files: how many there were.
    """

    def __init__(self, console: Console) -> None:
        self._console, self.files = console, 0
        self._next_line = time.monotonic() + LINE_EVERY_S
        self._opened = ExitStack()
        self._status = self._opened.enter_context(console.status("reading")) if console.is_terminal else None

    def update(self, file: Path) -> None:
        """A file is read now."""
        line, now = f"reading: {self.files:,} files, now {file}", time.monotonic()
        self.files += 1
        if self._status is not None:
            self._status.update(self._console.render_str(line))
        elif now >= self._next_line:
            self._next_line = now + LINE_EVERY_S
            self._console.print(line, highlight=False, markup=False, soft_wrap=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._opened.close()


def merge_stores(
    sources: Sequence[Path],
    target: Path,
    on_progress: Callable[[str, int, int], None] | None = None,
    index: RetrieverConfig | None = None,
) -> tuple[int, MergeReport]:
    """Copy index and KV of store folders into one, as if their documents had been ingested into it in this order.

    Nothing is split, embedded or computed again. The index goes first: where the merge is cut off, a document that has no KV
    yet is found, and recomputed in the prompt. The same call goes on from there. Profiles belong to a machine: none is copied.

    Args:
        sources: the `--store-dir` folders to copy from.
        target: the folder to copy into; made when missing.
        on_progress: called with the stage ("index" or "copy"), documents or entries done, and how many in all.
        index: names the database that documents are copied into, where it is not the target folder's own.

    Returns:
        Documents copied into the index, without those it had already, and what was done to the KV.

    Raises:
        InputError, StoreDirectoryError, StoreFullError: see `cacheblend.store.merge.merge`.
        RetrieverError: the indexes were built with different settings; see `merge_indexes`.
    """
    report = on_progress or (lambda *_: None)
    index = index or RetrieverConfig()
    kv = [source / KV_FOLDER for source in sources]
    check_stores(kv, target / KV_FOLDER)
    indexed = merge_indexes(
        [source / INDEX_FOLDER for source in sources],
        target / INDEX_FOLDER,
        index=index.index,
        schema=index.index_schema,
        on_progress=lambda done, total: report("index", done, total),
    )
    return indexed, merge(kv, target / KV_FOLDER, on_progress=lambda done, total: report("copy", done, total))
