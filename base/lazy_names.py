"""Names of a package that are imported at their first use, and heavy libraries that are loaded at theirs.

`cacheblend --help` and `documents ls` need the options and the catalogs, and no model: torch alone takes seconds to load.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from importlib import import_module
from importlib.util import find_spec
from threading import RLock
from types import ModuleType
from typing import Any

from .extras import needs_extra

HEAVY_LIBRARIES = ("torch", "transformers", "faiss")
_LOADING = RLock()


def lazy_names(
    package: str, modules: Mapping[str, tuple[str, ...]], extra: str | None = None
) -> tuple[list[str], Callable[[str], object]]:
    """Give a package's `__all__`, and its `__getattr__`, which imports a name's module at the name's first use.

    Args:
        package: the package's `__name__`.
        modules: which names are imported from which module; a dot before a module's name stands for the package.
        extra: the extra that brings what the modules need.
    """
    module_of = {name: module for module, names in modules.items() for name in names}

    def load(name: str) -> object:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        with needs_extra(extra) if extra else nullcontext():
            value: object = getattr(import_module(module_of[name], package), name)
        vars(sys.modules[package])[name] = value
        return value

    return sorted(module_of), load


class _DeferredLibrary(ModuleType):
    """A library in `sys.modules` that is imported at the first use of one of its names, and then takes its own place.

    `importlib.util.LazyLoader` would not do: the second `import` statement of a name already loads what it defers.
    """

    def __getattr__(self, name: str) -> Any:
        library = self.__name__
        with _LOADING:
            if sys.modules.get(library) is self:
                del sys.modules[library]
                real = import_module(library)
                for module in list(sys.modules.values()):
                    if getattr(module, "__dict__", {}).get(library) is self:
                        vars(module)[library] = real
        return getattr(sys.modules[library], name)


def defer_heavy_libraries() -> None:
    """Let `import torch` and the like load the library at the first use of one of its names.

    For a process of the command line, before it imports a command's module. What is loaded or missing stays as it is.
    """
    for name in HEAVY_LIBRARIES:
        spec = None if name in sys.modules else find_spec(name)
        if spec is not None:
            deferred = _DeferredLibrary(name)
            deferred.__spec__ = spec
            sys.modules[name] = deferred
