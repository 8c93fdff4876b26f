"""Files of a store damaged at random give nothing wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "damage_store.py"


def test_a_few_damages() -> None:
    """After each damage the store is refused or opens, and gives what was stored, or says that it is not there."""
    command = [sys.executable, SCRIPT, "--damages", "12", "--seed", "3", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=110)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures["damages"] == 12
    assert len(figures["by_kind"]) > 1
    assert (figures["wrong bytes"], figures["wrong texts"], figures["unforeseen"]) == (0, 0, 0)
