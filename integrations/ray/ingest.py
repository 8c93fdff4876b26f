"""The ingest on Ray: files are read in tasks, encoded in actors, and their documents put into the index here, by one writer.

Ray Data moves the batches: it starts the actors, holds readers back while actors are busy, and hands the batch of an actor that
died to another. What such a batch had stored is found by its key.
"""

import logging
import os
import pickle
import socket
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from cacheblend.base.errors import CacheBlendError, ConfigError, DocumentChangedError, InputError, needs_extra
from cacheblend.base.options import from_options
from cacheblend.base.threads import Progress
from cacheblend.blend.loading import load_tokenizer
from cacheblend.retriever import Embedder, Retriever
from cacheblend.service.engine.config import EngineConfig, remember_settings
from cacheblend.service.engine.document_sources import SourceReport
from cacheblend.service.engine.documents import Documents
from cacheblend.service.engine.ingest import EncodedBatch, IngestReport
from cacheblend.store import KVStore

from . import RayConfig
from .tasks import Delivery, PrecomputeActor, SourceFile, file_groups, list_files, read_batches

with needs_extra("ray"):
    import ray
    import ray.data
    from ray.data import ActorPoolStrategy, DataContext, ExecutionResources, TaskPoolStrategy

LOCAL = "local"
READERS = 2  # tasks that read files at once; one reads megabytes a second, of which an actor computes kilobytes
WAITING_PER_ACTOR = 2  # batches that an actor was given: one that it encodes, and the next
MAX_DEATHS = 10  # of actors over one batch: one that needs all memory kills each of them, and Ray would go on for ever
CONNECT_S = 5.0  # in which a cluster must answer
BUFFERED_BYTES = 64 * 2**20  # of batches that were read, and of those encoded that wait to be put into the index


def ingest_on_ray(
    sources: Sequence[str],
    config: EngineConfig,
    settings: RayConfig,
    *,
    report: SourceReport | None = None,
    progress: Progress | None = None,
    embedder: Embedder | None = None,
) -> IngestReport:
    """Split, index and precompute the documents of files in actors; what is stored already is skipped.

    Documents come into the index a batch at a time, each batch all at once, when the KV of its chunks is durable. If it
    ends early, the same call goes on from there.

    `report` receives files and documents that could not be used, `progress` follows the ingest, a batch at a time; an
    `embedder` in place of the one that the config names must be picklable.

    Raises:
        InputError: a source cannot be used, or there is no document at all.
        ConfigError: there is no cluster at the address.
        CacheBlendError: an actor could not go on.
    """
    # 1. Find the files, before anything is started.
    started, report, progress = time.perf_counter(), report or SourceReport(), progress or Progress()
    files = list_files(sources, report.skipped)
    config = _absolute(config)
    tokenizer = load_tokenizer(config.model)
    if tokenizer is None:
        raise InputError(f"the model at {config.model!r} has no tokenizer; save one beside it")
    total, evicted, done = IngestReport(), 0, dict[str, str]()
    with ExitStack() as opened:
        # 2. Open index and store; of the model only the tokenizer is loaded here.
        store = opened.enter_context(KVStore(config.store_config()))
        retriever = opened.enter_context(Retriever(config.retriever_config(), tokenizer, embedder))
        documents = Documents(store, retriever)
        remember_settings(config)
        versions = {document.id: document.version for document in retriever.documents()}
        intact = {id_: version for id_, version in versions.items() if retriever.is_intact(id_)}  # others are encoded again
        # 3. Have batches encoded, and put each into the index as it comes.
        node = opened.enter_context(_cluster(settings))
        deliveries = opened.enter_context(closing(_deliveries(files, config, settings, intact, embedder, node)))
        for delivery in deliveries:
            report.faults.update(delivery.read.faults)
            report.skipped.update(delivery.read.skipped)
            if delivery.error:
                raise CacheBlendError(f"an actor could not go on: {delivery.error}")
            if (batch := delivery.batch) is None:  # files without documents
                continue
            is_here = delivery.node == node
            if not is_here and config.store.remote is None:  # the engine would not find the KV
                allowed = "a cluster of this machine, unless --remote names a tier that all machines share"
                raise ConfigError("ray", settings.ray, allowed)
            total += _commit(batch, documents, versions, done, report)
            evicted += sum(key not in store for key in batch.distinct_keys) if is_here and not store.has_remote else 0
            progress.documents, progress.tokens = total.documents, total.tokens
            progress.note_batch()
    if not total.documents and not report.faults:
        raise InputError(f"no documents to ingest in {', '.join(sources)}")
    return replace(total, evicted=evicted, seconds=time.perf_counter() - started)


