"""Each fuzzing target for seconds; FUZZ_EXAMPLES=100000 makes it as many examples of each, drawn anew."""

import os

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from targets import TARGETS


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # what a damaged file keeps from being opened
@pytest.mark.parametrize("target", TARGETS)
def test_target(target: str) -> None:
    """Nothing unforeseen happens, whatever a client or a disk gives."""
    if target == "schemas":
        pytest.importorskip("llguidance", reason="the extra [structured] is not installed")
    if target == "files":
        pytest.importorskip("markitdown", reason="the extra [documents] is not installed")
    checks, few = TARGETS[target]
    examples = int(os.environ.get("FUZZ_EXAMPLES", 0))
    with checks() as check:

        @settings(
            max_examples=examples or few, derandomize=not examples, deadline=None, suppress_health_check=list(HealthCheck)
        )
        @given(st.data())
        def run(data: st.DataObject) -> None:
            check(data)

        run()
