"""The command line as a whole: commands found by name and imported at their use, with the options of the configs."""

import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from script_modules import load_script
from typer.main import get_command

from cacheblend.base.options import options_of
from cacheblend.blend import SELECTORS
from cacheblend.blend.config import SELECTOR_NAMES
from cacheblend.cli.main import COMMANDS, HELP, LazyCommand, app
from cacheblend.retriever.catalog import Catalog
from cacheblend.retriever.index import INDEX_FILE
from cacheblend.service import EngineConfig
from cacheblend.service.http.config import HttpConfig
from cacheblend.service.serving.scheduler import ServingConfig
from cacheblend.store import KVStore, StoreConfig
from cacheblend.store.codecs import CODECS
from cacheblend.store.config import CODEC_NAMES

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
OPTIONS = options_of(EngineConfig, ServingConfig, HttpConfig)


def _modules_after(*arguments: str, exit_code: int = 0) -> set[str]:
    """The modules that a run of the command line has imported, listed by a new interpreter."""
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


def test_serve_is_light_until_its_port_is_had() -> None:
    """`serve` says that the port is taken before it loads the server, and imports nothing of the evaluation."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        modules = _modules_after("serve", "--model", "m", "--port", str(taken.getsockname()[1]), exit_code=1)
    assert "cacheblend.cli.serve" in modules
    assert not modules & {"fastapi", "uvicorn"}
    assert not [name for name in modules if name.startswith("cacheblend.eval")]
    for wrong in (("--preset", "nope"), ("--recompute-ratio", "5"), ("--device", "cuda:99")):
        assert not _modules_after("serve", *wrong, exit_code=2) & {"fastapi", "uvicorn", "sentence_transformers"}


def test_listing_documents_is_light(tmp_path: Path) -> None:
    """`documents ls` reads the catalogs, and loads no model."""
    (tmp_path / "index").mkdir()
    Catalog(tmp_path / "index" / INDEX_FILE, {}).close()
    KVStore(StoreConfig(directory=tmp_path / "kv")).close()
    assert not _modules_after("documents", "ls", "--store-dir", str(tmp_path)) & {"transformers.modeling_utils", "fastapi"}


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_command(command: LazyCommand, capsys: pytest.CaptureFixture[str]) -> None:
    """Every command is there by its name with its line of help, and explains itself with examples."""
    group = get_command(app)
    found = group.get_command(typer.Context(group), str(command.name))
    assert found.help == command.help
    loaded = found.load()
    for each in getattr(loaded, "commands", {"": loaded}).values():
        _, _, examples = each.help.partition("Examples:\n\n")
        assert examples, each.name
        each.main(["--help"], standalone_mode=False)
        shown = [line.strip() for line in capsys.readouterr().out.splitlines()]
        for example in examples.split("\n"):
            assert len(example) <= 78, example
            assert example.strip() in shown, "an example has a line of its own at 80 columns"
            _parse(example.strip(), all_of_it=True)
        assert "<bool>" not in each.get_help(typer.Context(each, help_option_names=HELP)), each.name


def _parse(line: str, *, all_of_it: bool) -> None:
    """Parse a command of the line and its values, unless the command or an option is none; `all_of_it` wants arguments too."""
    words = shlex.split(re.split(r" (?:\||&&|>) |\.\.\.", line)[0], comments=True)[1:]
    found: Any = get_command(app)
    context = typer.Context(found)
    while words and hasattr(found, "get_command") and not words[0].startswith("-"):
        found = found.get_command(context, words.pop(0))
        assert found is not None, line
        found = found.load() if isinstance(found, LazyCommand) else found
        context = typer.Context(found, help_option_names=HELP)
    values, rest, _ = found.make_parser(context).parse_args(words)
    for parameter in found.params:
        given = values.get(parameter.name)
        given = given if isinstance(given, str | list | tuple | bool) else None  # else click's mark for nothing
        assert given or not parameter.required or not all_of_it, f"{line}: {parameter.name}"
        if given and given is not True and parameter.name != "config":
            parameter.process_value(context, given)
    assert not rest, line


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_of_the_docs(page: Path) -> None:
    """Each command of a page is one that there is, with its options; in a block it is complete."""
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    blocks = "".join(re.findall(r"```(?:sh|bash)\n(.*?)```", text, re.DOTALL))
    for line in re.findall(r"(?m)^(?:[A-Z_]+=\S+ |(?:sudo .* )?\S+/bin/)*(cacheblend .*)$", blocks):
        _parse(line, all_of_it=True)
    for line in re.findall(r"`(cacheblend [^`\n]+)`", text):
        _parse(line, all_of_it=False)


def _parameters(name: str) -> dict[str, Any]:
    command = next(each for each in COMMANDS if each.name == name)
    return {parameter.name: parameter for parameter in command.load().params}


def test_serve_has_every_option() -> None:
    """Each option is a flag and a variable of `serve`, with the field's default and help."""
    found = _parameters("serve")
    assert found.keys() - OPTIONS.keys() == {"model", "store_dir", "config", "yes"}
    for name, option in OPTIONS.items():
        assert (found[name].opts, found[name].envvar, found[name].help) == ([option.flag], option.variable, option.help)
        assert found[name].secondary_opts == (["--no-find-passages"] if name == "find_passages" else [])
        assert found[name].default in (option.default, None if option.default == () else option.default)


@pytest.mark.parametrize("name", ["ask", "ingest", "profile"])
def test_other_commands_share_options(name: str) -> None:
    """The other commands' options of an engine are the same ones."""
    shared = _parameters(name).keys() & OPTIONS.keys()
    assert {"device", "dtype", "allow_unverified", "chunk_tokens"} <= shared
    assert all(_parameters(name)[option].help == OPTIONS[option].help for option in shared)


def test_docs_are_up_to_date() -> None:
    """docs/options.md is what the script writes, and names every option."""
    script = load_script("write_options")
    page = script.options_page()
    assert script.FILE.read_text(encoding="utf-8") == page, "run .venv/bin/python scripts/write_options.py"
    assert set(re.findall(r"(?m)^\| `(--[a-z-]+)` \|", page)) == {option.flag for option in OPTIONS.values()}


REFUSED_AT_ONCE = [
    ("serve", "--help"),
    ("serve", "--preset", "nope"),
    ("serve", "--model", "./nowhere"),
    ("ask", "q", "--store-dir", ".", "--method", "nope"),
    ("ask", "q", "--store-dir", ".", "--recompute-ratio", "7"),
    ("ask", "q", "--store-dir", "nowhere"),
    ("ask", "q", "--store-dir", ".", "--filter", "{"),
    ("ingest", "nowhere", "--model", "x"),
    ("ingest", "nowhere", "--model", "x", "--kv-cache-dtype", "nope"),
    ("plan", "--ratio", "7"),
    ("plan", "nowhere.json"),
    ("eval", "--help"),
    ("eval", "nope"),
    ("eval", "musique", "--methods", "nope"),
]


def test_options_are_checked_before_libraries_load(tmp_path: Path) -> None:
    """Help, and the refusal of a wrong value or of a missing file, load neither torch nor transformers."""
    script = f"""
import sys, cacheblend.cli.main as cli
for run in {REFUSED_AT_ONCE}:
    try:
        cli.main(list(run))
    except SystemExit as end:
        assert end.code == (0 if "--help" in run else 2), run
    assert not {{"torch", "transformers"}} & sys.modules.keys(), run
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_names_that_options_allow() -> None:
    """What options are checked against, without torch, are the names of the registries."""
    assert (tuple(SELECTORS), tuple(CODECS)) == (SELECTOR_NAMES, CODEC_NAMES)
