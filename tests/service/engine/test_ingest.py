"""Ingests, at once and as streams: what they count, store and leave after an error, a kill or a full disk."""

import multiprocessing
import os
import signal
from collections.abc import Iterator
from itertools import islice, pairwise
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest
from engines import CHUNK_TOKENS, DOCUMENTS, POSITIONS, QUESTION, TOP_K, OpenEngine, head_of, key_of
from fakes import FakeEmbedder

from cacheblend.base.errors import InputError, PromptTooLongError, StoreFullError
from cacheblend.base.threads import Progress
from cacheblend.blend import precompute
from cacheblend.blend.decoder import Decoder
from cacheblend.cli.terminal import IngestProgress
from cacheblend.retriever import Document, RetrieverConfig
from cacheblend.service import Engine, EngineConfig
from cacheblend.service.engine.document_sources import StreamSize
from cacheblend.store import ChunkKV
from cacheblend.store.catalog import DocumentTable

MANY = [{"id": name, "title": name, "text": text[:300]} for name, text in sorted(topics.items())[:20]]


def stored(engine: Engine) -> int:
    return engine.store.stats().nvme.entries


def test_report(open_engine: OpenEngine) -> None:
    """An ingest counts documents, chunks and tokens, and every chunk's KV is durable when it returns."""
    engine = open_engine()
    report = engine.ingest(DOCUMENTS)
    chunks = engine.retriever.chunks()
    assert len(chunks) > 3 * len(DOCUMENTS)
    assert (report.documents, report.added, report.replaced, report.unchanged) == (len(DOCUMENTS), len(DOCUMENTS), 0, 0)
    assert (report.chunks, report.computed, report.already_stored) == (len(chunks), len(chunks), 0)
    assert report.tokens == sum(len(chunk.token_ids) for chunk in chunks)
    assert report.seconds > 0
    assert report.as_dict()["tokens"] == report.tokens
    assert (stored(engine), engine.store.stats().pending_writes) == (len(chunks), 0)
    for chunk in chunks:
        kv = engine.store.get(key_of(engine, chunk))
        assert kv is not None
        assert (kv.token_ids, kv.prefix_ids) == (chunk.token_ids, head_of(engine))


