"""Shadow evaluation: what is compared, and when the guard raises the ratio and lowers it again."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from engines import QUESTION, key_of
from hypothesis import given
from hypothesis import strategies as st
from served import Client, serve
from transformers import DynamicCache
from waiting import wait_until

from cacheblend.blend import FusionResult
from cacheblend.service import Engine
from cacheblend.service.serving import quality_guard
from cacheblend.service.serving import scheduler as scheduler_module
from cacheblend.service.serving.config import ServingConfig
from cacheblend.service.serving.quality_guard import STEP, QualityGuard, ShadowReport, compare, relative_kv_error
from cacheblend.service.serving.request import Done
from cacheblend.service.serving.scheduler import Scheduler


def prompt(probabilities: list[float], kv: float = 1.0) -> FusionResult:
    cache = DynamicCache()
    cache.update(torch.full((1, 2, 3, 4), kv), torch.full((1, 2, 3, 4), kv), 0)
    return FusionResult(torch.tensor(probabilities).log(), cache, (0, 1, 2), (), (), torch.zeros(3), 2, 0)


@pytest.mark.parametrize(
    ("full", "blended", "agreement"),
    [
        ([5, 6, 7, 8], [5, 6, 7, 8], 1.0),
        ([5, 6, 7, 8], [5, 9, 7, 8], 0.25),  # what follows a difference says nothing
        ([5, 6], [9, 6], 0.0),
        ([5, 1], [5, 1], 1.0),  # both ended
        ([5, 6, 7, 8], [5, 1], 0.25),  # blending ended too soon
        ([5, 1], [5, 6, 7, 8], 0.5),  # and here too late
    ],
)
def test_agreement(full: list[int], blended: list[int], agreement: float) -> None:
    """The share of full prefill's tokens before the first that differs."""
    same = prompt([0.5, 0.5])
    assert compare(same, full, same, blended, 0.15).agreement == agreement


def test_divergence_and_deviation() -> None:
    """KL is taken of full from blended, and the KV's squared difference over full prefill's size."""
    found = compare(prompt([0.9, 0.1]), [0], prompt([0.5, 0.5], kv=1.1), [0], 0.15)
    assert found.first_token_kl_nats == pytest.approx(0.9 * math.log(1.8) + 0.1 * math.log(0.2))
    assert found.relative_kv_error == pytest.approx(0.01, rel=1e-4)
    same = compare(prompt([0.9, 0.1]), [0], prompt([0.9, 0.1]), [0], 0.15)
    assert same.first_token_kl_nats == same.relative_kv_error == 0


def see(guard: QualityGuard, *agreements: float, ratio: float = 0.15) -> list[bool]:
    """Checks of requests served at the present level; which of them raised it."""
    return [guard.record_served(one, level=guard.level, ratio=max(ratio, guard.level)) for one in agreements]


def test_a_mean_at_the_floor_stays() -> None:
    """As long as the mean of the last checks is the floor or above, nothing is raised, and the oldest check is forgotten."""
    guard = QualityGuard(floor=0.5, window=4)
    assert not any(see(guard, 1, 0, 1, 0, 1, 0, 1, 0))
    assert guard.agreement == 0.5
    assert see(guard, 0) == [True]  # 0 1 0 0


def test_raising_needs_no_full_window() -> None:
    """The ratio is raised as soon as the window's mean cannot reach the floor any more."""
    guard = QualityGuard(floor=0.9, window=20)
    assert see(guard, 1, 0, 0.5, 0.5, 0) == [False] * 4 + [True]
    assert guard.agreement is None


def test_steps_up_to_full_recompute() -> None:
    """Each raise is a step above what the checked requests ran at, the last one is full recompute, and there it ends."""
    guard = QualityGuard(floor=1.0, window=1)
    levels = []
    for _ in range(6):
        see(guard, 0.5)
        levels.append(guard.level)
    assert levels == pytest.approx([0.15 + STEP, 0.15 + 2 * STEP, 0.15 + 3 * STEP, 1.0, 1.0, 1.0])


def test_a_high_ratio_is_raised_further() -> None:
    """Where requests ran at more than the level asked for, as the loading controller may choose, the step counts from there."""
    guard = QualityGuard(floor=0.9, window=2)
    see(guard, 1, ratio=0.6)
    see(guard, 0, ratio=0.2)
    assert guard.level == pytest.approx(0.6 + STEP)


