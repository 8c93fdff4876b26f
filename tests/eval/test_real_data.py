"""The real data sets, where they are at hand: every line is read, and every method runs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from fakes import FakeEmbedder

from cacheblend.blend import Fusor
from cacheblend.eval.data import DATA_SETS, PRESETS, FileSource, read_examples
from cacheblend.eval.method_plan import METHODS
from cacheblend.eval.run.folder import EvalConfig, RunFolder
from cacheblend.eval.run.runner import evaluate

DATA = Path(os.environ.get("CACHEBLEND_DATA", Path(__file__).parents[3] / "shared" / "data"))


def need(name: str) -> Path:
    path = DATA / DATA_SETS[name].file
    if not path.exists():
        pytest.skip(f"no {path.name} in {DATA} (set CACHEBLEND_DATA)")
    return path


@pytest.mark.parametrize("name", sorted(DATA_SETS))
def test_every_line_is_an_example(name: str) -> None:
    """Each file is read to its end, ids are unique, and there are as many cases as the set says, or half of them."""
    examples = list(read_examples(need(name)))
    assert len({example.id for example in examples}) == len(examples)
    assert DATA_SETS[name].cases / 2 <= len(examples) <= DATA_SETS[name].cases


@pytest.mark.parametrize(("name", "preset"), [("musique", "paper"), ("2wikimqa", "paper"), ("squad_shared", "extended")])
def test_every_method_runs(
    name: str, preset: str, fusor: Fusor, model_dir: Path, embedder: FakeEmbedder, tmp_path: Path
) -> None:
    """Cases longer than the model are cut, and every method leaves its tokens and times in the rows."""
    need(name)
    source = FileSource(name=name, data=str(DATA), cases=1 if preset == "paper" else 7, preset=PRESETS[preset])
    config = EvalConfig(source=source, model=str(model_dir), methods=METHODS, max_new_tokens=2)
    summary = evaluate(config, tmp_path / "run", fusor=fusor, embedder=embedder)
    rows = RunFolder(tmp_path / "run").rows()
    assert summary["cases"] == len(rows) == (1 if preset == "paper" else 6)
    for row in rows:
        assert row["prompt_tokens"] + 2 <= 1536
        assert set(row["methods"]) == set(METHODS)
        assert all(result["ttft_s"] > 0 and result["recomputed_tokens"] > 0 for result in row["methods"].values())
