"""`from targets import ...` for the tests of fuzzing, and what the targets take from the tests of service and store."""

import sys
from pathlib import Path

for folder in ("fuzz", "service", "store"):
    sys.path.insert(0, str(Path(__file__).parents[1] / folder))
