"""Options of the commands: those of the configs, the same in help, file, variables and docs."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from cacheblend.base.options import options_of
from cacheblend.cli.main import COMMANDS, _LazyCommand
from cacheblend.service import EngineConfig
from cacheblend.service.http.config import HttpConfig
from cacheblend.service.serving.config import ServingConfig

ROOT = Path(__file__).parents[3]
OPTIONS = options_of(EngineConfig, ServingConfig, HttpConfig)


def _parameters(name: str) -> dict[str, Any]:
    command = next(each for each in COMMANDS if each.name == name)
    return {parameter.name: parameter for parameter in _LazyCommand(command).load().params}


def test_serve_takes_every_option() -> None:
    """Each option is a flag and a variable of `serve`, with the field's default and help."""
    found = _parameters("serve")
    assert OPTIONS.keys() <= found.keys()
    assert found.keys() - OPTIONS.keys() == {"model", "store_dir", "config", "yes"}
    for name, option in OPTIONS.items():
        assert (found[name].opts, found[name].envvar, found[name].help) == ([option.flag], option.variable, option.help)
        assert found[name].default in (option.default, None if option.default == () else option.default)


@pytest.mark.parametrize("name", ["ask", "ingest", "profile", "plan"])
def test_other_commands(name: str) -> None:
    """The other commands' options of an engine are the same ones."""
    shared = _parameters(name).keys() & OPTIONS.keys()
    assert {"device", "dtype", "allow_unverified", "chunk_tokens"} <= shared
    assert all(_parameters(name)[option].help == OPTIONS[option].help for option in shared)


def test_docs_are_up_to_date() -> None:
    """docs/options.md is what the script writes, and names every option."""
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        from write_options import FILE, options_page
    finally:
        sys.path.pop(0)
    page = options_page()
    assert FILE.read_text(encoding="utf-8") == page, "run .venv/bin/python scripts/write_options.py"
    assert set(re.findall(r"(?m)^\| `(--[a-z-]+)` \|", page)) == {option.flag for option in OPTIONS.values()}
