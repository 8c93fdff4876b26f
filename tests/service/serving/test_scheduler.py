"""Turns and pace, and many requests at once: each answered as it would be by itself."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator

import pytest
import torch
from engines import DOCUMENTS, ODD_DOCUMENTS, QUESTION, key_of
from served import Client, replay, serve
from waiting import wait_until

from cacheblend.base.errors import ConfigError, DeadlineError, QueueFullError, ShuttingDownError
from cacheblend.service import Engine
from cacheblend.service.engine.prefill import PrefillSteps
from cacheblend.service.engine.request import Request, namespace_of
from cacheblend.service.serving.config import ServingConfig
from cacheblend.service.serving.request import Done, Failed
from cacheblend.service.serving.scheduler import CREDIT_S, DecodePace, PrefillTurns, Scheduler


@pytest.mark.parametrize("share", [0.1, 0.25, 0.5, 1.0])
def test_share(share: float) -> None:
    """Of a long prefill beside steps of 3 ms, in layers of 1 ms, steps take the share, to a layer."""
    pace, now, steps = DecodePace(share), 0.0, 0
    while now < 60.0:
        if share < 1:  # a layer
            now += 0.001
        if pace.is_due(now):
            pace.stepped(now, now + 0.003)
            now, steps = now + 0.003, steps + 1
    assert steps * 0.003 / now == pytest.approx(share, rel=0.1)


def test_giving_way_to_who_had_less() -> None:
    """Beside the prefill of a tenant that has had less, those that decode rest four times as long, and do go on."""
    pace = DecodePace(0.25)
    pace.stepped(0.0, 1.0)
    assert not pace.is_due(3.9)
    assert pace.is_due(4.0)
    assert not pace.is_due(12.9, gives_way=True)
    assert pace.is_due(13.0, gives_way=True)


def test_a_first_step_is_due() -> None:
    """Nobody waits before the first step."""
    assert DecodePace(0.01).is_due(0.0)


@pytest.mark.parametrize("share", [0, -0.1, 1.01, "half", True, float("nan")])
def test_bad_share(share: object) -> None:
    """A share outside 0..1 is refused, and so is none."""
    with pytest.raises(ConfigError, match="decode_share"):
        ServingConfig(decode_share=share)  # type: ignore[arg-type]  # as a caller may


def had(turns: PrefillTurns, tenants: list[str], layers: int, layer_s: float = 0.01) -> list[str]:
    """Whose layers ran."""
    order = []
    for _ in range(layers):
        order.append(turns.next(tenants))
        turns.spend(order[-1], layer_s)
    return order


def test_tenants_that_always_ask_share_alike() -> None:
    """Three tenants with requests at all times have a third of the layers each, whoever came first."""
    turns = PrefillTurns()
    turns.enter("early")
    had(turns, ["early"], 1000)
    for tenant in ("b", "c"):
        turns.enter(tenant)
    had(turns, ["early", "b", "c"], 100)  # the credit
    order = had(turns, ["early", "b", "c"], 300)
    assert {tenant: order.count(tenant) for tenant in set(order)} == {"early": 100, "b": 100, "c": 100}


def test_who_asks_little_is_served_at_once() -> None:
    """After a pause a tenant's request comes first, and no pause is long enough for more than the credit."""
    turns = PrefillTurns()
    for tenant in ("rare", "busy"):
        turns.enter(tenant)
    had(turns, ["rare"], 1)
    had(turns, ["busy"], 100_000)
    turns.enter("rare")
    order = had(turns, ["busy", "rare"], 100)
    first = order.index("busy")
    assert first == pytest.approx(CREDIT_S / 0.01, abs=1)
    assert order[first:].count("busy") == pytest.approx(order[first:].count("rare"), abs=1)


def test_decoding_counts(engine: Engine, scheduler: Scheduler) -> None:
    """A tenant whose long answer is decoded has had more than one whose prompt was prefilled alone."""
    serve(engine, scheduler, QUESTION, tenant="asks", max_tokens=1).result()
    serve(engine, scheduler, QUESTION, tenant="writes", max_tokens=100).result()
    turns = scheduler._turns
    for tenant in ("asks", "writes"):
        turns.enter(tenant)
    assert turns.next(["writes", "asks"]) == "asks"
    assert turns.is_before("asks", ["writes"])
    assert not turns.is_before("asks", ["asks", "writes"])


