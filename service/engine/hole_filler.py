"""Computes, behind the requests, the KV of chunks that a request did not find (paper §5.1, §6)."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple

from cacheblend.base.errors import CacheBlendError
from cacheblend.blend import ChunkContext, Fusor
from cacheblend.store import ChunkKey, ChunkKV, DocumentVersion, KVStore
from cacheblend.store.seen_before import SeenBefore

from .own_thread import in_own_thread

logger = logging.getLogger(__name__)
MOST_WAITING = 256  # holes; beyond them the namespace with most loses its last, which a later request finds again
POSTPONE_S = 1.0  # a precompute gives way to running requests for so long at least,
POSTPONE_TIMES = 9  # and for so many times what the last one took: beside them it has a tenth of the time
MOST_PENDING_BYTES = 128 * 2**20  # that wait to be written
REMEMBERED_MISSES = 8192  # keys; two misses further apart than so many others count as two first ones


class _Hole(NamedTuple):
    token_ids: tuple[int, ...]
    earlier: Sequence[Sequence[int]]  # the chunks of its document that it stands after
    document: DocumentVersion | None  # the ingested document that it is of


class HoleFiller:
    """One thread that precomputes chunks after their context and stores them.

    A fused KV is contaminated by its neighbours, and never stored.

    It takes one hole of each namespace in turn, so that one with many misses does not keep the others' waiting.

    In a store that is full, a chunk is computed when it is missed for the second time: many are asked for only once, and each
    would take as long as its part of the request did, and evict an entry that others may ask for.

    Args:
        fusor: the model.
        store: where the KV goes.
        prefix_ids: what every chunk is computed after.
        context: what stands between that and a chunk.
        version_of: the version of an ingested document now; None where there is none of that id.
    """

    def __init__(
        self,
        fusor: Fusor,
        store: KVStore,
        prefix_ids: Sequence[int],
        context: ChunkContext,
        version_of: Callable[[str], str | None],
    ) -> None:
        self._fusor, self._store, self._prefix_ids, self._context = fusor, store, tuple(prefix_ids), context
        self._version_of = version_of
        self._changed = threading.Condition()
        self._waiting: OrderedDict[str, OrderedDict[ChunkKey, _Hole]] = OrderedDict()  # by namespace; the first one is next
        self._missed = SeenBefore(REMEMBERED_MISSES)
        self._busy, self._took_s = False, 0.0
        self._requests = 0
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="hole-filler", daemon=True)
        self._thread.start()

    def fill(
        self,
        key: ChunkKey,
        token_ids: Sequence[int],
        earlier: Sequence[Sequence[int]],
        document: DocumentVersion | None = None,
    ) -> None:
        """Have a chunk's KV computed and stored, some time after the running requests, if it is worth it.

        Args:
            key: the chunk's.
            token_ids: the chunk's.
            earlier: the chunks of its document that it is computed after.
            document: id and version of the ingested document that it is of: its KV is stored only while that is there in this
                version, and goes with it; but for a salt's, which goes by use. None for a text that a request brought.
        """
        with self._changed:
            if self._closed or not self._is_worth(key, len(token_ids)):
                return
            line = self._waiting.setdefault(key.namespace, OrderedDict())
            line.setdefault(key, _Hole(tuple(token_ids), earlier, document))
            if sum(map(len, self._waiting.values())) > MOST_WAITING:
                longest, line = max(reversed(self._waiting.items()), key=lambda waiting: len(waiting[1]))
                line.popitem()
                if not line:
                    del self._waiting[longest]
            self._changed.notify_all()

    def keep(self, key: ChunkKey, kv: ChunkKV, document: DocumentVersion | None = None) -> None:
        """Store a chunk's KV that a request computed alone itself, if that is worth it; it is written in the background.

        Where the disk is behind it is dropped, to be missed again: the request does not wait for the disk. For `document` see
        `fill`.
        """
        with self._changed:
            worth = not self._closed and self._is_worth(key, len(kv.token_ids))
        if not worth or self._store.stats().pending_bytes > MOST_PENDING_BYTES:
            return
        try:
            self._put(key, kv, document)
        except Exception as error:  # the request has its KV, whatever becomes of the store's copy
            logger.warning("the KV of chunk %s was not stored: %s: %s", key, type(error).__name__, error)

    @property
    def waiting(self) -> int:
        """Holes that are not filled yet."""
        with self._changed:
            return sum(map(len, self._waiting.values())) + self._busy

    def __enter__(self) -> None:
        """A request is running: a precompute gives way to it, for a while."""
        with self._changed:
            self._requests += 1

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._requests -= 1
            self._changed.notify_all()

    def drain(self) -> None:
        """Wait until every hole known now is filled and stored."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or not (self._waiting or self._busy))
        self._store.flush()

    def stop(self) -> None:
        """Have the thread end after the chunk in work; what waits is left for a later request to find again."""
        with self._changed:
            self._closed = True
            self._waiting.clear()
            self._changed.notify_all()

    def close(self) -> None:
        """Stop, and wait for the thread."""
        self.stop()
        self._thread.join()

    def _is_worth(self, key: ChunkKey, tokens: int) -> bool:
        """Whether there is room for the chunk's KV, or it was missed before."""
        if self._missed.again(key.digest):
            return True
        stats, geometry = self._store.stats(), self._fusor.decoder.geometry
        entry_bytes = geometry.layers * geometry.layer_bytes(tokens) * 5 // 4  # a header comes on top; a codec's are fewer
        return stats.nvme.bytes + stats.pending_bytes + entry_bytes <= stats.nvme.budget_bytes

    def _take(self) -> tuple[ChunkKey, _Hole]:
        """The next hole; its namespace goes to the end of the turns."""
        namespace, line = self._waiting.popitem(last=False)
        hole = line.popitem(last=False)
        if line:
            self._waiting[namespace] = line
        return hole

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._waiting)
                postpone_s = max(POSTPONE_S, POSTPONE_TIMES * self._took_s)
                self._changed.wait_for(lambda: self._closed or not self._requests, timeout=postpone_s)
                if self._closed:
                    return
                key, hole = self._take()
                self._busy = True
            began = time.perf_counter()
            try:
                if key not in self._store and self._is_there(hole.document):
                    in_own_thread(self._compute, key, hole)
            except CacheBlendError as error:
                logger.warning("the KV of chunk %s was not stored: %s", key, error)
            except Exception:  # out of memory, say: without this thread no hole would ever be filled, and drain never return
                logger.exception("the KV of chunk %s was not computed", key)
            finally:
                with self._changed:
                    self._busy, self._took_s = False, time.perf_counter() - began
                    self._changed.notify_all()

    def _compute(self, key: ChunkKey, hole: _Hole) -> None:
        chunks = [*hole.earlier, hole.token_ids]
        (kv,) = self._fusor.precompute_document(chunks, self._prefix_ids, [len(chunks) - 1], self._context)
        self._put(key, kv, hole.document)

    def _is_there(self, document: DocumentVersion | None) -> bool:
        return document is None or self._version_of(document[0]) == document[1]

    def _put(self, key: ChunkKey, kv: ChunkKV, document: DocumentVersion | None) -> None:
        """Store a chunk's KV, unless its document was deleted or replaced since it was missed."""
        if document is not None and self._store.documents.version(document[0]) != document[1]:
            with self._store.exclusive():  # deletions take this lock: they come before or after
                if not self._is_there(document):
                    return
                self._store.documents.put([(*document, ())])  # a store whose catalogue was lost has forgotten it
        self._store.put(key, kv, flush=False, document=document)
