"""Each fuzzing target for seconds; FUZZ_EXAMPLES=100000 makes it as many examples of each, drawn anew."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from targets import TARGETS

EXAMPLES = {
    "bodies": 40,
    "entry-files": 60,
    "gguf": 40,
    "index-catalogs": 30,
    "json-lines": 200,
    "schemas": 100,
    "store-catalogs": 20,
}


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # what a damaged file keeps from being opened
@pytest.mark.parametrize("target", TARGETS)
def test_target(target: str) -> None:
    """Nothing unforeseen happens, whatever a client or a disk gives."""
    if target == "schemas":
        pytest.importorskip("llguidance", reason="the extra [structured] is not installed")
    examples = int(os.environ.get("FUZZ_EXAMPLES", 0))
    with TARGETS[target]() as check:

        @settings(
            max_examples=examples or EXAMPLES[target],
            derandomize=not examples,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        )
        @given(st.data())
        def run(data: st.DataObject) -> None:
            check(data)

        run()
