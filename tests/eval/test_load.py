"""Load: arrivals, what a client sees of a stream, the sums of a rate, and runs over our own service and a peer."""

import asyncio
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from api import listening
from example_files import case, write
from fakes import FakeEmbedder
from fastapi import Response
from peers import REQUEST, USAGE, peer, piece, refuse, sse

from cacheblend.blend import FusionConfig, Fusor
from cacheblend.eval.load import PERCENTILES, Sample, Target, ask, peer_target, poisson_arrivals, summarize_rate
from cacheblend.retriever import RetrieverConfig
from cacheblend.service import Engine, EngineConfig
from cacheblend.service.http.config import HttpConfig
from cacheblend.service.http.server import Server


def asked(address: str, *due_s: float) -> list[Sample]:
    """What becomes of requests to a peer that are due at these seconds."""
    target = peer_target("peer", address)

    async def send() -> list[Sample]:
        async with httpx.AsyncClient(timeout=60) as client:
            started = time.perf_counter()
            return await asyncio.gather(*(ask(client, target, REQUEST, 4, started, at) for at in due_s or (0.0,)))

    return asyncio.run(send())


def test_poisson_arrivals() -> None:
    """Arrivals begin at 0, are the seed's, scatter as a Poisson process's, and stretch with the rate."""
    moments = poisson_arrivals(4.0, 4000, seed=1)
    gaps = np.diff(moments)
    assert (len(moments), moments[0]) == (4000, 0.0)
    assert gaps.mean() == pytest.approx(0.25, rel=0.05)
    assert gaps.std() == pytest.approx(0.25, rel=0.05)
    assert moments == poisson_arrivals(4.0, 4000, seed=1) != poisson_arrivals(4.0, 4000, seed=2)
    assert [2 * moment for moment in moments] == pytest.approx(poisson_arrivals(2.0, 4000, seed=1))


def test_ttft_is_the_first_text() -> None:
    """An empty first piece, which only names a role, is no text; a request is sent when due, though another one waits."""
    others_asked = threading.Event()
    slow = sse(piece(""), others_asked, piece("a"), 0.3, piece("b", "stop"), USAGE, "[DONE]")

    def answer(number: int) -> Response:
        if number == 2:
            others_asked.set()
        return sse(piece("a", "stop")) if number else slow

    with peer(answer) as address:
        first, *others = asked(address, 0.0, 0.4, 0.5)
    assert (first.error, first.usage) == ("", USAGE["usage"])
    assert first.ttft_s is not None
    assert others_asked.is_set()
    assert 0.5 <= first.ttft_s < first.end_s  # not before the last one was due
    assert all(one.error == "" and one.due_s < one.end_s for one in others)


@pytest.mark.parametrize(
    ("answer", "named"),
    [
        (lambda _: refuse(429), "429"),
        (lambda _: refuse(503), "503"),
        (lambda _: sse(piece("a"), {"error": {"message": "gone"}}), "gone"),
        (lambda _: sse(piece("a")), "ended before"),
        (lambda _: sse("{"), "JSON"),
        (lambda _: sse({"choices": 3}), "TypeError"),
        (lambda _: sse(piece(None, "stop")), ""),
        (lambda _: sse(json.dumps(piece("a\u2028b\x85", "stop"), ensure_ascii=False)), ""),
    ],
    ids=["full", "broken", "error in the stream", "cut off", "no JSON", "odd JSON", "an empty answer", "other line ends"],
)
def test_what_a_server_may_do(answer: Any, named: str) -> None:
    """Whatever comes back is counted, and raises nothing."""
    with peer(answer) as address:
        (seen,) = asked(address)
    assert named in seen.error
    assert (seen.ttft_s is None) == bool(named)


def test_what_servers_are_asked() -> None:
    """Another server is sent one text and OpenAI's own fields; our service documents, question and method."""
    other = Target(label="x", address="http://a", model="m", api_key="secret")
    body = other.body(REQUEST, 4)
    assert body["messages"][0]["content"] == "Here is a place.\n\nThere is another.\n\nWhere?"
    assert set(body) == {"model", "messages", "max_tokens", "temperature", "stream", "stream_options"}
    assert other.headers == {"Authorization": "Bearer secret"}
    own = Target(label="x", address="http://a", model="m", method="blend").body(REQUEST, 4)
    assert own["messages"][0]["content"] == "Where?"
    assert (own["method"], own["documents"]) == ("blend", [{"text": text} for text in REQUEST.documents])


