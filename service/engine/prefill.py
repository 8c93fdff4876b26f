"""Prefill of a request by one of four methods (paper figure 1), and the prefix cache beside blending."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field, replace

import torch

from cacheblend.base.errors import DamagedEntryError, StoreError
from cacheblend.blend.decoder import Decoder
from cacheblend.blend.fusor import Fusor
from cacheblend.blend.generation import SequenceKV
from cacheblend.blend.hybrid import HybridDecoder, HybridSequence, State
from cacheblend.blend.interfaces import KVGeometry, LayerKV, LayerSource, ResidentLayers
from cacheblend.blend.prompt import FusionResult, LayerReport, Prompt, Segment
from cacheblend.blend.widening import WIDE_RATIO
from cacheblend.loader import LayerLoader, LoadingController, LoadingPlan, WorkEstimator
from cacheblend.store import BLOCK_TOKENS, RAM, BlockChain, ChunkKV, KVStore, LayerPair, PrefixBlocks, PrefixRun

from .background_precompute import BackgroundPrecompute
from .blend_plan import BlendPlan, BlendPolicy, BlendSegment, PlannedSegment, fresh_records, plan_blend
from .chunk_context import ChunkEncoder
from .config import EngineConfig
from .prompt import PromptTokens
from .request import Request

PrefillSteps = Generator[LayerReport, None, None]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prefill:
    """A prompt's prefill.

    Args:
        fused: KV and first logits.
        segments: what they were made from, in the prompt's order.
        ratio: the ratio that was asked of the fusor; None where it had no say.
        loading: what the loading controller expected; None where it was not asked.
        loaded_bytes: see `AnswerPlan`.
        look_alike: see `AnswerPlan`.
        prefix: holds the prompt's blocks for later prompts; None where nothing does.
    """

    fused: FusionResult
    segments: tuple[PlannedSegment, ...]
    ratio: float | None = None
    loading: LoadingPlan | None = None
    loaded_bytes: Mapping[str, int] = field(default_factory=dict)
    look_alike: int = 0
    prefix: CachedPrefix | None = None


class Prefiller:
    """Prefills requests by the method that each asks for; safe to use from several threads.

    Args:
        fusor: the model.
        store: where chunks' KV is.
        prefixes: blocks of what was served before.
        encoder: names chunks' KV, and computes it. The KV of its prefix is computed once and held.
        background: computes missing chunks' KV after the requests.
        config: selector and loader settings.
        controller: picks the ratio where the request does not; may be replaced. Without one, for want of a profile, it is r*,
            and full recompute for prompts that are too short to gain by blending.

    Attributes:
        work: counts a request's work, where nothing predicts its seconds.
    """

    def __init__(
        self,
        fusor: Fusor,
        store: KVStore,
        prefixes: PrefixCache,
        encoder: ChunkEncoder,
        background: BackgroundPrecompute,
        config: EngineConfig,
        controller: LoadingController | None,
    ) -> None:
        self._fusor, self._store, self._prefixes, self._encoder = fusor, store, prefixes, encoder
        self._background, self._config, self.controller = background, config, controller
        self._prefix_kv: ChunkKV | None = None
        if encoder.prefix_ids and fusor.exact_reason is None:
            self._prefix_kv = fusor.precompute(encoder.prefix_ids)
        self.work = WorkEstimator(
            schedule=config.fusion.schedule,
            layers=fusor.decoder.geometry.layers,
            row_multiply_adds=fusor.decoder.layer_parameters,
            device_type=fusor.decoder.device.type,
        )

    def steps(self, request: Request) -> PrefillSteps:
        """Prefill a request, a layer a step; at the end its `prefill` is set. Closing stops loading and releases pins."""
        if self._fusor.exact_reason is not None:
            return self._exact(request)
        if request.method == "full_recompute":
            return self._full_recompute(request)
        if request.method == "prefix_cache":
            return self._prefix_cache(request)
        return self._blend(request, 0.0 if request.method == "full_reuse" else request.fusion.recompute_ratio)

    def _full_recompute(self, request: Request) -> PrefillSteps:
        """Compute everything."""
        fused = yield from self._fusor.fuse_steps([Segment(request.prompt.token_ids)])
        request.prefill = Prefill(fused=fused, segments=tuple(fresh_records(request.prompt)))

    def _prefix_cache(self, request: Request) -> PrefillSteps:
        """Reuse what the prompt begins with as an earlier one did, exactly, in full blocks; compute the others."""
        token_ids = request.prompt.token_ids
        finding = self._prefixes.find(token_ids, len(token_ids) - 1, request.namespace)
        with finding as prefix, LayerLoader(self._config.loader) as loader:
            segments = [*filter(None, [prefix.segment]), Segment(token_ids[prefix.tokens :])]
            fused = yield from self._fusor.fuse_steps(segments, source=prefix.recording(loader))
            records, loaded = prefix.records(request.prompt), loader.bytes_by_tier
            request.prefill = Prefill(fused=fused, segments=records, loaded_bytes=loaded, prefix=prefix)

    def _exact(self, request: Request) -> PrefillSteps:
        """Run a hybrid's prompt, a piece a step, after the longest prefix whose states are held; with any method, exactly."""
        decoder, token_ids = self._fusor.decoder, request.prompt.token_ids
        assert isinstance(decoder, HybridDecoder)
        reuses = decoder.carries and request.method != "full_recompute"
        with self._prefixes.find(token_ids, reuses * (len(token_ids) - 1), request.namespace) as found:
            prefix, sequence = CachedStates(found.blocks, found.chain, found.run), decoder.resume(found.run)
            for end, is_held in decoder.pieces(prefix.tokens, len(request.prompt.prefix), len(token_ids)):
                began, rows = time.perf_counter(), token_ids[sequence.tokens : end]
                logits_V = decoder.extend(sequence, rows)
                if is_held:
                    prefix.hold(sequence, decoder)
                yield LayerReport(0, len(rows), 0.0, time.perf_counter() - began)
            computed = (torch.arange(prefix.tokens, len(token_ids)),) * decoder.geometry.layers
            none_N = torch.zeros(len(token_ids))
            fused = FusionResult(logits_V, sequence.cache, token_ids, computed, computed, none_N, 0, prefix.tokens)
            request.prefill = Prefill(fused=fused, segments=prefix.records(request.prompt), prefix=prefix)

    def _blend(self, request: Request, ratio: float | None) -> PrefillSteps:
        """Blend a request. An entry that turns out to be damaged is a miss in the next round."""
        for _ in range(len(request.prompt.chunks) + 1):
            with suppress(DamagedEntryError):
                yield from self._blend_once(request, ratio)
                return
        yield from self._full_recompute(request)  # entries that are damaged and cannot be set aside

    def _blend_once(self, request: Request, ratio: float | None) -> PrefillSteps:
        """Reuse every chunk that is stored, at whatever place, and recompute `ratio` of it; missing ones are computed."""
        prompt = request.prompt
        with (
            self._find_prefix(prompt, request.namespace) as prefix,
            self._store.pin(prompt.keys) as stored,
            LayerLoader(self._config.loader) as loader,
        ):
            # 1. Plan: the ratio, or full recompute, and the segments with their KV.
            parts = [chunk.part(kv) for chunk, kv in zip(prompt.chunks, prompt.by_chunk(stored), strict=True)]
            policy = BlendPolicy(
                ratio=ratio,
                quality_ratio=self._config.loader.quality_ratio,
                controller=self.controller,
                work=self.work,
                widens=request.fusion.max_loss_nats is not None and ratio != 0,
            )
            plan = plan_blend(prompt, self._prefix_segment(prompt, prefix), parts, policy)
            planned = time.perf_counter()
            prefix.exact_tokens = plan.exact_tokens
            # 2. Fuse, a layer a step; the loader reads the next layers meanwhile.
            source = prefix.recording(ResidentLayers() if plan.full_recompute else loader)
            steps = self._fusor.fuse_steps(plan.segments, replace(request.fusion, recompute_ratio=plan.ratio), source)
            fused = yield from steps
            # 3. Compare the plan with what it took, and have the misses computed after the running requests.
            if self._fusor.decoder.device.type == "cuda":  # its stream: others' layers are being copied to the device
                torch.cuda.current_stream(self._fusor.decoder.device).synchronize()
            took_s = time.perf_counter() - planned - steps.preempted_s
            self._observe(plan, loader, took_s, fused)
            for chunk in plan.misses:
                self._background.submit(chunk)
            request.prefill = Prefill(
                fused=fused,
                segments=tuple(segment.record for segment in plan.segments),
                ratio=None if plan.full_recompute else WIDE_RATIO if fused.is_widened else plan.ratio,
                loading=plan.predicted,
                loaded_bytes=loader.bytes_by_tier,
                look_alike=plan.look_alike,
                prefix=prefix,
            )

    def fetch(self, prompt: PromptTokens) -> None:
        """Fetch the KV of a prompt's chunks that nothing but the remote tier has, while that is faster than computing it."""
        if not self._store.has_remote or self._fusor.exact_reason is not None:
            return
        missing = [chunk for chunk in prompt.chunks if chunk.key is not None and chunk.key not in self._store]
        if missing:
            deadline_s = (self.controller or self.work).full_s(sum(len(chunk.token_ids) for chunk in missing))
            with suppress(StoreError):  # without room for the note the KV is evicted by use
                self._store.documents.note((chunk.document, chunk.key) for chunk in missing if chunk.key is not None)
            self._store.fetch(prompt.keys, deadline_s)

    def _find_prefix(self, prompt: PromptTokens, namespace: str) -> AbstractContextManager[CachedPrefix]:
        """Look up what stands before the chunks: the chunks themselves are reused at any place, and blended anew."""
        before = len(prompt.prefix) if prompt.chunks else len(prompt.token_ids) - 1
        limit = 0 if prompt.chunks and self._holds_prefix_of(prompt) else before
        return self._prefixes.find(prompt.token_ids, limit, namespace)

    def _prefix_segment(self, prompt: PromptTokens, prefix: CachedPrefix) -> BlendSegment | None:
        """The longest exact KV at hand that the prompt begins with."""
        if self._holds_prefix_of(prompt) and prefix.tokens <= len(prompt.prefix):
            return BlendSegment(prompt.prefix, self._prefix_kv, exact=True)
        return prefix.segment

    def _holds_prefix_of(self, prompt: PromptTokens) -> bool:
        is_exact = self._prefix_kv is not None and self._prefix_kv.model == self._fusor.exact_fingerprint(len(prompt))
        return is_exact and prompt.prefix == self._encoder.prefix_ids

    def _observe(self, plan: BlendPlan, loader: LayerLoader, prefill_s: float, fused: FusionResult) -> None:
        """Let the controller learn from what a prefill took."""
        loading, controller = plan.predicted, self.controller
        if loading is None or controller is None:
            return
        # A GPU computes while the host waits, so there the two can be separated only where the host hardly waited.
        waited = self._fusor.decoder.device.type == "cuda" and fused.wait_s > 0.05 * prefill_s
        is_predicted = not waited and not fused.is_widened and (plan.full_recompute or plan.ratio == loading.ratio)
        load_s, loaded = loader.load_s, loader.bytes_by_tier
        if loading.load_s_by_tier.keys() == {RAM}:  # an exact prefix in memory comes as fast; beside a file's it hardly counts
            load_s *= loaded.get(RAM, 0) / max(1, sum(loaded.values()))
        controller.record(loading, load_s=load_s, compute_s=prefill_s - fused.wait_s if is_predicted else None)


