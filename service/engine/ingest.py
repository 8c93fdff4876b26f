"""Ingest: documents on their way into index and store, a batch at a time, or one by one into a running vLLM.

What `Documents.add` does before it changes the documents is here, so that Ray's actors, without an index, do it as well.
"""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import compress
from typing import TYPE_CHECKING, Any

import httpx

from cacheblend.base.errors import ConfigError, DocumentChangedError, InputError, ServiceError
from cacheblend.base.options import option
from cacheblend.base.threads import Progress, in_groups
from cacheblend.retriever import Document
from cacheblend.retriever.document import CatalogedDocument, with_one_text

if TYPE_CHECKING:
    from concurrent.futures import Future

    from cacheblend.retriever import Chunk, EmbeddedDocument, Retriever
    from cacheblend.store import ChunkKey, DocumentVersion, KVStore

    from .chunk_context import ChunkEncoder

BATCH_DOCUMENTS = 64  # of a stream's batch
FETCH_S = 60.0  # chunks whose KV comes later from the remote tier are computed
BATCH_CHARACTERS = 2**20  # a batch ends with the document that reaches it
VLLM_ROUTE = "/v1/cacheblend/documents"
VLLM_TIMEOUT_S = 3600.0  # of a document: its answer comes when the KV of all its chunks is computed, between others' requests


@dataclass(frozen=True, slots=True, kw_only=True)
class IngestReport:
    """Counts of an ingest.

    Args:
        documents: those given: `added` with a new id, `replaced` with another text, `unchanged` with the same one.
        chunks: theirs: of `computed` the KV was computed now, of `already_stored` it was stored before.
        evicted: of a stream, entries that were evicted meanwhile, since the budget has no room for all.
        deleted: documents that no source had any more.
        dropped: chunks of replaced documents that no document has any more; their KV was removed.
        tokens: tokens of the chunks computed now.
        seconds: wall clock of the ingest.
    """

    documents: int = 0
    added: int = 0
    replaced: int = 0
    unchanged: int = 0
    chunks: int = 0
    computed: int = 0
    already_stored: int = 0
    evicted: int = 0
    deleted: int = 0
    dropped: int = 0
    tokens: int = 0
    seconds: float = 0.0

    def __add__(self, other: IngestReport) -> IngestReport:
        """Sums of both; a chunk that both have counts twice."""
        return IngestReport(**{name: value + getattr(other, name) for name, value in self.as_dict().items()})

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


@dataclass(slots=True)
class EncodedBatch:
    """A batch of documents that is ready for the index.

    Args:
        documents: those of the batch, as they were given; an id may stand more than once.
        embedded: by id, the documents that the index lacks in this version.
        chunks, keys: token ids and keys of all chunks, by document and version.
        found: chunks whose KV was stored before.
        computed: chunks whose KV was computed and stored now, in that order.
        tokens: tokens of the computed chunks.
    """

    documents: Sequence[Document | CatalogedDocument]
    embedded: dict[str, EmbeddedDocument] = field(default_factory=dict)
    chunks: dict[DocumentVersion, list[Sequence[int]]] = field(default_factory=dict)
    keys: dict[DocumentVersion, list[ChunkKey]] = field(default_factory=dict)
    found: set[ChunkKey] = field(default_factory=set)
    computed: list[ChunkKey] = field(default_factory=list)
    tokens: int = 0

    @property
    def distinct_keys(self) -> list[ChunkKey]:
        """The keys of all chunks, each once."""
        return list(dict.fromkeys(key for keys in self.keys.values() for key in keys))

    def leave_out(self, id_: str) -> None:
        """Take a document out of the batch; the KV of its chunks stays stored."""
        self.documents = [document for document in self.documents if document.id != id_]
        self.embedded.pop(id_, None)
        for version in [version for version in self.keys if version[0] == id_]:
            del self.keys[version]
            self.chunks.pop(version, None)

    def report(self, *, replaced: int, dropped: int) -> IngestReport:
        """The counts, now that the batch is in the index."""
        keyed, computed = len(self.distinct_keys), len(set(self.distinct_keys).intersection(self.computed))
        return IngestReport(
            documents=len(self.documents),
            added=len(self.embedded) - replaced,
            replaced=replaced,
            unchanged=len(self.documents) - len(self.embedded),
            chunks=keyed or sum(map(len, self.chunks.values())),  # a hybrid's have no keys
            computed=computed,
            already_stored=keyed - computed,
            dropped=dropped,
            tokens=self.tokens,
        )


