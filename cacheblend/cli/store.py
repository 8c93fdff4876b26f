"""`cacheblend store` and `cacheblend documents`: what lies in a store folder, without a model."""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from itertools import starmap
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cacheblend.base.errors import InputError
from cacheblend.retriever.index import INDEX_FILE, IndexedDocuments
from cacheblend.service.engine.config import INDEX_FOLDER, KV_FOLDER
from cacheblend.service.engine.documents import Documents, DocumentStatus, shown_chunk
from cacheblend.store import KVStore, StoreConfig

from . import options, terminal
from .terminal import counted

if TYPE_CHECKING:
    from cacheblend.retriever.catalog import IndexReport
    from cacheblend.store import VerifyReport

app = typer.Typer(help="List, measure, check and empty stores of chunk KV.", no_args_is_help=True)
documents = typer.Typer(help="List, show, pin and delete ingested documents.", no_args_is_help=True)
UNBOUNDED = 2**62  # bytes: looking at a store must not evict from it
Id = Annotated[str, typer.Argument(metavar="ID", help="The document's id, as `documents ls` prints it.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


def open_store(store_dir: Path, config: StoreConfig | None = None) -> KVStore:
    """The store of a folder, looked at without evicting from it; raises InputError if the folder holds none."""
    directory = store_dir / KV_FOLDER
    if not directory.is_dir():
        raise InputError(f"{store_dir} holds no store; give the --store-dir that documents were ingested into")
    config = config or StoreConfig()
    return KVStore(dataclasses.replace(config, directory=directory, ram_budget_bytes=1, nvme_budget_bytes=UNBOUNDED))


@app.command("ls")
def ls(store_dir: options.StoreDir = options.DEFAULT_STORE_DIR, as_json: options.Json = False) -> None:
    """List the stored chunks, the least recently used first.

    Examples:

        cacheblend store ls --store-dir ./store --json
    """
    with open_store(store_dir) as store:
        entries = store.ls()
    rows = [
        {"key": str(entry.key), "tokens": entry.tokens, "layers": entry.layers, "bytes": entry.bytes}
        | {"model": entry.key.model, "codec": entry.key.codec, "namespace": entry.key.namespace}
        | {"created": _time(entry.created_ns), "last_used": _time(entry.used_ns)}
        for entry in entries
    ]
    if as_json:
        terminal.print_json({"entries": rows})
        return
    shown = ("key", "tokens", "layers", "bytes", "codec", "last_used")
    terminal.print_table(shown, ([str(row["key"])[:16], *(row[name] for name in shown[1:])] for row in rows))
    terminal.print_line(counted(len(rows), "entry"))


def _time(nanoseconds: int) -> str:
    return datetime.fromtimestamp(nanoseconds / 1e9, tz=UTC).isoformat(timespec="seconds")


@app.command("stat")
def stat(store_dir: options.StoreDir = options.DEFAULT_STORE_DIR, as_json: options.Json = False) -> None:
    """Entries, tokens and bytes, by model.

    Examples:

        cacheblend store stat --store-dir ./store
    """
    by_model = defaultdict[str, Counter[str]](Counter)
    with open_store(store_dir) as store:
        for entry in store.ls():
            by_model[entry.key.model].update(entries=1, tokens=entry.tokens, bytes=entry.bytes)
    total = sum(by_model.values(), Counter(entries=0, tokens=0, bytes=0))
    if as_json:
        terminal.print_json({name: total[name] for name in ("entries", "tokens", "bytes")} | {"models": by_model})
        return
    for name, own in {"all models": total, **by_model}.items():
        sizes = (counted(own["entries"], "entry"), counted(own["tokens"], "token"), counted(own["bytes"], "byte"))
        terminal.print_line(f"{name[:16]}: {', '.join(sizes)}")


@app.command("verify")
def verify(
    store_dir: options.StoreDir = options.DEFAULT_STORE_DIR,
    repair: Annotated[
        bool, typer.Option("--repair", help="Repair what is found: damaged files are set aside, lost ones entered.")
    ] = False,
    as_json: options.Json = False,
) -> None:
    """Check every file and every checksum, of KV and index; exits with 1 if something is wrong and was not repaired.

    A document that is damaged in the index cannot be repaired: --repair removes it there. Its KV stays for when it is ingested
    again, or until it is deleted.

    Examples:

        cacheblend store verify --store-dir ./store --repair
    """
    with open_store(store_dir) as store, terminal.progress_bars() as progress:
        report = store.verify(repair=repair, on_progress=lambda done, total: progress("verify", done, total))
    index = None
    if (store_dir / INDEX_FOLDER / INDEX_FILE).is_file():
        with IndexedDocuments.open(store_dir / INDEX_FOLDER) as indexed:
            index = indexed.verify(repair=repair)
    ok = report.ok and (index is None or index.ok)
    if as_json:
        terminal.print_json({**dataclasses.asdict(report), "index": index and dataclasses.asdict(index), "ok": ok})
    else:
        _print_found(report, index)
        if not ok:
            terminal.print_line("repaired" if report.repaired else "run again with --repair")
    if not ok and not report.repaired:
        raise typer.Exit(1)


def _print_found(report: VerifyReport, index: IndexReport | None) -> None:
    found = (
        f"{len(report.damaged)} damaged, {len(report.missing)} without a file, {len(report.mismatched)} listed wrongly, "
        f"{counted(len(report.orphans), 'file')} without an entry, {report.leftovers} half written"
        f"{', totals miscounted' if report.miscounted else ''}"
    )
    size = f"{counted(report.entries, 'entry')}, {counted(report.bytes, 'byte')}"
    terminal.print_line(f"{size}: {'none damaged' if report.ok else found}")
    if index is None:
        return
    strays = counted(index.strays, "chunk")
    found = f"{len(index.damaged)} damaged, {strays} of no document{', its structure broken' if index.broken else ''}"
    size = f"{counted(index.documents, 'document')}, {counted(index.chunks, 'chunk')}"
    terminal.print_line(f"index: {size}: {'none damaged' if index.ok else found}")
    for id_ in index.damaged:
        terminal.print_line(f"  {id_}: {'removed from' if index.repaired else 'damaged in'} the index; ingest it again")


@app.command("clear")
def clear(store_dir: options.StoreDir = options.DEFAULT_STORE_DIR, yes: Yes = False, as_json: options.Json = False) -> None:
    """Remove every stored chunk KV; documents stay in the index, and their KV is computed anew when it is needed.

    Examples:

        cacheblend store clear --store-dir ./store --yes
    """
    with open_store(store_dir) as store:
        entries = len(store.ls())
        if not yes:
            terminal.confirm(f"Remove {counted(entries, 'entry')} from {store_dir}?")
        store.clear()
    terminal.print_result({"removed": entries}, f"{counted(entries, 'entry')} removed", as_json)


@documents.command("ls")
def list_documents(
    store_dir: options.StoreDir = options.DEFAULT_STORE_DIR,
    parts: Annotated[bool, typer.Option("--parts", help="Each page, slide and sheet of a file, and not the file.")] = False,
    as_json: options.Json = False,
) -> None:
    """List the documents, and how much of each one's KV is stored. The pages of a file are one.

    Examples:

        cacheblend documents ls --store-dir ./store --json
    """
    with _open_documents(store_dir) as opened:
        found, _ = opened.page(by_file=not parts)
    if as_json:
        terminal.print_json({"documents": [status.as_dict() for status in found]})
        return
    columns = ("id", "title", "parts", "chunks", "stored_chunks", "shared_chunks", "stored_bytes", "pinned")
    terminal.print_table(columns, ([getattr(each, name) for name in columns] for each in found))
    terminal.print_line(counted(len(found), "document"))


@documents.command("show")
def show(id_: Id, store_dir: options.StoreDir = options.DEFAULT_STORE_DIR, as_json: options.Json = False) -> None:
    """Show a document and the chunks that it was split into.

    Examples:

        cacheblend documents show handbook/travel.md --store-dir ./store
    """
    with _open_documents(store_dir) as opened:
        status, chunks = opened.show(id_)
    if as_json:
        terminal.print_json({**status.as_dict(), "texts": list(starmap(shown_chunk, chunks))})
        return
    for name, value in status.as_dict().items():
        terminal.print_line(f"{name}: {value}")
    for chunk, place in chunks:
        part = chunk.document_id.removeprefix(id_).removeprefix("#")
        head = f"{part}{', ' if part else ''}{counted(len(chunk.token_ids), 'token')}{place}"
        terminal.print_line(f"\n[{chunk.position}] {head}\n{chunk.text}")


@documents.command("delete")
@options.accepts(StoreConfig, only=options.OF_REMOTES)
def delete(
    id_: Id,
    store_dir: options.StoreDir = options.DEFAULT_STORE_DIR,
    yes: Yes = False,
    *,
    settings: options.Settings,
    as_json: options.Json = False,
) -> None:
    """Remove a document, or a file with all its pages, and the KV of the chunks that no other document has.

    Examples:

        cacheblend documents delete handbook/travel.md --store-dir ./store --yes
    """
    with _open_documents(store_dir, settings.make(StoreConfig)) as opened:
        if not yes:
            status = opened.status(id_)
            parts = f"{counted(status.parts, 'part')}, " if status.id != id_ or status.parts > 1 else ""
            chunks = counted(status.chunks, "chunk")
            terminal.confirm(f"Delete {id_!r}, {parts}{chunks}, {counted(status.own_bytes, 'byte')} of KV?")
        _print_status(opened.delete(id_), "deleted", as_json)


@documents.command("pin")
def pin(id_: Id, store_dir: options.StoreDir = options.DEFAULT_STORE_DIR, as_json: options.Json = False) -> None:
    """Keep the KV of the chunks of a document, or a file, from being evicted.

    Examples:

        cacheblend documents pin handbook/travel.md --store-dir ./store
    """
    with _open_documents(store_dir) as opened:
        _print_status(opened.pin(id_), "pinned", as_json)


@documents.command("unpin")
def unpin(id_: Id, store_dir: options.StoreDir = options.DEFAULT_STORE_DIR, as_json: options.Json = False) -> None:
    """Let the KV of the chunks of a document, or a file, be evicted again.

    Examples:

        cacheblend documents unpin handbook/travel.md --store-dir ./store
    """
    with _open_documents(store_dir) as opened:
        _print_status(opened.pin(id_, pinned=False), "unpinned", as_json)


@contextmanager
def _open_documents(store_dir: Path, config: StoreConfig | None = None) -> Iterator[Documents]:
    with open_store(store_dir, config) as store, IndexedDocuments.open(store_dir / INDEX_FOLDER) as index:
        yield Documents(index, store)


def _print_status(status: DocumentStatus, done: str, as_json: bool) -> None:
    kv = f"KV of {counted(status.stored_chunks, 'chunk')}, {counted(status.stored_bytes, 'byte')}"
    terminal.print_result(status.as_dict(), f"{done} {status.id}: {kv}", as_json)
