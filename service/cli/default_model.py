"""The model that is used where none is named: the reader that comes with the package."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from cacheblend.base.errors import InputError

READER = Path(__file__).parents[1] / "reader"
# Articles about a fictional world, and questions about them: what the reader was trained to read, and none that it saw.
CORPUS = READER / "corpus.jsonl"
QUESTIONS = READER / "questions.jsonl"
# The chunk size that the reader was trained for.
CHUNK_TOKENS = 96


def default_model() -> str:
    """Folder of the packaged reader.

    Raises:
        InputError: this installation has none.
    """
    if not (READER / "config.json").is_file():
        raise InputError("this installation has no trained reader; give a model with --model (or CACHEBLEND_MODEL)")
    return str(READER)


@dataclass(frozen=True, slots=True)
class ModelChoice:
    """What a command runs on.

    Attributes:
        model: a directory, GGUF file, hub id or known name.
        chunk_tokens: chunk size of its store.
        wants_corpus: the store is yet to be made, of the bundled corpus.
    """

    model: str
    chunk_tokens: int
    wants_corpus: bool


def choose_model(model: str | None, chunk_tokens: int, store_dir: Path) -> ModelChoice:
    """The model asked for, or the packaged reader with its own chunk size, over a store of its corpus where there is none yet.

    Raises:
        InputError: no reader in this installation.
    """
    if model is not None:
        return ModelChoice(model, chunk_tokens, wants_corpus=False)
    return ModelChoice(default_model(), CHUNK_TOKENS, wants_corpus=not store_dir.is_dir())


def bundled_corpus() -> list[dict[str, str]]:
    """The articles that come with the reader, as documents."""
    lines = CORPUS.read_text(encoding="utf-8").splitlines()
    return [{key: document[key] for key in ("id", "title", "text")} for document in map(json.loads, lines)]
