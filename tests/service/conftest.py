"""`from engines import ...` for the service's tests, a tiny fusor made once, and engines in the test's folder."""

import shutil
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from engines import CHUNK_TOKENS, DOCUMENTS, OpenEngine, make_model
from fakes import FakeEmbedder
from waiting import loading, wait_until

from cacheblend.base.options import from_options
from cacheblend.base.threads import Progress
from cacheblend.blend import Fusor
from cacheblend.retriever import RetrieverConfig
from cacheblend.service import Engine, EngineConfig
from cacheblend.service.engine.background_precompute import Foreground


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    make_model(directory)
    return directory


@pytest.fixture(scope="session")
def fusor(model_dir: Path) -> Fusor:
    return Fusor.from_pretrained(str(model_dir))


@pytest.fixture
def open_engine(model_dir: Path, fusor: Fusor, tmp_path: Path) -> Iterator[OpenEngine]:
    """Opens an engine in the test's folder; keywords go to `EngineConfig`. Closes what the test leaves open.

    The ratio is fixed, since the controller would choose by how fast the machine happens to be.
    """
    with ExitStack() as stack:

        def open_one(
            *,
            fusor: Fusor = fusor,
            embedder: FakeEmbedder | None = None,
            rewriting: Progress | None = None,
            foreground: Foreground | None = None,
            **options: object,
        ) -> Engine:
            settings = {
                "model": str(model_dir),
                "store_dir": tmp_path / "store",
                "chunk_tokens": CHUNK_TOKENS,
                "recompute_ratio": 0.15,
                "max_tokens": 6,
            }
            config = from_options(EngineConfig, {**settings, **options})
            embedder = embedder or FakeEmbedder()
            engine = Engine(config, fusor=fusor, embedder=embedder, rewriting=rewriting, foreground=foreground)
            stack.callback(engine.close)
            return engine

        yield open_one


@pytest.fixture(scope="session")
def ingested(model_dir: Path, fusor: Fusor, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store folder that holds the documents, to be copied."""
    folder = tmp_path_factory.mktemp("ingested") / "store"
    config = EngineConfig(model=str(model_dir), store_dir=folder, retriever=RetrieverConfig(chunk_tokens=CHUNK_TOKENS))
    with Engine(config, fusor=fusor, embedder=FakeEmbedder()) as engine:
        engine.ingest(DOCUMENTS)
    return folder


@pytest.fixture
def open_ingested(ingested: Path, open_engine: OpenEngine, tmp_path: Path) -> OpenEngine:
    """`open_engine` on a folder that holds the documents."""
    shutil.copytree(ingested, tmp_path / "store")
    return open_engine


@pytest.fixture
def engine(open_ingested: OpenEngine) -> Engine:
    """An engine that has ingested the documents; its KV is read from NVMe first."""
    return open_ingested()


@pytest.fixture(autouse=True)
def _no_loader_stays() -> Iterator[None]:
    yield
    wait_until(lambda: not loading())
