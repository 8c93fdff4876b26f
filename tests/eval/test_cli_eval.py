"""`cacheblend eval` on the command line."""

import csv
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from example_files import case, write

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(cacheblend: Run) -> Run:
    """Runs `cacheblend eval`."""
    return partial(cacheblend, "eval")


def test_a_run_prints_one_object(run: Run, model_dir: Path, tmp_path: Path) -> None:
    """`eval SET --json` prints F1, cases and TTFT by method, leaves the run below runs/, and overwrites nothing."""
    methods = "full_recompute,full_reuse,blend"
    write(tmp_path, "musique", [case(index) for index in range(3)])
    common = ("musique", "--data", tmp_path, "--model", model_dir)
    code, out, err = run(*common, "--methods", methods, "--max-tokens", 2, "--json")
    assert code == 0, err
    found = json.loads(out)
    assert set(found["methods"]) == set(methods.split(","))
    assert all(set(result) >= {"f1", "cases", "ttft_s_median"} for result in found["methods"].values())
    (folder,) = (tmp_path / "runs").iterdir()
    assert found["run"] == str(folder.relative_to(tmp_path))
    code, out, _ = run("report", folder)
    assert code == 0
    assert "| blend |" in out
    code, _, err = run(*common, "--out", folder)
    assert code == 2
    assert "--resume" in err


def test_a_data_set_runs_every_method(run: Run, model_dir: Path, tmp_path: Path) -> None:
    """A set from its file, by every method and several ratios, in both presets."""
    at_a_ratio = ("blend", "blend_hkvd", "blend_single_shot", "epic")
    every = ",".join(("full_recompute", "prefix_cache", "full_reuse", "balanced", "high", *at_a_ratio))
    write(tmp_path, "musique", [case(index) for index in range(2)])
    common = ("--data", tmp_path, "--model", model_dir, "--max-tokens", 2, "--json")
    code, out, err = run("musique", *common, "--methods", every, "--ratios", "0.1,0.3", "--out", tmp_path / "one")
    assert code == 0, err
    assert len(json.loads(out)["methods"]) == 5 + len(at_a_ratio) * 2
    write(tmp_path, "2wikimqa_shared", [case(index) for index in range(6)])
    code, out, err = run("2wikimqa_shared", *common, "--methods", "balanced", "--preset", "extended", "--out", tmp_path / "two")
    assert code == 0, err
    assert json.loads(out)["cases"] == 5  # the sixth filled the cache
    write(tmp_path, "multinews", [case(0, question="", task="summarization")])
    code, out, err = run("multinews", *common, "--out", tmp_path / "three")
    assert code == 0, err
    assert 0 <= json.loads(out)["methods"]["balanced"]["rouge_l"] <= 1
    code, _, err = run("report", tmp_path / "one", tmp_path / "three", "--figure", tmp_path / "loss.png")
    assert code == 0, err
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    header, *rows = csv.reader((tmp_path / "loss.csv").read_text().splitlines())
    assert len(rows) == 5 + len(at_a_ratio) * 2 + 4
    drawn = {row[header.index("method")]: row[header.index("first_token_kl_nats")] for row in rows}
    assert float(drawn["full_recompute"]) == 0 < float(drawn["full_reuse"])
    assert all(float(row[header.index("ttft_s")]) > 0 for row in rows)
    assert run("report", tmp_path / "one", "--figure", tmp_path / "loss.svg")[0] == 2


def test_options_shape_the_prompt(run: Run, model_dir: Path, tmp_path: Path) -> None:
    """Chunking, chunk size, number, order and prompt stand in the run's set-up; a user's documents run as a set does."""
    write(tmp_path, "musique", [case(index) for index in range(2)])
    common = ("--model", model_dir, "--max-tokens", 2, "--methods", "full_recompute,full_reuse", "--num-chunks", 2, "--json")
    options = ("--chunking", "passage", "--order", "gold-middle", "--prompt", "few-shot", "--chunk-tokens", 100)
    code, _, err = run("musique", "--data", tmp_path, *common, *options, "--out", tmp_path / "one")
    assert code == 0, err
    preset = json.loads((tmp_path / "one" / "setup.json").read_text())["config"]["source"]["preset"]
    wanted = {"chunking": "passage", "order": "gold-middle", "prompt": "few-shot", "chunk_tokens": 100, "num_chunks": 2}
    assert wanted.items() <= preset.items()
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("The desk opens at nine. " * 40)
    (tmp_path / "q.txt").write_text("When does the desk open?\n")
    arguments = ("documents", tmp_path / "notes", "--questions", tmp_path / "q.txt", *common, "--chunk-tokens", 50)
    code, out, err = run(*arguments, "--out", tmp_path / "two")
    assert code == 0, err
    found = json.loads(out)
    assert found["data_set"] == "documents"
    assert found["methods"]["full_reuse"]["f1"] is None
    assert found["methods"]["full_reuse"]["first_token_kl_nats"] > 0


def test_usage_errors_exit_with_2(run: Run, model_dir: Path, tmp_path: Path) -> None:
    """What is wrong is said in one line with the remedy, and no folder is made."""
    (tmp_path / "broken.jsonl").write_text(json.dumps(case(0)) + "\n{\n")
    for arguments, says in (
        (("trivia",), "one of musique"),
        (("musique", "--data", tmp_path, "--model", "./no/model"), "no model at"),
        (("musique", "--data", tmp_path, "--model", model_dir, "--methods", "magic"), "blend_single_shot"),
        (("musique", "--data", tmp_path, "--model", model_dir, "--ratios", "0.1,lots"), "separated by commas"),
        (("musique", "--data", tmp_path, "--model", model_dir, "--cases", "0"), "cases"),
        (("musique", "--data", tmp_path, "--model", model_dir, "--max-tokens", "0"), "at least 1"),
        (("musique", "--data", tmp_path, "--model", model_dir, "--kv-cache-dtype", "int3"), "int8"),
        (("musique", "--data", tmp_path, "--model", model_dir, "--device", "abacus"), "abacus"),
        (("musique", "--data", tmp_path, "--model", model_dir, "--resume"), "--out"),
        (("musique", "--model", model_dir), "CACHEBLEND_DATA"),
        (("musique", "--model", model_dir, "--preset", "best"), "extended"),
        (("musique", "--model", model_dir, "--data", tmp_path / "broken.jsonl", "--cases", "9", "--out", "bad"), "line 2"),
        (("documents", tmp_path, "--model", model_dir, "--questions", tmp_path / "broken.jsonl"), "line 2"),
        (("documents", tmp_path, "--model", model_dir, "--questions", "none.txt"), "none.txt"),
        (("report", tmp_path), "not the folder of a run"),
    ):
        code, out, err = run(*arguments)
        assert (code, out) == (2, ""), (arguments, err)
        assert says in err, (arguments, err)
        assert "Traceback" not in err
    assert not (tmp_path / "runs").exists()
