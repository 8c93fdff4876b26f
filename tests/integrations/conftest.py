"""A tiny engine for tests of what is built on it."""

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "service"))

CHUNK_TOKENS = 100  # a document's, which has the characters of a passage


@pytest.fixture(scope="session")
def handbook_store(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A tiny model, and a store folder with documents, to be copied."""
    from engines import DOCUMENTS, make_model
    from fakes import FakeEmbedder

    from cacheblend.retriever import RetrieverConfig
    from cacheblend.service import Engine, EngineConfig

    model, store = tmp_path_factory.mktemp("chat_model"), tmp_path_factory.mktemp("chat_store") / "store"
    make_model(model, positions=1024)
    config = EngineConfig(model=str(model), store_dir=store, retriever=RetrieverConfig(chunk_tokens=CHUNK_TOKENS))
    with Engine(config, embedder=FakeEmbedder()) as engine:
        engine.ingest([{**document, "text": str(document["text"])[:200]} for document in DOCUMENTS])
    return model, store


@pytest.fixture
def engine(handbook_store: tuple[Path, Path], tmp_path: Path) -> Iterator[object]:
    """An engine with documents, whose ratio is fixed."""
    from fakes import FakeEmbedder

    from cacheblend.base.options import from_options
    from cacheblend.service import Engine, EngineConfig

    model, store = handbook_store
    shutil.copytree(store, tmp_path / "store")
    given = {
        "model": str(model),
        "store_dir": tmp_path / "store",
        "chunk_tokens": CHUNK_TOKENS,
        "recompute_ratio": 0.15,
        "max_tokens": 6,
    }
    with Engine(from_options(EngineConfig, given), embedder=FakeEmbedder()) as opened:
        yield opened
