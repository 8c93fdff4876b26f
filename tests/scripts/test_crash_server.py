"""A server that is killed under load keeps what it acknowledged."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "crash_server.py"


def test_two_kills() -> None:
    """Killed twice, the server knows every document that it acknowledged, and answers about it from the store."""
    done = subprocess.run([sys.executable, SCRIPT, "--kills", "2"], capture_output=True, text=True, check=False, timeout=110)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures["kills"] == 2
    assert figures["acknowledged"] >= figures["asked"] > 0
