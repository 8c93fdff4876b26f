"""The offline job: documents are streamed, cut off and gone on with."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from collections.abc import Iterator
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest
import torch
from engines import CHUNK_TOKENS, DOCUMENTS, QUESTION, TOP_K, OpenEngine, head_of, key_of
from fakes import FakeEmbedder
from prompts import assert_same_kv

from cacheblend.base.errors import InputError
from cacheblend.base.threads import Progress
from cacheblend.blend import precompute
from cacheblend.blend.decoder import Decoder
from cacheblend.cli.terminal import IngestProgress
from cacheblend.retriever import RetrieverConfig
from cacheblend.service import Engine, EngineConfig
from cacheblend.service.engine.document_sources import DocumentStream, StreamSize

MANY = [{"id": name, "title": name, "text": text[:300]} for name, text in sorted(topics.items())[:20]]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "documents.jsonl"
    path.write_text("".join(json.dumps(document) + "\n" for document in MANY), encoding="utf-8")
    return path


def test_stream(open_engine: OpenEngine) -> None:
    """A stream is read no further than a batch ahead, and its report is that of all batches together."""
    engine = open_engine()
    given: list[str] = []
    ahead: list[int] = []
    steps: list[tuple[int, int]] = []

    def documents() -> Iterator[dict[str, object]]:
        for document in MANY:
            given.append(str(document["id"]))
            yield document

    class Steps(Progress):
        def note(self, stage: str, done: int, total: int) -> None:
            steps.append((self.documents, self.tokens))
            ahead.append(len(given) - self.documents)

        def note_batch(self) -> None:
            steps.append((self.documents, self.tokens))

    report = engine.ingest_stream(documents(), Steps(), batch_documents=3)
    chunks = engine.retriever.chunks()
    assert (report.documents, report.added) == (len(MANY), len(MANY))
    assert (report.computed, report.evicted) == (engine.store.stats().nvme.entries, 0)
    assert report.chunks >= report.computed
    assert report.tokens <= sum(len(chunk.token_ids) for chunk in chunks)
    assert max(ahead) == 3
    assert steps[-1] == (len(MANY), report.tokens)
    assert all(one <= other for one, other in pairwise(steps))
    again = engine.ingest_stream(MANY, batch_documents=3)
    assert (again.unchanged, again.computed, again.already_stored) == (len(MANY), 0, again.chunks)


def test_stream_is_the_same_as_one_ingest(open_engine: OpenEngine, tmp_path: Path) -> None:
    """Documents that were streamed are stored and found as if they had been ingested at once."""
    one, other = open_engine(), open_engine(store_dir=tmp_path / "other")
    one.ingest_stream(DOCUMENTS)
    other.ingest(DOCUMENTS)
    assert one.retriever.chunks() == other.retriever.chunks()
    assert {entry.key for entry in one.store.ls()} == {entry.key for entry in other.store.ls()}
    assert one.answer(QUESTION, num_chunks=TOP_K).token_ids == other.answer(QUESTION, num_chunks=TOP_K).token_ids


def test_bad_document_in_a_stream(open_engine: OpenEngine) -> None:
    """A bad document, and a second one of an id, are named; the batches before them are kept."""
    engine = open_engine()
    with pytest.raises(InputError, match="two documents have the id"):
        engine.ingest_stream([*MANY, {**MANY[0], "text": "other words"}], batch_documents=3)
    kept = [document.id for document in engine.retriever.documents()]
    assert kept == [document["id"] for document in MANY[:18]]
    with pytest.raises(InputError, match="'none' has no \"text\""):
        engine.ingest_stream([*MANY, {"id": "none"}])


def test_empty_stream(open_engine: OpenEngine) -> None:
    """A stream without documents is no error."""
    report = open_engine().ingest_stream([])
    assert (report.documents, report.computed) == (0, 0)
    assert report.seconds > 0


def test_evictions_of_a_stream(open_engine: OpenEngine, caplog: pytest.LogCaptureFixture) -> None:
    """A budget below the corpus is told once, with what did not stay."""
    engine = open_engine(nvme_budget_bytes=300_000, ram_budget_bytes=1)
    report = engine.ingest_stream(MANY, batch_documents=3)
    assert report.computed - report.evicted == engine.store.stats().nvme.entries > 0
    assert caplog.text.count("did not stay within nvme_budget_bytes=300000") == 1


def test_without_document_context(open_engine: OpenEngine) -> None:
    """Without it, chunks are computed after the head alone; with it, so are the first ones, and the others are not."""
    engine = open_engine(context_document_tokens=0)
    other = open_engine(store_dir=Path(engine.config.store_dir).parent / "with context")
    engine.ingest(DOCUMENTS)
    other.ingest(DOCUMENTS)
    for chunk in engine.retriever.chunks():
        kv = engine.store.get(key_of(engine, chunk))
        assert kv is not None
        assert kv.context == ""
        assert_same_kv(kv, engine.fusor.precompute(chunk.token_ids, head_of(engine)))
        twin = other.store.get(key_of(other, chunk))
        assert twin is not None
        if chunk.position:
            assert key_of(other, chunk) not in engine.store
            assert not torch.allclose(twin.layers[-1][1], kv.layers[-1][1], rtol=0, atol=1e-3)
        else:
            assert key_of(other, chunk) == key_of(engine, chunk)
            assert_same_kv(twin, kv)


def die_while_ingesting(model: str, store_dir: Path, passes: int) -> None:
    """Ingest, and be killed when so many passes through the model are done."""
    precompute.PASS_TOKENS = 100
    left = iter(range(passes))
    run_isolated = Decoder.run_isolated

    def deadly(decoder: Decoder, *arguments: Any) -> object:
        if next(left, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)
        return run_isolated(decoder, *arguments)

    Decoder.run_isolated = deadly  # type: ignore[assignment,method-assign]  # the same, deadly
    config = EngineConfig(model=model, store_dir=store_dir, retriever=RetrieverConfig(chunk_tokens=CHUNK_TOKENS))
    with Engine(config, embedder=FakeEmbedder()) as engine:
        engine.ingest_stream(MANY, batch_documents=3)


def test_killed_and_gone_on_with(open_engine: OpenEngine, model_dir: Path, tmp_path: Path) -> None:
    """An ingest that was killed goes on: what is durable is not computed again, and in the end nothing is missing."""
    process = multiprocessing.get_context("spawn").Process(
        target=die_while_ingesting, args=(str(model_dir), tmp_path / "store", 10)
    )
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    engine = open_engine()
    stored = engine.store.stats().nvme.entries
    assert engine.store.verify().ok
    report = engine.ingest_stream(MANY, batch_documents=3)
    entries = engine.store.stats().nvme.entries
    assert 0 < stored < entries
    assert (report.computed, report.documents) == (entries - stored, len(MANY))
    assert entries == len({key_of(engine, chunk) for chunk in engine.retriever.chunks()})


def test_size_of_a_stream(file: Path, tmp_path: Path) -> None:
    """Files are counted and checked before anything is done; standard input cannot be; nothing at all is an error."""
    stream = DocumentStream([str(file)])
    size = stream.measure()
    documents = list(stream)
    assert size == StreamSize(len(documents), sum(len(document.text) for document in documents))
    assert stream.characters == size.characters
    assert DocumentStream(["-"]).measure() is None
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    with pytest.raises(InputError, match="no documents"):
        DocumentStream([str(empty)]).measure()
    file.write_text(file.read_text() + '{"id": "bad"}\n')
    with pytest.raises(InputError, match=f"line {len(MANY) + 1}"):
        stream.measure()


def show(progress: IngestProgress, documents: int, tokens: int) -> None:
    progress.documents, progress.tokens = documents, tokens
    progress.note_batch()


def test_progress(file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Speed and time left are those of the documents that were computed, not of those that were skipped."""
    now = 100.0
    monkeypatch.setattr("cacheblend.cli.terminal.time.monotonic", lambda: now)
    stream = DocumentStream([str(file)])
    with IngestProgress(stream, StreamSize(20, 4000)) as progress:
        stream.characters = 1000
        show(progress, 5, 0)
        now = 110.0
        stream.characters = 2000
        show(progress, 9, 5000)
        assert progress.line() == "9 of 20 documents, 5,000 tokens, 500 tokens/s, 0:00:20 left"
        show(progress, 10, 6000)
    assert capsys.readouterr().err == "9 of 20 documents, 5,000 tokens, 500 tokens/s, 0:00:20 left\n"
    with IngestProgress(stream, StreamSize(1, 4000)) as progress:
        stream.characters = 4000  # one long document, read at once
        show(progress, 0, 0)
        now += 20
        progress.check()
        now += 20
        progress.note_windows(16, 300)
        assert capsys.readouterr().err == (
            "0 of 1 documents, 0 tokens, splitting 4,000 characters\n0 of 1 documents, 0 tokens, embedding 16 of 300 windows\n"
        )
        show(progress, 0, 0)
        progress.tokens = 100
        progress.note("precompute", 1, 10)
        now += 10
        assert progress.line() == "0 of 1 documents, 100 tokens, 10 tokens/s, 0:01:30 left"
    with IngestProgress(None, StreamSize(20, 4000)) as progress:
        show(progress, 5, 900)  # of documents that others read
        now += 10
        assert progress.line() == "5 of 20 documents, 900 tokens, 90 tokens/s, 0:00:30 left"
    with IngestProgress(stream, None) as progress:
        assert progress.line() == "0 documents, 0 tokens"
        progress.documents, progress.tokens = 1, 70
        now += 10
        assert progress.line() == "1 documents, 70 tokens, 7 tokens/s"


def test_progress_of_one_long_text(file: Path, monkeypatch: pytest.MonkeyPatch, open_engine: OpenEngine) -> None:
    """At three quarters of one text of few characters a token, a third of the time so far is left."""
    now = 100.0
    monkeypatch.setattr("cacheblend.cli.terminal.time.monotonic", lambda: now)
    text = "".join(chr(33 + number * number % 89) for number in range(2000))
    file.write_text(json.dumps({"id": "1", "text": text}) + "\n")
    stream, lines = DocumentStream([str(file)]), list[str]()

    class Slow(IngestProgress):
        def note(self, stage: str, done: int, total: int) -> None:
            nonlocal now
            now += 10 if stage == "precompute" else 0
            super().note(stage, done, total)
            if stage == "precompute":
                lines.append(self.line())

    with open_engine() as engine, Slow(stream, StreamSize(1, len(text))) as progress:
        report = engine.ingest_stream(stream, progress)
    assert report.tokens * 2 > len(text)
    assert report.computed >= 16
    at = report.computed * 3 // 4
    left_s = round(10 * at * (report.computed - at) / at)
    assert lines[at - 1].endswith(f", {timedelta(seconds=left_s)} left")
