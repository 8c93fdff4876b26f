"""A follower of an index that other replicas change: the KV of documents that are gone there goes here, too."""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from collections.abc import Iterable
from contextlib import AbstractContextManager

from cacheblend.base.errors import CacheBlendError
from cacheblend.retriever import Retriever
from cacheblend.store import ChunkKey, DocumentVersion, KVStore

logger = logging.getLogger(__name__)
LOOK_S = 0.5  # how often the index is asked for changes
MAX_NOTED = 65_536  # chunks that are remembered as noted


class IndexFollower:
    """A thread that follows an index which others change.

    What a search finds is the index's own affair: it is asked at every request. But a replica holds KV of documents that others
    have uploaded, computed here or copied from the remote tier, and nobody tells it of their deletion. So each chunk that a
    request used is noted as its document's, and a document that is gone, or has another version, goes from the store.

    Args:
        retriever: has the index.
        store: of this replica.
        changing: held while documents change in index and store; see `Documents`.
    """

    def __init__(self, retriever: Retriever, store: KVStore, changing: AbstractContextManager[object]) -> None:
        self._retriever, self._store, self._changing = retriever, store, changing
        self._generation = -1  # of the index that the store was held against; -1 is none yet
        self._wakes = threading.Condition()
        self._used: dict[DocumentVersion, set[ChunkKey]] = defaultdict(set)  # to be noted
        self._noted: set[tuple[DocumentVersion, str]] = set()
        self._closed = False
        self._is_away = False
        self._thread = threading.Thread(target=self._run, name="index-follower", daemon=True)
        self._thread.start()

    def note(self, chunks: Iterable[tuple[ChunkKey, DocumentVersion | None]]) -> None:
        """Note chunks that a request has used as their documents', soon; a salt's, and those of no document, are nobody's."""
        with self._wakes:
            for key, document in chunks:
                if document is not None and not key.namespace and (document, key.digest) not in self._noted:
                    if len(self._noted) >= MAX_NOTED:
                        self._noted.clear()
                    self._noted.add((document, key.digest))
                    self._used[document].add(key)
            if self._used:
                self._wakes.notify_all()

    def stop(self) -> None:
        """Have the thread end after what it does now."""
        with self._wakes:
            self._closed = True
            self._wakes.notify_all()

    def close(self) -> None:
        """Stop, and wait for the thread."""
        self.stop()
        self._thread.join()

    def _run(self) -> None:
        while True:
            try:
                self._note_used()
                self._drop_gone()
            except CacheBlendError as error:
                if not self._is_away:
                    logger.warning("the KV of documents that others delete stays until the index answers: %s", error)
                self._is_away = True
            except Exception:  # the thread must go on
                logger.exception("the index was not followed")
            else:
                self._is_away = False
            with self._wakes:
                self._wakes.wait_for(lambda: self._closed or (self._used and not self._is_away), timeout=LOOK_S)
                if self._closed:
                    return

    def _drop_gone(self) -> None:
        """Drop the KV of the store's documents that the index has no more, or in another version."""
        now, changed = self._retriever.changed_since(self._generation)
        if now == self._generation:
            return
        versions = self._retriever.versions() if changed is None else {}
        for id_ in self._store.documents.ids() if changed is None else sorted(changed):
            known = self._store.documents.version(id_)
            if known is None or known == versions.get(id_):
                continue
            with self._changing, self._store.exclusive():  # no upload, and no computed chunk, comes between
                known, now_has = self._store.documents.version(id_), self._retriever.version(id_)
                if known is not None and known != now_has:
                    # Of a version that was replaced, chunks may be the new one's too: the remote tier keeps them.
                    documents = self._store.documents if now_has is None else self._store.own_documents
                    documents.delete(id_)
        with self._wakes:
            self._noted.clear()  # a document may come back as it was
        self._generation = now

    def _note_used(self) -> None:
        """Note what requests have used; of a document that went meanwhile, drop what came of it."""
        while True:
            with self._wakes:
                if not self._used:
                    return
                document, keys = next((document, set(keys)) for document, keys in self._used.items())
            with self._store.exclusive():
                if is_there := self._retriever.version(document[0]) == document[1]:
                    self._store.own_documents.put([(*document, sorted(keys, key=str))])
            if not is_there:
                self._store.flush()  # copies of the remote tier's entries may be on their way
                self._store.own_documents.drop_unowned(keys)
            with self._wakes:
                if not is_there:
                    self._noted -= {(document, key.digest) for key in keys}
                self._used[document] -= keys
                if not self._used[document]:
                    del self._used[document]