def test_checks_of_another_level_do_not_count() -> None:
    """A request that was served before the ratio was raised says nothing about the ratio that it has now."""
    guard = QualityGuard(floor=0.9, window=2)
    see(guard, 0)
    raised = guard.level
    assert not guard.record_served(0.0, level=0.0, ratio=0.15)
    assert not guard.record_lower(1.0, level=0.0)
    assert (guard.level, guard.agreement) == (raised, None)


def test_coming_down_takes_more_than_the_floor() -> None:
    """The level below is taken again when a window of trials agrees half-way between floor and 1, not at the floor."""
    guard = QualityGuard(floor=0.8, window=2)
    see(guard, 0)
    level = guard.level
    assert guard.lower_level == 0.0
    assert [guard.record_lower(one, level=level) for one in (0.8, 0.8, 0.9)] == [False] * 3
    assert guard.record_lower(0.9, level=level)
    assert (guard.level, guard.lower_level) == (0.0, None)


def test_coming_down_from_full_recompute() -> None:
    """Step by step, the way it went up: each level below is tried out anew."""
    guard = QualityGuard(floor=0.9, window=1)
    for _ in range(3):
        see(guard, 0, ratio=0.4)
    went_up = [0.0, 0.4 + STEP, 0.4 + 2 * STEP, 1.0]
    went_up = sorted({min(level, 1.0) for level in went_up})
    came_down = [guard.level]
    while guard.lower_level is not None:
        assert guard.record_lower(1.0, level=guard.level)
        came_down.append(guard.level)
    assert came_down == pytest.approx(went_up[::-1])
    assert not guard.record_lower(1.0, level=0.0)


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), max_size=60), st.floats(0, 1), st.integers(1, 5))
def test_levels_stay_in_order(seen: list[tuple[float, float]], floor: float, window: int) -> None:
    """Whatever is seen, the level is within 0..1, the one below it is lower, and a floor of 0 never raises."""
    guard = QualityGuard(floor, window)
    for served, lower in seen:
        guard.record_served(served, level=guard.level, ratio=max(0.15, guard.level))
        guard.record_lower(lower, level=guard.level)
        assert 0 <= guard.level <= 1
        assert guard.lower_level is None or guard.lower_level < guard.level
        assert floor or not guard.level


def test_mean_kl_of_the_window() -> None:
    """KL is the mean of the window's requests at this level, and begins anew when the ratio is raised."""
    guard = QualityGuard(0.5, 2)
    assert guard.first_token_kl_nats is None
    for kl_nats in (9.0, 0.1, 0.3):
        assert not guard.record_served(1.0, level=0.0, ratio=0.15, kl_nats=kl_nats)
    assert guard.first_token_kl_nats == pytest.approx(0.2)
    guard.record_served(1.0, level=0.5, ratio=0.5, kl_nats=9.0)  # served at a level that is not the present one
    assert guard.first_token_kl_nats == pytest.approx(0.2)
    guard.record_served(0.0, level=0.0, ratio=0.15, kl_nats=0.5)
    assert guard.record_served(0.0, level=0.0, ratio=0.15, kl_nats=0.5)
    assert guard.first_token_kl_nats is None


Reports = list[ShadowReport]


@pytest.fixture
def reports() -> Reports:
    return []


@contextmanager
def guarded(engine: Engine, reports: Reports, *, guard_tokens: int = 8, guard_floor: float = 0.0) -> Iterator[Scheduler]:
    """A scheduler that checks every blended request, each by itself."""
    config = ServingConfig(guard_share=1.0, guard_floor=guard_floor)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quality_guard, "GUARD_TOKENS", guard_tokens)
        patch.setattr(quality_guard, "GUARD_WINDOW", 1)
        with Scheduler(engine.fusor, config, shadow_observer=reports.append) as scheduler:
            yield scheduler


def ask(engine: Engine, scheduler: Scheduler, reports: Reports, **options: object) -> Done:
    """A question whose check has ended."""
    before = len(reports)
    done = serve(engine, scheduler, QUESTION, **{"top_k": 4, **options}).result()
    wait_until(lambda: len(reports) > before)
    return done