def test_again(open_engine: OpenEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was ingested is not computed again, by the same engine or by the next on the same folder."""
    first = open_engine()
    chunks = first.ingest(DOCUMENTS).chunks
    monkeypatch.setattr(first.fusor.decoder, "run_isolated", None)
    again = first.ingest(DOCUMENTS)
    assert (again.added, again.unchanged, again.computed, again.already_stored) == (0, len(DOCUMENTS), 0, chunks)
    assert again.tokens == 0
    first.close()
    monkeypatch.undo()
    assert open_engine().ingest(DOCUMENTS).already_stored == chunks


@pytest.mark.parametrize(
    ("interruption", "call", "documents"),
    [
        (MemoryError, "ingest_stream", 0),
        (MemoryError, "ingest", 0),
        (KeyboardInterrupt, "ingest", 0),
        (KeyboardInterrupt, "ingest_stream", 1),
    ],
)
def test_interrupted(
    open_engine: OpenEngine, monkeypatch: pytest.MonkeyPatch, interruption: type[BaseException], call: str, documents: int
) -> None:
    """An error or a stop keeps no KV of no document; a cut, as of the first case, does: the next ingest finds and owns it."""
    engine = open_engine()
    first = len(engine.retriever.splitter.split(Document.of(DOCUMENTS[0])))
    precompute_documents, done = engine.fusor.precompute_documents, first + 2

    def interrupted(*arguments: Any, **options: Any) -> Iterator[ChunkKV]:
        yield from islice(precompute_documents(*arguments, **options), done)
        raise interruption

    monkeypatch.setattr(engine.fusor, "precompute_documents", interrupted)
    if is_cut := (interruption, call) == (MemoryError, "ingest_stream"):
        monkeypatch.setattr(DocumentTable, "drop_unowned", lambda *_: None)
    with pytest.raises(interruption):
        getattr(engine, call)(DOCUMENTS)
    monkeypatch.undo()
    engine.close()
    engine = open_engine()
    done = done if is_cut else first * documents
    unowned = 0 if documents else done
    assert (stored(engine), engine.retriever.count(), engine.store.verify().unowned) == (done, documents, unowned)
    report = engine.ingest(DOCUMENTS)
    assert (report.added, report.already_stored) == (len(DOCUMENTS) - documents, done)
    assert report.computed == report.chunks - done
    assert engine.store.verify().unowned == 0
    assert engine.answer(QUESTION, num_chunks=TOP_K).plan.hits == TOP_K


def test_stages(open_engine: OpenEngine) -> None:
    """Progress is told for the index by documents, then for the KV by chunks, each up to its total."""
    steps: list[tuple[str, int, int]] = []
    report = open_engine().ingest(DOCUMENTS, Progress(lambda *step: steps.append(step)))
    count = len(DOCUMENTS)
    assert steps[:count] == [("index", done, count) for done in range(1, count + 1)]
    assert steps[count:] == [("precompute", done, report.computed) for done in range(1, report.computed + 1)]


@pytest.mark.parametrize(
    ("documents", "message"),
    [
        ([], "no documents"),
        ([*DOCUMENTS, {"id": "empty", "text": "  "}], "'empty' has an empty text"),
        ([*DOCUMENTS, {"id": "for", "text": "other words"}], "two documents have the id 'for'"),
    ],
)
def test_bad_documents(open_engine: OpenEngine, documents: list[dict[str, object]], message: str) -> None:
    """A document that cannot be used is named, and nothing of the ingest is kept."""
    engine = open_engine()
    with pytest.raises(InputError, match=message):
        engine.ingest(documents)
    assert (engine.retriever.documents(), stored(engine)) == ([], 0)


def test_chunks_longer_than_the_model(open_engine: OpenEngine) -> None:
    """Chunks that the model cannot read are refused before anything is indexed; short documents are not."""
    engine = open_engine(chunk_tokens=2 * POSITIONS)
    long = {"id": "long", "text": "word " * POSITIONS}
    with pytest.raises(PromptTooLongError, match=rf"'long'.*{POSITIONS} positions.*lower chunk_tokens"):
        engine.ingest([*DOCUMENTS, long])
    assert (engine.retriever.documents(), stored(engine)) == ([], 0)
    assert engine.ingest(DOCUMENTS).computed == len(DOCUMENTS)


def test_full_disk(open_engine: OpenEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk is an error that says so; with room again, the next ingest completes what was left."""

    def no_room(*_: object) -> None:
        raise OSError(28, "No space left on device")

    engine = open_engine()
    monkeypatch.setattr("cacheblend.store.entry_file._write", no_room)
    with pytest.raises(StoreFullError):
        engine.ingest(DOCUMENTS)
    monkeypatch.undo()
    assert engine.documents.page()[0] == []
    report = engine.ingest(DOCUMENTS)
    assert (report.added, report.computed) == (len(DOCUMENTS), report.chunks)
    assert engine.answer(QUESTION, num_chunks=TOP_K).plan.hits == TOP_K


@pytest.mark.parametrize(("budget", "says"), [(1000, "nvme_budget_bytes=1000"), (300_000, "not fit the store's byte budget")])
def test_documents_beyond_the_budget_leave_nothing(open_engine: OpenEngine, budget: int, says: str) -> None:
    """Documents of which one chunk's KV, or all at once, does not fit are an error, and neither texts nor KV stay."""
    engine = open_engine(nvme_budget_bytes=budget, ram_budget_bytes=1)
    with pytest.raises(StoreFullError, match=says):
        engine.ingest(DOCUMENTS)
    assert (engine.documents.page()[0], stored(engine)) == ([], 0)


def test_index_budget(open_engine: OpenEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts beyond the index's budget are refused before they are computed, and nothing of them stays."""
    engine = open_engine(index_budget_bytes=100_000)
    engine.ingest(DOCUMENTS[:1])
    before = engine.documents.page()[0], stored(engine)
    big = {"id": "big", "text": "many words " * 10_000}
    with monkeypatch.context() as patch:
        patch.setattr(engine.retriever.embedder, "encode", None)
        with pytest.raises(StoreFullError, match="index_budget_bytes=100000; delete documents"):
            engine.ingest([big])
    with pytest.raises(StoreFullError, match="index_budget_bytes=100000"):  # with vectors and token ids it is too much
        engine.ingest([{"id": "half", "text": str(big["text"])[:40_000]}])
    assert (engine.documents.page()[0], stored(engine)) == before
    engine.ingest([{"id": "small", "text": "few words"}])
    engine.close()
    assert open_engine(index_budget_bytes=1).ingest(DOCUMENTS[:1]).unchanged == 1, "writes nothing"


def test_budget_below_the_corpus(open_engine: OpenEngine, caplog: pytest.LogCaptureFixture) -> None:
    """What does not fit is evicted, which a stream reports once and logs; questions over it are answered."""
    engine = open_engine(nvme_budget_bytes=300_000, ram_budget_bytes=1)
    report = engine.ingest_stream(DOCUMENTS)
    assert caplog.text.count("exceeded nvme_budget_bytes=300000") == 1
    assert report.computed == report.chunks > stored(engine) > 0
    assert report.evicted == report.chunks - stored(engine)
    answer = engine.answer(QUESTION, num_chunks=12)
    assert answer.plan.hits + answer.plan.misses == 12
    assert answer.plan.misses > 0


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


def test_bad_documents_in_a_stream(open_engine: OpenEngine) -> None:
    """A bad document, and a second one of an id, are named; the batches before them are kept."""
    engine = open_engine()
    assert engine.ingest_stream([]).documents == 0
    with pytest.raises(InputError, match="two documents have the id"):
        engine.ingest_stream([*MANY, {**MANY[0], "text": "other words"}], batch_documents=3)
    kept = [document.id for document in engine.retriever.documents()]
    assert kept == [document["id"] for document in MANY[:18]]
    with pytest.raises(InputError, match="'none' has no \"text\""):
        engine.ingest_stream([*MANY, {"id": "none"}])


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


def show(progress: IngestProgress, documents: int, tokens: int) -> None:
    progress.documents, progress.tokens = documents, tokens
    progress.note_batch()


def test_progress(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Speed and time left are those of the documents that were computed, not of those that were skipped."""
    now = 100.0
    monkeypatch.setattr("cacheblend.cli.terminal.time.monotonic", lambda: now)
    with IngestProgress(StreamSize(20, 4000)) as progress:
        show(progress, 5, 0)
        now = 110.0
        show(progress, 10, 5000)
        assert progress.line() == "10 of 20 documents, 5,000 tokens, 500 tokens/s, 0:00:20 left"
        show(progress, 10, 6000)
    assert capsys.readouterr().err == "10 of 20 documents, 5,000 tokens, 500 tokens/s, 0:00:20 left\n"
    with IngestProgress(StreamSize(1, 4000)) as progress:  # one long document
        now += 20
        progress.note_windows(16, 300)
        now += 20
        progress.check()
        stage = "0 of 1 documents, 0 tokens, embed 16 of 300\n"
        assert capsys.readouterr().err == stage * 2
        progress.tokens = 100
        now += 10
        progress.note("precompute", 1, 10)
        assert progress.line() == "0 of 1 documents, 100 tokens, 10 tokens/s, precompute 1 of 10"
    with IngestProgress(None) as progress:
        assert progress.line() == "0 documents, 0 tokens"
        progress.documents, progress.tokens = 1, 70
        now += 10
        assert progress.line() == "1 documents, 70 tokens, 7 tokens/s"
