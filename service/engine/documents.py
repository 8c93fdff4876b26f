"""Documents as a user sees them: their text in the index, and the KV of their chunks in the store.

A file of several parts (pages, slides, sheets, lines) is a document for each, `report.pdf#page=3`. Its own name, `report.pdf`,
stands for all of them together, unless a document has that id itself.
"""

import functools
import hashlib
import logging
import re
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import islice, product
from pathlib import PurePosixPath
from typing import Any

from cacheblend.base.errors import BudgetTooSmallError, CacheBlendError, DamagedDocumentError, InputError
from cacheblend.base.threads import Progress, in_groups
from cacheblend.retriever import Chunk, Document, Retriever
from cacheblend.retriever.document import CatalogedDocument, ChunkPlace, file_of
from cacheblend.retriever.index import IndexedDocuments
from cacheblend.store import ChunkKey, KVStore

from .ingest import DocumentEncoder, EncodedBatch, IngestReport

logger = logging.getLogger(__name__)
_NUMBER = re.compile("([0-9]+)")
DELETED_AT_ONCE = 64  # documents for which others wait together
_OF_STORE = ("stored_chunks", "shared_chunks", "stored_bytes", "own_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentStatus:
    """A document, or a file of several, and how much of its KV is stored.

    Args:
        title: empty where the index has lost the document, as a deletion that was cut off leaves it.
        version: hash of title, text and metadata.
        chunks: of its text; equal ones count each.
        stored_chunks: different chunks whose KV is stored now, for every model and codec that ingested the document.
        shared_chunks: different chunks that other documents have as well; each is stored once.
        stored_bytes: bytes of the files of its chunks' KV.
        own_bytes: the part of them that goes with the document.
        damaged: whether its id, version or title in the index is not what was written; a new ingest repairs it.
        parts: documents that it consists of. A file's figures are sums over them; chunks that they share count with each.
        metadata: those of the document, or of a file's first part; empty where they are damaged.
    """

    id: str
    title: str
    version: str
    chunks: int
    stored_chunks: int
    shared_chunks: int
    stored_bytes: int
    own_bytes: int
    damaged: bool = False
    parts: int = 1
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON; metadata where there are some."""
        plain = asdict(self)
        return plain if self.metadata else {name: value for name, value in plain.items() if name != "metadata"}


class Documents:
    """Documents in index and store together: added, listed, shown and deleted.

    Every change holds the store's lock, so that a deletion, by this process or another, does not come between an ingest's two
    halves. Without a model the first index is `IndexedDocuments`, and there is no encoder. The documents of the other indexes,
    which came another way, are shown and deleted too.
    """

    def __init__(self, store: KVStore, *indexes: IndexedDocuments, encoder: DocumentEncoder | None = None) -> None:
        self._index, self._indexes, self._store, self._encoder = indexes[0], indexes, store, encoder

    def add(
        self, documents: Sequence[Document | CatalogedDocument], progress: Progress, *, must_stay: bool = False
    ) -> IngestReport:
        """Add a batch of documents, in place of those with their ids, all at once; of those of the index KV that lacks.

        With `must_stay` an eviction of a chunk of the batch is an error; else its KV is computed when it is asked for.

        Raises:
            BudgetTooSmallError: the index's budget is full; or with `must_stay`, the KV of all chunks does not fit at once.
            CacheBlendError: an error of a step, or of `progress.check`. Nothing of the documents is left then, nor after
                KeyboardInterrupt, but without `must_stay` the documents whose KV was complete.
        """
        index, encoder, store = self._retriever(), self._encoder, self._store
        assert encoder is not None, "opened without a model"
        started = time.perf_counter()
        # 1. Split and embed. Nothing is written before all KV is there: who gives up leaves the documents as they were.
        versions = {document.id: index.version(document.id) for document in documents}
        changed = index.changed(one for one in documents if isinstance(one, Document))
        more = sum(len(document.content.encode()) for document in changed)
        for document in changed:
            with suppress(InputError, DamagedDocumentError):
                if versions[document.id] is not None:  # its old text goes
                    more -= sum(len(chunk.text.encode()) for chunk in index.chunks(document.id))
        if more > 0:
            index.check_room(more)
        batch, evictions = encoder.split(documents, changed, progress), store.stats().nvme.evictions
        try:
            # 2. Compute and store chunks' KV that is stored neither here nor in the remote tier.
            encoder.compute(batch, set(batch.distinct_keys) - batch.found, progress)
            # 3. Change the documents, all at once. KV that was evicted meanwhile, or went with another's upload, comes first.
            needed = set(batch.distinct_keys)
            while (report := self.commit(batch, versions, needed)) is None:
                gone = {key for key in needed if key not in store}
                lost = gone.intersection(batch.computed) if store.stats().nvme.evictions > evictions else ()
                if must_stay and lost:
                    remedy = "raise nvme_budget_bytes, delete documents, or ingest fewer at once"
                    raise BudgetTooSmallError(f"the KV of {len(lost)} chunks does not fit the store's byte budget; {remedy}")
                encoder.compute(batch, gone.difference(lost), progress)
                if not must_stay:
                    needed -= gone  # once each: if the budget is below the corpus, they may go again
        except BaseException as ended:  # given up, a full disk, a changed document, no memory: as if it never came
            try:
                if isinstance(ended, KeyboardInterrupt) and not must_stay:  # of a stream, what is complete stays
                    store.flush()
                    for id_ in [id_ for (id_, _), keys in batch.keys.items() if any(key not in store for key in keys)]:
                        batch.leave_out(id_)
                    self.commit(batch, versions)
                store.documents.drop_unowned(batch.computed)
            except (CacheBlendError, MemoryError, OSError) as error:
                stay = len(batch.computed)
                logger.warning("the KV of %d chunks of an ingest that was given up stays until it is evicted: %s", stay, error)
            raise
        progress.documents += len(documents)
        return replace(report, seconds=time.perf_counter() - started)

    def commit(
        self, batch: EncodedBatch, versions: Mapping[str, str | None], needed: Collection[ChunkKey] = ()
    ) -> IngestReport | None:
        """Put an encoded batch into index and store together; None, and no change, if the KV of a `needed` chunk is gone.

        `versions` are the documents' own when their encoding began; None if there was none.

        Raises:
            DocumentChangedError: a document was deleted or replaced meanwhile; nothing is changed then.
            StoreError, RetrieverError: store or index cannot be written.
        """
        with self._store.exclusive():
            if any(key not in self._store for key in needed):
                return None
            # The version that a document may have now: the one before, or another upload of this very text has made it.
            expected = {document.id: (versions[document.id], document.version) for document in batch.documents}
            # Before the change: where it fails, nothing is changed.
            if old := self._texts(batch.embedded).difference(*batch.chunks.values()):
                self._store.documents.forget_texts(old)
            replaced = self._retriever().put(list(batch.embedded.values()), expected)
            dropped = self._store.documents.put((*version, list(dict.fromkeys(keys))) for version, keys in batch.keys.items())
        return batch.report(replaced=replaced, dropped=dropped)

    def _retriever(self) -> Retriever:
        assert isinstance(self._index, Retriever), "opened without a model"
        return self._index

    def page(
        self, limit: int | None = None, after: str | None = None, *, by_file: bool = False, newest_first: bool = False
    ) -> tuple[list[DocumentStatus], bool]:
        """List a page of documents, and whether more follow: the indexed ones as they were added, then others by id.

        Args:
            limit: at most so many, 1 and above; None for all.
            after: those listed after the document, or the file, of this id; InputError if there is none.
            by_file: the parts of a file as one, where the first of them is listed.
            newest_first: those in the index in the reverse of the order of adding.
        """
        listed = self._listed(limit, after, by_file=by_file, newest_first=newest_first)
        return list(islice(listed, limit)), next(listed, None) is not None

    def _listed(self, limit: int | None, after: str | None, *, by_file: bool, newest_first: bool) -> Iterator[DocumentStatus]:
        @functools.cache
        def first_listed(name: str) -> str:
            """The document of a name, or the part of a file that is listed before the others; empty if there is none."""
            return next(iter(self._ids(name, newest_first=newest_first)), "")

        last = None if after is None else first_listed(after)
        if last == "":
            raise InputError(f"after={after!r}: there is no such document any more; begin again with the first page")
        for id_ in self._ids_after(last, limit, newest_first=newest_first):
            name = file_of(id_) if by_file else id_
            first = first_listed(name) if name != id_ else id_
            # No file's part, the first one of a file, or the part of a file whose name is a document's own.
            if first in (id_, name):
                with suppress(InputError):  # deleted since it was looked up
                    yield self.status(name if first == id_ else id_)

    def _ids_after(self, last: str | None, limit: int | None, *, newest_first: bool) -> Iterator[str]:
        """Ids of the first index's documents in the order of a listing, then of all others by id; after `last`."""
        in_index, place = last is None or self._index.version(last) is not None, last
        batch = None if limit is None else limit + 1
        while in_index and (documents := self._index.documents(batch, place, newest_first=newest_first)):
            yield from (document.id for document in documents)
            place = documents[-1].id
            if len(documents) != batch:  # that was all
                break
        least = "" if in_index or last is None else last
        others = sorted(id_ for id_ in self._other_ids() if id_ > least)
        known = set(self._index.ids()) if others else set()
        yield from (id_ for id_ in others if id_ not in known)

    def _other_ids(self, prefix: str = "") -> set[str]:
        """Ids, with a beginning, of all documents that the store or an index beside the first has."""
        return {*self._store.documents.ids(prefix), *(id_ for index in self._indexes[1:] for id_ in index.ids(prefix))}

    def show(self, id_: str) -> tuple[DocumentStatus, list[tuple[Chunk, ChunkPlace]]]:
        """One document, or a file's, and the chunks with their places; raises InputError if there is no such document."""
        statuses = self._statuses(id_)
        found: list[tuple[Chunk, ChunkPlace]] = []
        try:
            for status in statuses:
                index = self._index_of(status.id)
                chunks = index.chunks(status.id) if status.chunks else []
                found += zip(chunks, index.places(chunks), strict=True)
        except InputError:  # deleted since it was looked up
            raise _unknown(id_) from None
        return _together(id_, statuses), found

    def status(self, id_: str) -> DocumentStatus:
        """One document, or a file's together, without the chunks; raises as `show` does."""
        return _together(id_, self._statuses(id_))

    def _statuses(self, id_: str) -> list[DocumentStatus]:
        """Of a document, or else of the parts of a file, in order; raises as `show` does."""
        found = list[DocumentStatus]()
        for part in sorted(self._ids(id_), key=part_order):
            index, stored = self._index_of(part), self._store.documents.get(part)
            document = index.document(part)
            if (known := document or stored) is not None:
                metadata: dict[str, Any] = {}
                with suppress(DamagedDocumentError):
                    metadata = index.metadata(part)
                found.append(
                    DocumentStatus(
                        id=part,
                        title=document.title if document else "",
                        version=known.version,
                        chunks=document.chunks if document else 0,
                        damaged=document is not None and document.damaged,
                        metadata=metadata,
                        **{name: getattr(stored, name, 0) for name in _OF_STORE},
                    )
                )
        if not found:
            raise _unknown(id_)
        return found

    def _index_of(self, id_: str) -> IndexedDocuments:
        """The index that has a document; the first if none has."""
        return next((index for index in self._indexes if index.version(id_) is not None), self._index)

    def _ids(self, id_: str, *, newest_first: bool = False) -> list[str]:
        """The id of a document, or of the parts of a file: those in the index in the order of adding, then the others by id."""
        if any(index.version(id_) is not None for index in self._indexes) or self._store.documents.version(id_) is not None:
            return [id_]
        indexed = self._index.ids(f"{id_}#")
        others = sorted(self._other_ids(f"{id_}#").difference(indexed))
        ids = [*(reversed(indexed) if newest_first else indexed), *others]
        return [part for part in ids if file_of(part) == id_]

    def delete(self, id_: str) -> DocumentStatus:
        """Remove a document, or a file's, and the KV of the chunks that no other document has; the last status.

        After it no file of index and store has the texts, whose other copies docs/store.md lists.

        The KV goes first: where the process dies between the two, the document is still listed and can be deleted again.
        Raises InputError if there is no such document.
        """
        with self._store.exclusive():
            statuses = self._statuses(id_)
            self._delete([part.id for part in statuses])
            self._erase()
        return _together(id_, statuses)

    def _texts(self, ids: Iterable[str]) -> set[tuple[int, ...]]:
        """List the token ids of the chunks of documents, as far as they can be read, each once."""
        texts = set[tuple[int, ...]]()
        for index, id_ in product(self._indexes, ids):
            with suppress(InputError, DamagedDocumentError):
                texts.update(chunk.token_ids for chunk in index.chunks(id_))
        return texts

    def _delete(self, ids: Sequence[str]) -> None:
        """Delete documents, where there are such; `erase` of the indexes has yet to follow."""
        texts = self._texts(ids)
        for id_ in ids:
            if self._store.documents.version(id_) is not None:
                self._store.documents.delete(id_)
        self._store.documents.forget_texts(texts)
        for index in self._indexes:
            if indexed := [id_ for id_ in ids if index.version(id_) is not None]:
                index.delete(*indexed)

    def prune(self, ids: Collection[str], files: Collection[str] | None = None) -> list[str]:
        """Delete all documents but those of `ids`, or of `files` the parts that are not among them; the ids of the deleted."""
        parts = (id_ for file in files or () for id_ in self._index.ids(file) if file_of(id_) == file)
        gone = [id_ for id_ in (self._index.ids() if files is None else parts) if id_ not in ids]
        self.remove(gone)
        return gone

    def remove(self, ids: Sequence[str]) -> None:
        """Delete documents, where there are such, as `delete` does."""
        for group in in_groups(ids, lambda group: len(group) >= DELETED_AT_ONCE):
            with self._store.exclusive():
                self._delete(group)
        if ids:
            with self._store.exclusive():
                self._erase()

    def _erase(self) -> None:
        """Erase deleted texts, with the store's lock held: a writer that waited in the index would have searches wait."""
        for index in self._indexes:
            index.erase()


def shown_chunk(chunk: Chunk, place: ChunkPlace) -> dict[str, Any]:
    """A chunk of a document that is shown, plain values for JSON."""
    return {
        "document_id": chunk.document_id,
        "position": chunk.position,
        **place.as_dict(),
        "tokens": len(chunk.token_ids),
        "text": chunk.text,
    }


def part_order(id_: str) -> list[tuple[int, str]]:
    """Sort key of a file's parts, whose numbers are in the order of their values: `page=2`, `page=3-4`, `page=10`."""
    return [(int(each), "") if at % 2 else (0, each) for at, each in enumerate(_NUMBER.split(id_))]


def _together(id_: str, parts: Sequence[DocumentStatus]) -> DocumentStatus:
    """The status of a file's documents, or of the one document `id_`."""
    first, *others = parts
    if not others and first.id == id_:
        return first
    return DocumentStatus(
        id=id_,
        title=PurePosixPath(id_).name,
        version=hashlib.sha256("\n".join(part.version for part in parts).encode()).hexdigest(),
        damaged=any(part.damaged for part in parts),
        metadata=parts[0].metadata,
        **{name: sum(getattr(part, name) for part in parts) for name in ("chunks", "parts", *_OF_STORE)},
    )


def _unknown(id_: str) -> InputError:
    return InputError(f"there is no document {id_!r}; `GET /v1/documents` and `cacheblend documents ls` list them")
