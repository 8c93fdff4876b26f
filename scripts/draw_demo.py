"""Draw the picture of README.md: what `cacheblend demo` shows on a terminal, from a run's JSON.

    cacheblend demo --json >demo.json
    python scripts/draw_demo.py demo.json docs/figures/demo.svg [--questions 3]

The run's questions are taken at even distances, and nothing in the picture is of anything but the run. The same JSON gives the
same bytes.
"""

from __future__ import annotations

import argparse
import io
import json
import re
from pathlib import Path
from typing import Any

from rich.terminal_theme import DIMMED_MONOKAI

from cacheblend.cli.terminal import PlainConsole
from cacheblend.eval.demo_screen import DemoScreen
from cacheblend.eval.handbook_demo import AskedQuestion, MethodSummary

COLUMNS = 100
FONT_FACES = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)  # from a server: a picture asks nobody for its letters


def demo_svg(printed: dict[str, Any], questions: int) -> str:
    """The picture of a run.

    Args:
        printed: what `cacheblend demo --json` printed.
        questions: how many of the run's to show.
    """
    console = PlainConsole(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    asked = [AskedQuestion.from_dict(each) for each in printed["questions"]]
    screen = DemoScreen(console, len(asked))
    screen.begin(printed["model"], printed["ingest"]["documents"])
    questions = min(questions, len(asked))
    for index in (number * len(asked) // questions for number in range(questions)):
        screen.asked(asked[index], index + 1)
    screen.medians(asked, {method: MethodSummary(**row) for method, row in printed["methods"].items()})
    svg = console.export_svg(title="cacheblend demo", theme=DIMMED_MONOKAI, unique_id="demo")
    return FONT_FACES.sub("", svg)


def main() -> None:
    """Read the arguments, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="what `cacheblend demo --json` printed")
    parser.add_argument("picture", type=Path, help="the SVG file to write")
    parser.add_argument("--questions", type=int, default=3, help="questions to show (default: %(default)s)")
    arguments = parser.parse_args()
    arguments.picture.write_text(demo_svg(json.loads(arguments.run.read_text()), arguments.questions), encoding="utf-8")


if __name__ == "__main__":
    main()