class PrefixCache:
    """The blocks of prompts and answers that an engine has served, in RAM. Thread-safe.

    They are full prefill's own. Blended KV is approximate, and so is all that is generated after it: none of it is held.

    Args:
        fusor: the model.
        budget_bytes: of keys and values.

    Raises:
        ConfigError: a budget that is not above 0.
    """

    def __init__(self, fusor: Fusor, budget_bytes: int) -> None:
        self._fusor, self._budget_bytes = fusor, budget_bytes
        self.clear()

    def clear(self) -> None:
        """Forget every block, and what was counted; requests that are under way keep theirs."""
        self._blocks = PrefixBlocks(self._budget_bytes, self._fusor.decoder.windows)

    @contextmanager
    def find(self, token_ids: Sequence[int], limit: int, namespace: str) -> Iterator[CachedPrefix]:
        """The blocks that a prompt begins with, which stay in the context, and what keeps the prompt's own afterwards.

        Args:
            token_ids: the prompt.
            limit: at most so many of its tokens may be reused.
            namespace: requests of another one find none of its blocks, and it none of theirs.
        """
        chain = BlockChain(self._fusor.exact_fingerprint(len(token_ids)), namespace)
        chain.extend(token_ids)
        with self._blocks.match(token_ids[:limit], chain) as run:
            yield CachedPrefix(self._blocks, chain, run)

    def stats(self) -> dict[str, int]:
        """Numbers of held parts and bytes, look-ups, hits and evictions."""
        return self._blocks.stats()


