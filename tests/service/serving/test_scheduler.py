"""Many requests at once: each is answered as it would be by itself, and tenants take turns."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from engines import DOCUMENTS, ODD_DOCUMENTS, QUESTION, key_of
from served import Client, replay, serve
from waiting import wait_until

from cacheblend.base.errors import DeadlineError, QueueFullError, ShuttingDownError
from cacheblend.blend import LayerReport
from cacheblend.service import Engine
from cacheblend.service.engine.prefill import PrefillSteps
from cacheblend.service.engine.request import Done, Failed, Request, namespace_of
from cacheblend.service.serving import scheduler as scheduling
from cacheblend.service.serving.scheduler import LAYERS_AHEAD, DeviceClock, Scheduler, SchedulerState, ServingConfig, Turns

QUESTIONS = (QUESTION, "How is a class made?", "for?", "What does with do with a context manager that fails at exit?")

PAIRS = (("blend", "prefix_cache"), ("full_reuse", "full_recompute"), ("prefix_cache", "full_recompute"), ("blend",))


@pytest.fixture
def scheduler(engine: Engine) -> Iterator[Scheduler]:
    with Scheduler(engine.fusor) as scheduler:
        yield scheduler


def test_concurrent_answers_equal_a_replay_alone(engine: Engine, scheduler: Scheduler) -> None:
    """Requests of all methods and lengths served at once give the greedy tokens of their plans replayed alone."""
    wanted = [
        {"question": question, "num_chunks": num_chunks, "method": method, "max_tokens": max_tokens}
        for question, num_chunks, max_tokens, methods in zip(QUESTIONS, (4, 1, 3, 2), (12, 2, 7, 140), PAIRS, strict=True)
        for method in methods
    ] + [{"question": QUESTION, "documents": [*ODD_DOCUMENTS, *DOCUMENTS[:2]], "max_tokens": 9}]
    clients = [serve(engine, scheduler, **options) for options in wanted]
    for client in clients:
        done = client.result()
        assert isinstance(done, Done)
        assert done.answer.token_ids == replay(engine, done.answer.plan, len(done.answer.token_ids))
        assert client.text == done.answer.text == engine.fusor.tokenizer.decode(done.answer.token_ids, skip_special_tokens=True)
    assert not scheduler.state.decoding


def test_decoding_goes_on_during_a_prefill(engine: Engine, scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch) -> None:
    """While one request's layers run, another's tokens come."""
    first = serve(engine, scheduler, QUESTION, max_tokens=300)
    wait_until(lambda: len(first.token_ids) > 2)
    steps, report = engine.prefill_steps, LayerReport(0, 0, 0.0, 0.0)

    def long(prepared: Request) -> PrefillSteps:
        before = len(first.token_ids)
        while len(first.token_ids) < before + 3:
            yield report
        return (yield from steps(prepared))

    monkeypatch.setattr(engine, "prefill_steps", long)
    assert isinstance(serve(engine, scheduler, QUESTIONS[1], num_chunks=4, max_tokens=2).result(), Done)
    first.cancel()


@pytest.mark.parametrize("when", ["waiting", "prefilling", "decoding"])
def test_cancelling(engine: Engine, when: str) -> None:
    """A cancelled request ends wherever it is, without another event, its pins go, and the next one is served."""
    with Scheduler(engine.fusor, ServingConfig(max_num_seqs=1)) as scheduler:
        gate = threading.Event()
        first = serve(
            engine, scheduler, QUESTION, num_chunks=4, max_tokens=300, on_token=None if when == "decoding" else gate.wait
        )
        wait_until(lambda: scheduler.state.waiting == 0)
        second = serve(engine, scheduler, QUESTION, num_chunks=4, max_tokens=300)
        victim = second if when == "waiting" else first
        if when == "decoding":
            wait_until(lambda: len(first.token_ids) > 3)
        victim.cancel()
        gate.set()
        (first if victim is second else second).cancel()
        third = serve(engine, scheduler, QUESTION, num_chunks=4)
        assert isinstance(third.result(), Done)
        assert victim.end is None
    for scored in engine.answer(QUESTION, num_chunks=4).chunks:
        assert not engine.store._pins.is_pinned(key_of(engine, scored.chunk).digest)


def test_full_queue(engine: Engine) -> None:
    """A tenant with too many waiting or prepared is refused, and told when to come again by its own number alone."""
    with Scheduler(engine.fusor, ServingConfig(max_num_seqs=1, max_waiting=12, grace_s=0.0)) as scheduler:
        gate = threading.Event()
        serve(engine, scheduler, QUESTION, max_tokens=300, on_token=gate.wait)
        wait_until(lambda: scheduler.state.waiting == 0)
        clients, seconds = list[Client](), set[int]()
        for tenant, waiting in (("a", 12), ("b", 2)):
            clients += [serve(engine, scheduler, QUESTION, tenant=tenant) for _ in range(waiting)]
            with pytest.raises(QueueFullError, match="max_waiting") as caught:
                scheduler.check_room(tenant, preparing=12 - waiting)
            seconds.add(caught.value.retry_after_s)
        with pytest.raises(QueueFullError):
            serve(engine, scheduler, QUESTION, tenant="a")
        assert (len(seconds), min(seconds) >= 1, scheduler.state.waiting) == (1, True, 14)
        closer = threading.Thread(target=scheduler.close)
        closer.start()
        wait_until(lambda: not scheduler.is_alive)
        gate.set()
        closer.join()
        assert all(isinstance(client.result(), Failed | Done) for client in clients)
        with pytest.raises(ShuttingDownError):
            serve(engine, scheduler, QUESTION)


@pytest.mark.parametrize("turn_s", [1e9, 0.0])
def test_prompts_take_turns(engine: Engine, turn_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tenants' prompts are prefilled one after the other, long ones in turns; one tenant's prompts always in their order."""
    order: list[str] = []
    gate, begun = threading.Event(), threading.Event()
    steps, names = engine.prefill_steps, {namespace_of(salt): salt for salt in ("a1", "a2", "b1")}

    def noting(prepared: Request) -> PrefillSteps:
        begun.set()
        assert gate.wait(60)
        for report in steps(prepared):
            order.append(names[prepared.namespace])
            yield report

    monkeypatch.setattr(engine, "prefill_steps", noting)
    monkeypatch.setattr(scheduling, "TURN_S", turn_s)
    with Scheduler(engine.fusor, ServingConfig()) as scheduler:
        clients = [serve(engine, scheduler, QUESTION, max_tokens=1, tenant="a", cache_salt="a1")]
        assert begun.wait(60)
        for tenant, salt in (("a", "a2"), ("b", "b1")):
            clients.append(serve(engine, scheduler, QUESTION, max_tokens=1, tenant=tenant, cache_salt=salt))
        gate.set()
        for client in clients:
            assert isinstance(client.result(), Done)
    whole_prompts = [salt for salt, _ in itertools.groupby(order)]
    assert whole_prompts == ["a1", "b1", "a2"] if turn_s else len(whole_prompts) > 4
    assert order.index("a2") > len(order) - 1 - order[::-1].index("a1")


