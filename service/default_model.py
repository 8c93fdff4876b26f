"""The model that is used where none is named: the reader that comes with the package."""

from __future__ import annotations

from pathlib import Path

from cacheblend.store.errors import InputError

READER = Path(__file__).parent / "reader"


def default_model() -> str:
    """Folder of the packaged reader.

    Raises:
        InputError: this installation has none.
    """
    if not (READER / "config.json").is_file():
        raise InputError(
            "this installation has no trained reader; give a model directory or hub id with --model (or CACHEBLEND_MODEL)"
        )
    return str(READER)
