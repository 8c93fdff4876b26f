#!/usr/bin/env python
"""Fuzzes what comes from clients and disks for minutes: `scripts/fuzz.py --minutes 30 bodies gguf`; all targets without a name.

The targets are those of the tests (`tests/fuzz/targets.py`), which run each for seconds. What is found is printed as the
smallest input that hypothesis can make of it, with the seed that finds it again. The last line on stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

TESTS = Path(__file__).parents[1] / "tests"
sys.path += [str(TESTS), *(str(TESTS / folder) for folder in ("fuzz", "service", "store"))]
EXAMPLES = 500  # between two looks at the clock


def fuzz(target: str, minutes: float, first_seed: int) -> dict[str, Any]:
    """Run one target until its time is over or something is found."""
    from targets import TARGETS

    examples, began, number = 0, time.monotonic(), first_seed
    with TARGETS[target]() as check:
        while time.monotonic() - began < 60 * minutes:

            @seed(number)
            @settings(max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck))
            @given(st.data())
            def run(data: st.DataObject) -> None:
                nonlocal examples
                examples += 1
                check(data)

            try:
                run()
            except Exception:
                traceback.print_exc()
                return {"target": target, "examples": examples, "found": True, "seed": number}
            number += 1
    return {"target": target, "examples": examples, "found": False}


def main() -> None:
    """Run the targets named."""
    from targets import TARGETS

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"of {', '.join(TARGETS)}; all where none is named")
    parser.add_argument("--minutes", type=float, default=5.0, help="for each target")
    parser.add_argument("--seed", type=int, default=random.randrange(2**32), help="of the first round")
    options = parser.parse_args()
    if unknown := set(options.targets) - set(TARGETS):
        parser.error(f"there is no target {', '.join(sorted(unknown))}; there are {', '.join(TARGETS)}")
    rows = [fuzz(target, options.minutes, options.seed) for target in options.targets or TARGETS]
    print(json.dumps({"minutes": options.minutes, "targets": rows}))
    sys.exit(any(row["found"] for row in rows))


if __name__ == "__main__":
    main()