def test_a_check_is_the_comparison_with_full_prefill(engine: Engine, reports: Reports) -> None:
    """Agreement, divergence and deviation are those between the served prompt and `full_recompute`'s, computed alone."""
    with guarded(engine, reports, guard_tokens=5) as scheduler:
        done = ask(engine, scheduler, reports, temperature=1.0, max_tokens=1)  # neither sampling nor a short answer matters
        quality = scheduler.quality("")
    blended, full = (engine.answer(QUESTION, top_k=4, max_tokens=5, method=method) for method in ("blend", "full_recompute"))
    assert torch.equal(done.answer.first_logits, blended.first_logits)
    same = [one == other for one, other in zip(blended.token_ids, full.token_ids, strict=True)]
    served = reports[0].comparisons["served"]
    assert served.agreement == (same.index(False) if False in same else 5) / 5
    log_full, log_blended = (answer.first_logits.double().log_softmax(-1) for answer in (full, blended))
    assert served.first_token_kl_nats == pytest.approx(float((log_full.exp() * (log_full - log_blended)).sum()), rel=1e-3)
    caches = []
    for method in ("blend", "full_recompute"):
        prepared = engine.prepare(QUESTION, top_k=4, method=method)
        list(engine.prefill_steps(prepared))
        caches.append(prepared.fused.cache)
    assert served.relative_kv_error == pytest.approx(relative_kv_error(*caches), rel=1e-3)
    assert served.relative_kv_error > 0
    assert served.recompute_ratio == 0.15
    assert [report.outcome for report in reports] == ["compared"]
    assert (quality.evaluated, quality.agreement, quality.least_recompute_ratio) == (1, served.agreement, 0.0)


def test_a_floor_that_cannot_be_met(engine: Engine, reports: Reports, caplog: pytest.LogCaptureFixture) -> None:
    """Where answers never agree, the ratio rises step by step to full recompute, and that is logged and told."""
    caplog.set_level(logging.WARNING)
    ratios, methods = [], []
    with guarded(engine, reports, guard_floor=1.0, guard_tokens=40) as scheduler:
        for _ in range(5):
            plan = ask(engine, scheduler, reports, max_tokens=2).answer.plan
            ratios.append(plan.recompute_ratio)
            methods.append(plan.method)
            assert plan.recomputed_tokens == pytest.approx((plan.recompute_ratio or 0) * plan.reusable_tokens, abs=1)
        quality = scheduler.quality("")
    assert ratios == pytest.approx([0.15, 0.15 + STEP, 0.15 + 2 * STEP, 0.15 + 3 * STEP, None])
    assert methods == ["blend"] * 4 + ["full_recompute"]
    assert quality.full_recompute
    assert [report.level for report in reports] == pytest.approx([*ratios[1:4], 1.0, 1.0])
    assert set(reports[-1].comparisons) == {"lower"}
    assert caplog.text.count("agree too little") == 4
    assert "recomputed in full" in caplog.text


