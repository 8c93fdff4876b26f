"""`cacheblend model`: what it prints, and how it fails."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cacheblend.base.errors import ModelFetchError
from cacheblend.blend import models
from cacheblend.blend.gguf_file import FORMAT
from cacheblend.blend.models import find_model
from cacheblend.cli.main import main


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def _pretend_fetched(name: str) -> Path:
    folder = find_model(name).folder
    folder.mkdir(parents=True)
    (folder / "origin.json").write_text(json.dumps({"format": FORMAT}))
    return folder


def _fails(arguments: list[str]) -> object:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    return stopped.value.code


def _runs(arguments: list[str]) -> None:
    assert _fails(arguments) == 0  # the command line ends with an exit in any case


def test_ls(capsys: pytest.CaptureFixture[str]) -> None:
    """The list tells what is on this machine and where."""
    folder = _pretend_fetched("smollm2-135m")
    _runs(["model", "ls", "--json"])
    models = {model["name"]: model for model in json.loads(capsys.readouterr().out)["models"]}
    first, second = models["smollm2-135m"], models["gemma3-270m"]
    assert (first["name"], first["fetched"], first["path"]) == ("smollm2-135m", True, str(folder))
    assert (second["name"], second["fetched"], second["path"]) == ("gemma3-270m", False, None)
    _runs(["model", "ls"])
    assert "gemma3" in capsys.readouterr().out


def test_get_what_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    """A second `get` does nothing and says so, in JSON and in words."""
    folder = _pretend_fetched("gemma3-270m")
    _runs(["model", "get", "gemma3-270m", "--json"])
    told = json.loads(capsys.readouterr().out)
    assert told["already_there"] is True
    assert (told["path"], told["licence"]) == (str(folder), "Gemma Terms of Use")
    _runs(["model", "get", "gemma3-270m"])
    assert "is there already" in capsys.readouterr().out


def test_terms_and_unknown_names(capsys: pytest.CaptureFixture[str]) -> None:
    """Terms that are not accepted and names that nobody knows are the user's errors."""
    assert _fails(["model", "get", "gemma3-270m"]) == 2
    assert "https://ai.google.dev/gemma/terms" in capsys.readouterr().err
    assert _fails(["model", "get", "smollm"]) == 2
    assert "known are" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--accept-licence", "--accept-license"])
def test_either_spelling(flag: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Both spellings accept the terms; what fails then is the download, which is no error of usage."""

    def nothing(*_: object) -> Path:
        raise ModelFetchError("no network")

    monkeypatch.setattr(models.fetch_model, "__kwdefaults__", {**models.fetch_model.__kwdefaults__, "download": nothing})
    assert _fails(["model", "get", "gemma3-270m", flag]) == 1
    assert "no network" in capsys.readouterr().err