@dataclass(slots=True, eq=False)
class CachedPrefix:
    """One request's part of the prefix cache: the run that was found, and the blocks that the request leaves.

    Args:
        blocks: where they go.
        chain: of the prompt, and of what is generated.
        run: what was found; its KV may be read inside `PrefixCache.find`.
        exact_tokens: so many of the prompt's first tokens get exact KV; None for all of them, and those that are generated.
    """

    blocks: PrefixBlocks
    chain: BlockChain
    run: PrefixRun | None
    exact_tokens: int | None = None
    _layers: list[LayerKV] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """Tokens of the run; 0 where nothing was found."""
        return 0 if self.run is None else len(self.run.token_ids)

    @property
    def segment(self) -> BlendSegment | None:
        """The run as a segment of the prompt; None where nothing was found."""
        return None if self.run is None else BlendSegment(self.run.token_ids, self.run, exact=True)

    def records(self, prompt: PromptTokens) -> tuple[PlannedSegment, ...]:
        """Records of the run and of the prompt's other tokens, which are computed.

        The first has the hash of the run's last block, or of the prompt's first block where nothing was found.
        """
        digests = self.chain.digests[:1] if self.run is None else self.run.digests
        key = digests[-1].hex() if digests else None
        first, *others = *(one.record for one in (self.segment,) if one), *fresh_records(prompt, self.tokens)
        return replace(first, key=key), *others

    def recording(self, source: LayerSource) -> LayerSource:
        """Wrap a source so that its loaded layers are recorded; at the end of the fusion they hold the complete prompt."""
        return RecordingSource(source, self._layers)

    def commit_prompt(self) -> None:
        """Copy the prompt's blocks into the cache and drop its layers; once it is fused, best after its first token."""
        layers = tuple(self._layers)
        self._layers.clear()
        if not layers:
            return

        def read(layer: int, start: int, stop: int) -> LayerPair:
            return layers[layer].k_1HND[0, :, start:stop], layers[layer].v_1HND[0, :, start:stop]

        self.blocks.insert(self._digests, 0 if self.run is None else len(self.run.digests), read)

    def append(self, token_id: int, kv: SequenceKV, decoder: Decoder) -> None:
        """A token was generated and has its KV now; copy a block into the cache when it is full.

        Args:
            token_id: the token.
            kv: of the sequence, up to this token's.
            decoder: that decodes it.
        """
        self.commit_prompt()
        full = len(self.chain.digests)
        self.chain.extend((token_id,))
        if len(self.chain.digests) > full:

            def read(layer: int, start: int, stop: int) -> LayerPair:
                return decoder.stored(layer, kv.layers[layer].last(stop - start))

            self.blocks.insert(self._digests, full, read)

    @property
    def _digests(self) -> list[bytes]:
        """Each block to hold."""
        return self.chain.digests[: None if self.exact_tokens is None else self.exact_tokens // BLOCK_TOKENS]


@dataclass(slots=True, eq=False)
class CachedStates(CachedPrefix):
    """A hybrid's part of the prefix cache: beside the blocks of the attention layers' KV the states after some of them."""

    _last: tuple[HybridSequence, HybridDecoder, int, State] | None = None  # where the answer's last full block ended

    def hold(self, sequence: HybridSequence, decoder: HybridDecoder) -> None:
        """Copy the sequence's blocks, and the state after them; it stands at the end of a block."""
        digests = self.chain.digests[: sequence.tokens // BLOCK_TOKENS]
        self.blocks.insert(digests, 0, decoder.reader(sequence), decoder.snapshot(sequence))

    def append(self, token_id: int, kv: SequenceKV, decoder: Decoder) -> None:
        """A token was generated; at the end of a block its state is copied, for `commit_prompt`."""
        self.chain.extend((token_id,))
        assert isinstance(kv, HybridSequence)
        assert isinstance(decoder, HybridDecoder)
        if decoder.carries and kv.tokens % BLOCK_TOKENS == 0:
            self._last = kv, decoder, kv.tokens // BLOCK_TOKENS, decoder.snapshot(kv)

    def commit_prompt(self) -> None:
        """Hold the answer's blocks, now that it is complete, and the state after the last one."""
        if self._last is not None:
            sequence, decoder, blocks, state = self._last
            self.blocks.insert(self.chain.digests[:blocks], 0, decoder.reader(sequence), state)


class RecordingSource:
    """A source whose layers are recorded."""

    def __init__(self, source: LayerSource, layers: list[LayerKV]) -> None:
        self._source, self._layers = source, layers

    def start(self, prompt: Prompt, geometry: KVGeometry, *, reuse_layer_0: bool) -> None:
        self._layers.clear()
        self._source.start(prompt, geometry, reuse_layer_0=reuse_layer_0)

    def synchronize(self, layer: int) -> LayerKV:
        layer_kv = self._source.synchronize(layer)
        self._layers.append(layer_kv)
        return layer_kv
