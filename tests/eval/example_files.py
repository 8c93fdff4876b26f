"""Data set files with a few made-up cases."""

import gzip
import json
from pathlib import Path

from cacheblend.eval.data import DATA_SETS


def case(index: int, **changes: object) -> dict[str, object]:
    """A line of a data set whose passages tell of its own number, and of one that all cases share."""
    houses = " ".join(f"Person {index} lives in town {index}, in house {house}." for house in range(20))
    rivers = " ".join(f"Every town has a mayor, a river and {bridge} bridges." for bridge in range(20))
    own, shared = {"title": f"Title {index}", "text": houses}, {"title": "Shared", "text": rivers}
    return {
        "id": f"case-{index}",
        "question": f"Where does person {index} live?",
        "answers": [f"town {index}"],
        "passages": [own, shared],
        "task": "qa",
        **changes,
    }


def write(folder: Path, name: str, cases: list[dict[str, object]]) -> Path:
    path = folder / DATA_SETS[name].file
    lines = "".join(json.dumps(each) + "\n" for each in cases)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(lines.encode()))
    else:
        path.write_text(lines)
    return path
