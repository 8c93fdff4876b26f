"""A command line on a tiny model, and documents for it."""

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_line import CommandLine
from engines import DOCUMENTS
from fakes import FakeEmbedder

from cacheblend.retriever import DEFAULT_EMBEDDER


@pytest.fixture(autouse=True)
def own_signals() -> Iterator[None]:
    """The handler of SIGTERM that `serve` sets is removed after the test."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CommandLine:
    fake = FakeEmbedder(name=DEFAULT_EMBEDDER)
    monkeypatch.setattr("cacheblend.retriever.retriever.SentenceTransformerEmbedder", lambda _: fake)
    return CommandLine(capsys, model_dir, tmp_path / "store")


@pytest.fixture
def passages(tmp_path: Path) -> Path:
    """Three documents in a file."""
    path = tmp_path / "passages.jsonl"
    lines = [
        json.dumps(DOCUMENTS[0]),
        "",
        *(json.dumps({key: one[key] for key in ("title", "text")}) for one in DOCUMENTS[1:3]),
    ]
    path.write_text("\n".join(lines), encoding="utf-8")
    return path
