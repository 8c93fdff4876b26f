"""Kills processes that change a store, again and again, and checks what they leave.

    python scripts/crash_store.py                 # 200 kills

Each round, two processes put, get, pin, evict, delete and replace in one store, and are killed after a random moment. Then
every entry must be whole or a miss, the accounting right, the budget kept, and nothing left over. In every second round some
writes are torn or lose a bit without a word, as on a disk that lies. A fault ends the run with an error and keeps the store.
The last stdout line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "store"))

from crashes import check, kill_writers, processes

WRITERS = 2


def main() -> None:
    """Run the rounds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    context = processes()
    killed, damaged = 0, 0
    for round_ in range(-(-options.kills // WRITERS)):
        faults = round_ % 2 == 1
        directory = folder / ("faults" if faults else "store")
        try:
            kill_writers(context, directory, options.seed + round_, writers=WRITERS, faults=faults)
            damaged += len(check(directory, faults=faults).damaged)
        except AssertionError:
            print(f"round {round_} failed; the store is in {directory}", file=sys.stderr)
            raise
        killed += WRITERS
        if killed % 20 == 0:
            print(f"{killed} killed", file=sys.stderr)
    shutil.rmtree(folder)
    print(json.dumps({"kills": killed, "damaged_entries_found_and_set_aside": damaged, "wrong_bytes": 0, "left_over": 0}))


if __name__ == "__main__":
    main()
