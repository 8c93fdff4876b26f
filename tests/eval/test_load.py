"""Load: arrivals, what a client sees of a stream, the sums of a step, and whose requests are sent."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import httpx
import numpy as np
import pytest
from peers import EXAMPLE, REQUEST, SOURCE, USAGE, WORDING, peer, piece, refuse, sse

from cacheblend.base.errors import ConfigError, InputError
from cacheblend.blend import Fusor
from cacheblend.eval.load.sample import Sample, ask, poisson_arrivals, send_on_time, step_of
from cacheblend.eval.load.sweep import LoadConfig
from cacheblend.eval.load.target import LoadRequest, Target, load_requests, peer_target, split_requests


def asked(address: str, *, count: int = 1, arrivals_s: list[float] | None = None, **changes: Any) -> list[Sample]:
    """What becomes of requests to a peer."""
    target = peer_target("peer", address, WORDING, **changes)
    samples: list[Sample] = []

    async def send() -> None:
        async with httpx.AsyncClient(timeout=20) as client:
            await send_on_time(client, target, [REQUEST] * count, arrivals_s or [0.0] * count, 4, samples.append)

    asyncio.run(send())
    return samples


def sample(ttft_s: float | None, *, due_s: float = 0.0, end_s: float = 1.0, outcome: str = "answered", **more: Any) -> Sample:
    return Sample(id="x", due_s=due_s, sent_s=due_s + 0.01, end_s=end_s, outcome=outcome, ttft_s=ttft_s, **more)


def test_poisson_arrivals() -> None:
    """Arrivals rise, are the seed's, keep the asked rate, scatter as a Poisson process's, and stretch with the rate."""
    moments = poisson_arrivals(4.0, 4000, seed=1)
    gaps = np.diff([0.0, *moments])
    assert (gaps > 0).all()
    assert gaps.mean() == pytest.approx(0.25, rel=0.05)
    assert gaps.std() == pytest.approx(0.25, rel=0.05)
    assert moments == poisson_arrivals(4.0, 4000, seed=1) != poisson_arrivals(4.0, 4000, seed=2)
    assert [2 * moment for moment in moments] == pytest.approx(poisson_arrivals(2.0, 4000, seed=1))


def test_ttft_is_the_first_text() -> None:
    """An empty first piece, as role prompt are, is no text; usage comes from the last event."""
    with peer(lambda *_: sse(piece(""), 0.3, piece("a"), 0.2, piece("b", "stop"), USAGE, "[DONE]")) as address:
        (seen,) = asked(address)
    assert seen.outcome == "answered"
    assert seen.ttft_s is not None
    assert 0.3 <= seen.ttft_s < seen.end_s - 0.19
    assert (seen.text, seen.prompt_tokens, seen.cached_tokens, seen.completion_tokens) == ("ab", 40, 30, 2)
    assert seen.quality == 0  # "ab" is not "a b"


def test_requests_are_sent_when_due() -> None:
    """A request is sent at its moment though those before it have no answer, and its TTFT counts from that moment."""
    with peer(lambda number, _: sse(0.0 if number else 1.0, piece("a", "stop"))) as address:
        seen = asked(address, count=3, arrivals_s=[0.0, 0.1, 0.2])
    assert [one.due_s for one in sorted(seen, key=lambda one: one.due_s)] == [0.0, 0.1, 0.2]
    assert all(0 <= one.sent_s - one.due_s < 0.5 for one in seen)
    assert max(one.sent_s for one in seen) < 1.0 < max(one.end_s for one in seen)


@pytest.mark.parametrize(
    ("answer", "outcome", "named"),
    [
        (lambda *_: refuse(429), "rejected", "429"),
        (lambda *_: refuse(503), "failed", "503"),
        (lambda *_: sse(piece("a"), {"error": {"message": "gone"}}), "failed", "gone"),
        (lambda *_: sse(piece("a")), "failed", "ended before"),
        (lambda *_: sse("{"), "failed", "JSON"),
        (lambda *_: sse({"choices": 3}), "failed", "TypeError"),
        (lambda *_: sse(piece(None, "stop")), "answered", ""),
    ],
    ids=["full", "broken", "error in the stream", "cut off", "no JSON", "odd JSON", "an empty answer"],
)
def test_what_a_server_may_do(answer: Any, outcome: str, named: str) -> None:
    """Whatever comes back is counted, and raises nothing."""
    with peer(answer) as address:
        (seen,) = asked(address)
    assert seen.outcome == outcome
    assert named in seen.detail
    assert (seen.ttft_s is not None) == (seen.quality is not None) == (outcome == "answered")


def test_a_server_that_is_not_there() -> None:
    """A connection that is refused is a failed request, and an address without a server is told before a run."""
    target = Target(label="x", address="http://127.0.0.1:9", model="m", wording=WORDING)

    async def one() -> Sample:
        async with httpx.AsyncClient() as client:
            return await ask(client, target, REQUEST, 4, started=time.perf_counter(), due_s=0.0)

    assert asyncio.run(one()).outcome == "failed"
    with pytest.raises(InputError, match="/v1/models"):
        peer_target("x", "http://127.0.0.1:9", WORDING)


def test_what_a_peer_is_asked() -> None:
    """Another server gets instruction, chunks and question as one text, OpenAI's own fields alone, and its key."""
    bodies: list[dict[str, Any]] = []
    with peer(lambda _, body: bodies.append(body) or sse(piece("a", "stop"))) as address:
        asked(address, api_key="secret")
        asked(address, completions=True)
    chat, text = bodies
    (message,) = chat.pop("messages")
    assert (
        message["content"] == f"{WORDING.instruction}Here is a place.\n\nThere is another.\n\n{WORDING.before_question}Where?"
    )
    assert (chat["path"], chat["authorization"]) == ("chat/completions", "Bearer secret")
    assert set(chat) == {"model", "max_tokens", "temperature", "stream", "stream_options", "path", "authorization"}
    assert text["prompt"] == message["content"] + WORDING.after_question
    assert (text["path"], text["model"]) == ("completions", "peer-model")