def test_a_short_prompt_passes_a_long_one(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenant's long prompt gives way to its shortest at the end of a turn, and goes on between short ones."""
    steps, long_namespace, ended = engine.prefill_steps, namespace_of("long"), list[str]()
    held = threading.Event()

    def held_back(prepared: Request) -> PrefillSteps:
        if prepared.namespace == long_namespace:
            held.set()
            while len(ended) < 2:
                yield LayerReport(0, 0, 0.0, 0.0)
        return (yield from steps(prepared))

    monkeypatch.setattr(engine, "prefill_steps", held_back)
    monkeypatch.setattr(scheduling, "TURN_S", 0.0)
    with Scheduler(engine.fusor, ServingConfig(), lambda request, _: ended.append(request.namespace)) as scheduler:
        long = serve(engine, scheduler, QUESTION, max_tokens=1, num_chunks=4, cache_salt="long")
        assert held.wait(60)
        short = [serve(engine, scheduler, QUESTION, max_tokens=1, num_chunks=number) for number in (2, 1)]
        assert all(isinstance(client.result(), Done) for client in (*short, long))
        assert ended[-1] == long_namespace


def test_a_paused_prompt_that_is_cancelled(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt that waits for its next turn ends like any other, and its tenant's next request is served."""
    steps, held = engine.prefill_steps, threading.Event()
    long_namespace = namespace_of("long")

    def endless(prepared: Request) -> PrefillSteps:
        if prepared.namespace == long_namespace:
            held.set()
            while True:
                yield LayerReport(0, 0, 0.0, 0.0)
        yield from steps(prepared)

    monkeypatch.setattr(engine, "prefill_steps", endless)
    monkeypatch.setattr(scheduling, "TURN_S", 0.0)
    with Scheduler(engine.fusor, ServingConfig()) as scheduler:
        long = serve(engine, scheduler, QUESTION, tenant="a", cache_salt="long")
        assert held.wait(60)
        assert isinstance(serve(engine, scheduler, QUESTION, tenant="b").result(), Done)
        long.cancel()
        assert isinstance(serve(engine, scheduler, QUESTION, tenant="a").result(), Done)
        assert scheduler.state == SchedulerState(waiting=0, prefilling=0, decoding=0)


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


def test_closing_finishes_what_runs(engine: Engine) -> None:
    """Closing waits for the answers that are under way, and leaves no thread."""
    with Scheduler(engine.fusor) as scheduler:
        clients: list[Client] = [serve(engine, scheduler, QUESTION, max_tokens=10) for _ in range(3)]
    assert all(isinstance(client.end, Done) for client in clients)
    assert not [thread for thread in threading.enumerate() if thread.name == "scheduler"]


def test_a_fault_of_the_scheduler_leaves_nobody_waiting(engine: Engine) -> None:
    """If the thread itself fails, every request fails, no more are accepted, and closing works."""
    with Scheduler(engine.fusor) as scheduler:
        client = serve(engine, scheduler, QUESTION, arrived="a time that no clock has")
        assert isinstance(client.result().error, ShuttingDownError)
        wait_until(lambda: not scheduler.is_alive)
        with pytest.raises(ShuttingDownError):
            serve(engine, scheduler, QUESTION)


@dataclass(frozen=True)
class Waiting:
    tenant: str
    number: int = 0


def test_turns() -> None:
    """The tenant that was served longest ago is next, whoever has more requests; a tenant's own stay in order. One that may
    not have its turn now stays where it is.
    """
    turns, waiting = Turns(), [*(Waiting("a", number) for number in range(56)), Waiting("b", 0), Waiting("b", 1)]
    order = [turns.take(waiting) for _ in range(58)]
    assert [(one.tenant, one.number) for one in order[:5] if one] == [("a", 0), ("b", 0), ("a", 1), ("b", 1), ("a", 2)]
    assert [one.number for one in order if one and one.tenant == "a"] == list(range(56))
    assert turns.take(waiting) is None
    waiting += [Waiting("a"), Waiting("b")]  # "a" was the last one, although no "b" waited then
    assert turns.take(waiting) == Waiting("b")
    assert turns.take(waiting, lambda request: request.tenant != "a") is None
    assert (turns.take(waiting), waiting) == (Waiting("a"), [])


class Device:
    """Runs what is launched in order, on a clock of its own."""

    def __init__(self) -> None:
        self.host_s = self.done_s = self.idle_s = 0.0

    def launch(self, seconds: float, launch_s: float = 0.001) -> None:
        self.host_s += launch_s
        self.idle_s += max(0.0, self.host_s - self.done_s)
        self.done_s = max(self.done_s, self.host_s) + seconds

    def mark(self) -> Moment:
        return Moment(self)


class Moment:
    """An event of the device."""

    def __init__(self, device: Device) -> None:
        self.device, self.at_s = device, device.done_s

    def synchronize(self) -> None:
        self.device.host_s = max(self.device.host_s, self.at_s)


def test_the_host_is_a_few_layers_ahead_and_the_device_never_idle() -> None:
    """However long layers run, only a few are launched ahead, and the device has always one."""
    device = Device()
    clock = DeviceClock(device.mark)
    for _ in range(100):
        device.launch(0.02)
        clock.launched_layer()
        assert device.done_s - device.host_s <= LAYERS_AHEAD * 0.02 + 1e-9
    assert device.idle_s == pytest.approx(0.001)  # the first launch
    clock.now()
    assert device.host_s == device.done_s