QUESTIONS = (QUESTION, "How is a class made?", "for?", "What does with do with a context manager that fails at exit?")

PAIRS = (("blend", "prefix_cache"), ("full_reuse", "full_recompute"), ("prefix_cache", "full_recompute"), ("blend",))


@pytest.fixture
def scheduler(engine: Engine) -> Iterator[Scheduler]:
    with Scheduler(engine.fusor) as scheduler:
        yield scheduler


def test_concurrent_answers_equal_a_replay_alone(engine: Engine, scheduler: Scheduler) -> None:
    """Requests of all methods and lengths served at once give the greedy tokens of their plans replayed alone."""
    wanted = [
        {"question": question, "top_k": top_k, "method": method, "max_tokens": max_tokens}
        for question, top_k, max_tokens, methods in zip(QUESTIONS, (4, 1, 3, 2), (12, 2, 7, 140), PAIRS, strict=True)
        for method in methods
    ] + [{"question": QUESTION, "documents": [*ODD_DOCUMENTS, *DOCUMENTS[:2]], "max_tokens": 9}]
    clients = [serve(engine, scheduler, **options) for options in wanted]
    for client in clients:
        done = client.result()
        assert isinstance(done, Done)
        assert done.answer.token_ids == replay(engine, done.answer.plan, len(done.answer.token_ids))
        assert client.text == done.answer.text == engine.fusor.tokenizer.decode(done.answer.token_ids, skip_special_tokens=True)
    assert not scheduler.state.decoding


