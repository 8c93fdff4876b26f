"""Ingest on Ray: the local ingest's result from actors, and what a kill and an interrupt leave."""

import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from pydoc_data.topics import topics

import pytest

pytest.importorskip("ray", reason="ray is not installed; run `make check-ray`")

from engines import CHUNK_TOKENS, make_model
from fakes import FakeEmbedder

from cacheblend.base.errors import CacheBlendError, ConfigError, InputError
from cacheblend.base.threads import Progress
from cacheblend.integrations.ray import RayConfig, ingest
from cacheblend.integrations.ray.ingest import ingest_on_ray
from cacheblend.retriever import RetrieverConfig
from cacheblend.retriever.index import INDEX_FILE, IndexedDocuments
from cacheblend.service import Engine, EngineConfig
from cacheblend.service.engine.document_sources import DocumentStream, SourceReport
from cacheblend.store import KVStore, StoreConfig

# Ray starts processes, and warns, in ways of its own.
pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.timeout(1800)]

MANY = [{"id": name, "title": name, "text": text[:300]} for name, text in sorted(topics.items())[:40]]
ON_RAY = RayConfig(ray="local", ray_actors=2, ray_cpus=0.5, ray_batch_documents=4)
ONE_ACTOR = replace(ON_RAY, ray_actors=1)
TESTS = Path(__file__).parents[2]


