"""The lowest versions that pyproject.toml allows, as a constraints file for pip.

    python scripts/lowest_versions.py > lowest.txt
    python -m pip install --constraint lowest.txt --editable ".[dev]"

`make check-lowest` runs the tests with them, so that a floor is a version that was tried. torch is left out: which build of it
is installed is `scripts/install_torch.sh`'s matter.
"""

from __future__ import annotations

import tomllib
from pathlib import Path

from packaging.requirements import Requirement

PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"
LEFT_OUT = ("torch",)


def lowest_versions(pyproject: Path) -> list[str]:
    """`name==floor` for every requirement of the project and of its extras.

    Raises:
        ValueError: a requirement has no floor, or two have different ones.
    """
    project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
    listed = [*project["dependencies"], *(one for extra in project["optional-dependencies"].values() for one in extra)]
    requirements = [one for one in map(Requirement, listed) if one.name != project["name"]]  # its own extras have no version
    floors: dict[str, str] = {}
    for requirement in requirements:
        floor = [specifier.version for specifier in requirement.specifier if specifier.operator == ">="]
        if len(floor) != 1:
            raise ValueError(f"{requirement} has no floor; write {requirement.name}>=VERSION")
        if floors.setdefault(requirement.name, floor[0]) != floor[0]:
            raise ValueError(f"{requirement.name} has the floors {floors[requirement.name]} and {floor[0]}; write one of them")
    return [f"{name}=={floor}" for name, floor in floors.items() if name not in LEFT_OUT]


if __name__ == "__main__":
    print("\n".join(lowest_versions(PYPROJECT)))
