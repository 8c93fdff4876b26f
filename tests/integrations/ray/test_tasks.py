"""Tasks of an ingest on Ray: files that are listed, batches that are read of them, and KV that the remote tier must have.

Ray itself is not needed.
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from engines import CHUNK_TOKENS, make_model
from fakes import FakeEmbedder
from remote_servers import needs

from cacheblend.base.errors import ConfigError, InputError, MissingExtraError, RemoteError
from cacheblend.base.threads import Progress
from cacheblend.cli.main import app
from cacheblend.integrations.ray import RayConfig
from cacheblend.integrations.ray.tasks import ReadBatch, file_groups, list_files, read_batches, share
from cacheblend.retriever import Document, RetrieverConfig
from cacheblend.service import Engine, EngineConfig
from cacheblend.service.engine.document_sources import DocumentStream
from cacheblend.service.engine.ingest import DocumentEncoder, EncodedBatch
from cacheblend.store import ChunkKey, KVStore, StoreConfig, remote

DOCUMENTS = [Document(id=f"d{number}", title="", text=f"words of {number} that are many and more") for number in range(3)]
PAUSES_S = (0.0, 0.0, 0.0)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """A folder with lines, texts, a hidden file, a file that cannot be used, and one that is no text."""
    folder = tmp_path / "corpus"
    (folder / "sub").mkdir(parents=True)
    lines = [json.dumps({"id": f"line-{number}", "text": f"words of line {number}"}) for number in range(7)]
    (folder / "lines.jsonl").write_text("\n".join(lines))
    for number in range(3):
        (folder / "sub" / f"{number}.txt").write_text(f"words of text {number}")
    (folder / ".hidden.txt").write_text("hidden")
    (folder / "bad.jsonl").write_text('{"id": "good", "text": "first"}\n{"id": "bad"}\n')
    (folder / "empty.txt").write_text(" ")
    (folder / "noise.bin").write_bytes(b"\0\1\2")
    return folder


def read(folder: Path, batch_documents: int) -> list[ReadBatch]:
    files = list_files([str(folder)], {})
    return [batch for group in file_groups(files, batch_documents) for batch in read_batches(group, batch_documents)]


@pytest.mark.parametrize("batch_documents", [1, 2, 64])
def test_batches_are_the_stream_s_documents(corpus: Path, batch_documents: int) -> None:
    """The batches hold the documents of the local ingest, and name the same files that gave none."""
    stream = DocumentStream([str(corpus)])
    expected = list(stream)
    found = read(corpus, batch_documents)
    documents = [document for batch in found for document in batch.documents]
    assert sorted(documents, key=lambda one: one.id) == sorted(expected, key=lambda one: one.id)
    assert all(len(batch.documents) <= batch_documents for batch in found)
    faults = {name: why for batch in found for name, why in batch.faults.items()}
    skipped = {name: why for batch in found for name, why in batch.skipped.items()}
    assert faults == stream.report.faults
    assert skipped == {name: why for name, why in stream.report.skipped.items() if "hidden" not in name}


def test_small_files_fill_a_batch(corpus: Path) -> None:
    """Small files are read together, so that an actor gets more than one document at once."""
    files = list_files([str(corpus / "sub")], {})
    assert [len(group) for group in file_groups(files, 2)] == [2, 1]
    assert [[document.id for document in batch.documents] for batch in read(corpus / "sub", 64)] == [
        ["0.txt", "1.txt", "2.txt"]
    ]


def test_two_texts_of_one_id(tmp_path: Path) -> None:
    """Of two texts of one id in the files that are read together the first is taken, and the second is named."""
    path = tmp_path / "two.jsonl"
    path.write_text('{"id": "one", "text": "a"}\n{"id": "one", "text": "b"}\n{"id": "two", "text": "c"}\n')
    documents, faults = read(path, 64)
    assert [(one.id, one.text) for one in documents.documents] == [("one", "a"), ("two", "c")]
    assert list(faults.faults) == [f"{path}: one"]


@pytest.mark.parametrize("source", ["-", "https://example.org/a.html", "s3://bucket/corpus", "missing"])
def test_sources_that_no_other_process_reads(source: str) -> None:
    """Standard input, URLs and what does not exist are refused before anything is started."""
    with pytest.raises(InputError, match=source):
        list_files([source], {})


@pytest.mark.parametrize(
    "values",
    [{"ray": " "}, {"ray_actors": 0}, {"ray_cpus": 0}, {"ray_gpus": -1}, {"ray_gpus": 1.5}, {"ray_batch_documents": 0}],
)
def test_settings_that_are_not_allowed(values: dict[str, object]) -> None:
    """A setting that cannot be is refused by its name."""
    with pytest.raises(ConfigError, match=next(iter(values))):
        RayConfig(**values)  # type: ignore[arg-type]  # the wrong values are the test


def test_ray_is_not_installed(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without Ray the command says what to install, before anything is made; and it follows no folder on Ray."""
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "cacheblend.integrations.ray.ingest", raising=False)
    store = corpus.parent / "store"
    command = ["ingest", str(corpus), "--model", "none", "--store-dir", str(store), "--ray", "local"]
    with pytest.raises(MissingExtraError, match=r"pip install '\.\[ray\]'"):
        app(command, standalone_mode=False)
    with pytest.raises(InputError, match="--watch cannot be given with --ray"):
        app([*command, "--watch"], standalone_mode=False)
    assert not store.exists()


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """An engine whose remote tier takes little on the way."""
    needs("obstore", "objects")
    make_model(tmp_path / "model")
    monkeypatch.setattr(remote, "MAX_CHANGES", 1)
    store = StoreConfig(remote=f"file://{tmp_path}/shared")
    config = EngineConfig(
        model=str(tmp_path / "model"),
        store_dir=tmp_path / "store",
        store=store,
        retriever=RetrieverConfig(chunk_tokens=CHUNK_TOKENS),
    )
    with Engine(config, embedder=FakeEmbedder()) as engine:
        yield engine