class DocumentEncoder:
    """Splits, embeds and precomputes documents; KV that is stored is found by its key and not computed again.

    Args:
        retriever: splits and embeds; it may hold none of the documents.
        fetches: whether KV of the remote tier is copied here; else it is enough that the remote tier has it.
    """

    def __init__(self, encoder: ChunkEncoder, retriever: Retriever, store: KVStore, *, fetches: bool = True) -> None:
        self._encoder, self._retriever, self._store, self._fetches = encoder, retriever, store, fetches

    def split(
        self, documents: Sequence[Document | CatalogedDocument], changed: Sequence[Document], progress: Progress
    ) -> EncodedBatch:
        """Split a batch, embed the `changed` documents, which the index lacks, and look all chunks' KV up. Nothing is written.

        Raises:
            PromptTooLongError: a chunk, and what it is computed after, are longer than the model's positions.
            RetrieverError: the embedder cannot be used.
        """
        batch = EncodedBatch(documents)
        done = len(documents) - len(changed)
        if done:
            progress.note("index", done, len(documents))
        for one in self._retriever.embed(changed, progress):
            batch.embedded[one.document.id] = one
            progress.note("index", done + len(batch.embedded), len(documents))
        for document in {document.id: document for document in documents}.values():
            version, new = (document.id, document.version), batch.embedded.get(document.id)
            chunks = new.chunks if new else self._chunks(document, progress)
            batch.chunks[version] = [chunk.token_ids for chunk in chunks]
            self._encoder.check_lengths(document.id, batch.chunks[version], self._encoder.fusor.max_positions)
            batch.keys[version] = self._encoder.keys_of_document(batch.chunks[version])
        keys = batch.distinct_keys
        if self._fetches:
            self._store.fetch(keys, FETCH_S)
            batch.found = {key for key in keys if key in self._store}
            self._store.flush()  # its caller notes the documents, whose KV is durable by then
        else:
            batch.found = set(compress(keys, self._store.find(keys)))
        return batch

    def compute(self, batch: EncodedBatch, keys: Iterable[ChunkKey], progress: Progress) -> None:
        """Compute and store the KV of some of a batch's chunks, durably; StoreFullError if disk or budget has no room."""
        missing, documents = set(keys), list[tuple[list[Sequence[int]], list[int]]]()
        wanted: list[ChunkKey] = []
        for version, of_document in batch.keys.items():
            indexes: list[int] = []
            for index, key in enumerate(of_document):
                if key in missing:
                    missing.remove(key)  # of equal chunks the first one is computed
                    indexes.append(index)
                    wanted.append(key)
            documents.append((batch.chunks[version], indexes))
        total, writes = len(batch.computed) + len(wanted), deque["Future[bool]"]()
        progress.check()
        encoder = self._encoder
        computed = encoder.fusor.precompute_documents(documents, encoder.prefix_ids, encoder.context)
        for key, kv in zip(wanted, computed, strict=True):
            batch.computed.append(key)
            batch.tokens += len(kv.token_ids)
            progress.tokens += len(kv.token_ids)
            writes.append(self._store.put(key, kv, flush=False))
            while writes and writes[0].done():
                writes.popleft().result()  # a full disk ends the run here, not hours later
            progress.note("precompute", len(batch.computed), total)
            progress.check()
        for write in writes:
            write.result()

    def _chunks(self, document: Document | CatalogedDocument, progress: Progress) -> Sequence[Chunk]:
        """The chunks of a document that is in the index, or was a moment ago."""
        with suppress(InputError):
            chunks = self._retriever.chunks(document.id)
            if chunks and chunks[0].version == document.version:
                return chunks
        if isinstance(document, CatalogedDocument):
            raise DocumentChangedError(document.id)
        return self._retriever.splitter.split(document, progress.check)