def test_equal_to_answer(engine: Engine, scheduler: Scheduler) -> None:
    """A served request gives `Engine.answer`'s tokens, chunks and plan."""
    alone = engine.answer(QUESTION, top_k=4, max_tokens=25)
    served = serve(engine, scheduler, QUESTION, top_k=4, max_tokens=25).result().answer
    assert served.token_ids == alone.token_ids
    assert served.chunks == alone.chunks
    for one, other in zip(served.plan.recomputed, alone.plan.recomputed, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("decode_share", [1.0, 1e-9])
def test_decode_steps_between_layers(engine: Engine, decode_share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """While one request is prefilled, another goes on decoding, so far as its share goes: between all steps, or none.

    The device is waited for at those steps alone.
    """
    seen: list[str] = []
    steps = engine.prefill_steps

    def watched(*arguments: object) -> Iterator[object]:
        inner = steps(*arguments)  # type: ignore[arg-type]  # passed on as they came
        while True:
            try:
                report = next(inner)
            except StopIteration as done:
                return done.value
            seen.append("layer")
            yield report

    def waiting() -> float:
        seen.append("wait")
        return time.perf_counter()

    with Scheduler(engine.fusor, ServingConfig(decode_share=decode_share)) as scheduler:
        monkeypatch.setattr(scheduler._device, "now", waiting)
        first = serve(engine, scheduler, QUESTION, max_tokens=200, on_token=lambda: seen.append("token"))
        wait_until(lambda: len(first.token_ids) > 2)
        engine.prefill_steps = watched  # type: ignore[method-assign]
        assert isinstance(serve(engine, scheduler, QUESTIONS[1], top_k=4, max_tokens=2).result(), Done)
        layers = [place for place, kind in enumerate(seen) if kind == "layer"]
        assert len(layers) == 3 + 4  # the question's pass leaves the last layer out
        for kind in ("token", "wait"):
            between = [kind in seen[one:other] for one, other in itertools.pairwise(layers)]
            assert between == [decode_share == 1] * 6
        first.cancel()


def test_cache_salt(engine: Engine, scheduler: Scheduler) -> None:
    """Requests with a cache salt use none of the KV of others, and find their own again."""

    def hits(cache_salt: str) -> int:
        done = serve(engine, scheduler, QUESTION, top_k=3, cache_salt=cache_salt).result()
        engine.drain()
        return done.answer.plan.hits

    assert [hits(""), hits("one"), hits("one"), hits("two")] == [3, 0, 3, 0]


@pytest.mark.parametrize("when", ["waiting", "prefilling", "decoding"])
def test_cancelling(engine: Engine, when: str) -> None:
    """A cancelled request ends wherever it is, without another event, its pins go, and the next one is served."""
    with Scheduler(engine.fusor, ServingConfig(max_num_seqs=1)) as scheduler:
        gate = threading.Event()
        first = serve(engine, scheduler, QUESTION, top_k=4, max_tokens=300, on_token=None if when == "decoding" else gate.wait)
        wait_until(lambda: scheduler.state.waiting == 0)
        second = serve(engine, scheduler, QUESTION, top_k=4, max_tokens=300)
        victim = second if when == "waiting" else first
        if when == "decoding":
            wait_until(lambda: len(first.token_ids) > 3)
        victim.cancel()
        gate.set()
        (first if victim is second else second).cancel()
        third = serve(engine, scheduler, QUESTION, top_k=4)
        assert isinstance(third.result(), Done)
        assert victim.end is None
    for scored in engine.answer(QUESTION, top_k=4).chunks:
        assert not engine.store._pins.is_pinned(key_of(engine, scored.chunk).digest)


def test_full_queue(engine: Engine) -> None:
    """A tenant with too many waiting is refused, told when to come again, and another tenant is not."""
    with Scheduler(engine.fusor, ServingConfig(max_num_seqs=1, max_waiting=2, grace_s=0.0)) as scheduler:
        gate = threading.Event()
        serve(engine, scheduler, QUESTION, max_tokens=300, on_token=gate.wait)
        wait_until(lambda: scheduler.state.waiting == 0)
        waiting = [serve(engine, scheduler, QUESTION, tenant="a") for _ in range(2)]
        with pytest.raises(QueueFullError, match="max_waiting") as caught:
            serve(engine, scheduler, QUESTION, tenant="a")
        assert caught.value.retry_after_s >= 1
        other = serve(engine, scheduler, QUESTION, tenant="b")
        assert scheduler.state.waiting == 3
        closer = threading.Thread(target=scheduler.close)
        closer.start()
        wait_until(lambda: not scheduler.is_alive)
        gate.set()
        closer.join()
        for client in (*waiting, other):
            assert isinstance(client.result(), Failed | Done)
        with pytest.raises(ShuttingDownError):
            serve(engine, scheduler, QUESTION)


def test_tenants_take_turns(engine: Engine) -> None:
    """A tenant that asks once does not wait for all the requests of one that asked many times before."""
    order: list[str] = []
    with Scheduler(engine.fusor, ServingConfig(max_num_seqs=1), lambda request, _: order.append(request.tenant)) as scheduler:
        gate = threading.Event()
        blocker = serve(engine, scheduler, QUESTION, tenant="first", on_token=gate.wait)
        wait_until(lambda: scheduler.state.waiting == 0)
        clients = [serve(engine, scheduler, "for?", top_k=1, max_tokens=1, tenant=tenant) for tenant in "aaab"]
        gate.set()
        for client in (blocker, *clients):
            client.result()
    assert order == ["first", "a", "b", "a", "a"]


def test_prefills_of_tenants_share_the_time(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenant's prompt does not wait for the end of another's prefill, and a tenant's own are prefilled one by one."""
    order: list[str] = []
    gate, begun = threading.Event(), threading.Event()
    steps, names = engine.prefill_steps, {namespace_of(salt): salt for salt in ("a1", "a2", "b1")}

    def slow(prepared: Request) -> PrefillSteps:
        layers = steps(prepared)
        while True:
            begun.set()
            assert gate.wait(60)
            order.append(names[prepared.namespace])
            time.sleep(0.01)
            try:
                yield next(layers)
            except StopIteration as done:
                return done.value

    monkeypatch.setattr(engine, "prefill_steps", slow)
    with Scheduler(engine.fusor) as scheduler:
        clients = [serve(engine, scheduler, QUESTION, max_tokens=1, tenant="a", cache_salt="a1")]
        assert begun.wait(60)
        for tenant, salt in (("a", "a2"), ("b", "b1")):
            clients.append(serve(engine, scheduler, QUESTION, max_tokens=1, tenant=tenant, cache_salt=salt))
        gate.set()
        for client in clients:
            assert isinstance(client.result(), Done)
    last = {salt: len(order) - order[::-1].index(salt) for salt in order}
    assert order.index("b1") <= 2
    assert order.index("a2") >= last["a1"]
    assert last["b1"] < last["a2"]


def test_a_tenant_leaves_places_for_others(engine: Engine) -> None:
    """Where several tenants ask, long answers of one take no more than three quarters of the places."""
    order: list[str] = []
    with Scheduler(
        engine.fusor, ServingConfig(max_num_seqs=4), lambda request, _: order.append(request.tenant), several_tenants=True
    ) as scheduler:
        clients = [serve(engine, scheduler, QUESTION, max_tokens=300, tenant="a") for _ in range(4)]
        wait_until(lambda: scheduler.state.decoding == 3)
        assert (scheduler.state.waiting, scheduler.state.prefilling) == (1, 0)
        other = serve(engine, scheduler, QUESTION, max_tokens=1, tenant="b")
        assert isinstance(other.result(), Done)
        assert order == ["b"]
        for client in clients:
            client.cancel()


def test_retry_after_counts_the_tenants_own(engine: Engine) -> None:
    """What others have waiting is not in a tenant's `Retry-After`."""
    with Scheduler(engine.fusor, ServingConfig(max_num_seqs=1, max_waiting=12, grace_s=0.0)) as scheduler:
        gate = threading.Event()
        serve(engine, scheduler, QUESTION, max_tokens=300, on_token=gate.wait)
        wait_until(lambda: scheduler.state.waiting == 0)
        seconds = {}
        for tenant, waiting in (("a", 12), ("b", 2)):
            for _ in range(waiting):
                serve(engine, scheduler, QUESTION, tenant=tenant)
            with pytest.raises(QueueFullError) as caught:
                scheduler.check_room(tenant, preparing=12 - waiting)
            seconds[tenant] = caught.value.retry_after_s
        assert seconds["a"] == seconds["b"] <= 6  # half a second each, where nothing is known of the tenant
        scheduler.abort()
        gate.set()


@pytest.mark.parametrize("late_s", [0.0, 60.0])
def test_deadline(engine: Engine, late_s: float) -> None:
    """A request that is not answered in its time fails with a deadline error, and frees its place."""
    with Scheduler(engine.fusor, ServingConfig(deadline_s=0.3 + late_s)) as scheduler:
        end = serve(engine, scheduler, QUESTION, max_tokens=400, arrived=time.perf_counter() - late_s).result()
        assert isinstance(end, Failed)
        assert isinstance(end.error, DeadlineError)
        assert not scheduler.state.decoding


def test_an_error_hits_its_own_request(engine: Engine, scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error in one request's prefill fails that request alone."""
    running = serve(engine, scheduler, QUESTION, max_tokens=30)
    wait_until(lambda: len(running.token_ids) > 0)
    with monkeypatch.context() as patch:
        patch.setattr(engine, "prefill_steps", lambda *_: (_ for _ in [1 / 0]))
        failed = serve(engine, scheduler, QUESTION).result()
    assert isinstance(failed, Failed)
    assert isinstance(failed.error, ZeroDivisionError)
    assert isinstance(running.result(), Done)


def test_stop_string(engine: Engine, scheduler: Scheduler) -> None:
    """An answer ends before a stop string, which no piece of the stream shows."""
    whole = serve(engine, scheduler, QUESTION, max_tokens=30).result().answer.text
    stop = whole[len(whole) // 2 : len(whole) // 2 + 4]
    client = serve(engine, scheduler, QUESTION, max_tokens=30, stop=[stop])
    done = client.result()
    assert done.finish_reason == "stop"
    assert client.text == done.answer.text == whole[: whole.index(stop)]


def test_closing_finishes_what_runs(engine: Engine) -> None:
    """Closing waits for the answers that are under way, and leaves no thread."""
    with Scheduler(engine.fusor) as scheduler:
        clients: list[Client] = [serve(engine, scheduler, QUESTION, max_tokens=10) for _ in range(3)]
    assert all(isinstance(client.end, Done) for client in clients)
    assert not [thread for thread in threading.enumerate() if thread.name == "scheduler"]


def test_a_fault_of_the_scheduler_leaves_nobody_waiting(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the thread itself fails, every request is told, no more are taken, and closing works."""
    with Scheduler(engine.fusor) as scheduler:
        monkeypatch.setattr(scheduler, "_admit", lambda: 1 / 0)
        client = serve(engine, scheduler, QUESTION)
        assert isinstance(client.result().error, ShuttingDownError)
        wait_until(lambda: not scheduler.is_alive)
        with pytest.raises(ShuttingDownError):
            serve(engine, scheduler, QUESTION)
