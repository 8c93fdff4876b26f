"""The worker's half: blends prompts into vLLM's pages, some layers a step of the engine, and stores what was missing.

Shapes: H KV heads, T tokens handed over, D head size.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict, deque
from collections.abc import Collection, Generator, Iterable, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import torch

from cacheblend.base.errors import CacheBlendError, DamagedEntryError, StoreError
from cacheblend.base.memory import return_freed_memory
from cacheblend.base.threads import DaemonThreads
from cacheblend.blend import FusionConfig, FusionResult, Fusor, LayerKV, LayerReport, LayerSource, ResidentLayers, Segment
from cacheblend.loader import LayerLoader, LoadingController
from cacheblend.service.engine.blend_plan import BlendPolicy, BlendSegment, Found, plan_blend
from cacheblend.service.engine.chunk_context import ChunkNaming
from cacheblend.service.engine.prompt import PromptChunk, PromptTokens
from cacheblend.store import ChunkKey, ChunkKV, KVHandle, KVStore, LayerPair, Placement, PrefixRun

from .marks import Chunk, prompt_of
from .scheduler import BlendJob

logger = logging.getLogger(__name__)
THREADS = DaemonThreads("cacheblend-vllm")
MAX_WAITING_MISSES = 4096
BUSY_STEPS_A_MISS = 64  # beside running requests a missed chunk is computed no more often
# A layer's cost that grows with the prompt and not with its rows: for so many tokens KV is copied, rotated and written in the
# time of one row.
TOKENS_OF_A_ROW = 16
SLOW_LOADING = "slow_loading"  # why a prompt is left to vLLM whose stored KV would come no sooner than it is computed
# Many requests share what stands before the first chunk (a system message): from this length on its KV is held.
MIN_PREFIX_TOKENS = 64


class Ranks(Protocol):
    """Processes that hold a model's heads together; `VllmRunner` is one of them."""

    @property
    def ranks(self) -> int: ...

    @property
    def rank(self) -> int: ...

    def agree(self, flags: Sequence[bool]) -> list[bool]:
        """Of each flag, whether it is set on all ranks."""

    def own_heads(self, pair: LayerPair, kv_heads: int) -> LayerPair:
        """The rank's own heads of a stored layer."""

    def all_heads(self, pair: LayerPair, kv_heads: int) -> LayerPair:
        """All heads of a layer."""


class Pages(Protocol):
    """vLLM's paged KV cache, as this worker holds it."""

    def write(self, layer: int, k_THD: torch.Tensor, v_THD: torch.Tensor, block_ids: Sequence[int], start: int) -> None:
        """Write rotated keys and values to the positions from `start` on of the request that has these blocks."""


@dataclass(slots=True)
class _PageSink:
    """Writes each finished layer of a blend to the request's pages."""

    pages: Pages
    job: BlendJob

    def put(self, layer: int, whole: LayerKV) -> None:
        handed_over = slice(self.job.start, len(self.job.token_ids) - 1)
        k_THD, v_THD = (x_1HND[0, :, handed_over].transpose(0, 1) for x_1HND in (whole.k_1HND, whole.v_1HND))
        self.pages.write(layer, k_THD, v_THD, self.job.block_ids, self.job.start)


@dataclass(slots=True)
class Progress:
    """Outcome of the work since the last time; requests by vLLM's ids."""

    done: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    reports: dict[str, dict[str, Any]] = field(default_factory=dict)


