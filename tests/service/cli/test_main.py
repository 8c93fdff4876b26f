"""The command line as a whole: commands found by name and imported at their use."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.main import get_command

from cacheblend.base.options import GONE_OPTIONS
from cacheblend.cli.main import COMMANDS, Command, _LazyCommand, app, main
from cacheblend.retriever.catalog import Catalog
from cacheblend.retriever.index_folder import INDEX_FILE
from cacheblend.store import KVStore, StoreConfig


def _modules_after(*arguments: str, exit_code: int = 0) -> set[str]:
    """What a run of the command line has imported, told by a new interpreter."""
    code = (
        "import sys\nfrom cacheblend.cli.main import main\n"
        f"try:\n    main({list(arguments)!r})\nexcept SystemExit as ended:\n    assert (ended.code or 0) == {exit_code}\n"
        "print('\\n' + ' '.join(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.splitlines()[-1].split())


@pytest.mark.parametrize("arguments", [("--help",), ("--version",)])
def test_help_is_light(arguments: tuple[str, ...]) -> None:
    """Help and version import no model library, no retriever and no server."""
    assert not _modules_after(*arguments) & {"torch", "transformers", "numpy", "faiss", "fastapi", "cacheblend.blend"}


def test_the_port_is_taken_before_libraries_load() -> None:
    """`serve` says that the port is taken before it loads the server."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        modules = _modules_after("serve", "--model", "m", "--port", str(taken.getsockname()[1]), exit_code=1)
    assert not modules & {"fastapi", "uvicorn"}


def test_listing_documents_is_light(tmp_path: Path) -> None:
    """`documents ls` reads the catalogs, and loads no model."""
    (tmp_path / "index").mkdir()
    Catalog(tmp_path / "index" / INDEX_FILE, {}).close()
    KVStore(StoreConfig(directory=tmp_path / "kv")).close()
    assert not _modules_after("documents", "ls", "--store-dir", str(tmp_path)) & {"transformers.modeling_utils", "fastapi"}


def test_serve_imports_no_evaluation() -> None:
    """`cacheblend serve` imports nothing of the evaluation."""
    modules = _modules_after("serve", "--help")
    assert "cacheblend.cli.serve" in modules
    assert not [name for name in modules if name.startswith("cacheblend.eval")]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_command(command: Command) -> None:
    """Every command is there by its name, with its one line of help, and its target has help of its own."""
    group = get_command(app)
    context = typer.Context(group)
    assert command.name in group.list_commands(context)
    found = group.get_command(context, command.name)
    assert found.help == command.help
    assert found.load().help


def test_a_gone_option_names_its_place_taker(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A flag or a variable of an earlier version is refused with what took its place; no command has an option of its name."""
    for arguments, variable in ((["serve", "--on-miss=recompute"], ""), (["store", "ls"], "CACHEBLEND_ON_MISS")):
        if variable:
            monkeypatch.setenv(variable, "recompute")
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == 2
        assert f"in its place: {GONE_OPTIONS['on_miss']}" in capsys.readouterr().err
    for command in COMMANDS:
        loaded = _LazyCommand(command).load()
        for each in getattr(loaded, "commands", {"": loaded}).values():
            assert GONE_OPTIONS.keys().isdisjoint(parameter.name for parameter in each.params), each.name
