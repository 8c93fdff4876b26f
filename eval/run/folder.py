"""A run's folder: its set-up, raw rows as they come, and the summary; never overwritten, continued after a kill."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cacheblend.base.errors import InputError

SETUP, ROWS, SUMMARY = "setup.json", "rows.jsonl", "summary.json"
Row = dict[str, Any]


class RunFolder:
    """A folder of three files.

    `setup.json` holds the resolved configuration, model, machine and commit; `rows.jsonl` a line a case with every method in
    it; `summary.json` what `summarize` gives, once the run is whole.

    Args:
        path: the folder, as `create` or `resume` left it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, path: Path, setup: Mapping[str, Any]) -> RunFolder:
        """A new folder.

        Raises:
            InputError: the folder exists.
        """
        try:
            path.mkdir(parents=True)
        except FileExistsError as error:
            raise InputError(f"{path} exists; choose another --out, or go on with that run by --resume") from error
        _write(path / SETUP, setup)
        return cls(path)

    @classmethod
    def resume(cls, path: Path, setup: Mapping[str, Any]) -> RunFolder:
        """The folder of a run that was cut off.

        Raises:
            InputError: no run, or one with another set-up.
        """
        run = cls(path)
        before, now = run.setup(), json.loads(json.dumps(setup))
        different = [name for name in {**before, **now} if before.get(name) != now.get(name)]
        if different:
            said = "; ".join(f"{name}: {before.get(name)!r} before, {now.get(name)!r} now" for name in different)
            raise InputError(f"{path} is a run with another set-up, so it cannot go on: {said}")
        run._drop_torn_line()
        return run

    def setup(self) -> dict[str, Any]:
        """What `setup.json` says.

        Raises:
            InputError: the folder is no run.
        """
        try:
            setup: dict[str, Any] = json.loads((self.path / SETUP).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise InputError(f"{self.path} is not the folder of a run: its {SETUP} cannot be read ({error})") from error
        return setup

    def rows(self) -> list[Row]:
        """A row a case, in order; a last line torn by a kill is left out.

        Raises:
            InputError: another line is broken.
        """
        file = self.path / ROWS
        if not file.exists():
            return []
        rows: list[Row] = []
        for number, line in enumerate(file.read_bytes().split(b"\n")[:-1], start=1):
            try:
                rows.append(json.loads(line))
            except ValueError as error:
                raise InputError(f"{file}, line {number} is broken ({error}); the run cannot be used") from error
        return rows

    def append(self, row: Row) -> None:
        """Add a case's row; it is on disk when this returns."""
        line = json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n"
        with (self.path / ROWS).open("a", encoding="utf-8") as file:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write `summary.json`."""
        _write(self.path / SUMMARY, summary)

    def _drop_torn_line(self) -> None:
        file = self.path / ROWS
        if file.exists():
            whole = file.read_bytes().rpartition(b"\n")[0]
            os.truncate(file, len(whole) + 1 if whole else 0)


def _write(path: Path, value: Mapping[str, Any]) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")
    temporary.replace(path)
