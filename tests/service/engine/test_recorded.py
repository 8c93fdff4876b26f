"""A recorded answer's replay tells an answer that is right from one that is not."""

from __future__ import annotations

from dataclasses import replace

import pytest
from engines import QUESTION, TOP_K
from recorded import RecordedAnswer, check_replay

from cacheblend.service import Engine

pytestmark = pytest.mark.contract


@pytest.mark.parametrize("method", ["blend", "full_recompute", "prefix_cache", "full_reuse"])
def test_equal(engine: Engine, method: str) -> None:
    """An answer of any method, written to a line and read again, equals its replay."""
    engine.answer(QUESTION, num_chunks=TOP_K, method=method)
    answer = engine.answer(QUESTION, num_chunks=TOP_K, method=method, max_tokens=20)
    recorded = RecordedAnswer.from_line(RecordedAnswer.of(answer).line())
    assert check_replay(engine.fusor, recorded) == "equal"


def test_differs(engine: Engine) -> None:
    """Another token, a chunk of another document, and positions that were not recomputed all show."""
    recorded = RecordedAnswer.of(engine.answer(QUESTION, num_chunks=TOP_K, max_tokens=20))
    tokens = list(recorded.token_ids)
    tokens[7] = (tokens[7] + 1) % 500
    chunks = [at for at, (kind, *_) in enumerate(recorded.segments) if kind == "reused"]
    segments = list(recorded.segments)
    segments[chunks[0]], segments[chunks[-1]] = segments[chunks[-1]], segments[chunks[0]]
    assert check_replay(engine.fusor, replace(recorded, token_ids=tokens)) == "differs"
    assert check_replay(engine.fusor, replace(recorded, segments=segments)) == "differs"
    assert check_replay(engine.fusor, replace(recorded, recomputed=[[]] * len(recorded.recomputed))) == "differs"
