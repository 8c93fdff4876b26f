"""`cacheblend documents`: list, show, pin and delete what was ingested, without a model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from cacheblend.retriever.index_folder import IndexedDocuments
from cacheblend.service.engine.config import INDEX_FOLDER
from cacheblend.service.engine.documents import Documents, DocumentStatus, shown_chunk
from cacheblend.store import StoreConfig

from . import options, terminal
from .store import open_store
from .terminal import counted

app = typer.Typer(help="List, show, pin and delete ingested documents.", no_args_is_help=True)
Id = Annotated[str, typer.Argument(metavar="ID", help="The document's id, as `documents ls` prints it.")]


@app.command("ls")
def ls(
    store_dir: options.StoreDir = options.DEFAULT_STORE_DIR,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="At most so many; left out, all.")] = None,
    after: Annotated[str | None, typer.Option("--after", metavar="ID", help="Those listed after this document.")] = None,
    parts: Annotated[bool, typer.Option("--parts", help="Each page, slide and sheet of a file, and not the file.")] = False,
    as_json: options.Json = False,
) -> None:
    """List the documents, and how much of each one's KV is stored. The pages of a file are one.

    Example: cacheblend documents ls --store-dir ./store --limit 100 --json
    """
    with _open(store_dir) as documents:
        listed = documents.page if parts else documents.files
        found, has_more = listed(limit, after)
    if as_json:
        terminal.print_json({"documents": [status.as_dict() for status in found], "has_more": has_more})
        return
    columns = ("id", "title", "parts", "chunks", "stored_chunks", "shared_chunks", "stored_bytes", "pinned")
    terminal.print_table(columns, ([getattr(each, name) for name in columns] for each in found))
    terminal.print_line(f"{counted(len(found), 'document')}{'; there are more' if has_more else ''}")


@app.command("show")
def show(
    id_: Id,
    store_dir: options.StoreDir = options.DEFAULT_STORE_DIR,
    as_json: options.Json = False,
) -> None:
    """Show a document and the chunks that it was split into.

    Example: cacheblend documents show handbook/travel.md --store-dir ./store
    """
    with _open(store_dir) as documents:
        status, chunks = documents.show(id_)
        places = documents.places(chunks)
    if as_json:
        terminal.print_json({**status.as_dict(), "texts": list(map(shown_chunk, chunks, places))})
        return
    for name, value in status.as_dict().items():
        terminal.print_line(f"{name}: {value}")
    for chunk, place in zip(chunks, places, strict=True):
        part = chunk.document_id.removeprefix(id_).removeprefix("#")
        head = f"\n[{chunk.position}] {part}{', ' if part else ''}{counted(len(chunk.token_ids), 'token')}{place}"
        terminal.print_line(head)
        terminal.print_line(chunk.text)


@app.command("delete")
@options.accepts(StoreConfig, only=options.OF_REMOTES)
def delete(
    id_: Id,
    store_dir: options.StoreDir = options.DEFAULT_STORE_DIR,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    *,
    settings: options.Settings,
    as_json: options.Json = False,
) -> None:
    """Remove a document, or a file with all its pages, and the KV of the chunks that no other document has.

    Example: cacheblend documents delete handbook/travel.md --store-dir ./store --yes
    """
    with _open(store_dir, settings.make(StoreConfig)) as documents:
        if not yes:
            status = documents.status(id_)
            parts = f"{counted(status.parts, 'part')}, " if status.id != id_ or status.parts > 1 else ""
            chunks = counted(status.chunks, "chunk")
            terminal.confirm(f"Delete {id_!r}, {parts}{chunks}, {counted(status.own_bytes, 'byte')} of KV?")
        _print_status(documents.delete(id_), "deleted", as_json)


def set_pinned(
    context: typer.Context,
    id_: Id,
    store_dir: options.StoreDir = options.DEFAULT_STORE_DIR,
    as_json: options.Json = False,
) -> None:
    """Pin a document, or a file, or let it go, as the command is called."""
    with _open(store_dir) as documents:
        change = documents.pin if context.info_name == "pin" else documents.unpin
        _print_status(change(id_), f"{context.info_name}ned", as_json)


for _name, _what in (
    ("pin", "Keep the KV of the chunks of a document, or a file, from being evicted."),
    ("unpin", "Let the KV of the chunks of a document, or a file, be evicted again."),
):
    _example = f"Example: cacheblend documents {_name} handbook/travel.md --store-dir ./store"
    app.command(_name, help=f"{_what}\n\n{_example}")(set_pinned)


@contextmanager
def _open(store_dir: Path, config: StoreConfig | None = None) -> Iterator[Documents]:
    with open_store(store_dir, config) as store, IndexedDocuments.open(store_dir / INDEX_FOLDER) as index:
        yield Documents(index, store)


def _print_status(status: DocumentStatus, done: str, as_json: bool) -> None:
    if as_json:
        terminal.print_json(status.as_dict())
        return
    kv = f"KV of {counted(status.stored_chunks, 'chunk')}, {counted(status.stored_bytes, 'byte')}"
    terminal.print_line(f"{done} {status.id}: {kv}")
