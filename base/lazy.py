"""Names of a package that are imported from its modules when they are first used, so that its configs need no torch."""

import ast
from collections.abc import Callable
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path

from .errors import needs_extra


def names_of(file: str) -> dict[str, str | None]:
    """The modules of the names that a package's `__init__.py`, the file, imports from its own modules."""
    imports = [node for node in ast.walk(ast.parse(Path(file).read_text("utf-8"))) if isinstance(node, ast.ImportFrom)]
    return {alias.name: node.module for node in imports if node.level == 1 for alias in node.names}


def lazy_names(package: str, file: str, extra: str | None = None) -> Callable[[str], object]:
    """A package's `__getattr__`: imports what its `__init__.py`, the file, names in `from .module import name`.

    Those lines stand under `TYPE_CHECKING`, for type checkers, and are read here from the source; `extra` brings the
    libraries that the modules import.
    """
    module_of = names_of(file)

    def get(name: str) -> object:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        with needs_extra(extra) if extra else nullcontext():
            return getattr(import_module(f".{module_of[name]}", package), name)

    return get
