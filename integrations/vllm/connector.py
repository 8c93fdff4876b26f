"""vLLM's KV connector: hands blended prompts over as externally computed tokens.

The scheduler's instance stands in the engine's process, one in every worker holds the model; see `scheduler` and `worker`. At
start-up each worker checks that a blend is the engine's own cold prefill, where it must be.
"""

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from prometheus_client import Counter
from vllm import SamplingParams
from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.forward_context import set_forward_context
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput

from cacheblend.base.errors import UnsupportedModelError
from cacheblend.base.memory import return_freed_memory
from cacheblend.blend import FusionConfig, Fusor, KVGeometry, Segment
from cacheblend.service.engine.profiles import calibrated, find_controller
from cacheblend.service.engine.prompt import PromptChunk
from cacheblend.service.engine.request import namespace_of
from cacheblend.store import KVStore

from .config import ConnectorConfig
from .cpu_attention import CpuAttention
from .runner import VllmRunner
from .scheduler import TOKENS, BlendJob, BlendScheduler
from .worker import BlendWorker, PageSink, Report

logger = logging.getLogger(__name__)
CHECKED_TOKENS = 96  # of the prompt that is compared at start-up
# Of the log probability of the token that vLLM's own prefill finds likeliest, and of the next ones.
ALLOWED, ALLOWED_16_BITS = {torch.float32: 2e-3}, 0.25
LOGPROBS = 5


@dataclass(slots=True)
class BlendMetadata(base.KVConnectorMetadata):  # type: ignore[misc]  # vLLM is not installed where types are checked
    """Blends that the workers are to begin at a step, and the number of tokens that vLLM itself runs in it."""

    jobs: list[BlendJob] = field(default_factory=list)
    missed: list[PromptChunk] = field(default_factory=list)
    scheduled_tokens: int = 0


@dataclass(slots=True)
class BlendWorkerMetadata(base.KVConnectorWorkerMetadata):  # type: ignore[misc]  # see above
    """Work of one worker at a step: all ranks say the same."""

    reports: dict[str, Report]
    waiting_misses: int

    def aggregate(self, other: base.KVConnectorWorkerMetadata) -> base.KVConnectorWorkerMetadata:
        return self


class BlendStats(KVConnectorStats):  # type: ignore[misc]  # see above
    """Counts of an interval, by name; see `BlendScheduler.take_counts`."""

    data: dict[str, int]

    def reset(self) -> None:
        self.data.clear()

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for name, count in other.data.items():
            self.data[name] = self.data.get(name, 0) + count
        return self

    def reduce(self) -> dict[str, int | float]:
        return {f"cacheblend {name}": count for name, count in sorted(self.data.items())}

    def is_empty(self) -> bool:
        return not self.data


