"""A client of the scheduler, and the replay of a plan alone."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from recorded import RecordedAnswer, replay_prompt

from cacheblend.service import AnswerPlan, Engine
from cacheblend.service.engine.decoding import Piece
from cacheblend.service.engine.request import Done, Event, Failed
from cacheblend.service.serving.scheduler import Scheduler


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
    **options: Any,
) -> Client:
    """Submit a question; the options are `Engine.prepare`'s."""
    client = Client(on_token)
    request = engine.prepare(question, **{"num_chunks": 2, **options})
    request.deliver, client.cancel = client.deliver, request.cancel
    scheduler.submit(request)
    return client


def replay(engine: Engine, plan: AnswerPlan, tokens: int) -> list[int]:
    """The greedy tokens of a plan, run alone from freshly computed KV."""
    return engine.fusor.generate(replay_prompt(engine.fusor, RecordedAnswer.of_plan(plan, ())), tokens)
