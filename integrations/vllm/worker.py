"""The worker's half: blends prompts into vLLM's pages, some layers a step of the engine, and stores what was missing.

It imports nothing of vLLM. Shapes: H KV heads, T tokens handed over, D head size.
"""

from __future__ import annotations

import logging
from collections import OrderedDict, deque
from collections.abc import Collection, Generator, Iterable, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from cacheblend.base.errors import CacheBlendError, DamagedEntryError, StoreError
from cacheblend.base.memory import return_freed_memory
from cacheblend.base.threads import in_daemon_thread
from cacheblend.blend import FusionResult, Fusor, LayerKV, LayerReport, LayerSource, ResidentLayers
from cacheblend.loader import LayerLoader, LoadingController
from cacheblend.service.engine.blend_plan import BlendPlan, BlendPolicy, BlendSegment, plan_blend
from cacheblend.service.engine.chunk_context import ChunkNaming
from cacheblend.service.engine.config import EngineConfig
from cacheblend.service.engine.prompt import PromptChunk, PromptTokens
from cacheblend.store import ChunkKey, ChunkKV, KVHandle, KVStore, Placement, PrefixRun

from .scheduler import BlendJob

if TYPE_CHECKING:
    from .runner import VllmRunner

logger = logging.getLogger(__name__)
MAX_WAITING_MISSES = 64  # vLLM pauses and stops only after them; a later request misses the others again
BUSY_STEPS_A_MISS = 64  # beside running requests a missed chunk is computed no more often
# A layer's cost that grows with the prompt and not with its rows: for so many tokens KV is copied, rotated and written in the
# time of one row.
TOKENS_OF_A_ROW = 16
# Many requests share what stands before the first chunk (a system message): from this length on its KV is held.
MIN_PREFIX_TOKENS = 64
Report = dict[str, Any]


