"""`import cacheblend`: what the package offers, at its first use."""

import subprocess
import sys

import pytest

import cacheblend


def _fresh(code: str) -> str:
    """What code prints in a new interpreter."""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_import_brings_nothing() -> None:
    """The import, an error class and the version load no library, torch least, and of our modules the errors alone."""
    names = _fresh(
        "import sys, cacheblend; cacheblend.ConfigError, cacheblend.__version__; print(*sorted(sys.modules))"
    ).split()
    own = {name for name in names if name.startswith("cacheblend.")}
    assert own == {"cacheblend.base", "cacheblend.base.errors", "cacheblend.base.lazy"}
    packages = {name.partition(".")[0] for name in names} - set(sys.stdlib_module_names)
    assert not packages & {"torch", "transformers", "numpy", "safetensors", "typer", "rich"}, packages


@pytest.mark.parametrize("name", cacheblend.__all__)
def test_offers(name: str) -> None:
    """Every name that is offered is there."""
    assert getattr(cacheblend, name) is not None


def test_unknown_name() -> None:
    """A name that is not offered is an AttributeError, as of any module."""
    with pytest.raises(AttributeError, match="no attribute 'Fuser'"):
        _ = cacheblend.Fuser  # type: ignore[attr-defined]
