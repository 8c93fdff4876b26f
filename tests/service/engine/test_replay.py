"""The replay of an answer's plan tells an answer that is right from one that is not."""

from dataclasses import replace

import pytest
from engines import QUESTION, TOP_K, ask, key_of
from served import replay, replay_prompt

from cacheblend.service import Engine
from cacheblend.service.engine.request import METHODS

pytestmark = pytest.mark.contract


@pytest.mark.parametrize("method", METHODS)
def test_equal(engine: Engine, method: str) -> None:
    """An answer of any method, one of whose chunks was missed, equals the replay of its plan: logits and greedy tokens."""
    if method == "prefix_cache":
        ask(engine, method)
    engine.store.delete(key_of(engine, ask(engine, "full_recompute").chunks[1].chunk))
    answer = ask(engine, method, max_tokens=20)
    assert (replay_prompt(engine, answer.plan).logits - answer.first_logits).abs().max() <= 1e-4
    assert replay(engine, answer.plan, len(answer.token_ids)) == answer.token_ids


def test_differs(engine: Engine) -> None:
    """A chunk of another document, and positions that were not recomputed, both show."""
    answer = engine.answer(QUESTION, num_chunks=TOP_K, max_tokens=20)
    segments = list(answer.plan.segments)
    chunks = [at for at, segment in enumerate(segments) if segment.kind == "reused"]
    segments[chunks[0]], segments[chunks[-1]] = segments[chunks[-1]], segments[chunks[0]]
    nothing = tuple(positions[:0] for positions in answer.plan.recomputed)
    for wrong in (replace(answer.plan, segments=tuple(segments)), replace(answer.plan, recomputed=nothing)):
        assert replay(engine, wrong, len(answer.token_ids)) != answer.token_ids
