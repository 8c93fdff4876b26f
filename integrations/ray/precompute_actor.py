"""The actor of an ingest on Ray: it encodes batches of documents with a model, an embedder and a store of its own.

It does with a batch what the local ingest does (`DocumentEncoder`), up to the commit: the driver makes that.
"""

from __future__ import annotations

import atexit
import logging
import pickle
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from cacheblend.base.errors import CacheBlendError, RemoteError
from cacheblend.base.progress import Progress
from cacheblend.retriever import Retriever
from cacheblend.service.engine.chunk_context import ChunkEncoder
from cacheblend.service.engine.config import EngineConfig, load_fusor
from cacheblend.service.engine.ingest import DocumentEncoder, EncodedBatch
from cacheblend.service.engine.prompt import PromptRenderer
from cacheblend.store import KVStore

if TYPE_CHECKING:
    import ray

    from cacheblend.retriever import Embedder

    from .source_files import ReadBatch

logger = logging.getLogger(__name__)
PAUSES_S = (1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0)  # before the remote tier is asked again


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """Outcome of a batch.

    Args:
        batch: documents whose KV is durable, in the remote tier if there is one; None for no documents, or an error.
        faults: see `SourceReport`.
        skipped: see `SourceReport`.
        error: why the batch could not be done.
        node: of the cluster, where the KV is.
    """

    batch: EncodedBatch | None = None
    faults: Mapping[str, str] = field(default_factory=dict)
    skipped: Mapping[str, str] = field(default_factory=dict)
    error: str = ""
    node: str


class PrecomputeActor:
    """Encodes batches of documents, and stores the KV of their chunks; all of a batch is durable before it is delivered.

    Args:
        config: of the engine that is to use the KV.
        versions: of the documents that the index holds already, by id; a reference in a list, which is not resolved on the way.
        embedder: in place of the one that the config names.
    """

    def __init__(self, config: EngineConfig, versions: list[ray.ObjectRef[dict[str, str]]], embedder: Embedder | None) -> None:
        import ray

        fusor = load_fusor(config)
        prompts = PromptRenderer(fusor.tokenizer, config.instruction, max_positions=fusor.max_positions)
        in_memory = replace(config.retriever_config(), directory=None)
        retriever = Retriever(in_memory, fusor.tokenizer, embedder)
        self._store = KVStore(config.store_config())
        atexit.register(self._store.close)  # Ray ends a process without a word to what runs in it
        self._encoder = DocumentEncoder(ChunkEncoder.of(fusor, prompts.prefix, config), retriever, self._store, fetches=False)
        (self._versions,) = ray.get(versions)
        self._node = ray.get_runtime_context().get_node_id()

    def __call__(self, row: dict[str, bytes]) -> dict[str, bytes]:
        """Encode a batch; see `ReadBatch` and `Delivery`.

        They travel as pickles between the processes of one Ray cluster, which pickles its tasks itself; none comes
        from a client, a document or the remote tier.
        """
        batch: ReadBatch = pickle.loads(row["batch"])
        delivery = Delivery(faults=batch.faults, skipped=batch.skipped, node=self._node)
        if batch.documents:
            try:
                delivery = replace(delivery, batch=self._encode(batch))
            except CacheBlendError as error:
                delivery = replace(delivery, error=str(error))
        return {"delivery": pickle.dumps(delivery)}

    def _encode(self, read: ReadBatch) -> EncodedBatch:
        progress = Progress()
        given = {document.id: document for document in read.documents}
        changed = [document for document in given.values() if self._versions.get(document.id) != document.version]
        batch = self._encoder.split(read.documents, changed, progress)
        self._encoder.compute(batch, set(batch.distinct_keys) - batch.found, progress)
        share(self._store, self._encoder, batch)
        return replace(batch, chunks={})  # which stand in `embedded` as well


def share(store: KVStore, encoder: DocumentEncoder, batch: EncodedBatch) -> None:
    """Wait until the remote tier has the KV of every chunk of a batch.

    Entries that were dropped on the way are sent now, and entries that the disk here has evicted meanwhile are computed again.
    A remote tier that does not answer is asked again after each of `PAUSES_S`: it may be restarting, and the work of hours
    depends on it.

    Raises:
        RemoteError: the remote tier still refuses, or does not answer.
        StoreFullError: the disk is full.
    """
    if not store.has_remote:
        return
    store.flush_remote(store.config.remote_timeout_s)
    for pause_s in (*PAUSES_S, None):
        try:
            lost = store.share(batch.distinct_keys).lost
            if not lost:
                return
            why = f"{len(lost)} chunks were evicted from the disk before the remote tier had them"
            again = replace(batch, computed=[], tokens=0)
            encoder.compute(again, lost, Progress())
            batch.tokens += again.tokens
        except RemoteError as error:
            why = str(error)
        if pause_s is None:
            raise RemoteError(why)
        logger.warning("the remote tier lacks a batch's KV, which is sent again in %g s: %s", pause_s, why)
        time.sleep(pause_s)
