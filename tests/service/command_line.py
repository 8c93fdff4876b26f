"""The command line, run in the tests' own process."""

import json
from pathlib import Path

import pytest

from cacheblend.cli import main as cli


class Outcome:
    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    @property
    def json(self) -> dict[str, object]:
        """The one JSON object on stdout."""
        value: dict[str, object] = json.loads(self.out)
        return value


class CommandLine:
    """Runs `cacheblend` in this process, in a folder of its own."""

    def __init__(self, capsys: pytest.CaptureFixture[str], model: Path, store: Path) -> None:
        self._capsys, self.model, self.store = capsys, model, store

    def __call__(self, *arguments: str) -> Outcome:
        with pytest.raises(SystemExit) as exit_:
            cli.main(list(arguments))
        captured = self._capsys.readouterr()
        return Outcome(exit_.value.code or 0, captured.out, captured.err)

    def on_store(self, command: str, *arguments: str) -> Outcome:
        options = ("--model", str(self.model), "--store-dir", str(self.store), "--chunk-tokens", "24")
        return self(command, *arguments, *options)
