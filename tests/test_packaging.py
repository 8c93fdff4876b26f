"""The floors of what the distribution depends on."""

import importlib.metadata
import tomllib
from itertools import chain
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parent.parent


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
