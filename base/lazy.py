"""Names of a package that are imported from its modules when they are first used, so that its configs need no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from importlib import import_module

from .errors import needs_extra


def lazy_names(package: str, modules: Mapping[str, str], extra: str | None = None) -> Callable[[str], object]:
    """A package's `__getattr__` for the names, apart by blanks, of each of its modules; `extra` brings what they import."""
    module_of = {name: module for module, names in modules.items() for name in names.split()}

    def get(name: str) -> object:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        with needs_extra(extra) if extra else nullcontext():
            return getattr(import_module(f".{module_of[name]}", package), name)

    return get
