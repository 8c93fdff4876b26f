"""Work of an ingest on Ray in other processes: tasks read files, a batch of documents at a time, and actors encode the batches.

An actor does with a batch what the local ingest does (`DocumentEncoder`), up to the commit: the driver makes that.
"""

from __future__ import annotations

import atexit
import logging
import pickle
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from cacheblend.base.errors import CacheBlendError, InputError, RemoteError
from cacheblend.base.threads import Progress, in_groups
from cacheblend.retriever import Document, Embedder, Retriever
from cacheblend.service.engine.chunk_context import ChunkEncoder
from cacheblend.service.engine.config import EngineConfig, load_fusor
from cacheblend.service.engine.document_sources import STANDARD_INPUT, SourceReport, file_documents, source_files
from cacheblend.service.engine.file_converter import FileConverter
from cacheblend.service.engine.ingest import BATCH_CHARACTERS, DocumentEncoder, EncodedBatch, batches
from cacheblend.service.engine.prompt import PromptRenderer
from cacheblend.store import KVStore

if TYPE_CHECKING:
    import ray

logger = logging.getLogger(__name__)
PAUSES_S = (1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0)  # before the remote tier is asked again


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFile:
    """A file, at an absolute path, whose text becomes documents; one that was named itself, not found, must be right."""

    path: Path
    id: str
    bytes: int
    is_found: bool


@dataclass(frozen=True, slots=True)
class ReadBatch:
    """Documents for one actor, or the files that gave none, with the reason; see `SourceReport`."""

    documents: Sequence[Document] = ()
    faults: Mapping[str, str] = field(default_factory=dict)
    skipped: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Delivery:
    """Outcome of a batch: documents whose KV is durable, in the remote tier if there is one."""

    read: ReadBatch  # without the documents
    node: str  # of the cluster, where the KV is
    batch: EncodedBatch | None = None  # None for no documents, or an error
    error: str = ""  # why the batch could not be done


def list_files(sources: Sequence[str], skipped: dict[str, str]) -> list[SourceFile]:
    """The files of files, folders and patterns, without the hidden and the ignored; `skipped` receives those, and why.

    Raises:
        InputError: a source does not exist, holds nothing, or cannot be read in another process.
    """
    files: list[SourceFile] = []
    for source in sources:
        if source == STANDARD_INPUT or "://" in source:
            raise InputError(f"{source} cannot be ingested with --ray; save it as a file, or ingest it without")
        is_found = not Path(source).is_file()
        for path, id_ in source_files(source, skipped):
            files.append(SourceFile(path=path.absolute(), id=id_, bytes=path.stat().st_size, is_found=is_found))
    return files


def file_groups(files: Sequence[SourceFile], batch_documents: int) -> Iterator[list[SourceFile]]:
    """Files that are read one after the other: small ones together, so that their documents fill a batch."""
    return in_groups(files, lambda group: len(group) == batch_documents or sum(one.bytes for one in group) >= BATCH_CHARACTERS)


def read_batches(files: Sequence[SourceFile], batch_documents: int) -> Iterator[ReadBatch]:
    """Batches of the documents of files, as the local ingest makes them; a file that cannot be used is a fault."""
    report = SourceReport()
    with closing(FileConverter()) as converter:
        for batch in batches(_documents(files, converter, report), batch_documents):
            yield ReadBatch(batch)
    if report.faults or report.skipped:
        yield ReadBatch((), report.faults, report.skipped)


def _documents(files: Sequence[SourceFile], converter: FileConverter, report: SourceReport) -> Iterator[Document]:
    for file in files:
        with report.noting(str(file.path), is_found=file.is_found):
            yield from report.distinct(str(file.path), file_documents(file.path, file.id, converter, fault=report.note))


class PrecomputeActor:
    """Encodes batches of documents, and stores the KV of their chunks; all of a batch is durable before it is delivered.

    `versions` are of the intact documents of the index, by id: a reference in a list, which is not resolved on the way.
    """

    def __init__(self, config: EngineConfig, versions: list[ray.ObjectRef[dict[str, str]]], embedder: Embedder | None) -> None:
        import ray

        fusor = load_fusor(config)
        prompts = PromptRenderer(fusor.tokenizer, config.instruction, max_positions=fusor.max_positions)
        retriever = Retriever(replace(config.retriever_config(), directory=None), fusor.tokenizer, embedder)
        self._store = KVStore(config.store_config())
        atexit.register(self._store.close)  # Ray ends a process without a word to what runs in it
        self._encoder = DocumentEncoder(ChunkEncoder.of(fusor, prompts.prefix, config), retriever, self._store, fetches=False)
        (self._versions,) = ray.get(versions)
        self._node = ray.get_runtime_context().get_node_id()

    def __call__(self, row: dict[str, bytes]) -> dict[str, bytes]:
        """Encode a `ReadBatch` to a `Delivery`.

        They travel as pickles within a Ray cluster, as its tasks do; none comes from a client, a document or the remote tier.
        """
        read: ReadBatch = pickle.loads(row["batch"])
        batch, why = None, ""
        try:
            if read.documents:
                batch = self._encode(read.documents)
        except CacheBlendError as error:
            why = str(error)
        return {"delivery": pickle.dumps(Delivery(replace(read, documents=()), self._node, batch, why))}

    def _encode(self, documents: Sequence[Document]) -> EncodedBatch:
        progress = Progress()
        given = {document.id: document for document in documents}
        changed = [document for document in given.values() if self._versions.get(document.id) != document.version]
        batch = self._encoder.split(documents, changed, progress)
        self._encoder.compute(batch, set(batch.distinct_keys) - batch.found, progress)
        share(self._store, self._encoder, batch)
        return batch


def share(store: KVStore, encoder: DocumentEncoder, batch: EncodedBatch, pauses_s: Sequence[float] = PAUSES_S) -> None:
    """Wait until the remote tier, if there is one, has the KV of every chunk of a batch.

    Entries that were dropped on the way are sent now, and entries that the disk here has evicted meanwhile are computed again.
    A remote tier that does not answer is asked again after each pause: it may be restarting.

    Raises:
        RemoteError: the remote tier still refuses, or does not answer.
        StoreFullError: the disk is full.
    """
    if not store.has_remote:
        return
    for pause_s in (*pauses_s, None):
        try:
            lost = store.share(batch.distinct_keys)
            if not lost:
                return
            failure = RemoteError(f"{len(lost)} chunks were evicted from the disk before the remote tier had them")
            again = replace(batch, computed=[], tokens=0)
            encoder.compute(again, lost, Progress())
            batch.tokens += again.tokens
        except RemoteError as error:
            failure = error
        if pause_s is None:
            raise failure
        logger.warning("the remote tier lacks a batch's KV, which is sent again in %g s: %s", pause_s, failure)
        time.sleep(pause_s)
