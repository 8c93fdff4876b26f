"""`cacheblend store` and `cacheblend documents`: what lies in a store folder, without a model."""

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import starmap
from pathlib import Path
from typing import Annotated

import typer
from rich.filesize import decimal

from cacheblend.base.errors import InputError
from cacheblend.retriever.catalog import IndexReport
from cacheblend.retriever.index import INDEX_FILE, IndexedDocuments
from cacheblend.service.engine.config import INDEX_FOLDER, KV_FOLDER, VLLM_FOLDER
from cacheblend.service.engine.documents import Documents, shown_chunk
from cacheblend.store import KVStore, StoreConfig, VerifyReport

from . import options, terminal
from .terminal import counted

app = typer.Typer(help="Check stores of chunk KV and their index.", no_args_is_help=True)
documents = typer.Typer(help="List, show and delete ingested documents.", no_args_is_help=True)
UNBOUNDED = 2**62  # bytes: looking at a store must not evict from it
Id = Annotated[str, typer.Argument(metavar="ID", help="The document's id, as `documents ls` prints it.")]


def open_store(store_dir: Path, config: StoreConfig | None = None) -> KVStore:
    """The store of a folder, looked at without evicting from it; raises InputError if the folder holds none."""
    directory = store_dir / KV_FOLDER
    if not directory.is_dir():
        raise InputError(f"{store_dir} holds no store; give the --store-dir that documents were ingested into")
    config = config or StoreConfig()
    return KVStore(dataclasses.replace(config, directory=directory, ram_budget_bytes=1, nvme_budget_bytes=UNBOUNDED))


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

        cacheblend store verify --store-dir ./my-store --repair
    """
    with open_store(store_dir) as store, terminal.progress_bars() as progress:
        report = store.verify(repair=repair, on_progress=lambda done, total: progress("verify", done, total))
    indexes = dict[str, IndexReport]()
    for name in (INDEX_FOLDER, VLLM_FOLDER):
        if (store_dir / name / INDEX_FILE).is_file():
            with IndexedDocuments.open(store_dir / name) as indexed:
                indexes[name] = indexed.verify(repair=repair)
    ok = report.ok and all(index.ok for index in indexes.values())
    if as_json:
        found = {name: dataclasses.asdict(index) for name, index in indexes.items()}
        terminal.print_json({**dataclasses.asdict(report), INDEX_FOLDER: None, **found, "ok": ok})
    else:
        _print_found(report, indexes)
        if not ok:
            terminal.print_line("repaired" if report.repaired else "run again with --repair")
    if not ok and not report.repaired:
        raise typer.Exit(1)


def _print_found(report: VerifyReport, indexes: Mapping[str, IndexReport]) -> None:
    found = (
        f"{len(report.damaged)} damaged, {len(report.missing)} without a file, {len(report.mismatched)} listed wrongly, "
        f"{counted(len(report.orphans), 'file')} without an entry, {report.leftovers} half written"
        f"{', totals miscounted' if report.miscounted else ''}"
    )
    size = f"{counted(report.entries, 'entry')}, {report.unowned} of no document, {counted(report.bytes, 'byte')}"
    terminal.print_line(f"{size}: {'none damaged' if report.ok else found}")
    for name, index in indexes.items():
        strays = counted(index.strays, "chunk")
        found = f"{len(index.damaged)} damaged, {strays} of no document{', its structure broken' if index.broken else ''}"
        size = f"{counted(index.documents, 'document')}, {counted(index.chunks, 'chunk')}"
        terminal.print_line(f"{name}: {size}: {'none damaged' if index.ok else found}")
        for id_ in index.damaged:
            terminal.print_line(f"  {id_}: {'removed from' if index.repaired else 'damaged in'} the index; ingest it again")


@documents.command("ls")
def list_documents(
    store_dir: options.StoreDir = options.DEFAULT_STORE_DIR,
    parts: Annotated[bool, typer.Option("--parts", help="Each page, slide and sheet of a file, and not the file.")] = False,
    as_json: options.Json = False,
) -> None:
    """List the documents, and how much of each one's KV is stored. The pages of a file are one.

    Examples:

        cacheblend documents ls --store-dir ./my-store --json
    """
    with _open_documents(store_dir) as opened:
        found, _ = opened.page(by_file=not parts)
    if as_json:
        terminal.print_json({"documents": [status.as_dict() for status in found]})
        return
    rows = [(one.id, one.chunks, one.stored_chunks, decimal(one.stored_bytes), one.title or one.id) for one in found]
    terminal.print_table(("id", "chunks", "with KV", "size", "title"), rows)
    terminal.print_line(counted(len(found), "document"))


@documents.command("show")
def show(id_: Id, store_dir: options.StoreDir = options.DEFAULT_STORE_DIR, as_json: options.Json = False) -> None:
    """Show a document and the chunks that it was split into.

    Examples:

        cacheblend documents show handbook/travel.md --store-dir ./my-store
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
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    *,
    settings: options.Settings,
    as_json: options.Json = False,
) -> None:
    """Remove a document, or a file with all its pages, and the KV of the chunks that no other document has.

    Examples:

        cacheblend documents delete handbook/travel.md --store-dir my-store --yes
    """
    with _open_documents(store_dir, settings.make(StoreConfig)) as opened:
        if not yes:
            status = opened.status(id_)
            parts = f"{counted(status.parts, 'part')}, " if status.id != id_ or status.parts > 1 else ""
            chunks = counted(status.chunks, "chunk")
            terminal.confirm(f"Delete {id_!r}, {parts}{chunks}, {counted(status.own_bytes, 'byte')} of KV?")
        deleted = opened.delete(id_)
    kv = f"KV of {counted(deleted.stored_chunks, 'chunk')}, {counted(deleted.stored_bytes, 'byte')}"
    terminal.print_result(deleted.as_dict(), f"deleted {deleted.id}: {kv}", as_json)


@contextmanager
def _open_documents(store_dir: Path, config: StoreConfig | None = None) -> Iterator[Documents]:
    folders = [store_dir / INDEX_FOLDER, store_dir / VLLM_FOLDER]
    found = [folder for folder in folders if (folder / INDEX_FILE).is_file()] or folders[:1]
    with open_store(store_dir, config) as store, ExitStack() as opened:
        yield Documents(store, *(opened.enter_context(IndexedDocuments.open(folder)) for folder in found))
