"""Engines of vLLM over tiny random models that have a tokenizer; skipped where vLLM cannot be imported."""

import os
import sys
from contextlib import AbstractContextManager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from vllm_engines import MakeModel, OpenServed, Served, TinyModels, open_engine

WITHOUT = "vLLM is not installed here; scripts/check_vllm.sh makes an environment with its CPU build and runs these tests"

os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "0")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if find_spec("vllm") is not None:
        return
    for item in items:
        if Path(__file__).parent in Path(item.fspath).parents and "engine" in item.path.stem:
            item.add_marker(pytest.mark.skip(reason=WITHOUT))


@pytest.fixture(scope="session")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> MakeModel:
    """Writes a tiny random model of a family; gives its folder."""
    return TinyModels(tmp_path_factory.mktemp("models"))


@pytest.fixture
def open_served(tmp_path: Path) -> OpenServed:
    """Opens an engine over a model's folder, with a store in the test's folder; see `open_engine`."""

    def open_one(folder: Path, **options: Any) -> AbstractContextManager[Served]:
        return open_engine(folder, tmp_path / "store", **options)

    return open_one
