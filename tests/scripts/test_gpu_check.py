"""The one call for a GPU goes through all its steps on a CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "gpu_check.py"


def test_cpu_form(tmp_path: Path) -> None:
    """On a tiny shape the checks hold, and the last line, the file and the table have every figure, each above 0."""
    (directory := tmp_path / "disk").mkdir()
    arguments = ["--device", "cpu", "--shapes", "tiny", "--repeats", "1", "--directory", str(directory)]
    arguments += ["--out", str(tmp_path / "gpu.json")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, SCRIPT, *arguments], capture_output=True, text=True, env=environment, check=False, timeout=110
    )
    assert done.returncode == 0, done.stderr
    *printed, last = done.stdout.splitlines()
    summary = json.loads(last)
    assert summary["ok"]
    assert json.loads((tmp_path / "gpu.json").read_text()) == summary
    assert [line.split("|")[1:3] for line in printed[-2:]] == [[" tiny ", f" {row['tokens']} "] for row in summary["prompts"]]
    assert {int(count): step_s > 0 for count, step_s in summary["prompts"][0]["decode_s"].items()} == {
        1: True,
        4: True,
        16: True,
        64: True,
    }
    assert [row["tokens"] for row in summary["prompts"]] == [1 + 3 * 32 + 32, 1 + 6 * 32 + 32]
    for row in summary["prompts"]:
        for tier in ("ram", "nvme"):
            assert all(row[f"{tier}_{ratio}_speedup"] > 0 for ratio in (0.05, 0.15, 0.3))
            assert 0 <= row[f"{tier}_idle_share"] <= 1
        assert row["ram_over_copy"] > 0
    assert not list(directory.iterdir())
