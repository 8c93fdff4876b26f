"""The command line as a whole: commands found by name and imported at their use."""

from __future__ import annotations

import subprocess
import sys

import pytest
import typer
from typer.main import get_command

from cacheblend.eval.cli import COMMANDS as EVALUATION
from cacheblend.service.cli.main import COMMANDS, Command, app


def _modules_after(*arguments: str) -> set[str]:
    """What a run of the command line has imported, told by a new interpreter."""
    code = (
        "import sys\nfrom cacheblend.service.cli.main import main\n"
        f"try:\n    main({list(arguments)!r})\nexcept SystemExit as ended:\n    assert not ended.code, ended.code\n"
        "print('\\n' + ' '.join(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.splitlines()[-1].split())


@pytest.mark.parametrize("arguments", [("--help",), ("--version",)])
def test_help_is_light(arguments: tuple[str, ...]) -> None:
    """Help and version import no model library, no retriever and no server."""
    assert not _modules_after(*arguments) & {"torch", "transformers", "numpy", "faiss", "fastapi", "cacheblend.blend"}


def test_serve_imports_no_evaluation() -> None:
    """`cacheblend serve` imports nothing of the evaluation."""
    modules = _modules_after("serve", "--help")
    assert "cacheblend.service.cli.serve" in modules
    assert not [name for name in modules if name.startswith("cacheblend.eval")]


@pytest.mark.parametrize("command", [*COMMANDS, *EVALUATION], ids=lambda command: command.name)
def test_command(command: Command) -> None:
    """Every command is there by its name, with its one line of help, and its target has help of its own."""
    group = get_command(app)
    context = typer.Context(group)
    assert command.name in group.list_commands(context)
    found = group.get_command(context, command.name)
    assert found.help == command.help
    assert found.load().help


def test_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    """A package that names commands in the entry-point group adds them; the project's own names stay its own."""

    class Entry:
        def load(self) -> list[Command]:
            return [Command("weigh", "cacheblend.service.cli.store:stat", "Weigh."), Command("ask", "nowhere:ask", "Not this.")]

    monkeypatch.setattr("cacheblend.service.cli.main.entry_points", lambda **_: [Entry()])
    group = get_command(app)
    context = typer.Context(group)
    assert "weigh" in group.list_commands(context)
    assert group.get_command(context, "ask").help != "Not this."
