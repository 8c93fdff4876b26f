"""Shadow evaluation: the comparison with full prefill."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import pytest
import torch
from engines import QUESTION, key_of
from served import Client, serve
from waiting import wait_until

from cacheblend.blend.fidelity import Comparison, relative_kv_error
from cacheblend.blend.fusion import FusionSteps
from cacheblend.service import Engine
from cacheblend.service.engine.request import Done
from cacheblend.service.serving import quality_guard
from cacheblend.service.serving.scheduler import Scheduler, ServingConfig


class Report(NamedTuple):
    """What an observer is called with."""

    tenant: str
    comparison: Comparison | None


Reports = list[Report]


@pytest.fixture
def reports(monkeypatch: pytest.MonkeyPatch) -> Reports:
    monkeypatch.setattr(quality_guard, "GUARD_WINDOW", 1)
    return []


@contextmanager
def guarded(engine: Engine, reports: Reports) -> Iterator[Scheduler]:
    """A scheduler that compares every blended request."""
    config = ServingConfig(guard_share=1.0)
    with Scheduler(engine.fusor, config, shadow_observer=lambda *report: reports.append(Report(*report))) as scheduler:
        yield scheduler


def ask(engine: Engine, scheduler: Scheduler, reports: Reports, **options: object) -> Done:
    """A question whose check has ended."""
    before = len(reports)
    done = serve(engine, scheduler, QUESTION, **{"num_chunks": 4, **options}).result()
    wait_until(lambda: len(reports) > before)
    return done


def test_a_check_is_the_comparison_with_full_prefill(engine: Engine, reports: Reports) -> None:
    """Agreement, divergence and deviation are those between the served prompt and `full_recompute`'s, computed alone."""
    with guarded(engine, reports) as scheduler:
        done = ask(engine, scheduler, reports, temperature=1.0, max_tokens=1)  # neither sampling nor a short answer matters
        quality = scheduler.quality("")
    blended, full = (
        engine.answer(QUESTION, num_chunks=4, max_tokens=8, method=method) for method in ("blend", "full_recompute")
    )
    assert torch.equal(done.answer.first_logits, blended.first_logits)
    same = [one == other for one, other in zip(blended.token_ids, full.token_ids, strict=True)]
    served = reports[0].comparison
    assert served is not None
    assert served.agreement == (same.index(False) if False in same else 8) / 8
    log_full, log_blended = (answer.first_logits.double().log_softmax(-1) for answer in (full, blended))
    assert served.first_token_kl_nats == pytest.approx(float((log_full.exp() * (log_full - log_blended)).sum()), rel=1e-3)
    caches = []
    for method in ("blend", "full_recompute"):
        prepared = engine.prepare(QUESTION, num_chunks=4, method=method)
        list(engine.prefill_steps(prepared))
        caches.append(prepared.fused.cache)
    assert served.relative_kv_error == pytest.approx(relative_kv_error(*caches), rel=1e-3)
    assert served.relative_kv_error > 0
    assert len(reports) == 1
    assert (quality["evaluated"], quality["agreement"]) == (1, served.agreement)


@pytest.mark.parametrize("options", [{"method": "full_reuse"}, {"method": "full_recompute"}, {"recompute_ratio": 0.15}])
def test_what_the_caller_chose_is_not_compared(engine: Engine, reports: Reports, options: dict[str, object]) -> None:
    """Requests with another method, or with a ratio of the caller's own, are not compared."""
    with guarded(engine, reports) as scheduler:
        serve(engine, scheduler, QUESTION, num_chunks=4, **options).result()
        ask(engine, scheduler, reports)
    assert len(reports) == 1


def test_tenants_are_counted_by_their_own(engine: Engine, reports: Reports) -> None:
    """One tenant's comparisons are not another's, and a prompt of which no chunk was stored is not compared."""
    with guarded(engine, reports) as scheduler:
        serve(engine, scheduler, QUESTION, num_chunks=4, tenant="one", cache_salt="salt").result()
        engine.drain()
        assert not reports
        ask(engine, scheduler, reports, tenant="one", cache_salt="salt")
        assert [scheduler.quality(tenant)["evaluated"] for tenant in ("one", "two")] == [1, 0]
    assert {report.tenant for report in reports} == {"one"}


def test_checks_wait_for_an_idle_moment(engine: Engine, reports: Reports) -> None:
    """While requests run no check does, and only one prompt waits for its check."""
    with guarded(engine, reports) as scheduler:
        gate = threading.Event()
        blocker = serve(engine, scheduler, QUESTION, max_tokens=300, method="full_recompute", on_token=gate.wait)
        wait_until(lambda: scheduler.state.waiting == 0)
        clients: list[Client] = [serve(engine, scheduler, QUESTION, num_chunks=3, max_tokens=2) for _ in range(4)]
        gate.set()
        for client in clients:
            assert isinstance(client.result(), Done)
        assert not reports
        blocker.cancel()
        wait_until(lambda: len(reports) == 1)
        ask(engine, scheduler, reports)
    assert [report.comparison is None for report in reports] == [False, False]


def test_a_request_interrupts_a_check(engine: Engine, reports: Reports, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that comes during a check is served before the check's next layer."""
    order: list[str] = []
    fuse_steps = engine.fusor.fuse_steps

    with guarded(engine, reports) as scheduler:

        def check(segments: list[object]) -> Iterator[object]:
            steps = fuse_steps(segments)
            for report in steps:
                order.append("layer of the check")
                if order == ["layer of the check"]:
                    options = {"method": "full_reuse", "max_tokens": 2, "on_token": lambda: order.append("token")}
                    serve(engine, scheduler, QUESTION, **options)
                yield report
            return steps.result

        def watched(segments: list[object], *config: object) -> FusionSteps:
            return fuse_steps(segments, *config) if config else FusionSteps(check(segments))

        monkeypatch.setattr(engine.fusor, "fuse_steps", watched)
        ask(engine, scheduler, reports)
    assert order == ["layer of the check", "token", "token", *["layer of the check"] * 3]


def test_a_check_that_fails_hurts_nobody(engine: Engine, reports: Reports, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error in a check is logged and counted, and requests are served as before."""
    with guarded(engine, reports) as scheduler:
        steps = engine.fusor.fuse_steps  # called for a check without a config
        with monkeypatch.context() as patch:
            patch.setattr(engine.fusor, "fuse_steps", lambda segments, *config: steps(segments, *config) if config else 1 / 0)
            ask(engine, scheduler, reports)
        assert isinstance(ask(engine, scheduler, reports), Done)
    assert [report.comparison is None for report in reports] == [True, False]


def test_an_observer_that_fails_hurts_nobody(engine: Engine) -> None:
    """Where a check cannot be told, requests are served as before."""

    def fail(*_: object) -> None:
        raise RuntimeError

    with Scheduler(engine.fusor, ServingConfig(guard_share=1.0), shadow_observer=fail) as scheduler:
        for number in range(1, 3):
            assert isinstance(serve(engine, scheduler, QUESTION).result(), Done)
            wait_until(lambda checked=number: scheduler.quality("")["evaluated"] == checked)


def test_closing_drops_checks(engine: Engine, reports: Reports) -> None:
    """The service does not wait for checks when it stops, and one in work leaves no pin."""
    with guarded(engine, reports) as scheduler:
        answers = [serve(engine, scheduler, QUESTION, num_chunks=4).result() for _ in range(2)]
    for scored in answers[0].answer.chunks:
        assert not engine.store._pins.is_pinned(key_of(engine, scored.chunk).digest)
