"""`cacheblend reindex` and `Engine.reindex`: another model, or another embedder, for the same documents."""

from pathlib import Path

import pytest
from command_line import CommandLine
from engines import DOCUMENTS, QUESTION, OpenEngine, make_model
from fakes import FakeEmbedder
from remote_servers import needs

from cacheblend.base.errors import PromptTooLongError, RetrieverError, ServiceError
from cacheblend.base.threads import Progress
from cacheblend.blend import Fusor
from cacheblend.cli.store import open_store


@pytest.fixture(scope="module")
def other_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("other")
    make_model(directory, vocab=500)
    return directory


@pytest.fixture(scope="module")
def other(other_dir: Path) -> Fusor:
    """A model with another tokenizer."""
    return Fusor.from_pretrained(str(other_dir))


def test_a_change_of_model(
    run: CommandLine, passages: Path, other_dir: Path, other: Fusor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other model is refused by name with the remedy, which gives it the very chunks, and leaves no KV of the old one."""
    on_store = ("--store-dir", str(run.store))
    assert "holds no index" in run("reindex", "--model", "x", *on_store).err
    run.on_store("ingest", str(passages))
    before = run("documents", "show", "for", *on_store, "--json").json["texts"]
    with monkeypatch.context() as patch:
        patch.setattr(Fusor, "from_pretrained", lambda *_, **__: pytest.fail("weights were loaded"))
        for command in (["ask", "for?"], ["ingest", str(passages)]):
            refused = run(*command, *on_store, "--model", str(other_dir))
            assert f"for {run.model}, not for {other_dir}; name that one, or have `cacheblend reindex --model" in refused.err
    done = run("reindex", "--model", str(other_dir), *on_store, "--json").json
    assert (done["documents"], done["computed"]) == (3, done["chunks"])
    with open_store(run.store) as store:
        assert {entry.key.model for entry in store.ls()} == {other.fingerprint}
    after = run("documents", "show", "for", *on_store, "--json").json["texts"]
    assert before != after, "its tokens"
    assert [one["text"] for one in before] == [one["text"] for one in after]  # type: ignore[attr-defined]
    assert run("ask", "for?", *on_store, "--max-tokens", "2").code == 0, "the store's model is the new one"
    assert run("store", "verify", *on_store).code == 0


def test_an_interrupted_reindex_goes_on(open_engine: OpenEngine, other: Fusor) -> None:
    """KV that a reindex had computed is not computed again; an engine that was open before refuses the index from then on."""
    old = open_engine()
    old.ingest(DOCUMENTS)
    new, progress = open_engine(fusor=other, rewriting=Progress()), Progress()
    with pytest.raises(RetrieverError, match="cacheblend reindex"):
        old.search(QUESTION, 3)
    few = DOCUMENTS[:2]
    new.ingest(few)
    with pytest.raises(ServiceError):
        new.reindex(Progress(check=lambda: (_ for _ in ()).throw(ServiceError("enough"))))
    report = new.reindex(progress)
    stored = sum(len(set(new.retriever.chunks(str(one["id"])))) for one in few)
    assert (report.already_stored, report.computed) == (stored, report.chunks - stored)
    assert progress.documents == report.documents == len(DOCUMENTS)
    assert new.answer(QUESTION, num_chunks=3).plan.hits == 3
    assert new.reindex().computed == 0


def test_another_embedder(open_engine: OpenEngine) -> None:
    """All is embedded anew, with vectors of another length too, and KV stays."""
    first = open_engine()
    first.ingest(DOCUMENTS)
    first.close()
    wide = FakeEmbedder("wide", dimensions=32)
    with pytest.raises(RetrieverError, match=r"'fake', and this run has 'wide'.*cacheblend reindex"):
        open_engine(embedder=wide)
    again = open_engine(embedder=wide, rewriting=Progress())
    assert again.reindex().computed == 0
    assert {one.chunk.document_id for one in again.search("class", 3)} >= {"class"}


def test_another_codec(open_engine: OpenEngine) -> None:
    """KV of another codec goes, too."""
    open_engine().ingest(DOCUMENTS)
    engine = open_engine(kv_cache_dtype="int8")
    assert engine.reindex().computed == len(engine.store.ls())
    assert {entry.key.codec for entry in engine.store.ls()} == {"int8"}


def test_the_remote_tier_keeps_others(open_engine: OpenEngine, other: Fusor, tmp_path: Path) -> None:
    """The old model's KV in the remote tier may be another store's, and stays."""
    needs("obstore", "objects")
    shared = {"remote": f"file://{tmp_path}/shared"}
    old = open_engine(store_dir=tmp_path / "one", **shared)
    old.ingest(DOCUMENTS)
    keys = [entry.key for entry in old.store.ls()]
    old.close()
    new = open_engine(store_dir=tmp_path / "one", fusor=other, rewriting=Progress(), **shared)
    new.reindex()
    assert new.store.flush_remote(60)
    assert not any(key in new.store for key in keys)
    assert all(new.store.find(keys))


def test_a_refused_model_leaves_the_index(open_engine: OpenEngine, tmp_path: Path) -> None:
    """Of a model with too few positions for a chunk nothing is changed."""
    open_engine(chunk_tokens=100).ingest(DOCUMENTS)
    make_model(tmp_path / "small", positions=64, vocab=500)
    with pytest.raises(PromptTooLongError, match="64 positions"):
        open_engine(fusor=Fusor.from_pretrained(str(tmp_path / "small")), rewriting=Progress(), chunk_tokens=100)
    assert open_engine(chunk_tokens=100).answer(QUESTION, num_chunks=3).plan.hits == 3
