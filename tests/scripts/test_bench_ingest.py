"""The bench of the ingest job runs on a few chunks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from script_modules import load_script

TINY = ["--hidden", "32", "--layers", "2", "--heads", "4", "--kv-heads", "2", "--intermediate", "48", "--vocab", "400"]
SCRIPT = Path(__file__).parents[2] / "scripts" / "bench_ingest.py"


def test_a_few_chunks(tmp_path: Path) -> None:
    """The last line has every ratio, each above 0, and the store that was measured is gone."""
    load_script("make_random_model").main([str(tmp_path / "model"), *TINY])
    stores = tmp_path / "stores"
    stores.mkdir()
    arguments = ["--chunks", "12", "--repeats", "1", "--threads", "1", "--dtype", "float32", "--directory", str(stores)]
    arguments += ["--model", str(tmp_path / "model"), "--chunk-tokens", "256"]
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
    assert summary["read_tokens"] >= summary["tokens"]  # the overlap of a document's windows is read twice
    assert summary["shared_tokens"] > 0
    assert summary["dtype"] == "torch.float32"
    assert not list(stores.iterdir())
