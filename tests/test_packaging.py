"""The distribution's list of packages, written by hand, is whole, and so are the floors of what it depends on."""

from __future__ import annotations

import importlib.metadata
import tomllib
from itertools import chain
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parent.parent
FOLDERS = ("base", "blend", "eval", "integrations", "loader", "retriever", "service", "store")


def test_every_package_is_listed() -> None:
    """Each folder with Python files is a package in pyproject.toml, mapped to its place, and linked where tools look for it."""
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {path.parent for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")}
    mapped = {f"cacheblend.{folder.relative_to(ROOT).as_posix().replace('/', '.')}": folder for folder in folders}
    mapped["cacheblend"] = ROOT / "cacheblend"
    assert sorted(setuptools["packages"]) == sorted(mapped)
    assert {name: ROOT / place for name, place in setuptools["package-dir"].items()} == mapped
    for name, folder in mapped.items():
        assert (folder / "__init__.py").is_file(), name
    assert "py.typed" in setuptools["package-data"]["cacheblend"]
    for folder in FOLDERS:
        assert (ROOT / "cacheblend" / folder).readlink() == Path("..") / folder


def test_floors() -> None:
    """Everything but torch has a floor, closed to the versions that are known to be open, and not above what is installed."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    floors: dict[str, Version] = {}
    for line in chain(project["dependencies"], *project["optional-dependencies"].values()):
        requirement = Requirement(line)
        floor = [Version(each.version) for each in requirement.specifier if each.operator == ">="]
        if requirement.name not in (project["name"], "torch"):  # the extras of its own have no version
            assert [floors.setdefault(requirement.name, floor[0])] == floor, line
    for name, mended in {"starlette": "1.3.0", "fastapi": "0.132.0", "sentence-transformers": "6.0.0"}.items():
        assert floors[name] >= Version(mended), name
    for name in ("starlette", "fastapi", "uvicorn", "pydantic", "tokenizers", "transformers"):
        assert floors[name] <= Version(importlib.metadata.version(name)), name
