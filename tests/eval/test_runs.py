"""Runs: a folder a run, whole after a kill, never overwritten, and no quality of random weights."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from example_files import case, write
from fakes import FakeEmbedder

from cacheblend.base.errors import InputError
from cacheblend.blend import Fusor
from cacheblend.eval.data import FileSource, Preset
from cacheblend.eval.run.folder import EvalConfig, RunFolder
from cacheblend.eval.run.report import report, summarize
from cacheblend.eval.run.runner import CaseRunner, evaluate

METHODS = ("full_recompute", "full_reuse", "blend")


@pytest.fixture
def config(model_dir: Path, source: FileSource) -> EvalConfig:
    return EvalConfig(source=source, model=str(model_dir), methods=METHODS, max_new_tokens=3)


def untimed(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows without times, which differ from run to run."""
    for row in rows:
        for result in row["methods"].values():
            del result["ttft_s"]
    return rows


def test_a_run_is_whole(config: EvalConfig, fusor: Fusor, embedder: FakeEmbedder, tmp_path: Path) -> None:
    """Set-up, a row a case with every method, and the summary by method and class are in the new folder."""
    seen: list[tuple[str, int, int]] = []
    summary = evaluate(config, tmp_path / "run", fusor=fusor, embedder=embedder, on_progress=lambda *step: seen.append(step))
    run = RunFolder(tmp_path / "run")
    setup, rows = run.setup(), run.rows()
    assert {"data_set": "musique", "seed": 0, "cases": 5}.items() <= setup["config"]["source"].items()
    assert setup["config"]["max_new_tokens"] == 3
    assert setup["fingerprint"] == fusor.fingerprint
    assert {"device", "threads", "commit", "versions"} <= set(setup)
    assert [row["case"] for row in rows] == list(range(5))
    assert seen[-1] == ("cases", 5, 5)
    assert json.loads((tmp_path / "run" / "summary.json").read_text()) == summary
    assert set(summary["methods"]) == set(METHODS)
    full, blend = summary["methods"]["full_recompute"], summary["methods"]["blend"]
    assert "f1_difference" not in full
    assert full["relative_kv_error"] == 0 < blend["relative_kv_error"]
    assert blend["f1_difference"]["mean"] == pytest.approx(blend["f1"] - full["f1"])
    for name, of_full in (("first_token_kl_nats", 0), ("gold_nll_over_full_nats", 0), ("equal_greedy_tokens", 1)):
        assert full[name] == pytest.approx(of_full, abs=1e-9)
        assert f"{name}_difference" not in full
        values = [row["methods"]["blend"][name] for row in rows]
        assert blend[name] == pytest.approx(sum(values) / 5)
        difference = blend[f"{name}_difference"]
        assert difference["mean"] == pytest.approx(blend[name] - of_full)
        assert difference["low"] <= difference["mean"] <= difference["high"]
    assert blend["first_token_kl_nats"] > 0
    assert full["compute_share"] == 1 > blend["compute_share"] > 0
    for row in rows:
        own, other = row["methods"]["full_recompute"], row["methods"]["blend"]
        assert other["gold_nll_over_full_nats"] == pytest.approx(other["gold_nll_nats"] - own["gold_nll_nats"])


