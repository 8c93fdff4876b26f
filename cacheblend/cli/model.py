"""`cacheblend model`: known models, fetched once and found by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from cacheblend.base.errors import InputError
from cacheblend.base.files import make_folder, make_private_file
from cacheblend.service.engine.config import write_examples

from . import options, terminal

if TYPE_CHECKING:
    from cacheblend.blend.models import KnownModel
    from cacheblend.service.engine.engine import Engine

app = typer.Typer(help="Fetch small pretrained models, and list them.", no_args_is_help=True)


@app.command("get")
def get(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A known model; see `cacheblend model ls`.")],
    accept_licence: Annotated[
        bool, typer.Option("--accept-licence", help="You accept the model's terms; asked for once, where it has any.")
    ] = False,
    accept_license: Annotated[bool, typer.Option("--accept-license", hidden=True)] = False,
    as_json: options.Json = False,
) -> None:
    """Fetch a known model, check it, and convert it once; every command then takes its name for --model, offline.

    It is kept in the user's cache folder (XDG_CACHE_HOME); nothing is installed. A second time does nothing.

    Examples:
        cacheblend model get smollm2-135m && cacheblend ask -m smollm2-135m "Who signs?" --store-dir ./store

        cacheblend model get gemma3-270m --accept-licence --json
    """
    terminal.hush_libraries()
    from cacheblend.blend.models import find_model

    model = find_model(name)
    fetched = fetch(model, accept_licence=accept_licence or accept_license)
    if as_json:
        terminal.print_json({**_row(model), "already_there": not fetched})
        return
    state = "fetched" if fetched else "is there already"
    terminal.stdout.print(f"{name} {state}: {model.folder}", highlight=False, soft_wrap=True)
    terminal.stdout.print(f"licence: {model.licence} ({model.licence_url})", highlight=False, soft_wrap=True)


def fetch(model: KnownModel, *, accept_licence: bool = False) -> bool:
    """Fetch a known model unless it is there, licence and progress on stderr; False where it was there already.

    Raises:
        InputError, ModelFetchError: see `fetch_model`.
    """
    from cacheblend.blend.models import fetch_model

    if not model.is_fetched:
        size = f"{model.download_bytes / 1e6:,.0f} MB"
        terms = f"{model.licence} ({model.licence_url})"
        terminal.stderr.print(f"{model.name}: {size} to download; {terms}", highlight=False, soft_wrap=True)
    with terminal.progress_bars() as progress:
        return fetch_model(model, accept_licence=accept_licence, on_progress=progress)


@app.command("ls")
def ls(as_json: options.Json = False) -> None:
    """List the known models, and which of them are on this machine.

    Example: cacheblend model ls --json
    """
    from cacheblend.blend.models import KNOWN_MODELS

    rows = [_row(model) for model in KNOWN_MODELS.values()]
    if as_json:
        terminal.print_json({"models": rows})
        return
    table = Table("model", "family", "parameters", "licence", "download", "on disk")
    for row in rows:
        on_disk = f"{row['bytes'] / 1e6:,.0f} MB" if row["fetched"] else "-"
        download = f"{row['download_bytes'] / 1e6:,.0f} MB"
        table.add_row(row["name"], row["family"], f"{row['parameters'] / 1e6:,.0f} M", row["licence"], download, on_disk)
    terminal.stdout.print(table)


def _row(model: KnownModel) -> dict[str, Any]:
    fetched = model.is_fetched
    return {
        "name": model.name,
        "family": model.family,
        "parameters": model.parameters,
        "licence": model.licence,
        "licence_url": model.licence_url,
        "sha256": model.gguf_sha256,
        "download_bytes": model.download_bytes,
        "fetched": fetched,
        "path": str(model.folder) if fetched else None,
        "bytes": _bytes(model.folder) if fetched else 0,
    }


def _bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())


READER = Path(__file__).parents[1] / "reader"
# Articles about a fictional world, and questions about them: what the reader was trained to read, and none that it saw.
CORPUS = READER / "corpus.jsonl"
QUESTIONS = READER / "questions.jsonl"
# The chunk size that the reader was trained for.
CHUNK_TOKENS = 96
UNFINISHED = "corpus-unfinished"  # a file in a store's folder, as long as the store has a part of the corpus alone


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
    """Model and store that a command runs on.

    Attributes:
        model: a directory, GGUF file, hub id or known name.
        chunk_tokens: chunk size of its store.
        wants_corpus: the store is yet to be made of the bundled corpus, or that was cut off.
        store_dir: the store's folder; the reader has its own, unless one is named.
    """

    model: str
    chunk_tokens: int
    wants_corpus: bool
    store_dir: Path


def choose_model(model: str | None, chunk_tokens: int, store_dir: Path) -> ModelChoice:
    """The model asked for, or the packaged reader with its own chunk size, over a store of its corpus where there is none yet.

    Raises:
        InputError: no reader in this installation.
    """
    if model is not None:  # it may be the one that the store was begun with
        wants_corpus = Path(model).resolve() == READER.resolve() and (store_dir / UNFINISHED).is_file()
        return ModelChoice(model, chunk_tokens, wants_corpus, store_dir)
    if store_dir == options.DEFAULT_STORE_DIR and not store_dir.is_dir():
        store_dir = store_dir.with_name("reader")  # or its corpus would stand between the documents of the user's first ingest
    wants_corpus = not store_dir.is_dir() or (store_dir / UNFINISHED).is_file()
    return ModelChoice(default_model(), CHUNK_TOKENS, wants_corpus, store_dir)


def corpus_note(store_dir: Path) -> str:
    """The note before the first answer of the packaged reader."""
    return (
        f"No model was given and there is no store yet: the packaged reader first computes the KV of its own "
        f"articles, some minutes and 0.5 GB in {store_dir}. "
        "`cacheblend ingest` makes a store of your documents."
    )


def begin_corpus(store_dir: Path) -> None:
    """Note that a store which is yet to be made will have the corpus: where a start is cut off, the next one goes on."""
    with suppress(OSError):  # whoever opens the store says what is in the way
        make_folder(store_dir)
    make_private_file(store_dir / UNFINISHED)


def ingest_corpus(engine: Engine, progress: Callable[[str, int, int], None]) -> None:
    """Ingest the articles that come with the reader, and note the questions that come with them, for the page to offer."""
    engine.ingest(bundled_corpus(), progress)
    questions = [json.loads(line)["question"] for line in QUESTIONS.read_text(encoding="utf-8").splitlines()]
    store_dir = Path(engine.config.store_dir)
    write_examples(store_dir, questions)
    (store_dir / UNFINISHED).unlink(missing_ok=True)


def bundled_corpus() -> list[dict[str, str]]:
    """The articles that come with the reader, as documents."""
    lines = CORPUS.read_text(encoding="utf-8").splitlines()
    return [{key: document[key] for key in ("id", "title", "text")} for document in map(json.loads, lines)]