def test_coming_down(engine: Engine, reports: Reports, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once the trial of the level below agrees with full prefill, requests run at it again."""
    with guarded(engine, reports, guard_floor=1.0, guard_tokens=40) as scheduler:
        for _ in range(4):
            ask(engine, scheduler, reports, max_tokens=2)
        assert scheduler.quality("").full_recompute
        monkeypatch.setattr(quality_guard, "GUARD_TOKENS", 1)
        agreeing = "cacheblend.service.serving.quality_guard.first_tokens"
        monkeypatch.setattr(agreeing, lambda _, prompts, *__: (yield) or [[1]] * len(prompts))
        levels = []
        for _ in range(4):
            ask(engine, scheduler, reports, max_tokens=2)
            levels.append(scheduler.quality("").least_recompute_ratio)
        assert levels == pytest.approx([0.15 + 3 * STEP, 0.15 + 2 * STEP, 0.15 + STEP, 0.0])
        assert ask(engine, scheduler, reports, max_tokens=2).answer.plan.recompute_ratio == 0.15


@pytest.mark.parametrize("options", [{"method": "full_reuse"}, {"method": "full_recompute"}, {"own_ratio": True}])
def test_what_the_caller_chose_is_left_alone(engine: Engine, reports: Reports, options: dict[str, object]) -> None:
    """Another method, and a ratio of the caller's own, are neither checked nor raised."""
    with guarded(engine, reports, guard_floor=1.0, guard_tokens=40) as scheduler:
        ask(engine, scheduler, reports)
        assert scheduler.quality("").least_recompute_ratio > 0.15
        plan = serve(engine, scheduler, QUESTION, top_k=4, **options).result().answer.plan
        assert plan.recompute_ratio in (0.0, 0.15, None)
        ask(engine, scheduler, reports)
    assert len(reports) == 2


def test_tenants_are_judged_alone(engine: Engine, reports: Reports) -> None:
    """One tenant's ratio is not raised for what another's answers are."""
    with guarded(engine, reports, guard_floor=1.0, guard_tokens=40) as scheduler:
        serve(engine, scheduler, QUESTION, top_k=4, tenant="one", cache_salt="salt").result()
        engine.drain()
        assert not reports  # no chunk was stored, so nothing was blended
        ask(engine, scheduler, reports, tenant="one", cache_salt="salt")
        assert scheduler.quality("one").least_recompute_ratio > 0
        assert scheduler.quality("two").least_recompute_ratio == 0
        assert ask(engine, scheduler, reports, tenant="two").answer.plan.recompute_ratio == 0.15
    assert {report.tenant for report in reports} == {"one", "two"}


def test_checks_wait_for_an_idle_moment(engine: Engine, reports: Reports) -> None:
    """While requests run no check does, few are kept waiting, and the others are dropped and counted."""
    with guarded(engine, reports) as scheduler:
        gate = threading.Event()
        blocker = serve(engine, scheduler, QUESTION, max_tokens=300, method="full_recompute", on_token=gate.wait)
        wait_until(lambda: scheduler.state.waiting == 0)
        clients: list[Client] = [serve(engine, scheduler, QUESTION, top_k=3, max_tokens=2) for _ in range(4)]
        threading.Timer(0.2, gate.set).start()
        for client in clients:
            assert isinstance(client.result(), Done)
        assert [report.outcome for report in reports] == ["dropped"] * 2
        blocker.cancel()
        wait_until(lambda: len(reports) == 4)
    assert [report.outcome for report in reports[2:]] == ["compared"] * 2


def test_checks_wait_for_who_asks_again(engine: Engine, reports: Reports, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the requests of a client that asks one after the other no check begins; after a pause it does."""
    monkeypatch.setattr(scheduler_module, "SHADOW_AFTER_S", 1e6)
    begun: list[object] = []
    step = quality_guard.ShadowEvaluation.step
    monkeypatch.setattr(quality_guard.ShadowEvaluation, "step", lambda shadow: (begun.append(shadow), step(shadow)))
    with guarded(engine, reports) as scheduler:
        for _ in range(2):
            assert isinstance(serve(engine, scheduler, QUESTION, top_k=3, max_tokens=2).result(), Done)
        assert not begun
        monkeypatch.setattr(scheduler_module, "SHADOW_AFTER_S", 0.01)
        assert isinstance(serve(engine, scheduler, QUESTION, top_k=3, max_tokens=2, method="full_reuse").result(), Done)
        wait_until(lambda: len(reports) == 2)


def test_a_request_interrupts_a_check(engine: Engine, reports: Reports, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that comes during a check is served before the check's next layer."""
    order: list[str] = []
    fuse_steps = engine.fusor.fuse_steps

    with guarded(engine, reports) as scheduler:

        def watched(segments: list[object], *rest: object) -> Iterator[object]:
            if rest:
                return (yield from fuse_steps(segments, *rest))
            steps = fuse_steps(segments)
            while True:
                try:
                    report = next(steps)
                except StopIteration as done:
                    return done.value
                order.append("layer of the check")
                if order == ["layer of the check"]:
                    options = {"method": "full_reuse", "max_tokens": 2, "on_token": lambda: order.append("token")}
                    serve(engine, scheduler, QUESTION, **options)
                yield report

        monkeypatch.setattr(engine.fusor, "fuse_steps", watched)
        ask(engine, scheduler, reports)
    assert order == ["layer of the check", "token", "token", *["layer of the check"] * 3]


def test_a_check_that_fails_hurts_nobody(engine: Engine, reports: Reports, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error in a check is logged and counted, and requests are served as before."""
    with guarded(engine, reports) as scheduler:
        with monkeypatch.context() as patch:
            patch.setattr("cacheblend.service.serving.quality_guard.compare", lambda *_: 1 / 0)
            ask(engine, scheduler, reports)
        assert isinstance(ask(engine, scheduler, reports), Done)
    assert [report.outcome for report in reports] == ["failed", "compared"]


def test_an_observer_that_fails_hurts_nobody(engine: Engine) -> None:
    """Where a check cannot be told, requests are served as before."""

    def fail(_: ShadowReport) -> None:
        raise RuntimeError

    with Scheduler(engine.fusor, ServingConfig(guard_share=1.0), shadow_observer=fail) as scheduler:
        for number in range(1, 3):
            assert isinstance(serve(engine, scheduler, QUESTION).result(), Done)
            wait_until(lambda checked=number: scheduler.quality("").evaluated == checked)


def test_closing_drops_checks(engine: Engine, reports: Reports) -> None:
    """The service does not wait for checks when it stops, and one in work leaves no pin."""
    with guarded(engine, reports) as scheduler:
        answers = [serve(engine, scheduler, QUESTION, top_k=4).result() for _ in range(2)]
    for scored in answers[0].answer.chunks:
        assert not engine.store._pins.is_pinned(key_of(engine, scored.chunk).digest)
