"""KV of chunks that requests missed, computed in the background and stored (paper §5.1, §6); requests come first."""

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable

from cacheblend.base.errors import CacheBlendError
from cacheblend.base.threads import in_own_thread, lower_priority
from cacheblend.retriever import Retriever
from cacheblend.store import PASSAGES, ChunkKey, DocumentVersion, KVStore
from cacheblend.store.tiers import AdmissionFilter

from .chunk_context import ChunkEncoder
from .ingest import FETCH_S
from .prompt import PromptChunk

logger = logging.getLogger(__name__)
POSTPONE_TIMES = 3  # of the seconds that the last precompute took: beside running requests it has a quarter of the time
REMEMBERED_MISSES = 8192  # keys; two misses further apart than so many others count as two first ones


class Foreground:
    """Requests that run on a model now, of all engines that share it; a context manager around each. Thread-safe.

    Background work on the model gives way to them.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._running = 0

    def __enter__(self) -> None:
        with self._changed:
            self._running += 1

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._running -= 1
            self._changed.notify_all()

    def wait_for_pause(self, timeout_s: float, cancelled: Callable[[], bool]) -> None:
        """Wait until no request runs, at most `timeout_s` seconds; `cancelled` is asked again after each `wake`."""
        with self._changed:
            self._changed.wait_for(lambda: cancelled() or not self._running, timeout=timeout_s)

    def wake(self) -> None:
        """Have all who wait ask again whether they are cancelled."""
        with self._changed:
            self._changed.notify_all()


class BackgroundPrecompute:
    """One thread that computes missed chunks' KV after their context and stores it.

    It takes one chunk of each namespace in turn, so that one with many misses does not delay the others'.

    In a store that is full, a chunk is computed when it is missed for the second time: many are asked for only once, and each
    would cost as much as its part of the request did, and evict an entry that others may ask for.

    Args:
        encoder: computes the KV.
        store: where it goes.
        documents: the ingested documents.
        foreground: the requests of this model, which come first.

    Attributes:
        max_waiting: missed chunks; beyond them the longest queue loses its last, which a later request misses again.
        postpone_s: seconds for which a precompute gives way to running requests at least.
    """

    max_waiting = 256
    postpone_s = 1.0

    def __init__(self, encoder: ChunkEncoder, store: KVStore, documents: Retriever, foreground: Foreground) -> None:
        self._encoder, self._store, self._documents, self._foreground = encoder, store, documents, foreground
        self._changed = threading.Condition()
        self._queues: OrderedDict[str, OrderedDict[ChunkKey, PromptChunk]] = OrderedDict()  # by namespace; the first is next
        self._missed = AdmissionFilter(REMEMBERED_MISSES)
        self._busy, self._took_s = False, 0.0
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="background-precompute", daemon=True)
        self._thread.start()

    def submit(self, chunk: PromptChunk) -> None:
        """Have a missed chunk's KV computed and stored, some time after the running requests, if it is worth it.

        KV of an ingested document is stored only while the document is there in the chunk's version, and is dropped with it;
        but for a salt's, which is evicted by use.
        """
        key = chunk.key
        with self._changed:
            if key is None or self._closed or not self._is_worth(key, len(chunk.stored_ids or chunk.token_ids)):
                return
            self._queues.setdefault(key.namespace, OrderedDict()).setdefault(key, chunk)
            if sum(map(len, self._queues.values())) > self.max_waiting:
                namespace, longest = max(reversed(self._queues.items()), key=lambda queue: len(queue[1]))
                longest.popitem()
                if not longest:
                    del self._queues[namespace]
            self._changed.notify_all()

    @property
    def waiting(self) -> int:
        """Missed chunks that are not computed yet."""
        with self._changed:
            return sum(map(len, self._queues.values())) + self._busy

    def drain(self) -> None:
        """Wait until every chunk known now is computed and stored."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or not (self._queues or self._busy))
        self._store.flush()

    def stop(self) -> None:
        """Have the thread end after the chunk in work; what waits is left for a later request to miss again."""
        with self._changed:
            self._closed = True
            self._queues.clear()
            self._changed.notify_all()
        self._foreground.wake()

    def close(self) -> None:
        """Stop, and wait for the thread."""
        self.stop()
        self._thread.join()

    def _is_worth(self, key: ChunkKey, tokens: int) -> bool:
        """Whether there is room for the chunk's KV, or it was missed before, as a passage that comes here was."""
        if key.namespace.startswith(PASSAGES) or self._missed.admits(key.digest):
            return True
        stats, geometry = self._store.stats(), self._encoder.fusor.decoder.geometry
        entry_bytes = geometry.layers * geometry.layer_bytes(tokens) * 5 // 4  # a header comes on top; a codec's are fewer
        return stats.nvme.bytes + stats.pending_bytes + entry_bytes <= stats.nvme.budget_bytes

    def _work(self) -> None:
        while True:
            # 1. Wait for a miss, and for a pause between requests.
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._queues)
            self._foreground.wait_for_pause(max(self.postpone_s, POSTPONE_TIMES * self._took_s), lambda: self._closed)
            # 2. Take the next namespace's next chunk; the namespace goes to the end of the queue.
            with self._changed:
                if self._closed:
                    return
                namespace, queue = self._queues.popitem(last=False)
                key, miss = queue.popitem(last=False)
                if queue:
                    self._queues[namespace] = queue
                self._busy = True
            # 3. Compute and store it, unless somebody else did, or its document is gone.
            began = time.perf_counter()
            try:
                if key not in self._store and self._is_there(miss.document) and not self._fetch(key, miss):
                    in_own_thread(self._compute, key, miss)
            except CacheBlendError as error:
                logger.warning("the KV of chunk %s was not stored: %s", key, error)
            except Exception:  # out of memory, say: without this thread no miss would be computed, and drain never return
                logger.exception("the KV of chunk %s was not computed", key)
            finally:
                with self._changed:
                    self._busy, self._took_s = False, time.perf_counter() - began
                    self._changed.notify_all()

    def _fetch(self, key: ChunkKey, miss: PromptChunk) -> bool:
        if not self._store.has_remote:
            return False
        self._store.documents.note([(miss.document, key)])
        return self._store.fetch([key], FETCH_S) > 0

    def _is_there(self, document: DocumentVersion | None) -> bool:
        return document is None or self._documents.version(document[0]) == document[1]

    def _compute(self, key: ChunkKey, miss: PromptChunk) -> None:
        """Compute and store a chunk's KV, unless its document was deleted or replaced since it was missed."""
        lower_priority()
        kv, document = self._encoder.compute(miss.stored_ids or miss.token_ids, miss.earlier), miss.document
        if document is not None and self._store.documents.version(document[0]) != document[1]:
            with self._store.exclusive():  # deletions take this lock: they come before or after
                if not self._is_there(document):
                    return
                self._store.documents.put([(*document, ())])  # a store whose catalog was lost has forgotten it
        self._store.put(key, kv, flush=False, document=document)