def batches(documents: Iterable[Document], batch_documents: int) -> Iterator[list[Document]]:
    """Groups that are ingested at once: `batch_documents`, or fewer if they have `BATCH_CHARACTERS`; an id has one text."""
    return in_groups(
        with_one_text(documents),
        lambda batch: len(batch) == batch_documents or sum(len(one.text) for one in batch) >= BATCH_CHARACTERS,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmConfig:
    """A running vLLM that documents are given to; raises ConfigError for an address that is none of HTTP."""

    vllm: str | None = option(None, "Have a running vLLM with CacheBlendConnector, http://host:8000, store the documents' KV.")
    vllm_api_key: str | None = option(None, "Key of that vLLM (its --api-key).", secret=True)

    def __post_init__(self) -> None:
        if self.vllm is not None and not re.match(r"https?://[^/]", self.vllm, re.IGNORECASE):
            raise ConfigError("vllm", self.vllm, "an address such as http://localhost:8000")


def upload_documents(
    documents: Iterable[Document], config: VllmConfig, faults: dict[str, str], progress: Progress
) -> IngestReport:
    """Have a running vLLM store the KV of documents' chunks; what it has stored before is not computed again.

    `faults` collects the documents that it refuses; `progress.tokens` are those of documents of which KV was computed.

    Raises:
        ServiceError: it does not answer, or has no such route; the same call goes on where it was.
        InputError: it refuses the key.
    """
    started, report = time.monotonic(), IngestReport()
    headers = {"Authorization": f"Bearer {config.vllm_api_key}"} if config.vllm_api_key else {}
    with httpx.Client(headers=headers, timeout=VLLM_TIMEOUT_S) as client:  # without redirects: the key is for this host
        for done, document in enumerate(documents, 1):
            report += _post(client, config, document, faults)
            progress.documents, progress.tokens = done, report.tokens
            progress.note_batch()
    return replace(report, seconds=time.monotonic() - started)


def _post(client: httpx.Client, config: VllmConfig, document: Document, faults: dict[str, str]) -> IngestReport:
    """Post a document, and report what was stored; see `upload_documents`."""
    route = (config.vllm or "").rstrip("/").removesuffix("/v1") + VLLM_ROUTE  # of an address as OpenAI's clients take it, too
    try:
        given = {name: getattr(document, name) for name in ("id", "title", "text", "metadata")}
        answer = client.post(route, json={"documents": [given]})
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        why = str(error) or type(error).__name__
        raise ServiceError(f"{config.vllm} does not answer ({why}); is it running?") from error
    body: dict[str, Any] = {}
    with suppress(ValueError, TypeError):  # of another server
        body = dict(answer.json())
    if answer.is_success and {"chunks", "stored_chunks", "tokens"} <= body.keys():
        chunks, computed = int(body["chunks"]), int(body["stored_chunks"])
        tokens = int(body["tokens"]) if computed else 0
        return IngestReport(documents=1, chunks=chunks, computed=computed, already_stored=chunks - computed, tokens=tokens)
    match answer.status_code:
        case 400 | 413 | 422:
            refusal = body.get("error")
            message = refusal.get("message") if isinstance(refusal, dict) else answer.reason_phrase
            faults[document.id] = f"{document.id}: {message}"
            return IngestReport()
        case 401 | 403:
            raise InputError(f"{config.vllm} refuses the key ({answer.status_code}); give --vllm-api-key")
        case 200 | 404 | 405:
            remedy = "start vLLM with CacheBlendConnector and VLLM_PLUGINS=cacheblend"
            raise ServiceError(f"{config.vllm} has no {VLLM_ROUTE}: {remedy}")
    raise ServiceError(f"{config.vllm} answers {answer.status_code}: {answer.text[:200] or answer.reason_phrase}")