def _commit(
    batch: EncodedBatch, documents: Documents, versions: Mapping[str, str], done: dict[str, str], report: SourceReport
) -> IngestReport:
    """Put a batch into the index, but for documents that were changed meanwhile by others or by this ingest, which are faults.

    `versions` are of the documents that the index held at the start, `done` those of this ingest so far.
    """
    for id_ in [id_ for id_, new in batch.embedded.items() if done.get(id_) == new.document.version]:
        del batch.embedded[id_]  # the same text stood in two files
    while True:
        before = {document.id: versions.get(document.id) for document in batch.documents}
        try:
            made = documents.commit(batch, before)
            break
        except DocumentChangedError as error:
            id_ = error.document_id
            report.faults[id_] = f"another document has the id {id_!r}; rename it" if id_ in done else str(error)
            batch.leave_out(id_)
    assert made is not None, "no chunk was asked for"
    done |= {document.id: document.version for document in batch.documents}
    return made


def _deliveries(
    files: Sequence[SourceFile],
    config: EngineConfig,
    settings: RayConfig,
    versions: Mapping[str, str],
    embedder: Embedder | None,
    node: str,
) -> Generator[Delivery, None, None]:
    """Batches as actors finish them, in whatever order; few are under way at any time."""
    context = DataContext.get_current().copy()
    context.target_max_block_size = 1  # a batch is a block: it goes on when it is done
    context.execution_options.resource_limits = ExecutionResources(object_store_memory=BUFFERED_BYTES)
    context.enable_progress_bars = False
    batch_documents = settings.ray_batch_documents

    def read(row: dict[str, Any]) -> Iterator[dict[str, list[bytes]]]:
        for group in row["files"]:
            for batch in read_batches(pickle.loads(group), batch_documents):
                yield {"batch": [pickle.dumps(batch)]}

    with DataContext.current(context):
        groups = [{"files": pickle.dumps(group)} for group in file_groups(files, batch_documents)]
        rows = (
            ray.data.from_items(groups)
            .map_batches(
                read,
                batch_size=1,
                compute=TaskPoolStrategy(size=min(READERS, len(groups))),
                num_cpus=0,  # actors may have all of them
                label_selector={"ray.io/node-id": node},  # paths are of this machine
            )
            .map(
                cast(Any, PrecomputeActor),  # Ray's types know only functions
                fn_constructor_args=(config, [ray.put(dict(versions))], embedder),
                compute=ActorPoolStrategy(size=settings.ray_actors, max_tasks_in_flight_per_actor=WAITING_PER_ACTOR),
                num_cpus=settings.ray_cpus,
                num_gpus=settings.ray_gpus,
                max_task_retries=MAX_DEATHS,
            )
        )
        try:
            for row in rows.iter_rows():
                yield pickle.loads(row["delivery"])
        except ray.exceptions.RayError as error:  # of an actor that cannot begin, with its traceback
            why = [line for line in str(error).splitlines() if line.strip()]
            raise CacheBlendError(f"an actor could not go on: {why[-1].strip() if why else error!r}") from error


@contextmanager
def _cluster(settings: RayConfig) -> Iterator[str]:
    """A connection to the cluster, this process's own if it has one, or a cluster of this machine; yields the id of this node.

    Raises:
        ConfigError: there is no cluster at the address.
    """
    for name in ("ray", "ray.data"):  # no advice and no progress of Ray's between ours; its own log files have them
        for handler in logging.getLogger(name).handlers:
            if isinstance(handler, logging.StreamHandler) and not isinstance(handler, logging.FileHandler):
                handler.setLevel(logging.ERROR)
    logging.getLogger("ray").setLevel(logging.ERROR)
    if ray.is_initialized():
        yield ray.get_runtime_context().get_node_id()
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is reported to anybody
    address = str(settings.ray)
    own: dict[str, Any] = {}
    if address == LOCAL:
        cpus = max(os.cpu_count() or 1, round(settings.ray_actors * settings.ray_cpus + 0.5))
        own = {"num_cpus": cpus, "include_dashboard": False, "object_store_memory": 4 * BUFFERED_BYTES}
    try:
        _reach(address)
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **own)
    except (OSError, ValueError) as error:
        allowed = f"local, or auto or HOST:PORT on a machine of a cluster that runs ({error})"
        raise ConfigError("ray", address, allowed) from error
    try:
        yield ray.get_runtime_context().get_node_id()
    finally:
        ray.shutdown()


def _reach(address: str) -> None:
    """Find out whether anybody listens at an address: Ray would try for a minute, and then end the process.

    Raises:
        OSError: nobody listens.
        ValueError: the address has no port.
    """
    if address in (LOCAL, "auto"):
        return
    host, found, port = address.rpartition(":")
    if not found or not port.isdigit() or "/" in host:
        raise ValueError("no HOST:PORT")
    socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()


def _absolute(config: EngineConfig) -> EngineConfig:
    """The config with paths that mean the same in an actor, whose working folder is another, and where nobody reads KV."""
    given = {"model": config.model, "context_filler": config.context_filler, "embedder": config.retriever.embedder}
    paths = {name: str(path.absolute()) for name, one in given.items() if (path := Path(one).expanduser()).exists()}
    return from_options(EngineConfig, {**paths, "store_dir": Path(config.store_dir).absolute(), "ram_budget_bytes": 1}, config)
