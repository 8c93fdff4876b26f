"""A client of the scheduler, and the replay of a plan alone."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from recorded import RecordedAnswer, replay_prompt

from cacheblend.service import AnswerPlan, Engine
from cacheblend.service.serving.scheduler import Scheduler
from cacheblend.service.serving.served_request import Done, Event, Failed, Piece, ServedRequest


class Client:
    """Collects a request's events."""

    def __init__(self, on_token: Callable[[], object] | None) -> None:
        self._on_token, self._ended = on_token, threading.Event()
        self.token_ids: list[int] = []
        self.text = ""
        self.end: Done | Failed | None = None
        self.cancel: Callable[[], None] = lambda: None

    def deliver(self, event: Event) -> None:
        if isinstance(event, Piece):
            self.token_ids.append(event.token_id)
            self.text += event.text
            if self._on_token is not None:
                self._on_token()
            return
        if isinstance(event, Done):
            self.text += event.last_text
        self.end = event
        self._ended.set()

    def result(self) -> Any:
        assert self._ended.wait(110), "no answer came"
        return self.end


def serve(
    engine: Engine,
    scheduler: Scheduler,
    question: str,
    *,
    on_token: Callable[[], object] | None = None,
    tenant: str = "",
    cache_salt: str = "",
    stop: Sequence[str] = (),
    own_ratio: bool = False,
    arrived: float | None = None,
    **options: Any,
) -> Client:
    """Submit a question; the options are `Engine.prepare`'s."""
    client = Client(on_token)
    prepared = engine.prepare(question, cache_salt=cache_salt, **{"num_chunks": 2, **options})
    request = ServedRequest(
        engine,
        prepared,
        client.deliver,
        tenant=tenant,
        stop=stop,
        own_ratio=own_ratio,
        arrived=arrived,
    )
    client.cancel = request.cancel
    scheduler.submit(request)
    return client


def replay(engine: Engine, plan: AnswerPlan, tokens: int) -> list[int]:
    """The greedy tokens of a plan, run alone from freshly computed KV."""
    return engine.fusor.generate(replay_prompt(engine.fusor, RecordedAnswer.of_plan(plan, ())), tokens)