def test_sums_of_a_step() -> None:
    """Percentiles are over the answered, throughput over first arrival to last answer, the hit rate over tokens."""
    samples = [
        sample(
            ttft_s,
            due_s=1.0 + place,
            end_s=2.0 + place,
            prompt_tokens=100,
            cached_tokens=50 * place,
            completion_tokens=8,
            quality=0.5 * place,
        )
        for place, ttft_s in enumerate((0.1, 0.5, 0.2))
    ]
    samples += [sample(None, due_s=9.0, end_s=90.0, outcome=outcome) for outcome in ("rejected", "failed", "failed")]
    step = step_of("blend", 2.0, samples, evictions=7)
    assert (step.requests, step.answered, step.rejected, step.failed) == (6, 3, 1, 2)
    assert step.ttft_median_s == 0.2
    assert step.ttft_p99_s == pytest.approx(0.2 + 0.98 * 0.3)
    assert step.throughput_rps == pytest.approx(3 / (4.0 - 1.0))
    assert step.tokens_per_s == pytest.approx(24 / 3.0)
    assert step.hit_rate == pytest.approx(150 / 300)
    assert (step.quality, step.evictions) == (0.5, 7)
    assert step.latest_send_s == pytest.approx(0.01)
    none = step_of("blend", 2.0, [sample(None, outcome="failed")])
    assert (none.ttft_median_s, none.ttft_p99_s, none.throughput_rps, none.hit_rate, none.quality) == (
        None,
        None,
        0.0,
        None,
        None,
    )


def test_each_rate_has_its_own_requests() -> None:
    """Warm-up and rates never share a request; what the set sets apart warms up, and too few are refused."""
    requests = [LoadRequest(EXAMPLE, str(number), ("x",), 1) for number in range(9)]
    coming = iter(requests)
    warm_up, by_rate = split_requests(coming, 1, 2, 3)
    assert [request.question for group in (warm_up, *by_rate) for request in group] == list("0123456")
    assert list(coming) == requests[7:]
    apart = [LoadRequest(EXAMPLE, "apart", ("x",), 1, is_warm_up=True)] * 2
    warm_up, by_rate = split_requests([*apart, *requests], 5, 2, 3)
    assert warm_up == apart
    assert [request.question for group in by_rate for request in group] == list("012345")
    with pytest.raises(InputError, match="need 10"):
        split_requests(requests, 1, 2, 5)


def test_requests_have_the_documents_text(fusor: Fusor) -> None:
    """The world's chunks arrive as they were written, those of an article as one document."""
    (request, *_) = load_requests(SOURCE, fusor.tokenizer, None)
    (case, *_) = SOURCE.requests(fusor.tokenizer, None)
    articles: dict[str, str] = {}
    for id_, passage in zip(case.prompt.document_ids, case.example.passages, strict=True):
        articles[id_] = articles.get(id_, "") + passage.text
    assert request.documents == tuple(text.strip() for text in articles.values())
    assert len(articles) < len(case.prompt.chunks)
    assert request.chunk_tokens == max(map(len, case.prompt.chunks))
    assert request.question == case.example.question


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"rates_rps": ()}, "rates"),
        ({"rates_rps": (0.0,)}, "above 0"),
        ({"rates_rps": (1.0, 1.0)}, "once"),
        ({"requests": 0}, "requests"),
        ({"timeout_s": 0.0}, "timeout_s"),
    ],
)
def test_bad_configs(change: dict[str, Any], named: str) -> None:
    """A value that is not allowed is refused by name."""
    with pytest.raises(ConfigError, match=named):
        LoadConfig(**{"source": SOURCE, "rates_rps": (1.0,), **change})
