"""The evaluation's commands, as `cacheblend` lists them; see the entry point in pyproject.toml."""

from __future__ import annotations

from cacheblend.service.cli.main import Command

COMMANDS = (
    Command("demo", "cacheblend.eval.cli_demo:demo", "Ingest documents, ask, and print the methods side by side."),
    Command("calibrate", "cacheblend.eval.cli_calibrate:calibrate", "Measure what blending loses on your documents."),
    Command("eval", "cacheblend.eval.cli_eval:app", "Measure quality and TTFT of the methods side by side on a data set."),
)
