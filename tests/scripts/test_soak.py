"""The soak, in seconds: what it checks holds, and it sees what does not."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from script_modules import load_script

SCRIPT = Path(__file__).parents[2] / "scripts" / "soak.py"
GOOD: dict[str, Any] = {
    "faults": 0,
    "exit_code": 0,
    "damaged": 0,
    "left_over": {},
    "differs": 0,
    "not_recorded": 0,
    "replays": 20,
    "evictions": {"ram": 1, "nvme": 1},
    "memory_flat": True,
}


def test_in_seconds() -> None:
    """Sixteen clients for six seconds leave nothing over, and get their plans' answers. Memory wants minutes to be judged."""
    command = [sys.executable, SCRIPT, "--seconds", "6", "--streams", "16", "--replays", "20"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=110)
    assert done.stdout, done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    assert load_script("soak").holds({**figures, "memory_flat": True}), figures
    assert figures["equal"] >= 10
    assert figures["requests"]["cancellation"] > 0
    assert figures["requests"]["malformed"] > 0


@pytest.mark.parametrize(
    "change",
    [
        {"faults": 1},
        {"exit_code": None},
        {"exit_code": -9},
        {"damaged": 1},
        {"left_over": {"pins": 1}},
        {"differs": 1},
        {"not_recorded": 1},
        {"replays": 0},
        {"evictions": {"ram": 1, "nvme": 0}},
        {"memory_flat": False},
    ],
    ids=str,
)
def test_each_fault_shows(change: dict[str, object]) -> None:
    """Each figure that is not as it must be fails the run."""
    holds = load_script("soak").holds
    assert holds(GOOD)
    assert not holds({**GOOD, **change})