def test_a_killed_run_goes_on(
    config: EvalConfig, fusor: Fusor, embedder: FakeEmbedder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run killed within its fourth case, its last line torn, gives the rows of one that was not; nothing is overwritten."""
    run = partial(evaluate, fusor=fusor, embedder=embedder)
    run(config, tmp_path / "unbroken")
    run_case = CaseRunner.run

    def killed(self: CaseRunner, request: Any, index: int) -> dict[str, Any]:
        if index == 3:
            raise KeyboardInterrupt
        return run_case(self, request, index)

    monkeypatch.setattr(CaseRunner, "run", killed)
    with pytest.raises(KeyboardInterrupt):
        run(config, tmp_path / "cut")
    monkeypatch.undo()
    with (tmp_path / "cut" / "rows.jsonl").open("a") as file:
        file.write('{"case": 3, "id": "2-')
    before = RunFolder(tmp_path / "cut").rows()
    assert [row["case"] for row in before] == [0, 1, 2]
    assert summarize(RunFolder(tmp_path / "cut"))["cases"] == 3
    with pytest.raises(InputError, match="exists; choose another --out"):
        run(config, tmp_path / "cut")
    with pytest.raises(InputError, match="another set-up"):
        run(replace(config, max_new_tokens=2), tmp_path / "cut", resume=True)
    with pytest.raises(InputError, match="not the folder of a run"):
        run(config, tmp_path / "nothing", resume=True)
    assert not (tmp_path / "nothing").exists()
    run(config, tmp_path / "cut", resume=True)
    after = RunFolder(tmp_path / "cut").rows()
    assert after[:3] == before
    assert untimed(after) == untimed(RunFolder(tmp_path / "unbroken").rows())


def test_random_weights_have_no_quality(
    config: EvalConfig, fusor: Fusor, embedder: FakeEmbedder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model whose configuration says that it is random gets times and tokens, and no F1 in rows, summary or report."""
    monkeypatch.setattr(fusor.model.config, "random_weights", True, raising=False)
    summary = evaluate(config, tmp_path / "run", fusor=fusor, embedder=embedder)
    assert summary["weights"] == "random"
    assert "random" in summary["quality"]
    for result in summary["methods"].values():
        assert result["f1"] is result["em"] is None
        assert "f1_difference" not in result
        assert result["gold_nll_nats"] is result["gold_nll_over_full_nats"] is None
        assert result["first_token_kl_nats"] >= 0
        assert result["ttft_s_median"] > 0
    [row, *_] = RunFolder(tmp_path / "run").rows()
    assert all(set(result["quality"].values()) == {None} for result in row["methods"].values())
    text = report([tmp_path / "run"])
    assert "f1" not in text
    assert "Quality is left out" in text


def test_long_cases_are_cut_and_counted(fusor: Fusor, embedder: FakeEmbedder, model_dir: Path, tmp_path: Path) -> None:
    """Contexts beyond the model's positions are cut, said in rows and summary, and every method runs on what is left."""
    passages = [{"title": f"Title {index}", "text": f"Town {index} has a river. " * 60} for index in range(12)]
    write(tmp_path, "musique", [case(index, passages=passages) for index in range(2)])
    source = FileSource(name="musique", data=str(tmp_path), preset=Preset(chunk_tokens=200, num_chunks=10))
    config = EvalConfig(source=source, model=str(model_dir), methods=("full_recompute", "blend"), max_new_tokens=2)
    summary = evaluate(config, tmp_path / "run", fusor=fusor, embedder=embedder)
    assert summary["cases_cut"] == 2
    for row in RunFolder(tmp_path / "run").rows():
        assert row["dropped_chunks"] > 0
        assert row["cut_tokens"] > 0
        assert row["prompt_tokens"] + 2 <= 1536


def test_reports_compare_runs(config: EvalConfig, fusor: Fusor, embedder: FakeEmbedder, tmp_path: Path) -> None:
    """A report has a table a run, and runs side by side; a broken or empty run is named."""
    evaluate(config, tmp_path / "one", fusor=fusor, embedder=embedder)
    swept = replace(config, ratios=(0.1, 0.5), max_new_tokens=2)
    evaluate(swept, tmp_path / "two", fusor=fusor, embedder=embedder)
    text = report([tmp_path / "one", tmp_path / "two"])
    assert "| blend@0.5 |" in text
    assert "| method | one: TTFT | one: quality | two: TTFT | two: quality |" in text
    assert text.count("| full_recompute |") == 3
    (tmp_path / "one" / "rows.jsonl").write_text('{"case": 0\n{"case": 1}\n')
    with pytest.raises(InputError, match="line 1 is broken"):
        report([tmp_path / "one"])
    (tmp_path / "one" / "rows.jsonl").write_text("")
    with pytest.raises(InputError, match="no complete case"):
        report([tmp_path / "one"])