@dataclass(slots=True)
class PageSink:
    """Writes each finished layer of a prompt of `tokens` to vLLM's paged KV cache, from `start` on and but for the last token.

    The runner knows each layer's layout and scales; `block_ids` are of the prompt's pages, of `block_size` tokens each.
    """

    runner: VllmRunner
    block_size: int
    block_ids: Sequence[int]
    start: int
    tokens: int

    def put(self, layer: int, layer_kv: LayerKV) -> None:
        """See `LayerSink`."""
        positions_T = torch.arange(self.start, self.tokens - 1)
        handed_over = slice(self.start, self.tokens - 1)
        k_THD, v_THD = (x_1HND[0, :, handed_over].transpose(0, 1) for x_1HND in (layer_kv.k_1HND, layer_kv.v_1HND))
        blocks_T = torch.tensor(self.block_ids)[positions_T // self.block_size]
        slots_T = (blocks_T * self.block_size + positions_T % self.block_size).to(k_THD.device)
        if k_THD.device.type != "cpu":  # where backends read heads that stand side by side
            k_THD, v_THD = k_THD.contiguous(), v_THD.contiguous()
        self.runner.write_pages(layer, k_THD, v_THD, slots_T)


class BlendWorker:
    """Blends one prompt after the other, and computes missed chunks when there is none; all in the engine's own thread.

    Every rank of a tensor-parallel engine makes the same calls in the same order: the ranks agree on the hits before the first
    layer, and have read all KV by then, so that none waits for another in the middle.

    Args:
        runner: the fusor's, of this process among those that hold the model; writes the pages of `block_size` tokens.
        prefix_tokens: how many tokens' KV is held of what prompts begin with.
        engine: has r* and the widening of requests that name no ratio.
        controller: picks their ratio; None for r*. Ranks ask none: they have read all KV
            before the first layer, so there is no loading to hide behind.
    """

    def __init__(
        self,
        fusor: Fusor,
        naming: ChunkNaming,
        store: KVStore,
        runner: VllmRunner,
        block_size: int,
        prefix_tokens: int,
        engine: EngineConfig,
        controller: LoadingController | None = None,
    ) -> None:
        self._fusor, self._naming, self._store, self._runner, self._block_size = fusor, naming, store, runner, block_size
        self._prefix_tokens, self._engine = prefix_tokens, engine
        self._controller = controller if runner.ranks == 1 else None
        # Prompts whose chunks' KV may come from the remote tier first, and what fetches it: the first rank, for all.
        self._fetches: deque[tuple[BlendJob, Future[None] | None]] = deque()
        self._blends: deque[tuple[BlendJob, Generator[int, None, Report]]] = deque()
        self._missed: OrderedDict[ChunkKey, PromptChunk] = OrderedDict()
        self._prefixes: OrderedDict[tuple[str, tuple[int, ...]], PrefixRun] = OrderedDict()  # by namespace and token ids
        self._done: dict[str, Report | None] = {}
        self._busy_steps = 0

    @property
    def waiting_misses(self) -> int:
        """Missed chunks that are not computed yet."""
        return len(self._missed)

    @property
    def blending(self) -> int:
        """Prompts that wait or are under way."""
        return len(self._fetches) + len(self._blends)

    def step(self, jobs: Iterable[BlendJob], missed: Iterable[PromptChunk], rows: int, *, is_idle: bool) -> None:
        """Work as much as vLLM's own prefill of `rows` tokens would, at least a layer.

        Without a blend compute a missed chunk, in few of the steps unless idle.
        """
        has_remote = self._store.has_remote and self._runner.rank == 0
        for job in jobs:
            fetch = partial(self._fetch_missing, job.prompt)
            self._fetches.append((job, in_daemon_thread(fetch, "cacheblend-vllm") if has_remote else None))
        self._begin_fetched()
        self._miss(missed)
        left = max(1, rows) * self._fusor.runner.geometry.layers
        self._busy_steps = 0 if is_idle else self._busy_steps + 1
        if not self._blends and self._busy_steps % BUSY_STEPS_A_MISS == 0:
            self._compute_missed()
        while self._blends and left > 0:
            job, steps = self._blends[0]
            try:
                left -= next(steps)
                continue
            except StopIteration as done:
                report = done.value
            except Exception as error:
                logger.exception("request %s is computed exactly: its blend failed", job.request_id)
                report = {"blended": False, "reason": f"failed: {type(error).__name__}"}
            self._blends.popleft()
            self._done[job.request_id] = report

    def cancel(self, request_ids: Collection[str]) -> None:
        """Stop the blends of requests that have ended, whose pages are then free."""
        for fetch in [fetch for fetch in self._fetches if fetch[0].request_id in request_ids]:
            self._fetches.remove(fetch)
            self._done[fetch[0].request_id] = None
        for blend in [blend for blend in self._blends if blend[0].request_id in request_ids]:
            blend[1].close()
            self._blends.remove(blend)
            self._done[blend[0].request_id] = None

    def take_done(self) -> dict[str, Report | None]:
        """Reports of the requests, by vLLM's ids, that were blended, failed or cancelled (None) since the last call."""
        done, self._done = self._done, {}
        return done

    def close(self) -> None:
        """Stop what is under way, and close the store."""
        for _, steps in self._blends:
            steps.close()
        self._blends.clear()
        wait([fetch for _, fetch in self._fetches if fetch is not None], self._store.config.remote_timeout_s)
        self._fetches.clear()
        self._store.close()

    def _fetch_missing(self, prompt: PromptTokens) -> None:
        """Fetch a prompt's missing chunks while that is predicted to be faster than computing them."""
        missing = (chunk for chunk in prompt.chunks if chunk.key is not None and chunk.key not in self._store)
        tokens, timeout_s = sum(len(chunk.token_ids) for chunk in missing), self._store.config.remote_timeout_s
        self._store.fetch(prompt.keys, timeout_s if self._controller is None else self._controller.full_s(tokens))
        if self._runner.ranks > 1:
            self._store.flush()  # the other ranks read files

    def _begin_fetched(self) -> None:
        """Begin the blends of the prompts whose chunks' KV has come, or does not come."""
        has_ended = self._runner.agree([fetch is None or fetch.done() for _, fetch in self._fetches])
        for ended, (job, fetch) in zip(has_ended, list(self._fetches), strict=True):
            if ended:
                if fetch is not None and (error := fetch.exception()) is not None:
                    logger.warning("chunks' KV is not copied from the remote tier: %s", error)
                self._fetches.remove((job, fetch))
                self._blends.append((job, self._blend(job)))

    def _blend(self, job: BlendJob) -> Generator[int, None, Report]:
        """Blend a prompt into its pages; yields what each layer cost in rows, and returns the report.

        An entry that turns out to be damaged is a miss in the next round.
        """
        for _ in job.prompt.keys:
            with suppress(DamagedEntryError):
                return (yield from self._blend_once(job))
        return (yield from self._blend_once(job))

    def _blend_once(self, job: BlendJob) -> Generator[int, None, Report]:
        prompt, geometry = job.prompt, self._fusor.runner.geometry
        with ExitStack() as held:
            # 1. Look up the chunks; all ranks go on with the same hits. Compute the prefix, or look it up.
            stored, source = self._find(prompt, held)
            prefix = yield from self._prefix_segment(prompt.prefix, prompt.keys[0].namespace)
            # 2. Plan: more is recomputed where that hides beside loading. What full recompute gives as soon is left to vLLM,
            #    and so are chunks that all look alike.
            nats = self._engine.fusion.max_loss_nats if job.ratio is None else None
            policy = BlendPolicy(
                ratio=job.ratio,
                quality_ratio=self._engine.loader.quality_ratio,
                controller=self._controller,
                widens=nats is not None,
            )
            stored = [chunk.part(kv) for chunk, kv in zip(prompt.chunks, stored, strict=True)]
            plan = plan_blend(prompt, prefix, stored, policy)
            reused = [segment.kv for segment in plan.segments if segment.kv is not None and not segment.exact]
            if plan.full_recompute or not reused:
                if plan.predicted is not None and self._controller is not None:
                    self._controller.record(plan.predicted, load_s=0.0, compute_s=None)  # its corrections fade
                self._miss(plan.misses)
                reason = "slow_loading" if plan.full_recompute else "look_alike" if plan.look_alike else "not_stored"
                return {"blended": False, "reason": reason}
            # 3. Blend it, each finished layer straight into the pages.
            config = replace(self._engine.fusion, recompute_ratio=plan.ratio, max_loss_nats=nats)
            sink = PageSink(self._runner, self._block_size, job.block_ids, job.start, len(prompt))
            steps = held.enter_context(closing(self._fusor.fuse_steps(plan.segments, config, source, sink)))
            for layer in steps:
                yield _rows(layer, len(prompt))
            blended = steps.result
        # 4. Let the controller learn; what was missing is computed after its own context later, and stored.
        predicted = None if blended.is_widened else plan.predicted
        if predicted is not None and self._controller is not None and isinstance(source, LayerLoader):
            computed_s = sum(report.compute_s for report in (*blended.selection, *blended.layers))
            # A GPU computes while the host waits.
            is_predicted = geometry.device.type == "cpu" and plan.ratio == predicted.ratio
            self._controller.record(predicted, load_s=source.load_s, compute_s=computed_s if is_predicted else None)
        self._miss(plan.misses)
        return _report(plan, len(prompt.keys), reused, blended)

    def _find(self, prompt: PromptTokens, held: ExitStack) -> tuple[list[KVHandle | None], LayerSource]:
        """The stored KV of each chunk, None for a miss, and what brings it; with ranks, this one's heads, in memory."""
        if self._runner.ranks == 1:
            pinned = held.enter_context(self._store.pin(prompt.keys))
            return list(prompt.by_chunk(pinned)), held.enter_context(LayerLoader())
        placements: Sequence[Placement | None] = [None] * len(prompt.keys)
        try:
            placements = held.enter_context(self._store.pin(prompt.keys))
        except CacheBlendError as error:  # the other ranks wait for what this one has found
            logger.warning("chunks' KV is not read: %s", error)
        found = [None if placement is None else self._own_heads(placement) for placement in placements]
        agreed = self._runner.agree([kv is not None for kv in found])
        agreed_on = [kv if everywhere else None for kv, everywhere in zip(found, agreed, strict=True)]
        return list(prompt.by_chunk(agreed_on)), ResidentLayers()

    def _own_heads(self, placement: Placement) -> ChunkKV | None:
        """The KV of this rank's heads, in memory; None for an entry that cannot be read."""
        try:
            layers = [self._runner.own_heads(placement.read_layer(layer)) for layer in range(placement.num_layers)]
        except StoreError:
            return None
        return ChunkKV(layers, placement.token_ids, placement.prefix_ids, placement.model, placement.context)

    def _prefix_segment(self, ids: tuple[int, ...], namespace: str) -> Generator[int, None, BlendSegment | None]:
        """A prompt's prefix, with its exact KV where that is held; yields what each layer cost in rows.

        It is computed by itself, not in the blend: its rows are neighbours then, which vLLM's own kernel runs as vLLM does.
        """
        if not MIN_PREFIX_TOKENS <= len(ids) <= self._prefix_tokens:
            return None
        name = namespace, ids
        if name not in self._prefixes:
            while len(ids) + sum(len(held) for _, held in self._prefixes) > self._prefix_tokens:
                self._prefixes.popitem(last=False)
            steps, run = self._fusor.prefix_steps(ids, torch.device("cpu"))
            with closing(steps):
                for layer in steps:
                    yield _rows(layer, len(ids))
            self._prefixes[name] = run
        self._prefixes.move_to_end(name)
        return BlendSegment(ids, self._prefixes[name], exact=True)

    def _miss(self, chunks: Iterable[PromptChunk]) -> None:
        for chunk in chunks:
            if chunk.key is not None and len(self._missed) < MAX_WAITING_MISSES:
                self._missed.setdefault(chunk.key, chunk)

    def _compute_missed(self) -> None:
        """Compute the KV of one missed chunk after its own context, and store it."""
        while self._missed:
            key, chunk = self._missed.popitem(last=False)
            # Looked for here and not in the remote tier, which may hold it damaged.
            if self._runner.agree(self._find_stored([key], is_here=True))[0]:
                continue
            try:  # where the disk is behind, the chunk is left for a later request to miss again
                token_ids = chunk.stored_ids or chunk.token_ids
                self.precompute((*chunk.earlier, token_ids), [len(chunk.earlier)], key.namespace)
            except Exception:
                logger.exception("the KV of a missed chunk of %d tokens is not computed", len(chunk.token_ids))
            return

    def precompute(
        self, chunks: Sequence[tuple[int, ...]], which: Sequence[int], namespace: str, document: Sequence[str] = ()
    ) -> tuple[int, int, int]:
        """Compute and store the KV of a document's chunks at ascending indexes, for a namespace, "" for everybody's.

        Where `document` is given, id and version, the store must know it in that version; see `KVStore.put`.
        What all ranks do together does not depend on what one of them stores, or cannot.

        Returns:
            How many chunks are stored now that were not; how many are left, since too much waits to be written; and how many
            the store could not take. The first rank knows, who writes.
        """
        # 1. Look up which are stored; all ranks compute the same.
        earlier = self._naming.context.earlier(chunks)
        keys = {index: self._naming.key(chunks[index], earlier[index], namespace) for index in which}
        have = self._runner.agree(self._find_stored(list(keys.values())))
        new = [index for index, is_stored in zip(which, have, strict=True) if not is_stored]
        geometry = self._fusor.runner.geometry
        kv_bytes = geometry.layers * geometry.layer_bytes(sum(len(chunks[index]) for index in new)) * self._runner.ranks
        if not new or not self._runner.agree([self._has_room(kv_bytes)])[0]:
            return 0, len(new), 0
        # 2. Compute the others, and hand them to the store.
        stored = left = 0
        computed = self._fusor.precompute_documents([(chunks, new)], self._naming.prefix_ids, self._naming.context)
        for index in new:
            has_room, is_stored = self._put(keys[index], next(computed), document)  # a view, whose pass nothing else holds
            left, stored = left + (not has_room), stored + is_stored
        del computed
        return_freed_memory()  # of the passes, which no request needs
        return stored, left, len(new) - stored - left

    def _put(self, key: ChunkKey, kv: ChunkKV, document: Sequence[str]) -> tuple[bool, bool]:
        """Hand a chunk's KV to the store; returns whether it has room, and whether it stored the KV."""
        kv = replace(kv, layers=[self._runner.all_heads(pair) for pair in kv.layers])
        if not self._has_room(sum(x_HTD.nbytes for pair in kv.layers for x_HTD in pair)):
            return False, False
        try:
            if self._runner.rank == 0:
                self._store.put(key, kv, flush=False, document=(document[0], document[1]) if document else None)
        except Exception as error:  # a full disk, values that the codec cannot hold: the chunk stays a miss
            logger.warning("a chunk's KV is not stored: %s: %s", type(error).__name__, error)
            return True, False
        return True, True

    def _has_room(self, kv_bytes: int) -> bool:
        """Whether this rank's store accepts so much without waiting for the disk; the engine's thread must not wait."""
        pending_bytes = self._store.stats().pending_bytes
        return not pending_bytes or pending_bytes + kv_bytes <= self._store.config.write_queue_bytes

    def _find_stored(self, keys: Sequence[ChunkKey], *, is_here: bool = False) -> list[bool]:
        """Whether each key is stored; no key in a store that cannot be read, since the other ranks wait for an answer."""
        try:
            return [key in self._store for key in keys] if is_here else self._store.find(keys)
        except CacheBlendError as error:
            logger.warning("chunks' KV is not looked up: %s", error)
            return [False] * len(keys)


def _report(plan: BlendPlan, chunks: int, reused: Sequence[KVHandle], blended: FusionResult) -> Report:
    """A request's report of its blend, for the answer."""
    hits = [len(kv.token_ids) for kv in reused]
    later = blended.recomputed[1:] or blended.recomputed
    return {
        "blended": True,
        "chunks": chunks,
        "hits": len(hits),
        "hit_tokens": sum(hits),
        "missed_tokens": sum(len(chunk.token_ids) for chunk in plan.misses),
        "recomputed_tokens": round(sum(map(len, later)) / len(later)),
        "recompute_ratio": round(blended.recomputed_ratio, 4),
        "widened": blended.is_widened,
    }


def _rows(layer: LayerReport, tokens: int) -> int:
    """Cost of a layer of a prompt of so many tokens, in rows."""
    return layer.recomputed - (-tokens // TOKENS_OF_A_ROW)
