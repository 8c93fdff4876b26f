"""A server that is killed under load keeps what it acknowledged."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "crash_server.py"
HELD = {"open_files": 30, "threads": 20, "objects_of_requests": 0, "resident_mib": 400}
GOOD: dict[str, Any] = {"replicas": 2, "survivor": None, "lost": 0, "damaged": 0, "remote_objects": 9, "remote_damaged": 0}


def load_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("crash_server", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_two_kills() -> None:
    """Killed twice, the server knows every document that it acknowledged, and answers about it from the store."""
    done = subprocess.run([sys.executable, SCRIPT, "--kills", "2"], capture_output=True, text=True, check=False, timeout=110)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures["kills"] == 2
    assert figures["acknowledged"] >= figures["asked"] > 0
    assert (figures["lost"], figures["damaged"]) == (0, 0)


@pytest.mark.parametrize("change", [{"lost": 1}, {"damaged": 1}, {"remote_objects": 0}, {"remote_damaged": 1}], ids=str)
def test_each_fault_shows(change: dict[str, int]) -> None:
    """Each figure that is not as it must be fails the run."""
    script = load_script()
    assert script.faults_of(GOOD) == []
    assert script.faults_of({**GOOD, **change}) == list(change)


@pytest.mark.parametrize("name", HELD)
def test_drift_shows(name: str) -> None:
    """What a survivor holds more for good is a fault; a busy round is none, and a quiet one hides nothing."""
    script = load_script()
    more = {**HELD, name: HELD[name] + script.SPARE[name] + 1}
    for last, faults in (([HELD, more, HELD], []), ([more, HELD, more], [name])):
        rounds = [HELD] * 6 + last
        assert script.faults_of({**GOOD, "survivor": script.drift_of(rounds)}) == faults
