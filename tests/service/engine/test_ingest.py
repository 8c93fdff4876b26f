from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
from engines import CHUNK_TOKENS, DOCUMENTS, POSITIONS, QUESTION, TOP_K, OpenEngine, head_of, key_of

from cacheblend.base.errors import ConfigError, InputError, PromptTooLongError, StoreFullError
from cacheblend.base.threads import Progress
from cacheblend.retriever import Document
from cacheblend.service import Engine
from cacheblend.store import ChunkKV


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


def test_replaced_document(open_engine: OpenEngine) -> None:
    """A known id with another text replaces the document: only chunks not seen before are computed, and answers use them."""
    engine = open_engine()
    engine.ingest(DOCUMENTS)
    old, *_ = DOCUMENTS
    text = f"{old['text']}\nThe else clause of the zebra loop walks to the river."
    report = engine.ingest([{**old, "text": text}])
    assert (report.added, report.replaced, report.unchanged) == (0, 1, 0)
    assert 0 < report.computed < report.chunks
    new = next(chunk for chunk in engine.retriever.chunks("for") if "zebra" in chunk.text)
    answer = engine.answer(new.text, num_chunks=1)
    assert answer.chunks[0].chunk == new
    assert (answer.plan.hits, answer.plan.misses) == (1, 0)


def test_same_chunk_in_two_documents(open_engine: OpenEngine) -> None:
    """A text that stands in two documents is computed once."""
    engine = open_engine()
    report = engine.ingest([{"id": "one", "text": "the same words"}, {"id": "two", "text": "the same words"}])
    assert (report.documents, report.added, report.chunks, report.computed) == (2, 2, 1, 1)
    assert len(engine.retriever.chunks()) == 2


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, MemoryError])
def test_interrupted(open_engine: OpenEngine, monkeypatch: pytest.MonkeyPatch, interruption: type[BaseException]) -> None:
    """An ingest that is cut off changes no document, and the next one goes on from the KV that was computed."""
    engine = open_engine()
    first = len(engine.retriever.splitter.split(Document.of(DOCUMENTS[0])))
    precompute_documents, done = engine.fusor.precompute_documents, first + 2

    def interrupted(*arguments: Any, **options: Any) -> Iterator[ChunkKV]:
        yield from islice(precompute_documents(*arguments, **options), done)
        raise interruption

    monkeypatch.setattr(engine.fusor, "precompute_documents", interrupted)
    with pytest.raises(interruption):
        engine.ingest(DOCUMENTS)
    monkeypatch.undo()
    engine.close()
    engine = open_engine()
    assert (stored(engine), engine.retriever.documents()) == (done, [])
    report = engine.ingest(DOCUMENTS)
    assert (report.added, report.already_stored) == (len(DOCUMENTS), done)
    assert report.computed == report.chunks - done
    assert engine.answer(QUESTION, num_chunks=TOP_K).plan.hits == TOP_K


def test_progress(open_engine: OpenEngine) -> None:
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
        ([*DOCUMENTS, {"id": "none"}], "'none' has no \"text\""),
        ([*DOCUMENTS, {"id": 3, "text": "words"}], "id must be text"),
        ([*DOCUMENTS, {"id": "for", "text": "other words"}], "two documents have the id 'for'"),
        (["words"], "must be a dict"),
        ([*DOCUMENTS, {"id": "broken", "text": "\ud800"}], "'broken'.*Unicode"),
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
    with pytest.raises(PromptTooLongError, match=rf"'long'.*{POSITIONS} positions.*chunk_tokens={2 * POSITIONS}"):
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
    assert engine.documents.ls() == []
    report = engine.ingest(DOCUMENTS)
    assert (report.added, report.computed) == (len(DOCUMENTS), report.chunks)
    assert engine.answer(QUESTION, num_chunks=TOP_K).plan.hits == TOP_K


def test_budget_below_a_chunk(open_engine: OpenEngine) -> None:
    """A KV budget that holds no single chunk is an error that names the budget."""
    with pytest.raises(StoreFullError, match="nvme_budget_bytes=1000"):
        open_engine(nvme_budget_bytes=1000).ingest(DOCUMENTS)


def test_documents_beyond_the_budget_leave_nothing(open_engine: OpenEngine) -> None:
    """Documents whose KV does not fit at once are an error, and neither their texts nor their KV stay."""
    engine = open_engine(nvme_budget_bytes=300_000, ram_budget_bytes=1)
    with pytest.raises(StoreFullError, match="does not fit the store's byte budget"):
        engine.ingest(DOCUMENTS)
    assert (engine.documents.ls(), stored(engine)) == ([], 0)


def test_index_budget(open_engine: OpenEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts beyond the index's budget are refused before they are computed, and nothing of them stays."""
    engine = open_engine(index_budget_bytes=100_000)
    engine.ingest(DOCUMENTS[:1])
    before = engine.documents.ls(), stored(engine)
    big = {"id": "big", "text": "many words " * 10_000}
    with monkeypatch.context() as patch:
        patch.setattr(engine.retriever.embedder, "encode", None)
        with pytest.raises(StoreFullError, match="index_budget_bytes=100000; delete documents"):
            engine.ingest([big])
    with pytest.raises(StoreFullError, match="index_budget_bytes=100000"):  # with vectors and token ids it is too much
        engine.ingest([{"id": "half", "text": str(big["text"])[:40_000]}])
    assert (engine.documents.ls(), stored(engine)) == before
    engine.ingest([{"id": "small", "text": "few words"}])


def test_budget_below_the_corpus(open_engine: OpenEngine) -> None:
    """A KV budget below the corpus keeps what fits, which a stream reports; questions over the rest are answered."""
    engine = open_engine(nvme_budget_bytes=300_000, ram_budget_bytes=1)
    report = engine.ingest_stream(DOCUMENTS)
    assert report.computed == report.chunks > stored(engine) > 0
    assert report.evicted == report.chunks - stored(engine)
    answer = engine.answer(QUESTION, num_chunks=12)
    assert answer.plan.hits + answer.plan.misses == 12
    assert answer.plan.misses > 0


def test_chunking_is_fixed_for_a_folder(open_engine: OpenEngine) -> None:
    """A folder ingested with chunks of one size is not opened with another."""
    open_engine().ingest(DOCUMENTS)
    with pytest.raises(Exception, match="chunk_tokens"):
        open_engine(chunk_tokens=CHUNK_TOKENS + 1)
    with pytest.raises(ConfigError, match="chunk_tokens"):
        open_engine(chunk_tokens=0)
