"""`cacheblend store`: look at, check and empty stores, without a model."""

from __future__ import annotations

import dataclasses
import datetime
from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cacheblend.base.errors import InputError
from cacheblend.retriever.index_folder import INDEX_FILE, IndexedDocuments
from cacheblend.service.engine.config import INDEX_FOLDER, KV_FOLDER
from cacheblend.store import KVStore, StoreConfig

from . import options, terminal
from .terminal import counted

if TYPE_CHECKING:
    from cacheblend.retriever.catalog import IndexReport
    from cacheblend.store.verify import VerifyReport

app = typer.Typer(help="List, measure, check and empty stores of chunk KV.", no_args_is_help=True)
UNBOUNDED = 2**62  # looking at a store must not evict from it


@app.command("ls")
def ls(store_dir: options.StoreDir = options.DEFAULT_STORE_DIR, as_json: options.Json = False) -> None:
    """List the stored chunks, the least recently used first.

    Example: cacheblend store ls --store-dir ./store --json
    """
    with open_store(store_dir) as store:
        entries = store.ls()
    rows = [
        {
            "key": str(entry.key),
            "tokens": entry.tokens,
            "layers": entry.layers,
            "bytes": entry.bytes,
            "model": entry.key.model,
            "codec": entry.key.codec,
            "namespace": entry.key.namespace,
            "created": _time(entry.created_ns),
            "last_used": _time(entry.used_ns),
        }
        for entry in entries
    ]
    if as_json:
        terminal.print_json({"entries": rows})
        return
    shown = ("key", "tokens", "layers", "bytes", "codec", "last_used")
    terminal.print_table(shown, ([str(row["key"])[:16], *(row[name] for name in shown[1:])] for row in rows))
    terminal.print_line(counted(len(rows), "entry"))


@app.command("stat")
def stat(store_dir: options.StoreDir = options.DEFAULT_STORE_DIR, as_json: options.Json = False) -> None:
    """Entries, tokens and bytes, by model.

    Example: cacheblend store stat --store-dir ./store
    """
    with open_store(store_dir) as store:
        entries = store.ls()
    by_model = defaultdict[str, Counter[str]](Counter)
    for entry in entries:
        by_model[entry.key.model].update(entries=1, tokens=entry.tokens, bytes=entry.bytes)
    total = sum(by_model.values(), Counter(entries=0, tokens=0, bytes=0))
    if as_json:
        terminal.print_json({name: total[name] for name in ("entries", "tokens", "bytes")} | {"models": by_model})
        return
    kinds = {"entries": "entry", "tokens": "token", "bytes": "byte"}
    terminal.print_line(", ".join(counted(total[name], noun) for name, noun in kinds.items()))
    for model, own in by_model.items():
        terminal.print_line(f"  model {model[:16]}: {counted(own['entries'], 'entry')}, {counted(own['bytes'], 'byte')}")


@app.command("verify")
def verify(
    store_dir: options.StoreDir = options.DEFAULT_STORE_DIR,
    repair: Annotated[
        bool,
        typer.Option("--repair", help="Repair what is found: damaged files are set aside, lost ones entered."),
    ] = False,
    as_json: options.Json = False,
) -> None:
    """Check every file and every checksum, of KV and index; exits with 1 if something is wrong and was not repaired.

    A document that is damaged in the index cannot be repaired: --repair removes it there. Its KV stays for when it is ingested
    again, or until it is deleted.

    Example: cacheblend store verify --store-dir ./store --repair
    """
    with open_store(store_dir) as store, terminal.progress_bars() as progress:
        report = store.verify(repair=repair, on_progress=lambda done, total: progress("verify", done, total))
    index = None
    if (store_dir / INDEX_FOLDER / INDEX_FILE).is_file():
        with IndexedDocuments.open(store_dir / INDEX_FOLDER) as documents:
            index = documents.verify(repair=repair)
    ok = report.ok and (index is None or index.ok)
    if as_json:
        terminal.print_json({**report.as_dict(), "index": None if index is None else dataclasses.asdict(index), "ok": ok})
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
def clear(
    store_dir: options.StoreDir = options.DEFAULT_STORE_DIR,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: options.Json = False,
) -> None:
    """Remove every stored chunk KV; documents stay in the index, and their KV is computed anew when it is needed.

    Example: cacheblend store clear --store-dir ./store --yes
    """
    with open_store(store_dir) as store:
        entries = len(store.ls())
        if not yes:
            terminal.confirm(f"Remove {counted(entries, 'entry')} from {store_dir}?")
        store.clear()
    if as_json:
        terminal.print_json({"removed": entries})
    else:
        terminal.print_line(f"{counted(entries, 'entry')} removed")


@app.command("push")
@options.accepts(StoreConfig, only=options.OF_REMOTES)
def push(
    store_dir: options.StoreDir = options.DEFAULT_STORE_DIR,
    *,
    settings: options.Settings,
    as_json: options.Json = False,
) -> None:
    """Send to --remote the entries that the store has and the remote tier lacks, such as those dropped during an outage.

    Example: cacheblend store push --store-dir ./store --remote redis://cache.internal:6379/0
    """
    config = settings.make(StoreConfig)
    if config.remote is None:
        raise InputError("no remote tier is named; give --remote URL, or set CACHEBLEND_REMOTE")
    sent, sent_bytes, lost, group = 0, 0, 0, 64
    with open_store(store_dir, config) as store, terminal.progress_bars() as progress:
        keys = [entry.key for entry in store.ls()]
        for at in range(0, len(keys), group):
            shared = store.share(keys[at : at + group])
            sent, sent_bytes, lost = sent + shared.entries, sent_bytes + shared.bytes, lost + len(shared.lost)
            progress("push", min(at + group, len(keys)), len(keys))
    there = len(keys) - sent - lost
    if as_json:
        terminal.print_json({"entries": sent, "bytes": sent_bytes, "already_there": there, "refused": lost})
        return
    terminal.print_line(
        f"{counted(sent, 'entry')} pushed ({counted(sent_bytes, 'byte')}), {there} there before, {lost} damaged"
    )


def open_store(store_dir: Path, config: StoreConfig | None = None) -> KVStore:
    """The store of a folder, looked at without evicting from it.

    Raises:
        InputError: the folder holds no store.
    """
    directory = store_dir / KV_FOLDER
    if not directory.is_dir():
        raise InputError(f"{store_dir} holds no store; give the --store-dir that documents were ingested into")
    config = config or StoreConfig()
    return KVStore(replace(config, directory=directory, ram_budget_bytes=1, nvme_budget_bytes=UNBOUNDED))


def _time(nanoseconds: int) -> str:
    return datetime.datetime.fromtimestamp(nanoseconds / 1e9, tz=datetime.UTC).isoformat(timespec="seconds")
