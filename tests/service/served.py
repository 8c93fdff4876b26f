"""A client of the scheduler, and the replay of a plan alone."""

import threading
from collections.abc import Callable
from typing import Any

from cacheblend.blend import ExplicitPositions, FusionConfig, FusionResult, Segment
from cacheblend.blend.precompute import DOCUMENT_TOKENS
from cacheblend.service import AnswerPlan, Engine
from cacheblend.service.engine.chunk_context import chunk_context
from cacheblend.service.engine.config import INSTRUCTION
from cacheblend.service.engine.decoding import Piece
from cacheblend.service.engine.prompt import PromptRenderer
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
    engine: Engine, scheduler: Scheduler, question: str, *, on_token: Callable[[], object] | None = None, **options: Any
) -> Client:
    """Submit a question; the options are `Engine.prepare`'s."""
    client = Client(on_token)
    request = engine.prepare(question, **{"num_chunks": 2, **options})
    request.deliver, client.cancel = client.deliver, request.cancel
    scheduler.submit(request)
    return client


def replay_prompt(engine: Engine, plan: AnswerPlan) -> FusionResult:
    """The prompt of a plan, run alone from freshly computed KV."""
    fusor = engine.fusor
    if plan.method == "full_recompute":
        return fusor.prefill([token for segment in plan.segments for token in segment.token_ids])
    head = PromptRenderer(fusor.tokenizer, INSTRUCTION).prefix
    context = chunk_context(fusor, "auto", DOCUMENT_TOKENS)
    segments = list[Segment]()
    for planned in plan.segments:
        token_ids, earlier = planned.token_ids, planned.earlier
        match planned.kind:
            case "fresh":
                segments.append(Segment(token_ids))
            case "exact":
                segments.append(Segment(token_ids, fusor.precompute(token_ids), exact=True))
            case _:
                (kv,) = fusor.precompute_document([*earlier, token_ids], head, [len(earlier)], context)
                segments.append(Segment(token_ids, kv))
    return fusor.fuse(segments, FusionConfig(selector=ExplicitPositions(plan.recomputed)))


def replay(engine: Engine, plan: AnswerPlan, tokens: int) -> list[int]:
    """The greedy tokens of a plan; see `replay_prompt`."""
    return engine.fusor.generate(replay_prompt(engine, plan), tokens)
