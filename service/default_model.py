"""The model that is used where none is named: the reader that comes with the package."""

from __future__ import annotations

from pathlib import Path

from cacheblend.store.errors import InputError

READER = Path(__file__).parent / "reader"
# Articles about a fictional world, and questions about them: what the reader was trained to read, and none that it saw.
CORPUS = READER / "corpus.jsonl"
QUESTIONS = READER / "questions.jsonl"
# The chunk size that the reader was trained for.
CHUNK_TOKENS = 128


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
