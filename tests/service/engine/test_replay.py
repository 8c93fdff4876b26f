"""The replay of an answer's plan tells an answer that is right from one that is not."""

from __future__ import annotations

from dataclasses import replace

import pytest
from engines import QUESTION, TOP_K
from served import replay

from cacheblend.service import Engine

pytestmark = pytest.mark.contract


@pytest.mark.parametrize("method", ["blend", "full_recompute", "prefix_cache", "full_reuse"])
def test_equal(engine: Engine, method: str) -> None:
    """An answer of any method equals the replay of its plan."""
    engine.answer(QUESTION, num_chunks=TOP_K, method=method)
    answer = engine.answer(QUESTION, num_chunks=TOP_K, method=method, max_tokens=20)
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