class BlendWorker:
    """Blends one prompt after the other, and computes missed chunks when there is none; all in the engine's own thread.

    Every rank of a tensor-parallel engine makes the same calls in the same order: the ranks agree on the hits before the first
    layer, and have read all KV by then, so that none waits for another in the middle.

    Args:
        fusor: over vLLM's model.
        naming: names chunks' KV.
        store: where it is.
        pages: where blended KV goes.
        ranks: this process among those that hold the model.
        kv_heads: of all ranks together.
        prefix_tokens: how many tokens' KV is held of what prompts begin with.
        controller: picks the ratio of requests that name none; None for their least one. Ranks ask none: they have read all KV
            before the first layer, so there is no loading to hide behind.
    """

    def __init__(
        self,
        fusor: Fusor,
        naming: ChunkNaming,
        store: KVStore,
        pages: Pages,
        ranks: Ranks,
        kv_heads: int,
        prefix_tokens: int,
        controller: LoadingController | None = None,
    ) -> None:
        self._fusor, self._naming, self._store, self._pages, self._ranks = fusor, naming, store, pages, ranks
        self._prefix_tokens = prefix_tokens
        self._kv_heads, self._controller = kv_heads, controller if ranks.ranks == 1 else None
        # Prompts whose chunks' KV may come from the remote tier first, and what fetches it: the first rank, for all.
        self._fetches: deque[tuple[BlendJob, Future[int] | None]] = deque()
        self._blends: deque[tuple[BlendJob, Generator[int, None, dict[str, Any]]]] = deque()
        self._missed: OrderedDict[ChunkKey, PromptChunk] = OrderedDict()
        self._prefixes: OrderedDict[Chunk, PrefixRun] = OrderedDict()
        self._progress, self._busy_steps = Progress(), 0

    @property
    def waiting_misses(self) -> int:
        """Missed chunks that are not computed yet."""
        return len(self._missed)

    @property
    def blending(self) -> int:
        """Prompts that wait or are under way."""
        return len(self._fetches) + len(self._blends)

    def step(self, jobs: Iterable[BlendJob], missed: Iterable[PromptChunk], rows: int, *, is_idle: bool) -> None:
        """Work as much as vLLM's own prefill of `rows` tokens would: at least a layer; or when idle a missed chunk."""
        for job in jobs:
            self._fetch(job)
        self._begin_fetched()
        for chunk in missed:
            self._miss(chunk)
        left = max(1, rows) * self._fusor.runner.geometry.layers
        self._busy_steps = 0 if is_idle else self._busy_steps + 1
        if not self._blends and self._busy_steps % BUSY_STEPS_A_MISS == 0:
            self._compute_missed()
        while self._blends and left > 0:
            job, steps = self._blends[0]
            try:
                left -= next(steps)
            except StopIteration as done:
                if not done.value["blended"]:
                    self._progress.failed.add(job.request_id)
                self._end(job, done.value)
            except Exception as error:
                logger.exception("request %s is computed exactly: its blend failed", job.request_id)
                self._progress.failed.add(job.request_id)
                self._end(job, {"blended": False, "reason": f"failed: {type(error).__name__}"})

    def cancel(self, request_ids: Collection[str]) -> None:
        """Stop the blends of requests that have ended, whose pages are then free."""
        for job, fetch in [one for one in self._fetches if one[0].request_id in request_ids]:
            self._fetches.remove((job, fetch))
            self._progress.done.add(job.request_id)
        for job, steps in [blend for blend in self._blends if blend[0].request_id in request_ids]:
            steps.close()
            self._blends.remove((job, steps))
            self._progress.done.add(job.request_id)

    def take_progress(self) -> Progress:
        """Outcomes of the work since the last call."""
        progress, self._progress = self._progress, Progress()
        return progress

    def close(self) -> None:
        """Stop what is under way, and close the store."""
        for _, steps in self._blends:
            steps.close()
        self._blends.clear()
        wait([fetch for _, fetch in self._fetches if fetch is not None], self._store.config.remote_timeout_s)
        self._fetches.clear()
        self._store.close()

    def _fetch(self, job: BlendJob) -> None:
        """Copy a prompt's chunks that only the remote tier has, while requests run; then the prompt is blended."""
        if not self._store.has_remote:
            self._blends.append((job, self._blend(job)))
            return
        keys, fetch = self._prompt_of(job).keys, None
        if self._ranks.rank == 0:
            fetch = THREADS.call(partial(self._fetch_missing, keys, job))
        self._fetches.append((job, fetch))

    def _fetch_missing(self, keys: Sequence[ChunkKey], job: BlendJob) -> int:
        """Fetch a prompt's missing chunks while that is predicted to be faster than computing them; returns how many came."""
        chunks = zip(keys, job.marks.chunks, strict=True)
        missing = sum(stop - start for key, (start, stop) in chunks if key not in self._store)
        timeout_s = self._store.config.remote_timeout_s
        return self._store.fetch(keys, timeout_s if self._controller is None else self._controller.full_s(missing))

    def _begin_fetched(self) -> None:
        """Begin the blends of the prompts whose chunks' KV has come, or does not come."""
        has_ended = self._ranks.agree([fetch is None or fetch.done() for _, fetch in self._fetches])
        for ended, (job, fetch) in zip(has_ended, list(self._fetches), strict=True):
            if ended:
                if fetch is not None and (error := fetch.exception()) is not None:
                    logger.warning("chunks' KV is not copied from the remote tier: %s", error)
                self._fetches.remove((job, fetch))
                self._blends.append((job, self._blend(job)))

    def _prompt_of(self, job: BlendJob) -> PromptTokens:
        return prompt_of(self._naming, job.token_ids, job.marks, job.cache_salt)

    def _end(self, job: BlendJob, report: dict[str, Any]) -> None:
        self._blends.popleft()
        self._progress.done.add(job.request_id)
        self._progress.reports[job.request_id] = report

    def _blend(self, job: BlendJob) -> Generator[int, None, dict[str, Any]]:
        """Blend a prompt into its pages; yields what each layer cost in rows, and returns the report.

        An entry that turns out to be damaged is a miss in the next round.
        """
        for _ in job.marks.chunks:
            with suppress(DamagedEntryError):
                return (yield from self._blend_once(job))
        return (yield from self._blend_once(job))

    def _blend_once(self, job: BlendJob) -> Generator[int, None, dict[str, Any]]:
        started, prompt = time.perf_counter(), self._prompt_of(job)
        with ExitStack() as held:
            # 1. Look up the chunks; all ranks go on with the same hits. Compute the prefix, or look it up.
            stored, source = self._find(prompt, held)
            prefix = yield from self._prefix_segment(prompt.prefix)
            # 2. Plan: more is recomputed where that hides beside loading; what full recompute gives as soon is left to vLLM.
            policy = BlendPolicy(
                ratio=None if job.is_least else job.ratio,
                quality_ratio=job.ratio,
                layers=self._fusor.runner.geometry.layers,
                controller=self._controller,
            )
            plan = plan_blend(prompt, Found(prefix, stored), policy)
            if plan.full_recompute:
                if plan.predicted is not None and self._controller is not None:
                    self._controller.record(plan.predicted, load_s=0.0, compute_s=None)  # its corrections fade
                for chunk in plan.misses:
                    self._miss(chunk)
                return {"blended": False, "reason": SLOW_LOADING}
            # 3. Blend it, each finished layer straight into the pages.
            segments = [Segment(segment.token_ids, segment.kv, segment.exact) for segment in plan.segments]
            config = FusionConfig(recompute_ratio=plan.ratio)
            steps = held.enter_context(closing(self._fusor.fuse_steps(segments, config, source, _PageSink(self._pages, job))))
            for layer in steps:
                yield _rows(layer, len(prompt))
            blended = steps.result
        # 4. Let the controller learn; what was missing is computed after its own context later, and stored.
        if plan.predicted is not None and self._controller is not None and isinstance(source, LayerLoader):
            computed_s = sum(report.compute_s for report in (*blended.selection, *blended.layers))
            on_cpu = self._fusor.runner.geometry.device.type == "cpu"  # a GPU computes while the host waits
            self._controller.record(plan.predicted, load_s=source.load_s, compute_s=computed_s if on_cpu else None)
        for chunk in plan.misses:
            self._miss(chunk)
        return _report(job, stored, blended, time.perf_counter() - started)

    def _find(self, prompt: PromptTokens, held: ExitStack) -> tuple[list[KVHandle | None], LayerSource]:
        """The stored KV of each chunk, None for a miss, and what brings it; with ranks, this one's heads, in memory."""
        if self._ranks.ranks == 1:
            pinned = held.enter_context(self._store.pin(prompt.keys))
            return list(prompt.by_chunk(pinned)), held.enter_context(LayerLoader())
        placements: Sequence[Placement | None] = [None] * len(prompt.keys)
        try:
            placements = held.enter_context(self._store.pin(prompt.keys))
        except CacheBlendError as error:  # the other ranks wait for what this one has found
            logger.warning("chunks' KV is not read: %s", error)
        found = [None if placement is None else self._own_heads(placement) for placement in placements]
        agreed = self._ranks.agree([kv is not None for kv in found])
        agreed_on = [kv if everywhere else None for kv, everywhere in zip(found, agreed, strict=True)]
        return list(prompt.by_chunk(agreed_on)), ResidentLayers()

    def _own_heads(self, placement: Placement) -> ChunkKV | None:
        """The KV of this rank's heads, in memory; None for an entry that cannot be read."""
        every = range(placement.num_layers)
        try:
            layers = [self._ranks.own_heads(placement.read_layer(layer), self._kv_heads) for layer in every]
        except StoreError:
            return None
        return ChunkKV(layers, placement.token_ids, placement.prefix_ids, placement.model, placement.context)

    def _prefix_segment(self, ids: Chunk) -> Generator[int, None, BlendSegment | None]:
        """What stands before the first chunk, with its exact KV where that is held; yields what each layer cost in rows.

        It is computed by itself, not in the blend: its rows are neighbours then, which vLLM's own kernel runs as vLLM does.
        """
        if not MIN_PREFIX_TOKENS <= len(ids) <= self._prefix_tokens:
            return None
        if ids not in self._prefixes:
            while len(ids) + sum(map(len, self._prefixes)) > self._prefix_tokens:
                self._prefixes.popitem(last=False)
            steps, run = self._fusor.prefix_steps(ids, torch.device("cpu"))
            with closing(steps):
                for layer in steps:
                    yield _rows(layer, len(ids))
            self._prefixes[ids] = run
        self._prefixes.move_to_end(ids)
        return BlendSegment(ids, self._prefixes[ids], exact=True)

    def _miss(self, chunk: PromptChunk) -> None:
        if chunk.key is not None and len(self._missed) < MAX_WAITING_MISSES:
            self._missed.setdefault(chunk.key, chunk)

    def _compute_missed(self) -> None:
        """Compute the KV of one missed chunk after its own context, and store it."""
        while self._missed:
            key, chunk = self._missed.popitem(last=False)
            # Looked for here and not in the remote tier, which may hold it damaged.
            if self._ranks.agree([key in self._store])[0]:
                continue
            try:  # where the disk is behind, the chunk is left for a later request to miss again
                self.precompute([(*chunk.earlier, chunk.token_ids)], {len(chunk.earlier)}, key.namespace)
            except Exception:
                logger.exception("the KV of a missed chunk of %d tokens is not computed", len(chunk.token_ids))
            return

    def precompute(
        self, documents: Sequence[Sequence[Chunk]], which: Collection[int] | None, namespace: str
    ) -> tuple[int, int]:
        """Compute and store the KV of documents' chunks.

        What of a call all ranks do together does not depend on what one of them stores, or cannot.

        Args:
            documents: the token ids of each document's chunks, in its order.
            which: indexes of the chunks wanted of each; None for all.
            namespace: whose they are; empty for everybody's.

        Returns:
            How many chunks are stored now that were not; and how many are left, since too much waits to be written: the
            first rank knows, who writes.
        """
        # 1. Look up which are stored; all ranks compute the same.
        wanted: list[tuple[Sequence[Chunk], list[int]]] = []
        for chunks in documents:
            earlier = self._naming.context.earlier(chunks)
            asked = [index for index in range(len(chunks)) if which is None or index in which]
            have = self._ranks.agree(self._find_stored([self._naming.key(chunks[i], earlier[i], namespace) for i in asked]))
            wanted.append((chunks, [index for index, here in zip(asked, have, strict=True) if not here]))
        count, stored, left = sum(len(new) for _, new in wanted), 0, 0
        tokens = sum(len(chunks[index]) for chunks, new in wanted for index in new)
        geometry = self._fusor.runner.geometry
        kv_bytes = geometry.layers * geometry.layer_bytes(tokens) * self._ranks.ranks
        if not count or not self._ranks.agree([self._has_room(kv_bytes)])[0]:
            return 0, count
        # 2. Compute the others, and hand them to the store; a document at a time, whose pass is in memory until then.
        for document in wanted:
            for kv in self._fusor.precompute_documents([document], self._naming.prefix_ids, self._naming.context):
                has_room, is_stored = self._put(kv, namespace)
                left, stored = left + (not has_room), stored + is_stored
                del kv  # a view of what its pass gave
        return_freed_memory()  # of the passes, which no request needs
        return stored, left

    def _put(self, kv: ChunkKV, namespace: str) -> tuple[bool, bool]:
        """Hand a chunk's KV to the store; returns whether it has room, and whether it stored the KV."""
        whole = replace(kv, layers=[self._ranks.all_heads(pair, self._kv_heads) for pair in kv.layers])
        key = ChunkKey.of(
            whole.token_ids,
            prefix_ids=whole.prefix_ids,
            context=whole.context,
            model=self._naming.model,
            codec=self._naming.codec,
            namespace=namespace,
        )
        if not self._has_room(sum(x_HTD.nbytes for pair in whole.layers for x_HTD in pair)):
            return False, False
        try:
            if self._ranks.rank == 0:
                self._store.put(key, whole, flush=False)
        except Exception as error:  # a full disk, values that the codec cannot hold: the chunk stays a miss
            logger.warning("a chunk's KV is not stored: %s: %s", type(error).__name__, error)
            return True, False
        return True, True

    def _has_room(self, kv_bytes: int) -> bool:
        """Whether this rank's store accepts so much without waiting for the disk; the engine's thread must not wait."""
        pending_bytes = self._store.stats().pending_bytes
        return not pending_bytes or pending_bytes + kv_bytes <= self._store.config.write_queue_bytes

    def _find_stored(self, keys: Sequence[ChunkKey]) -> list[bool]:
        """None in a store that cannot be read, since the other ranks wait for an answer."""
        try:
            return self._store.find(keys)
        except CacheBlendError as error:
            logger.warning("chunks' KV is not looked up: %s", error)
            return [False] * len(keys)


def _report(job: BlendJob, stored: Sequence[KVHandle | None], blended: FusionResult, blend_s: float) -> dict[str, Any]:
    """A request's report of its blend, for the answer."""
    hits = [len(kv.token_ids) for kv in stored if kv is not None]
    later = blended.recomputed[1:] or blended.recomputed
    return {
        "blended": True,
        "chunks": len(job.marks.chunks),
        "hits": len(hits),
        "hit_tokens": sum(hits),
        "missed_tokens": sum(stop - start for start, stop in job.marks.chunks) - sum(hits),
        "recomputed_tokens": round(sum(map(len, later)) / len(later)),
        "recompute_ratio": round(blended.recomputed_ratio, 4),
        "wait_s": round(blended.wait_s, 4),
        "blend_s": round(blend_s, 4),
    }


def _rows(layer: LayerReport, tokens: int) -> int:
    """Cost of a layer of a prompt of so many tokens, in rows."""
    return layer.recomputed - (-tokens // TOKENS_OF_A_ROW)
