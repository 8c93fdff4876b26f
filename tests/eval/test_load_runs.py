"""Load: whole runs over our own service and a peer, interrupted ones too, and what the command refuses."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from peers import SOURCE, USAGE, WORDING, peer, piece, refuse, sse

from cacheblend.base.errors import ServiceError
from cacheblend.blend import FusionConfig, Fusor
from cacheblend.cli import main as cli
from cacheblend.eval.load.own_server import own_server
from cacheblend.eval.load.report import load_report
from cacheblend.eval.load.sweep import LoadConfig, run_load
from cacheblend.eval.load.target import load_requests, peer_target, split_requests
from cacheblend.retriever import RetrieverConfig
from cacheblend.service import Engine, EngineConfig
from cacheblend.service.http.config import HttpConfig
from cacheblend.service.http.server import Server

sys.path.insert(0, str(Path(__file__).parents[1] / "service"))
from api import listening


@pytest.fixture
def own_interrupts() -> Iterator[None]:
    """Python's own handler of Ctrl-C, whatever a test before this one has put in its place."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("own_interrupts")
def test_an_interrupt_leaves_a_partial_report(tmp_path: Path, fusor: Fusor) -> None:
    """Ctrl-C in the middle of a rate ends the run; what has ended is in rows, summary and report."""

    def answer(number: int, _: object) -> Any:
        if number == 5:
            os.kill(os.getpid(), signal.SIGINT)
        return sse(piece("a", "stop"), USAGE)

    config = LoadConfig(source=SOURCE, rates_rps=(50.0, 1.0), requests=3, warm_up=2)
    with peer(answer) as address:
        targets = [peer_target("peer", address, WORDING)]
        warm_up, by_rate = split_requests(load_requests(SOURCE, fusor.tokenizer, None), 2, 2, 3)
        summary = run_load(config, targets, warm_up, by_rate, tmp_path / "run")
    assert summary["interrupted"]
    first = summary["steps"][0]
    assert (first["rate_rps"], first["answered"]) == (50.0, 3)
    assert "Interrupted" in load_report(summary)
    assert json.loads((tmp_path / "run" / "summary.json").read_text()) == summary


def test_a_run_over_methods_and_a_peer(
    tmp_path: Path, model_dir: Path, fusor: Fusor, embedder: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command asks our service by each method and a peer, at each rate, and tells one object; no key is written down."""
    config = EngineConfig(
        model=str(model_dir),
        store_dir=tmp_path / "store",
        retriever=RetrieverConfig(chunk_tokens=512),
        fusion=FusionConfig(recompute_ratio=0.15),
    )
    options = "--rates 20,60 --requests 3 --warm-up 1 --max-tokens 3 --peer-api-key secret --json"
    methods = "full_recompute,prefix_cache,blend"
    with (
        Engine(config, fusor=fusor, embedder=embedder) as engine,
        Server(config, http=HttpConfig(served_model_name="m"), engine=engine) as server,
        listening(server) as address,
        peer(lambda *_: sse(piece("a"), piece("b", "stop"), USAGE)) as other,
    ):
        servers = ["--address", address, "--peer", f"vllm={other}/v1"]
        files = ["--model", str(model_dir), "--out", str(tmp_path / "run")]
        with pytest.raises(SystemExit) as left:
            cli.main(["eval", "load", *files, *servers, "--methods", methods, *options.split()])
    said = capsys.readouterr()
    assert not left.value.code, said.err
    summary = json.loads(said.out)
    assert not summary["interrupted"]
    wanted = [(label, rate) for rate in (20.0, 60.0) for label in ("full_recompute", "prefix_cache", "blend", "vllm")]
    assert [(step["target"], step["rate_rps"]) for step in summary["steps"]] == wanted
    assert all(step["answered"] == 3 and step["failed"] == 0 for step in summary["steps"])
    hit_rate = {step["target"]: step["hit_rate"] for step in summary["steps"]}
    assert hit_rate["full_recompute"] == 0
    assert hit_rate["blend"] > 0.7
    assert hit_rate["vllm"] == 0.75
    assert all((step["evictions"] is None) == (step["target"] == "vllm") for step in summary["steps"])
    assert all(0 <= step["quality"] <= 1 for step in summary["steps"])
    assert {row["ttft_median_s"] for row in summary["equal_ttft"]}
    rows = [json.loads(line) for line in (tmp_path / "run" / "rows.jsonl").read_text().splitlines()]
    assert len(rows) == 4 * 2 * 3
    ids = [{row["id"] for row in rows if row["target"] == label} for label in ("blend", "vllm")]
    assert ids[0] == ids[1]
    assert "secret" not in (tmp_path / "run" / "setup.json").read_text()
    with pytest.raises(SystemExit) as left:
        cli.main(["eval", "report", str(tmp_path / "run")])
    assert not left.value.code
    assert capsys.readouterr().out == load_report(summary)
    assert "| blend |" in load_report(summary)


def test_usage_errors(tmp_path: Path, model_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is wrong is said in one line with the remedy, and no folder is made."""
    common = ["eval", "load", "--model", str(model_dir), "--out", str(tmp_path / "run"), "--requests", "1", "--warm-up", "0"]
    with peer(lambda *_: refuse(500)) as address:
        for arguments, code, says in (
            (["--rates", "x"], 2, "separated by commas"),
            (["--peer", "somewhere"], 2, "NAME=URL"),
            (["--methods", ""], 2, "--peer"),
            (["--address", address], 2, "is no CacheBlend service"),
            (["--data-set", "trivia"], 2, "one of world"),
            (["--cases", "0"], 2, "cases"),
            (["--cases", "0", "--data-set", "musique", "--preset", "paper"], 2, "cases"),
            (["--model", "./no/model"], 2, "no model at"),
            (["--methods", "", "--peer", f"a={address}", "--warm-up", "1", "--out", str(tmp_path / "other")], 1, "warm-up"),
        ):
            with pytest.raises(SystemExit) as left:
                cli.main([*common, *arguments])
            said = capsys.readouterr()
            assert (left.value.code, said.out) == (code, ""), said.err
            assert says in said.err
    assert not (tmp_path / "run").exists()


def test_a_service_that_does_not_start() -> None:
    """Where the service that is started ends at once, its own words are told."""
    with pytest.raises(ServiceError, match=r"is not a model directory"), own_server(["--model", "./no/model"]):
        pass
