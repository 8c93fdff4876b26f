"""The check at start-up: where blending must be exact, it equals the engine's own cold prefill."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from vllm import SamplingParams
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput

from cacheblend.base.errors import UnsupportedModelError
from cacheblend.blend import FusionConfig, Fusor, LayerKV, Segment

from .worker import Pages

CHECKED_TOKENS = 96
# Of the log probability of the token that vLLM's own prefill finds likeliest, and of the next ones.
ALLOWED = {torch.float32: 2e-3}
ALLOWED_16_BITS = 0.25
LOGPROBS = 5


def check_against_engine(worker: Any, fusor: Fusor, pages: Pages, metadata: Callable[[], Any]) -> None:
    """Compare the next token's likeliest log probabilities after a prompt of random tokens.

    The engine prefills it by itself; then each prompt is blended into pages at ratio 1.0 and, with a first half that is
    contextually exact, at ratio 0, where rotated stored keys are read; and the engine runs the last token over those.

    Args:
        worker: vLLM's, with model and pages, before the first request.
        fusor: over its model.
        pages: its pages.
        metadata: makes the connector's metadata of an empty step.

    Raises:
        UnsupportedModelError: they differ, or the model does not run layer by layer.
    """
    runner = worker.model_runner
    tokens = min(CHECKED_TOKENS, int(runner.max_model_len) - 1, int(runner.max_num_tokens))
    generator = torch.Generator().manual_seed(0)
    ids: list[int] = torch.randint(fusor.runner.vocab_size, (tokens,), generator=generator).tolist()
    name = type(runner.get_model()).__name__
    try:
        with _without_graphs(runner):
            exact = _run(worker, ids, 0, metadata)
            half = tokens // 2
            prefix, chunk, rest = ids[:8], ids[8:half], ids[half:]
            stored = Segment(chunk, fusor.precompute(chunk, prefix))  # after the very tokens that stand before it
            for ratio in (1.0, 0.0):
                _write(fusor, [Segment(prefix), stored, Segment(rest)], ratio, pages, _blocks(worker, tokens))
                blended = _run(worker, ids, tokens - 1, metadata)
                _compare(name, fusor.runner.geometry.dtype, exact, blended, f"ratio {ratio}")
    except (RuntimeError, AttributeError, TypeError, KeyError, IndexError) as error:
        raise UnsupportedModelError(f"{name} does not run layer by layer in this vLLM: {error!r}") from error


@contextmanager
def _without_graphs(runner: Any) -> Iterator[None]:
    """Have the engine's model runner use no CUDA graph: none may be asked for before they are captured, after the check."""
    dispatcher = getattr(runner, "cudagraph_dispatcher", None)
    if dispatcher is None:
        yield
        return
    initialized, dispatcher.keys_initialized = dispatcher.keys_initialized, False
    try:
        yield
    finally:
        dispatcher.keys_initialized = initialized


def _write(fusor: Fusor, segments: Sequence[Segment], ratio: float, pages: Pages, block_ids: Sequence[int]) -> None:
    """Blend a prompt into pages."""

    class Sink:
        def put(self, layer: int, layer_kv: LayerKV) -> None:
            k_THD, v_THD = (x_1HND[0].transpose(0, 1) for x_1HND in (layer_kv.k_1HND, layer_kv.v_1HND))
            pages.write(layer, k_THD, v_THD, block_ids, 0)

    for _ in fusor.fuse_steps(segments, FusionConfig(recompute_ratio=ratio), sink=Sink()):
        pass


def _blocks(worker: Any, tokens: int) -> list[int]:
    """Pages for a prompt; block 0 is vLLM's null block. Nothing else uses any yet."""
    (group,) = worker.model_runner.kv_cache_config.kv_cache_groups
    return list(range(1, 2 + tokens // int(group.kv_cache_spec.block_size)))


def _run(worker: Any, ids: list[int], computed: int, metadata: Callable[[], Any]) -> dict[int, float]:
    """The likeliest next tokens' log probabilities, by one step of the engine's own model runner; empty where it tells none."""
    request_id = f"cacheblend-check-{computed}"
    step = SchedulerOutput.make_empty()
    step.scheduled_new_reqs = [
        NewRequestData(
            req_id=request_id,
            prompt_token_ids=ids,
            mm_features=[],
            sampling_params=SamplingParams(max_tokens=1, temperature=0.0, logprobs=LOGPROBS),
            pooling_params=None,
            block_ids=(_blocks(worker, len(ids)),),
            num_computed_tokens=computed,
            lora_request=None,
            prefill_token_ids=ids,
        )
    ]
    step.num_scheduled_tokens = {request_id: len(ids) - computed}
    step.total_num_scheduled_tokens = len(ids) - computed
    step.kv_connector_metadata = metadata()
    output = worker.execute_model(step) or worker.sample_tokens(None)
    if hasattr(output, "get_output"):
        output = output.get_output()
    ended = SchedulerOutput.make_empty()
    ended.finished_req_ids = {request_id}
    ended.kv_connector_metadata = metadata()
    worker.execute_model(ended)
    found = getattr(output, "logprobs", None)
    if found is None:
        return {}
    return {int(token): float(value) for token, value in zip(found.logprob_token_ids[0], found.logprobs[0], strict=True)}


def _compare(name: str, dtype: torch.dtype, exact: dict[int, float], blended: dict[int, float], what: str) -> None:
    off = max((abs(value - blended[token]) for token, value in exact.items() if token in blended), default=0.0)
    allowed = ALLOWED.get(dtype, ALLOWED_16_BITS)
    if (exact and not exact.keys() & blended.keys()) or not off <= allowed:
        raise UnsupportedModelError(
            f"{name} cannot be blended in this vLLM: at {what}, where blending must be exact, log probabilities of the next "
            f"token are off by {off:.3g} (allowed: {allowed:g})"
        )
