"""Ingest: documents into the index, their chunks' KV into the store, and stores merged into one."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from cacheblend.base.errors import BudgetTooSmallError, CacheBlendError, InputError, PromptTooLongError
from cacheblend.retriever import Document, RetrieverConfig
from cacheblend.retriever.index_folder import merge_indexes
from cacheblend.store.merge import check_stores, merge

from .config import INDEX_FOLDER, KV_FOLDER

if TYPE_CHECKING:
    from rich.console import Console

    from cacheblend.retriever import Chunk, EmbeddedDocument, Retriever
    from cacheblend.store import ChunkKey, KVStore
    from cacheblend.store.merge import MergeReport

    from .chunk_contexts import ChunkEncoder
    from .document_sources import DocumentStream, StreamSize

logger = logging.getLogger(__name__)
Progress = Callable[[str, int, int], None]
StreamProgress = Callable[[int, int], None]
Check = Callable[[], None]
BATCH_DOCUMENTS = 64
BATCH_CHARACTERS = 2**20  # a batch ends with the document that reaches it
LINE_EVERY_S = 10.0  # of progress, where there is no terminal
CHARACTERS_PER_TOKEN = 4.0  # until a batch of documents says how many there are


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


@dataclass(slots=True)
class _Batch:
    """Documents that are ingested at once, and what was done of them."""

    documents: Sequence[Document]
    on_progress: Progress = lambda *_: None
    on_computed: Callable[[int], None] = lambda _: None  # called with the tokens of each chunk that was computed
    check: Check = lambda: None
    chunks: dict[tuple[str, str], list[Sequence[int]]] = field(default_factory=dict)  # by document and version
    keys: dict[tuple[str, str], list[ChunkKey]] = field(default_factory=dict)
    stored: list[ChunkKey] = field(default_factory=list)
    tokens: int = 0


class Ingester:
    """Splits, indexes and precomputes documents.

    Args:
        encoder: names and computes chunks' KV.
        retriever: splits and indexes.
        store: keeps the KV.
        changing: held while documents change in index and store; see `Documents`.
    """

    def __init__(
        self, encoder: ChunkEncoder, retriever: Retriever, store: KVStore, *, changing: AbstractContextManager[object]
    ) -> None:
        self._encoder, self._retriever, self._store, self._changing = encoder, retriever, store, changing

    def ingest(
        self, documents: Iterable[Mapping[str, object]], on_progress: Progress | None = None, check: Check | None = None
    ) -> IngestReport:
        """See `Engine.ingest`."""
        given = [Document.of(document) for document in documents]
        if not given:
            raise InputError("no documents to ingest; give at least one")
        report = self._ingest(_Batch(given, on_progress or (lambda *_: None), check=check or (lambda: None)))
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
    ) -> IngestReport:
        """See `Engine.ingest_stream`."""
        started, evictions = time.perf_counter(), self._store.stats().nvme.evictions
        report = on_progress or (lambda *_: None)
        total, tokens = IngestReport.empty(), 0

        def count(chunk_tokens: int) -> None:
            nonlocal tokens
            tokens += chunk_tokens
            report(total.documents, tokens)

        for batch in _batches(map(Document.of, documents)):
            total += self._ingest(_Batch(batch, on_computed=count, check=check or (lambda: None)))
            report(total.documents, tokens)
        evicted = self._store.stats().nvme.evictions - evictions
        if evicted:
            budget_bytes = self._store.config.nvme_budget_bytes
            logger.warning(
                "the KV of %d chunks did not stay within nvme_budget_bytes=%d; raise it to keep all", evicted, budget_bytes
            )
        return replace(total, evicted=evicted, seconds=time.perf_counter() - started)

    def _ingest(self, batch: _Batch) -> IngestReport:
        started, given, retriever = time.perf_counter(), batch.documents, self._retriever
        self._check_lengths(given)
        # What a document may be at the end: what it is now, or what another upload of this very text has made it.
        expected = {document.id: (retriever.version(document.id), document.version) for document in given}
        # 1. Embed what is new. Nothing is written before all KV is there: who gives up leaves the documents as they were.
        embedded: dict[str, EmbeddedDocument] = {}
        done = len(given) - len(new := retriever.changed(given))
        if done:
            batch.on_progress("index", done, len(given))
        for one in retriever.embed(new, batch.check):
            embedded[one.document.id] = one
            batch.on_progress("index", done + len(embedded), len(given))
        # 2. Compute and store chunks' KV that is stored neither here nor in the remote tier.
        for document in {document.id: document for document in given}.values():
            of_document = embedded[document.id].chunks if document.id in embedded else self._chunks(document)
            own: list[Sequence[int]] = [chunk.token_ids for chunk in of_document]
            batch.chunks[document.id, document.version] = own
            batch.keys[document.id, document.version] = list(map(self._encoder.key, own, self._encoder.context.earlier(own)))
        every = dict.fromkeys(key for keys in batch.keys.values() for key in keys)
        self._store.fetch(every)
        found = {key for key in every if key in self._store}
        try:
            self._compute(batch, every.keys() - found)
            # 3. Change the documents, all at once. KV that was there and is evicted by now is computed first.
            while True:
                with self._changing, self._store.exclusive():
                    gone = {key for key in found if key not in self._store}
                    if not gone:
                        replaced = retriever.put(list(embedded.values()), expected)
                        dropped = self._store.documents.put(
                            (*document, list(dict.fromkeys(keys))) for document, keys in batch.keys.items()
                        )
                        break
                self._compute(batch, gone)
                found -= gone  # once each: where the budget is below the corpus, they may go again
        except CacheBlendError:  # given up by client or service, a full disk, a changed document: as if it never came
            try:
                self._store.documents.drop_unowned(batch.stored)
            except CacheBlendError as error:
                logger.warning(
                    "the KV of %d chunks of an ingest that was given up stays until it is evicted: %s", len(batch.stored), error
                )
            raise
        return IngestReport(
            documents=len(given),
            added=len(embedded) - replaced,
            replaced=replaced,
            unchanged=len(given) - len(embedded),
            chunks=len(every),
            computed=len(batch.stored),
            already_stored=len(every) - len(batch.stored),
            evicted=sum(key not in self._store for key in every),
            dropped=dropped,
            tokens=batch.tokens,
            seconds=time.perf_counter() - started,
        )

    def _compute(self, batch: _Batch, keys: Iterable[ChunkKey]) -> None:
        """Compute and store the KV of some of a batch's chunks, and note it there. All is durable at the end."""
        missing, documents = set(keys), list[tuple[list[Sequence[int]], list[int]]]()
        wanted: list[ChunkKey] = []
        for versioned, of_document in batch.keys.items():
            indexes: list[int] = []
            for index, key in enumerate(of_document):
                if key in missing:
                    missing.remove(key)  # of equal chunks the first one is computed
                    indexes.append(index)
                    wanted.append(key)
            documents.append((batch.chunks[versioned], indexes))
        total, writes = len(batch.stored) + len(wanted), deque[Future[bool]]()
        batch.check()
        for key, kv in zip(wanted, self._encoder.compute_documents(documents), strict=True):
            batch.stored.append(key)
            batch.tokens += len(kv.token_ids)
            writes.append(self._store.put(key, kv, flush=False))
            while writes and writes[0].done():
                writes.popleft().result()  # a full disk ends the run here, not hours later
            batch.on_progress("precompute", len(batch.stored), total)
            batch.on_computed(len(kv.token_ids))
            batch.check()
        for write in writes:
            write.result()

    def _chunks(self, document: Document) -> Sequence[Chunk]:
        """The chunks of a document that is here, or was a moment ago."""
        try:
            chunks = self._retriever.chunks(document.id)
        except InputError:
            chunks = []
        return chunks if chunks and chunks[0].version == document.version else self._retriever.splitter.split(document)

    def _check_lengths(self, documents: Iterable[Document]) -> None:
        """Refuse documents of which a chunk and what it is computed after are longer than the model's positions.

        Raises:
            PromptTooLongError: so.
        """
        splitter, max_positions = self._retriever.splitter, self._encoder.fusor.max_positions
        before = len(self._encoder.prefix_ids) + len(self._encoder.context.filler_ids)
        chunk_tokens = splitter.config.chunk_tokens
        if max_positions is None or before + 2 * chunk_tokens <= max_positions:  # a chunk is a little over chunk_tokens
            return
        for document in documents:
            longest = max(len(chunk.token_ids) for chunk in splitter.split(document))
            if before + longest > max_positions:
                raise PromptTooLongError(
                    f"document {document.id!r} has a chunk of {longest} tokens, and the model {max_positions} positions, of "
                    f"which {before} are for what stands before it; lower chunk_tokens={chunk_tokens}"
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


class IngestProgress:
    """A line that changes on a terminal, else a line every ten seconds, as a log wants it; a context manager.

    The speed is that since the first chunk began to be computed, so that documents which are skipped promise no early end. What
    is done is known by the computed tokens: documents are read, and counted, a batch at a time.

    Args:
        console: where to.
        stream: the documents being read.
        size: of the stream; None where that is not known, and no time left can be shown.
    """

    def __init__(self, console: Console, stream: DocumentStream, size: StreamSize | None) -> None:
        self._console, self._stream, self._size = console, stream, size
        self._skipped_characters = self._done_characters = 0
        self._done_documents = self._done_tokens = self._tokens = 0
        self._started = time.monotonic()
        self._next_line = time.monotonic() + LINE_EVERY_S
        self._opened = ExitStack()
        self._status = self._opened.enter_context(console.status("reading")) if console.is_terminal else None

    def update(self, documents: int, tokens: int) -> None:
        """What was done so far; `StreamProgress`."""
        now, self._tokens = time.monotonic(), tokens
        if not tokens:
            self._skipped_characters, self._started = self._stream.characters * (documents > 0), now
        if documents != self._done_documents:  # a batch ended, and the next one is not read yet
            self._done_documents, self._done_characters, self._done_tokens = documents, self._stream.characters, tokens
        self._show(self.line(documents, tokens, now), now)

    def check(self) -> None:
        """Say that a batch's texts are split and embedded, which comes before the first of its chunks is computed."""
        if self._tokens == self._done_tokens and (characters := self._stream.characters - self._done_characters) > 0:
            now = time.monotonic()
            line = self.line(self._done_documents, self._tokens, now)
            self._show(f"{line}, embedding {characters:,} characters", now)

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
            of_done = self._done_characters - self._skipped_characters
            per_token = of_done / self._done_tokens if self._done_tokens and of_done else CHARACTERS_PER_TOKEN
            done = self._done_characters + (tokens - self._done_tokens) * per_token
            if self._size is not None and done > self._skipped_characters:
                left_s = seconds * max(0.0, self._size.characters - done) / (done - self._skipped_characters)
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