@pytest.fixture
def encoder(engine: Engine) -> DocumentEncoder:
    return DocumentEncoder(engine._encoder, engine.retriever, engine.store, fetches=False)


@pytest.fixture
def batch(encoder: DocumentEncoder) -> EncodedBatch:
    """Documents whose KV is computed, and in the remote tier in part."""
    encoded = encoder.split(DOCUMENTS, DOCUMENTS, Progress())
    encoder.compute(encoded, encoded.distinct_keys, Progress())
    return encoded


def missing(engine: Engine, batch: EncodedBatch, tmp_path: Path) -> int:
    """Number of a batch's entries that the remote tier lacks."""
    with KVStore(replace(engine.store.config, directory=tmp_path / "looks")) as looks:
        return looks.find(batch.distinct_keys).count(False)


def test_evicted_chunks_are_computed_again(
    engine: Engine, encoder: DocumentEncoder, batch: EncodedBatch, tmp_path: Path
) -> None:
    """A chunk that neither the disk nor the remote tier has is in the remote tier at the end, and its tokens are counted."""
    engine.store.flush_remote(10)
    engine.store.delete(batch.distinct_keys[0])
    engine.store.flush_remote(10)
    tokens, computed = batch.tokens, len(batch.computed)
    assert missing(engine, batch, tmp_path)
    share(engine.store, encoder, batch)
    assert missing(engine, batch, tmp_path) == 0
    assert batch.tokens > tokens
    assert len(batch.computed) == computed


def test_a_remote_that_is_away(
    engine: Engine, encoder: DocumentEncoder, batch: EncodedBatch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A remote tier that refuses some calls, as a server that restarts does, ends no ingest; after the last pause its error
    is raised: no document is committed whose KV is nowhere.
    """
    own, refusals = engine.store.share, [True] * 7

    def refuse(keys: list[ChunkKey]) -> list[ChunkKey]:
        if refusals and refusals.pop():
            raise RemoteError("away for a moment")
        return own(keys)

    monkeypatch.setattr(engine.store, "share", refuse)
    with pytest.raises(RemoteError, match="away for a moment"):
        share(engine.store, encoder, batch, PAUSES_S)
    assert len(refusals) == 3
    share(engine.store, encoder, batch, PAUSES_S)
    assert missing(engine, batch, tmp_path) == 0