class BlendMetrics(KVConnectorPromMetrics):  # type: ignore[misc]  # see above
    """`cacheblend_vllm_requests_total` by outcome, and `cacheblend_vllm_tokens_total` by kind."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: list[str], labels: dict[int, list[object]]) -> None:
        super().__init__(vllm_config, metric_types, labelnames, labels)
        counter = metric_types[Counter]
        self._requests = counter(
            "cacheblend_vllm_requests",
            'Marked requests: outcome "blended", or "exact" with the reason why vLLM computed it.',
            labelnames=[*labelnames, "outcome", "reason"],
        )
        self._tokens = counter(
            "cacheblend_vllm_tokens",
            'Tokens of blended chunks: "hit" and "missed" in the store, "recomputed" a layer in the mean, question included.',
            labelnames=[*labelnames, "kind"],
        )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        labels = self.per_engine_labelvalues[engine_idx]
        for name, count in transfer_stats_data.items():
            if name in TOKENS:
                self._tokens.labels(*labels, name.removesuffix("_tokens")).inc(count)
            else:
                outcome, _, reason = name.partition(":")
                self._requests.labels(*labels, outcome, reason).inc(count)


class CacheBlendConnector(base.KVConnectorBase_V1, base.SupportsHMA):  # type: ignore[misc]  # see above
    """Blends requests whose `kv_transfer_params` have marks; see `Marks`. With a hybrid model all are left to vLLM.

    Raises:
        ConfigError: an option is unknown or has a value that is not allowed.
        UnsupportedModelError: the model, or what it is run with, cannot be blended; the message names what.
    """

    requires_kv_delivery = False  # nothing waits for the blocks of a preempted request

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        if not vllm_config.model_config.is_hybrid and (trouble := _trouble(vllm_config, kv_cache_config)):
            raise UnsupportedModelError(f"CacheBlendConnector does not work with {trouble}; leave it out")
        self._config = ConnectorConfig.from_options(self._kv_transfer_config.kv_connector_extra_config)
        # A failed blend is computed by vLLM; its own default is to fail the request.
        self._kv_transfer_config.kv_load_failure_policy = "recompute"
        self._rows = int(vllm_config.scheduler_config.max_num_batched_tokens)
        self._block_size = int(kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size)
        self._worker: BlendWorker | None = None
        self._reports: dict[str, Report] = {}  # of the step, between two calls of vLLM's
        if role == base.KVConnectorRole.WORKER:
            _name_shapes_of_sharing_layers(vllm_config, kv_cache_config)
        if role == base.KVConnectorRole.SCHEDULER:
            # The scheduler asks what is stored, and reads nothing.
            self._store = KVStore(replace(self._config.store_config(), ram_budget_bytes=1))
            hashed = kv_cache_config.hash_block_size or self._block_size
            model, parallel = vllm_config.model_config, vllm_config.parallel_config
            layers, heads = model.get_num_layers(parallel), model.get_num_kv_heads(parallel)  # of one worker
            geometry = KVGeometry(layers, heads, model.get_head_size(), model.dtype, torch.device("cpu"))
            prefix_tokens = self._config.prefix_tokens(geometry, parallel.tensor_parallel_size)
            ratio = self._config.engine.loader.quality_ratio
            naming = self._config.naming(model)
            refusal = "hybrid_model" if model.is_hybrid else ""
            self._scheduler = BlendScheduler(naming, self._store.find, self._cached, ratio, hashed, prefix_tokens, refusal)

    # The scheduler's side, in the order in which vLLM calls it.

    def on_new_request(self, request: Any) -> None:
        self._scheduler.arrive(request)

    def _cached(self, request: Any) -> int:
        """Count a request's first tokens that vLLM's prefix cache has; vLLM sets its manager after making the connector."""
        return int(self._kv_cache_manager.get_computed_blocks(request)[1])

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Always asynchronous, so that other requests go on between the layers of a blend."""
        tokens = self._scheduler.matched(request, num_computed_tokens)
        return tokens, bool(tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens > 0:
            self._scheduler.allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> base.KVConnectorMetadata:
        jobs, missed = self._scheduler.take_jobs()
        return BlendMetadata(jobs, missed, int(scheduler_output.total_num_scheduled_tokens))

    def update_connector_output(self, connector_output: Any) -> None:
        done = connector_output.kv_connector_worker_meta
        if isinstance(done, BlendWorkerMetadata):
            self._scheduler.observe(done.reports, done.waiting_misses)

    def has_pending_push_work(self) -> bool:
        """The engine goes on stepping while missed chunks wait to be computed."""
        return self._scheduler.has_misses

    def request_finished_all_groups(self, request: Any, block_ids: tuple[list[int], ...]) -> tuple[bool, dict[str, Any] | None]:
        return False, self._scheduler.finish(request)

    # A worker's side.

    def attach(self, worker: Any) -> None:
        """Take a worker's loaded model and pages, and check that blending over them is exact where it must be.

        A hybrid model is not taken.

        Raises:
            UnsupportedModelError: it is not, or the model's layers cannot be run on chosen rows.
        """
        settings, device = self._vllm_config.model_config, torch.device(self._vllm_config.device_config.device)
        if settings.is_hybrid:
            logger.warning("%s is a hybrid model: every request is computed exactly, and no KV is stored", settings.model)
            return
        naming = self._config.naming(settings)
        with set_forward_context(None, self._vllm_config):
            runner = VllmRunner(worker.model_runner.get_model(), settings, device)
        if runner.has_sinks:  # without the hybrid manager vLLM 0.32's CPU kernel counts sinks once for each part of split KV
            os.environ["VLLM_CPU_ATTN_SPLIT_KV"] = "0"
        store = KVStore(self._config.store_config(runner.ranks))
        try:
            fusor = Fusor.from_runner(runner, naming.model)
            runner.cpu_attention = CpuAttention.of(worker, runner.attentions)
            with set_forward_context(None, self._vllm_config):
                check_against_engine(worker, fusor, runner)
            engine = calibrated(self._config.engine, fusor, naming.prefix_ids)
            controller = find_controller(engine, fusor)
            prefix_tokens = self._config.prefix_tokens(runner.geometry, runner.ranks)
            return_freed_memory()  # of the checks and trials, which need more than vLLM's own steps
            self._worker = BlendWorker(fusor, naming, store, runner, self._block_size, prefix_tokens, engine, controller)
        except BaseException:
            store.close()
            raise

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Blend as much as vLLM's own prefill would run in the remaining budget of the step."""
        if self._worker is not None and isinstance(metadata := self._get_connector_metadata(), BlendMetadata):
            if not (metadata.jobs or metadata.missed or self._worker.blending or self._worker.waiting_misses):
                return
            scheduled = metadata.scheduled_tokens
            with set_forward_context(None, self._vllm_config):
                self._worker.step(metadata.jobs, metadata.missed, self._rows - scheduled, is_idle=scheduled == 0)

    def get_transfer_results(self, finished_req_ids: set[str]) -> base.KVConnectorTransferResults:
        if self._worker is None:
            return base.KVConnectorTransferResults()
        self._worker.cancel(finished_req_ids)
        done = self._worker.take_done()
        self._reports = {name: report for name, report in done.items() if report is not None}
        failed = {name for name, report in self._reports.items() if not report["blended"]}
        return base.KVConnectorTransferResults(finished_recving=set(done), failed_recving=failed)

    def build_connector_worker_meta(self) -> base.KVConnectorWorkerMetadata | None:
        return None if self._worker is None else BlendWorkerMetadata(self._reports, self._worker.waiting_misses)

    def precompute(
        self, chunks: Sequence[Sequence[int]], which: Sequence[int], cache_salt: str | None, document: Sequence[str] = ()
    ) -> tuple[int, int, int]:
        """Compute and store chunks' KV now, between two steps of the engine; see `BlendWorker.precompute`."""
        if self._worker is None:  # a hybrid model
            return 0, 0, 0
        with set_forward_context(None, self._vllm_config):
            namespace = namespace_of(cache_salt or "")
            return self._worker.precompute([tuple(chunk) for chunk in chunks], which, namespace, document)

    # Requests run when all of their KV is there, and vLLM's own KV is not stored.

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None: ...

    def wait_for_save(self) -> None: ...

    # Both sides.

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.close()
            self._worker = None
        elif self.role == base.KVConnectorRole.SCHEDULER:
            self._store.close()

    def get_kv_connector_stats(self) -> BlendStats | None:
        """Count requests and tokens; the scheduler's side does."""
        counts = self._scheduler.take_counts() if self.role == base.KVConnectorRole.SCHEDULER else {}
        return BlendStats(data=counts) if counts else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> BlendStats:
        return BlendStats(data=dict(data or {}))

    @classmethod
    def build_prom_metrics(cls, *args: Any) -> BlendMetrics:
        return BlendMetrics(*args)


def check_against_engine(worker: Any, fusor: Fusor, runner: VllmRunner) -> None:
    """Compare the next token's likeliest log probabilities after a prompt of random tokens.

    The engine prefills all but its last token by itself; then those are blended into the pages at ratio 1.0 and, with a first
    half that is contextually exact, at ratio 0, where rotated stored keys are read. The engine runs the last token over each.
    `worker` is vLLM's, with model and pages, before the first request.

    Raises:
        UnsupportedModelError: they differ, or the model does not run layer by layer.
    """
    engine = worker.model_runner
    tokens = min(CHECKED_TOKENS, int(engine.max_model_len) - 1, int(engine.max_num_tokens))
    generator = torch.Generator().manual_seed(0)
    ids: list[int] = torch.randint(fusor.runner.vocab_size, (tokens,), generator=generator).tolist()
    (group,) = engine.kv_cache_config.kv_cache_groups
    size = int(group.kv_cache_spec.block_size)
    block_ids = list(range(1, 2 + tokens // size))  # block 0 is vLLM's null block
    name = type(engine.get_model()).__name__
    try:
        with _without_graphs(engine.cudagraph_dispatcher):
            _run(worker, ids[:-1], 0, block_ids)
            exact = _run(worker, ids, tokens - 1, block_ids)
            half = tokens // 2
            prefix, chunk, suffix = ids[:8], ids[8:half], ids[half:]
            stored = Segment(chunk, fusor.precompute(chunk, prefix))  # after the very tokens that stand before it
            for ratio in (1.0, 0.0):
                config, sink = FusionConfig(recompute_ratio=ratio), PageSink(runner, size, block_ids, 0, tokens)
                fusor.fuse_steps([Segment(prefix), stored, Segment(suffix)], config, sink=sink).run()
                blended = _run(worker, ids, tokens - 1, block_ids)
                _compare(name, fusor.runner.geometry.dtype, exact, blended, ratio)
    except (RuntimeError, AttributeError, TypeError, KeyError, IndexError) as error:
        raise UnsupportedModelError(f"{name} does not run layer by layer in this vLLM: {error!r}") from error


@contextmanager
def _without_graphs(dispatcher: Any) -> Iterator[None]:
    """Use no CUDA graph: none may be asked for before they are captured, after the check."""
    initialized, dispatcher.keys_initialized = dispatcher.keys_initialized, False
    try:
        yield
    finally:
        dispatcher.keys_initialized = initialized


def _run(worker: Any, ids: list[int], computed: int, block_ids: list[int]) -> dict[int, float]:
    """The likeliest next tokens' log probabilities, by one step of the engine's own model runner; empty on ranks without."""
    request_id = f"cacheblend-check-{computed}"
    step = SchedulerOutput.make_empty()
    step.scheduled_new_reqs = [
        NewRequestData(
            req_id=request_id,
            prompt_token_ids=ids,
            mm_features=[],
            sampling_params=SamplingParams(max_tokens=1, temperature=0.0, logprobs=LOGPROBS),
            pooling_params=None,
            block_ids=(block_ids,),
            num_computed_tokens=computed,
            lora_request=None,
            prefill_token_ids=ids,
        )
    ]
    step.num_scheduled_tokens = {request_id: len(ids) - computed}
    step.total_num_scheduled_tokens = len(ids) - computed
    step.kv_connector_metadata = BlendMetadata()
    output = worker.execute_model(step) or worker.sample_tokens(None)
    if hasattr(output, "get_output"):
        output = output.get_output()
    ended = SchedulerOutput.make_empty()
    ended.finished_req_ids = {request_id}
    ended.kv_connector_metadata = BlendMetadata()
    worker.execute_model(ended)
    found = getattr(output, "logprobs", None)
    if found is None:
        return {}
    return {int(token): float(value) for token, value in zip(found.logprob_token_ids[0], found.logprobs[0], strict=True)}


def _compare(name: str, dtype: torch.dtype, exact: dict[int, float], blended: dict[int, float], ratio: float) -> None:
    off = max((abs(value - blended[token]) for token, value in exact.items() if token in blended), default=0.0)
    allowed = ALLOWED.get(dtype, ALLOWED_16_BITS)
    if (exact and not exact.keys() & blended.keys()) or not off <= allowed:
        found = f"at ratio {ratio}, which must be exact, log probabilities are off by {off:.3g} (allowed: {allowed:g})"
        raise UnsupportedModelError(f"{name} cannot be blended in this vLLM: {found}")


def _name_shapes_of_sharing_layers(vllm_config: Any, kv_cache_config: Any) -> None:
    """Give layers that read an earlier layer's KV that layer's shape.

    vLLM 0.32 looks for it where layers have different shapes, and finds none without its hybrid KV cache manager.
    """
    for name, module in vllm_config.compilation_config.static_forward_context.items():
        target = getattr(module, "kv_sharing_target_layer_name", None)
        for group in kv_cache_config.kv_cache_groups:
            shapes = getattr(group.kv_cache_spec, "kv_cache_specs", {})
            if target in shapes:
                shapes[name] = shapes[target]


def _trouble(vllm_config: Any, kv_cache_config: Any) -> str:
    """Settings of an engine that blending does not support; empty if there are none."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    found = {
        "pipeline parallelism": parallel.pipeline_parallel_size > 1,
        "context parallelism": max(parallel.decode_context_parallel_size, parallel.prefill_context_parallel_size) > 1,
        "weight transfer": vllm_config.weight_transfer_config is not None,  # KV is named by the weights of the start
        "LoRA": vllm_config.lora_config is not None,
        "speculative decoding": vllm_config.speculative_config is not None,
        "Model Runner V2; run with VLLM_USE_V2_MODEL_RUNNER=0": vllm_config.use_v2_model_runner,
        "encoder-decoder models": model.is_encoder_decoder,
        "pooling models": model.runner_type != "generate",
        "several KV cache groups; run with --disable-hybrid-kv-cache-manager": len(kv_cache_config.kv_cache_groups) > 1,
    }
    return ", ".join(name for name, is_so in found.items() if is_so)
