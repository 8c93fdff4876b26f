"""The recall of the ways to search, and the answers from what was found."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import measure_retrieval
import pytest
from fakes import FakeEmbedder

from cacheblend.base.errors import InputError

sys.path.insert(0, str(Path(__file__).parents[1] / "service"))
from engines import make_model


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of three cases, and no embedding model."""
    monkeypatch.setattr(measure_retrieval, "SentenceTransformerEmbedder", FakeEmbedder)
    shared = [{"title": "Shared", "text": f"Every town has {count} mayors and a river. " * 20} for count in range(3)]
    cases = [
        {
            "id": f"case-{index}",
            "question": f"Where does person {index} live?",
            "answers": [f"town {index}"],
            "passages": [{"title": f"Title {index}", "text": f"Person {index} lives in town {index}. " * 20}, shared[index]],
            "task": "qa",
        }
        for index in range(3)
    ]
    (tmp_path / "cases.jsonl").write_text("".join(json.dumps(case) + "\n" for case in cases))
    return tmp_path / "cases.jsonl"


@pytest.fixture(scope="module", autouse=True)
def _own_model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A tiny random model is the default one."""
    folder = tmp_path_factory.mktemp("model")
    make_model(folder, positions=4096)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure_retrieval, "DEFAULT_MODEL", str(folder))
        yield


def figures(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    measure_retrieval.main([*arguments, "--json"])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_recall(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With as many chunks as there are, every gold passage is found; split ones of a title are one document."""
    found = figures(capsys, str(data), "--num-chunks", "6", "--way", "hybrid")
    assert (found["passages"], found["documents"], found["questions"]) == (6, 6, 3)
    assert found["hybrid"] == {"recall": 1.0, "answer": 1.0, "all": 1.0}
    split = figures(capsys, str(data), "--num-chunks", "1", "--chunk-tokens", "4", "--way", "hybrid")
    assert (split["passages"], split["documents"]) == (6, 4)
    assert split["hybrid"]["answer"] < 1  # a chunk without the answer is none that holds it


def test_answers_go_on(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Both methods answer from stored chunks, and a run that was cut off goes on after its last whole case."""
    arguments = [str(data), "--answers", "--num-chunks", "2", "--chunk-tokens", "64", "--way", "hybrid", "--ratio", "0.2"]
    arguments += ["--out", str(tmp_path / "rows")]
    whole = figures(capsys, *arguments)
    rows = [json.loads(line) for line in (tmp_path / "rows").read_text().splitlines()[1:]]
    assert [row["id"] for row in rows] == ["case-0", "case-1", "case-2"]
    assert all(row["answers"]["blend"]["hits"] == 2 for row in rows)
    full, blended = (whole["hybrid"][method] for method in measure_retrieval.METHODS)
    assert full["gold_nll_nats"] != blended["gold_nll_nats"]
    assert full["first_token_kl_nats"] == 0 < blended["first_token_kl_nats"]
    mean, low, high, _ = whole["hybrid"]["nll_over_full"]
    assert mean == pytest.approx(blended["gold_nll_nats"] - full["gold_nll_nats"], abs=0.002)
    assert low <= mean <= high

    lines = (tmp_path / "rows").read_text().splitlines(keepends=True)
    (tmp_path / "rows").write_text("".join(lines[:3]) + lines[3][:20])
    answered, marks = [], measure_retrieval.Answerer.marks
    monkeypatch.setattr(
        measure_retrieval.Answerer, "marks", lambda self, *case: answered.append(case[0].id) or marks(self, *case)
    )
    assert figures(capsys, *arguments) == whole
    assert answered == ["case-2"]
    with pytest.raises(InputError, match="choose another --out"):
        measure_retrieval.main([*arguments, "--num-chunks", "1"])


def test_ratio_filler_and_order(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A ratio of 1 is nearer full recompute than 0, each filler gives other KV, and another order is another prompt."""
    arguments = [str(data), "--answers", "--num-chunks", "2", "--chunk-tokens", "64", "--way", "hybrid", "--ratio", "0.2"]
    exact, reused, unfilled, last = (
        figures(capsys, *arguments, *own)["hybrid"]
        for own in (["--ratio", "1"], ["--ratio", "0"], ["--ratio", "0", "--context-filler", "none"], ["--best-last"])
    )
    kl = [one["blend"]["first_token_kl_nats"] for one in (exact, reused, unfilled)]
    assert kl[0] < kl[1] != kl[2]
    full = [one["full_recompute"]["gold_nll_nats"] for one in (exact, reused, unfilled, last)]
    assert full[0] == full[1] == full[2] != full[3]
