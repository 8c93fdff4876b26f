"""The bench of the ingest job runs on a few chunks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench_ingest.py"


def test_a_few_chunks(tmp_path: Path) -> None:
    """The last line has every ratio, each above 0, and the store that was measured is gone."""
    arguments = ["--chunks", "12", "--repeats", "1", "--threads", "1", "--dtype", "float32", "--directory", str(tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(SCRIPT), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=110)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    ratios = {name: value for name, value in summary.items() if "_over_" in name}
    assert set(ratios) == {"kv_over_forward", "ingest_over_forward"}
    assert all(value > 0 for value in ratios.values())
    assert set(summary["seconds"]) == {"forward", "kv", "ingest"}
    assert 12 <= summary["chunks"] < 20
    assert summary["read_tokens"] == summary["tokens"]  # the reader's documents are of one window each
    assert summary["shared_tokens"] > 0
    assert summary["dtype"] == "torch.float32"
    assert not list(tmp_path.iterdir())