def actors_below(process: int) -> list[int]:
    """Processes of actors that descend from a process."""
    parents: dict[int, int] = {}
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit():
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                if b"PrecomputeActor" in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
        except (OSError, ValueError):  # it has ended
            continue

    def descends(one: int) -> bool:
        return one in parents and one > 1 and (one == process or descends(parents[one]))

    return [one for one in found if descends(one)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    make_model(directory)
    return directory


@pytest.fixture(scope="module", autouse=True)
def _cluster() -> Iterator[None]:
    """A cluster of this machine for the tests that ask for none of their own; its actors find the fake embedder."""
    import ray

    environment = {"env_vars": {"PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1"}}
    ray.init(address="local", num_cpus=2, include_dashboard=False, object_store_memory=2**28, runtime_env=environment)
    yield
    ray.shutdown()


@pytest.fixture
def configure(model: Path, tmp_path: Path) -> Callable[..., EngineConfig]:
    """Makes configurations in the test's folder."""

    def make(name: str = "store", **options: object) -> EngineConfig:
        retriever = RetrieverConfig(chunk_tokens=CHUNK_TOKENS)
        return EngineConfig(model=str(model), store_dir=tmp_path / name, retriever=retriever, **options)  # type: ignore[arg-type]

    return make


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """A folder of two files, which both have one document, and of one that cannot be used."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    for name, own in (("a", MANY[:21]), ("b", MANY[20:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in own))
    (folder / "bad.jsonl").write_text("{")
    return folder


def test_as_the_local_ingest(configure: Callable[..., EngineConfig], corpus: Path) -> None:
    """Actors leave what the local ingest leaves in index and store; a second run adds a changed document and a damaged one."""
    report, steps = SourceReport(), list[tuple[int, int]]()

    class Steps(Progress):
        def note_batch(self) -> None:
            steps.append((self.documents, self.tokens))

    config, local = configure(), configure("local")
    first = ingest_on_ray([str(corpus)], config, ON_RAY, report=report, progress=Steps(), embedder=FakeEmbedder())
    stream = DocumentStream([str(corpus)])
    with Engine(local, embedder=FakeEmbedder()) as engine:
        expected = engine.ingest_stream(stream)
        chunks = {(chunk.document_id, chunk.position): chunk for chunk in engine.retriever.chunks()}
        keys = {entry.key for entry in engine.store.ls()}
    assert report.faults.keys() == stream.report.faults.keys()
    assert (first.documents, first.added, first.unchanged) == (expected.documents, expected.added, expected.unchanged)
    assert (first.computed, first.tokens, first.evicted) == (expected.computed, expected.tokens, 0)
    assert steps[-1] == (first.documents, first.tokens)
    assert len(steps) > 5
    with Engine(config, embedder=FakeEmbedder()) as engine:
        assert {(chunk.document_id, chunk.position): chunk for chunk in engine.retriever.chunks()} == chunks
        assert {entry.key for entry in engine.store.ls()} == keys
        assert engine.store.verify().ok
        assert len(engine.answer("What does the else clause do?", method="blend", max_tokens=4).token_ids) == 4
    (corpus / "a.jsonl").write_text(json.dumps({**MANY[0], "text": "words that are quite new"}) + "\n")
    with sqlite3.connect(config.retriever_config().directory / INDEX_FILE) as catalog:  # type: ignore[operator]
        catalog.execute("UPDATE chunks SET text = 'damage' WHERE document_id = ?", (MANY[-1]["id"],))
    catalog.close()
    second = ingest_on_ray([str(corpus)], config, ON_RAY, embedder=FakeEmbedder())
    assert (second.documents, second.replaced, second.unchanged) == (len(MANY) - 20 + 1, 2, len(MANY) - 21)
    assert 0 < second.computed <= 2


def test_what_an_actor_cannot_do(configure: Callable[..., EngineConfig], model: Path, tmp_path: Path) -> None:
    """An actor's error ends the ingest with its message, and what was done before is kept."""
    path = tmp_path / "documents.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in MANY[:4]))
    small = configure("small", store=StoreConfig(nvme_budget_bytes=2000))
    with pytest.raises(CacheBlendError, match=r"an actor could not go on: .* is larger than nvme_budget_bytes=2000"):
        ingest_on_ray([str(path)], small, ONE_ACTOR, embedder=FakeEmbedder())
    broken = tmp_path / "broken"
    shutil.copytree(model, broken)
    (broken / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(CacheBlendError, match="an actor could not go on"):
        ingest_on_ray([str(path)], replace(configure(), model=str(broken)), ONE_ACTOR, embedder=FakeEmbedder())
    path.write_text("")
    with pytest.raises(InputError, match="no documents to ingest"):
        ingest_on_ray([str(path)], configure(), ONE_ACTOR, embedder=FakeEmbedder())


class DeadlyEmbedder(FakeEmbedder):
    """Ends its process, as a kernel does that is out of memory, at one text."""

    def encode(self, texts: Sequence[str]) -> object:
        if any("deadly" in text for text in texts):
            os._exit(137)
        return super().encode(texts)


def test_a_batch_that_kills_its_actors(
    configure: Callable[..., EngineConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch over which every actor dies is not tried for ever: the ingest ends with an error."""
    import ray.cloudpickle

    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # actors do not find this file
    monkeypatch.setattr(ingest, "MAX_DEATHS", 1)
    path = tmp_path / "documents.jsonl"
    path.write_text(json.dumps({**MANY[0], "text": "deadly words"}) + "\n")
    with pytest.raises(CacheBlendError, match="an actor could not go on"):
        ingest_on_ray([str(path)], configure(), ONE_ACTOR, embedder=DeadlyEmbedder())


def test_remote_tier(configure: Callable[..., EngineConfig], corpus: Path, tmp_path: Path) -> None:
    """With a remote tier the KV of every chunk is there when its document is indexed, and computed for no other store again."""
    pytest.importorskip("obstore", reason="obstore is not installed; pip install '.[objects]'")
    shared = tmp_path / "shared"
    shared.mkdir()
    store = StoreConfig(remote=f"file://{shared}", remote_timeout_s=60)  # a late answer would be a miss
    first = ingest_on_ray([str(corpus)], configure(store=store), ON_RAY, embedder=FakeEmbedder())
    with Engine(configure(), embedder=FakeEmbedder()) as engine:
        keys = [entry.key for entry in engine.store.ls()]
    with KVStore(StoreConfig(directory=tmp_path / "looks", remote=f"file://{shared}")) as looks:
        assert all(looks.find(keys))
    second = ingest_on_ray([str(corpus)], configure("other", store=store), ON_RAY, embedder=FakeEmbedder())
    assert (first.computed, second.computed, second.already_stored) == (len(keys), 0, first.chunks)


def test_interrupt(model: Path, corpus: Path, tmp_path: Path) -> None:
    """Ctrl-C ends the command with a word, and every process of its cluster; what was done is kept."""
    command = [sys.executable, "-m", "cacheblend", "ingest", str(corpus), "-m", str(model)]
    command += f"--ray local --ray-batch-documents 1 --chunk-tokens {CHUNK_TOKENS} -s {tmp_path / 'store'}".split()
    index = tmp_path / "store" / "index"

    def indexed() -> int:
        if not (index / "catalogue.sqlite").is_file():
            return 0
        with IndexedDocuments.open(index) as documents:
            return len(documents.ids())

    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as ingest:
        while indexed() < 1 and ingest.poll() is None:
            time.sleep(0.1)
        actors = actors_below(ingest.pid)
        ingest.send_signal(signal.SIGINT)
        _, said = ingest.communicate(timeout=300)  # some ten seconds where nothing else runs
    assert ingest.returncode != 0
    assert "interrupted; what was done is stored" in said
    assert "Traceback" not in said
    assert actors
    assert not [actor for actor in actors if Path(f"/proc/{actor}").exists()]
    assert 1 <= indexed() < len(MANY)


@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:1", "somewhere"])
def test_no_cluster(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An address at which nothing listens, or that is none, is refused at once, while Ray would wait for a minute."""
    import ray

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(ConfigError, match="HOST:PORT"), ingest._cluster(replace(ON_RAY, ray=address)):
        pass
