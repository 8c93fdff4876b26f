"""`cacheblend ingest --vllm`: files become documents of a running vLLM, by the connector's route; vLLM itself is not needed."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn
from make_random_model import ModelShape, python_help, train_tokenizer
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from cacheblend.blend import ChunkContext
from cacheblend.cli import main as cli
from cacheblend.integrations.vllm.config import ConnectorConfig
from cacheblend.integrations.vllm.router import BlendRoutes, PromptMarker, WindowPrecomputes

pytest.importorskip("pathspec", reason="pathspec is not installed; the extra [rag] brings it")

KEY = "a key of vLLM"
RULES = " ".join(f"Rule {number}: trains to town {number} are booked by the office." for number in range(12))


class RunningVllm:
    """A server with the connector's routes, whose engine computes nothing and knows what it was given.

    Attributes:
        url: its address.
        stored: token ids of the chunks.
        broken: whether the engine fails.
    """

    def __init__(self, store_dir: Path) -> None:
        self.url, self.stored, self.broken = "", set[tuple[int, ...]](), False
        tokenizer = train_tokenizer(python_help()[:20], ModelShape(vocab=400, max_positions=2048))
        routes = BlendRoutes()
        routes._marker = PromptMarker(tokenizer, ConnectorConfig(store_dir=str(store_dir), chunk_tokens=64), 2048)
        self.routes = routes
        routes._engine = SimpleNamespace(collective_rpc=self._collective_rpc)
        self.app = Starlette()
        self.app.add_middleware(_KeyCheck)
        routes.attach_router(self.app)

    async def _collective_rpc(self, _: str, args: Any) -> list[int]:
        if self.broken:
            raise RuntimeError("planted")
        (chunks,), which, _salt = args
        new = {tuple(chunks[index]) for index in which} - self.stored
        self.stored |= new
        return [[len(new), 0]]


class _KeyCheck:
    """As vLLM's `--api-key` does."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and Request(scope).headers.get("authorization") != f"Bearer {KEY}":
            refused: Response = JSONResponse({"error": "Unauthorized"}, 401)
            return await refused(scope, receive, send)
        return await self._app(scope, receive, send)


@pytest.fixture
def vllm(tmp_path: Path) -> Iterator[RunningVllm]:
    """The server, until the test ends."""
    running = RunningVllm(tmp_path / "store")
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as listener:
        process = uvicorn.Server(uvicorn.Config(running.app, log_config=None, ws="none", lifespan="off"))
        thread = threading.Thread(target=process.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            while not process.started:
                time.sleep(0.001)
            running.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            yield running
        finally:
            process.should_exit = True
            thread.join()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two documents, one of several chunks, and a file that cannot be read as its kind."""
    files = tmp_path / "handbook"
    files.mkdir()
    (files / "travel.md").write_text(RULES, encoding="utf-8")
    (files / "lunch.txt").write_text("Lunch is at noon, and free on Fridays.", encoding="utf-8")
    (files / "broken.jsonl").write_text("{not json", encoding="utf-8")
    return files


def ingest(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        cli.main(["ingest", *arguments])
    captured = capsys.readouterr()
    return int(ended.value.code or 0), captured.out, captured.err


def test_files_are_stored_by_the_running_engine(
    vllm: RunningVllm, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder's documents are posted one by one; a file that cannot be used is named; a second run computes nothing."""
    monkeypatch.setenv("CACHEBLEND_VLLM_API_KEY", KEY)
    code, out, err = ingest(capsys, str(folder), "--vllm", f"{vllm.url}/v1", "--json")
    report = json.loads(out)
    assert code == 1
    assert "broken.jsonl" in err
    assert [Path(name).name for name in report["faults"]] == ["broken.jsonl"]
    assert (report["documents"], report["computed"], report["already_stored"]) == (2, len(vllm.stored), 0)
    assert report["chunks"] > 2
    (folder / "broken.jsonl").unlink()
    code, out, _ = ingest(capsys, str(folder), "--vllm", vllm.url)
    assert code == 0
    assert f"KV of 0 computed, {report['chunks']} stored before" in out


def test_a_document_that_is_refused_is_named(
    vllm: RunningVllm, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What vLLM refuses of one document is told with its id, and the others are stored."""
    lines = [{"id": "bad", "title": "Travel", "text": RULES}, {"id": "good", "title": "", "text": RULES}]
    path = tmp_path / "documents.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    own = PromptMarker.split

    def refuse(self: PromptMarker, document: Any) -> Any:
        return own(self, {**document, "text": ""} if document["title"] else document)

    monkeypatch.setattr(PromptMarker, "split", refuse)
    code, out, err = ingest(capsys, str(path), "--vllm", vllm.url, "--vllm-api-key", KEY, "--json")
    assert code == 1
    assert list(json.loads(out)["faults"]) == ["bad"]
    assert json.loads(out)["documents"] == 1
    assert "bad: " in err


def test_a_document_that_the_model_has_no_room_for_is_named(
    vllm: RunningVllm, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A document with a chunk beyond the model's positions is listed as refused, and the others are stored."""
    (folder / "broken.jsonl").unlink()
    vllm.routes._precomputes = WindowPrecomputes((), ChunkContext(), 50)
    code, out, _ = ingest(capsys, str(folder), "--vllm", vllm.url, "--vllm-api-key", KEY, "--json")
    report = json.loads(out)
    assert (code, report["documents"], report["computed"]) == (1, 1, 1)
    ((name, why),) = report["faults"].items()
    assert ("travel.md" in name, "50 positions" in why) == (True, True)


def test_what_is_wrong_with_the_server_is_said(vllm: RunningVllm, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A wrong key, no such route, a failing engine and nobody there are one line each, with what to do."""
    (folder / "broken.jsonl").unlink()
    code, _, err = ingest(capsys, str(folder), "--vllm", vllm.url)
    assert (code, "give --vllm-api-key" in err) == (2, True)
    code, _, err = ingest(capsys, str(folder), "--vllm", f"{vllm.url}/other", "--vllm-api-key", KEY)
    assert (code, "VLLM_PLUGINS=cacheblend" in err) == (1, True)
    vllm.broken = True
    code, _, err = ingest(capsys, str(folder), "--vllm", vllm.url, "--vllm-api-key", KEY)
    assert (code, "answers 500" in err) == (1, True)
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        port = nobody.getsockname()[1]
    code, _, err = ingest(capsys, str(folder), "--vllm", f"http://127.0.0.1:{port}")
    assert (code, "does not answer" in err) == (1, True)
    code, _, err = ingest(capsys, str(folder), "--vllm", "localhost:8000")
    assert (code, "http://localhost:8000" in err) == (2, True)
    code, _, err = ingest(capsys, str(folder), "--vllm", vllm.url, "--watch")
    assert (code, "--watch" in err) == (2, True)
    code, _, err = ingest(capsys, str(folder))
    assert (code, "give --model" in err) == (2, True)
