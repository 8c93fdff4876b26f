"""A server that is killed under load keeps what it acknowledged."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from script_modules import load_script

SCRIPT = Path(__file__).parents[2] / "scripts" / "crash_server.py"


@pytest.mark.process
@pytest.mark.timeout(400)
def test_two_kills() -> None:
    """Killed twice, the server knows every document that it acknowledged, and answers about it from the store."""
    done = subprocess.run([sys.executable, SCRIPT, "--kills", "2"], capture_output=True, text=True, check=False, timeout=390)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures["kills"] == 2
    assert figures["acknowledged"] >= figures["asked"] > 0
    assert (figures["lost"], figures["damaged"]) == (0, 0)


@pytest.mark.parametrize("change", [{"lost": 1}, {"damaged": 1}], ids=str)
def test_each_fault_shows(change: dict[str, int]) -> None:
    """Each figure that is not as it must be fails the run."""
    script = load_script("crash_server")
    assert script.faults_of({"lost": 0, "damaged": 0}) == []
    assert script.faults_of({"lost": 0, "damaged": 0, **change}) == list(change)


def test_what_a_server_does_not_list_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lost is what was acknowledged and is not listed; a deletion that a kill cut off may have been made."""
    script = load_script("crash_server")
    known = script.Acknowledged(texts={"here": "a", "gone": "b", "deleted": None, "doubtful": "c"}, doubtful={"doubtful": None})
    monkeypatch.setattr("acknowledged._listed", lambda _: {"here", "doubtful"})
    assert script.lost_documents("http://one", known) == {"gone"}
