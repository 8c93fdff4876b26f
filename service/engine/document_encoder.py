"""Documents on their way into index and store: split, embedded, the KV of their chunks computed and stored.

All of an ingest's work is here but the change of the documents itself (`DocumentWriter.put`), so that processes without an
index do it as the engine does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cacheblend.base.errors import InputError, PromptTooLongError

if TYPE_CHECKING:
    from concurrent.futures import Future

    from cacheblend.retriever import Chunk, Document, EmbeddedDocument, Retriever
    from cacheblend.store import ChunkKey, DocumentVersion, KVStore

    from .chunk_contexts import ChunkEncoder

Progress = Callable[[str, int, int], None]
Check = Callable[[], None]
FETCH_S = 60.0  # chunks whose KV comes later from the remote tier are computed


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodingWatch:
    """Watcher of the encoding of a batch.

    Args:
        on_progress: called with the stage ("index" or "precompute"), documents or chunks done, and how many in all.
        on_embedded: called with the windows embedded of the texts that are embedded at once, and how many there are.
        on_computed: called with the tokens of each chunk that was computed.
        check: called between the steps of the work; what it raises ends it.
    """

    on_progress: Progress = lambda *_: None
    on_embedded: Callable[[int, int], None] = lambda *_: None
    on_computed: Callable[[int], None] = lambda _: None
    check: Check = lambda: None


@dataclass(slots=True)
class EncodedDocuments:
    """Documents that are ready for the index.

    Args:
        documents: those that were given.
        embedded: by id, those that the index lacks in this version.
        chunks: token ids of all chunks, by document and version.
        keys: keys of all chunks, by document and version.
        found: chunks whose KV was stored before.
        computed: chunks whose KV was computed and stored now, in that order.
        tokens: of those.
    """

    documents: Sequence[Document]
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


class DocumentEncoder:
    """Splits, embeds and precomputes documents; what is stored already is found by its key and not computed again.

    Args:
        encoder: names and computes chunks' KV.
        retriever: splits and embeds; it may hold none of the documents.
        store: takes the KV.
        fetches: whether KV that the remote tier alone has is copied here; else it is enough there.
    """

    def __init__(self, encoder: ChunkEncoder, retriever: Retriever, store: KVStore, *, fetches: bool = True) -> None:
        self._encoder, self._retriever, self._store, self._fetches = encoder, retriever, store, fetches

    def split(self, documents: Sequence[Document], changed: Sequence[Document], watch: EncodingWatch) -> EncodedDocuments:
        """Split all documents, embed those that the index lacks, and look their chunks' KV up. Nothing is written.

        Args:
            documents: of a batch.
            changed: those of them that the index lacks in this version.
            watch: who follows it.

        Raises:
            PromptTooLongError: a chunk, and what it is computed after, are longer than the model's positions.
            RetrieverError: the embedder cannot be used.
        """
        self._check_lengths(documents)
        encoded = EncodedDocuments(documents)
        done = len(documents) - len(changed)
        if done:
            watch.on_progress("index", done, len(documents))
        for one in self._retriever.embed(changed, watch.check, watch.on_embedded):
            encoded.embedded[one.document.id] = one
            watch.on_progress("index", done + len(encoded.embedded), len(documents))
        for document in {document.id: document for document in documents}.values():
            new = encoded.embedded.get(document.id)
            own: list[Sequence[int]] = [chunk.token_ids for chunk in (new.chunks if new else self._chunks(document))]
            version = (document.id, document.version)
            encoded.chunks[version] = own
            encoded.keys[version] = self._encoder.keys_of_document(own)
        encoded.found = self._stored(encoded.distinct_keys)
        return encoded

    def compute(self, encoded: EncodedDocuments, keys: Iterable[ChunkKey], watch: EncodingWatch) -> None:
        """Compute and store the KV of some of a batch's chunks, and note it there. All is durable at the end.

        Raises:
            StoreFullError: the disk is full, or a chunk's KV is larger than the whole budget.
        """
        missing, documents = set(keys), list[tuple[list[Sequence[int]], list[int]]]()
        wanted: list[ChunkKey] = []
        for version, of_document in encoded.keys.items():
            indexes: list[int] = []
            for index, key in enumerate(of_document):
                if key in missing:
                    missing.remove(key)  # of equal chunks the first one is computed
                    indexes.append(index)
                    wanted.append(key)
            documents.append((encoded.chunks[version], indexes))
        total, writes = len(encoded.computed) + len(wanted), deque["Future[bool]"]()
        watch.check()
        for key, kv in zip(wanted, self._encoder.compute_documents(documents), strict=True):
            encoded.computed.append(key)
            encoded.tokens += len(kv.token_ids)
            writes.append(self._store.put(key, kv, flush=False))
            while writes and writes[0].done():
                writes.popleft().result()  # a full disk ends the run here, not hours later
            watch.on_progress("precompute", len(encoded.computed), total)
            watch.on_computed(len(kv.token_ids))
            watch.check()
        for write in writes:
            write.result()

    def _stored(self, keys: Sequence[ChunkKey]) -> set[ChunkKey]:
        """Those of some chunks whose KV is stored here, or in the remote tier."""
        if self._fetches:
            self._store.fetch(keys, FETCH_S)
            self._store.flush()  # its caller notes the documents, whose KV is durable by then
        found = [key in self._store for key in keys] if self._fetches else self._store.find(keys)
        return {key for key, is_stored in zip(keys, found, strict=True) if is_stored}

    def _chunks(self, document: Document) -> Sequence[Chunk]:
        """The chunks of a document that is in the index, or was a moment ago."""
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
