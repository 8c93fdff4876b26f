"""Each fuzzing target for seconds; `scripts/fuzz.py` runs them for minutes."""

from __future__ import annotations

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
    with TARGETS[target]() as check:

        @settings(max_examples=EXAMPLES[target], derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
        @given(st.data())
        def run(data: st.DataObject) -> None:
            check(data)

        run()