def test_sums_of_a_rate() -> None:
    """Percentiles are over the answered, throughput over first arrival to last answer, the cached share over tokens."""
    usage = {"prompt_tokens": 100, "prompt_tokens_details": {"cached_tokens": 40}}
    samples = [
        Sample(due_s=at, end_s=at + 1.0, ttft_s=ttft_s, usage=usage) for at, ttft_s in ((0.0, 0.1), (1.0, 0.5), (2.0, 0.2))
    ]
    step = summarize_rate("blend", 2.0, [*samples, Sample(due_s=9.0, end_s=90.0, error="503")])
    assert (step["requests"], step["answered"], step["first_error"]) == (4, 3, "503")
    assert step["ttft_s_p50"] == 0.2
    assert step["ttft_s_p99"] == pytest.approx(0.2 + 0.98 * 0.3)
    assert step["throughput_rps"] == pytest.approx(3 / 3.0)
    assert step["cached_share"] == pytest.approx(0.4)
    none = summarize_rate("blend", 2.0, [Sample(due_s=0.0, error="503")])
    assert [none[f"ttft_s_p{percentile}"] for percentile in PERCENTILES] == [None] * 3
    assert (none["throughput_rps"], none["cached_share"]) == (0.0, None)


Run = Callable[..., tuple[int, str, str]]


def test_a_run_over_methods_and_a_peer(
    tmp_path: Path, model_dir: Path, fusor: Fusor, embedder: FakeEmbedder, cacheblend: Run
) -> None:
    """The command asks our service by each method and a peer, at each rate, draws it, and prints one object."""
    write(tmp_path, "musique", [case(index) for index in range(6)])
    config = EngineConfig(
        model=str(model_dir),
        store_dir=tmp_path / "store",
        retriever=RetrieverConfig(chunk_tokens=512),
        fusion=FusionConfig(recompute_ratio=0.15),
    )
    with (
        Engine(config, fusor=fusor, embedder=embedder) as engine,
        Server(config, http=HttpConfig(served_model_name="m"), engine=engine) as server,
        listening(server) as address,
        peer(lambda _: sse(piece("a"), piece("b", "stop"), USAGE)) as other,
    ):
        servers = ("--address", address, "--peer", f"other={other}/v1", "--methods", "full_recompute,blend")
        few = ("--rates", "20,60", "--cases", 6, "--max-tokens", 3, "--figure", tmp_path / "load.png", "--json")
        code, out, err = cacheblend("eval", "load", "musique", "--data", tmp_path, *servers, *few)
    assert code == 0, err
    steps = json.loads(out)["steps"]
    assert [(step["target"], step["rate_rps"]) for step in steps] == [
        (label, rate) for label in ("full_recompute", "blend", "other") for rate in (20.0, 60.0)
    ]
    assert all(step["answered"] == step["requests"] == 3 for step in steps), steps
    drawn = [line.split(",")[1:3] for line in (tmp_path / "load.csv").read_text().splitlines()[1:]]
    assert drawn == [[step["target"], str(step["rate_rps"])] for step in steps]
    assert (tmp_path / "load.png").read_bytes().startswith(b"\x89PNG")
    cached = {step["target"]: step["cached_share"] for step in steps}
    assert cached["full_recompute"] == 0
    assert cached["blend"] > 0.5
    assert cached["other"] == 0.75


def test_usage_errors(tmp_path: Path, cacheblend: Run) -> None:
    """What is wrong is said in one line with the remedy."""
    write(tmp_path, "musique", [case(0)])
    with peer(lambda _: refuse(500)) as address:
        for arguments, says in (
            (("musique", "--data", tmp_path), "--peer"),
            (("musique", "--data", tmp_path, "--peer", "somewhere"), "NAME=URL"),
            (("musique", "--data", tmp_path, "--address", address), "is no CacheBlend service"),
            (("musique", "--data", tmp_path, "--peer", f"a={address}", "--rates", "x"), "separated by commas"),
            (("musique", "--data", tmp_path, "--peer", f"a={address}", "--rates", "1,2"), "cases"),
            (("musique", "--data", tmp_path, "--peer", f"a={address}", "--rates", "0"), "above 0"),
            (("musique", "--data", tmp_path, "--peer", f"a={address}", "--figure", "load.svg"), ".png"),
            (("musique", "--data", tmp_path, "--peer", "a=http://127.0.0.1:9"), "/v1/models"),
        ):
            code, out, err = cacheblend("eval", "load", *arguments)
            assert (code, out) == (2, ""), err
            assert says in err
        code, out, err = cacheblend("eval", "load", "musique", "--data", tmp_path, "--peer", f"a={address}", "--rates", "1")
        assert (code, "throughput_rps" in out, "at 1 a second: ValueError: 500" in err) == (1, True, True), (out, err)
