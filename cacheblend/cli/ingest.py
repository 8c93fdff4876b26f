"""`cacheblend ingest`, files, folders and URLs into index and store, here, on Ray or in a running vLLM; `reindex`."""

from __future__ import annotations

import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, redirect_stdout, suppress
from dataclasses import replace
from itertools import count, groupby
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.filesize import decimal

from cacheblend.base.errors import InputError, StoreFullError
from cacheblend.base.options import GIB
from cacheblend.integrations.ray import RayConfig
from cacheblend.retriever.index import INDEX_FILE, IndexedDocuments
from cacheblend.retriever.metadata import read_metadata
from cacheblend.service.engine.config import INDEX_FOLDER, KV_FOLDER, EngineConfig, has_kv, load_fusor, remember_settings
from cacheblend.service.engine.document_sources import UNLISTED, DocumentStream, SourceReport, StreamSize, parse_json
from cacheblend.service.engine.ingest import IngestReport, VllmConfig, upload_documents
from cacheblend.service.engine.web_pages import WebFiles

from . import options, terminal
from .model import stored_token_bytes
from .terminal import IngestProgress, LiveLine, counted

if TYPE_CHECKING:
    from cacheblend.blend import Fusor, KVGeometry
    from cacheblend.service.engine.engine import Engine

OF_ANSWERS = ("preset", "max_tokens", "recompute_ratio", "max_loss_nats", "selector", "min_score", "find_passages")
OF_READING = ("prefix_budget_bytes", "ram_budget_bytes")
NAMED = 10  # skipped files of each reason
ASK_FROM_BYTES = 2 * GIB


@options.accepts(EngineConfig, RayConfig, VllmConfig, without=(*OF_ANSWERS, *OF_READING))
def ingest(
    sources: Annotated[list[str], typer.Argument(metavar="FILE|DIR|URL|-...", help="Files, folders, patterns, URLs, or -.")],
    model: Annotated[
        str | None, typer.Option("--model", "-m", envvar="CACHEBLEND_MODEL", help=f"{options.MODEL_HELP} Not with --vllm.")
    ] = None,
    store_dir: options.StoreDir = options.DEFAULT_STORE_DIR,
    *,
    settings: options.Settings,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask, however much disk the KV takes.")] = False,
    prune: Annotated[bool, typer.Option("--prune", help="Delete all documents that none of these sources has.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Stay, and follow folders' changes until Ctrl-C or SIGTERM.")] = False,
    allow_private_urls: Annotated[
        bool, typer.Option("--allow-private-urls", help="Fetch URLs of this machine and of private networks, too.")
    ] = False,
    metadata: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="Of all documents, to filter by; may be repeated.")
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Split, index and precompute documents: text, code, PDF, Office, HTML, EPUB, mails, JSON lines.

    What is stored already is skipped, so an interrupted run goes on where it was. Files are read one by one, and twice: once to
    check and count them all, before the model is loaded. Of several files, those that cannot be used are listed at the end, and
    the exit code is 1. Of a folder hidden and ignored files are left out.

    Examples:

        cacheblend ingest handbook/ "papers/**/*.pdf" notes.docx --model ./model
        cacheblend ingest https://example.org/handbook.html --model ./model
        cacheblend ingest handbook/ --model ./model --prune
        cacheblend ingest handbook/ --model ./model --watch
        cacheblend ingest corpus/ -m ./model --ray local --ray-actors 2
        cacheblend ingest handbook/ --vllm http://localhost:8000
    """
    ray, vllm = settings.make(RayConfig), settings.make(VllmConfig)
    _check_together(sources, store_dir, ray, vllm, watch=watch, prune=prune)
    fields = _read_fields(metadata or (), is_here=not (watch or ray.ray or vllm.vllm))
    stream = DocumentStream(sources, WebFiles(allow_private=allow_private_urls), fields)
    with _resumable(is_failure=not watch), closing(stream):  # --watch ends by a signal and in no other way
        if vllm.vllm is not None:
            with IngestProgress(_measured(stream)) as progress:
                report = upload_documents(stream, vllm, stream.report.faults, progress)
        elif ray.ray is not None:
            report = _ingest_on_ray(sources, stream, _config(settings, model, store_dir), ray, yes=yes)
        else:
            report = _ingest(stream, _config(settings, model, store_dir), sources if watch else (), yes=yes, prune=prune)
    faults, skipped = stream.report.faults, stream.report.skipped
    terminal.print_result({**report.as_dict(), "faults": faults, "skipped": skipped}, _summary(report), as_json)
    if faults and not watch:  # whose faults were printed when they came
        terminal.note(f"{counted(len(faults), 'file')} could not be used:")
        _print_faults(faults)
        raise typer.Exit(1)


@options.accepts(EngineConfig, without=(*OF_ANSWERS, *OF_READING, "chunk_tokens"))
def reindex(
    model: Annotated[str, typer.Option("--model", "-m", envvar="CACHEBLEND_MODEL", help=options.MODEL_HELP)],
    store_dir: options.StoreDir = options.DEFAULT_STORE_DIR,
    *,
    settings: options.Settings,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask, however much disk the KV takes.")] = False,
    as_json: options.Json = False,
) -> None:
    """Compute the ingested documents' KV for another model, from their texts in the index; no file is read again.

    Stop a service on the store first. The index is made the new model's; a new --embedder embeds all anew. Then all KV of other
    models and other --kv-cache-dtype is removed here, and the new model's computed; a remote tier keeps the old, for others. An
    interrupted run goes on where it was. Chunks stay as they were cut.

    Examples:

        cacheblend reindex --model ./new-model
        cacheblend reindex --model qwen2.5-coder-0.5b --store-dir my-store --yes
    """
    with IndexedDocuments.open(store_dir / INDEX_FOLDER) as index:
        documents, chunk_tokens = index.documents(), int(index.setting("chunk_tokens") or 1)
    config = settings.make(EngineConfig, model=options.check_path(model), store_dir=store_dir, chunk_tokens=chunk_tokens)
    tokens = chunk_tokens * sum(document.chunks for document in documents)  # at most, about
    config, fusor = _load(config, lambda _: tokens, yes=yes, rewrites=True)
    with _resumable(), IngestProgress(StreamSize(len(documents))) as progress:
        from cacheblend.service.engine.engine import Engine

        with Engine(config, fusor=fusor, rewriting=progress) as engine:
            remember_settings(config)
            report = engine.reindex(progress)
    terminal.print_result(report.as_dict(), _summary(report), as_json)


def _read_fields(given: Sequence[str], *, is_here: bool) -> dict[str, Any]:
    """Metadata of options `NAME=VALUE`; a value that is JSON, such as 2024, true or ["de", "fr"], is that, and else text."""
    if given and not is_here:
        raise InputError("--metadata cannot be given with --watch, --ray or --vllm; give JSON lines with their own metadata")
    found = dict[str, Any]()
    for name, is_pair, value in (one.partition("=") for one in given):
        if not is_pair:
            raise InputError(f"--metadata {name!r}: give NAME=VALUE, such as year=2024")
        found[name] = value
        with suppress(InputError):
            found[name] = parse_json(value, name)
    return read_metadata(found)


def _check_together(sources: list[str], store_dir: Path, ray: RayConfig, vllm: VllmConfig, *, watch: bool, prune: bool) -> None:
    """Refuse options that exclude each other, and folders that cannot be watched."""
    if vllm.vllm is not None and (watch or ray.ray is not None):
        raise InputError("--vllm cannot be given with --watch or --ray; vLLM itself computes, when it is told to")
    if prune and (vllm.vllm is not None or ray.ray is not None):
        raise InputError("--prune cannot be given with --vllm or --ray; ingest without it, or delete documents by name")
    if ray.ray is not None and watch:
        raise InputError("--watch cannot be given with --ray; run the command again after a change")
    if watch:
        from cacheblend.service.engine.folder_watch import check_folders

        check_folders(sources, store_dir)


def _config(settings: options.Settings, model: str | None, store_dir: Path) -> EngineConfig:
    if model is None:
        raise InputError("no model is named; give --model, or set CACHEBLEND_MODEL")
    return settings.make(EngineConfig, model=options.check_path(model), store_dir=store_dir)


@contextmanager
def _resumable(*, is_failure: bool = True) -> Iterator[None]:
    """End a command at SIGTERM as at Ctrl-C: what is open is closed, and what stays is said."""

    def stop(number: int, _: object) -> None:
        raise KeyboardInterrupt(number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    except KeyboardInterrupt as error:
        terminal.note("interrupted; what was done is stored, and the same command goes on from there")
        raise typer.Exit(128 + (*error.args, signal.SIGINT)[0] if is_failure else 0) from None
    finally:
        signal.signal(signal.SIGTERM, before)


def _ingest(stream: DocumentStream, config: EngineConfig, folders: Sequence[str], *, yes: bool, prune: bool) -> IngestReport:
    """Ingest a stream, delete what it has no more, then follow the changes of folders, if there are any."""
    try:
        size = _measured(stream, config)
    except InputError:
        if not folders:
            raise
        size = StreamSize()  # a folder that is filled later
    with terminal.shown_stages():
        from cacheblend.service.engine.engine import Engine, check_index

        check_index(config)
    config, fusor = _load(config, lambda tokenizer: size.tokens(tokenizer) if size else None, yes=yes)
    with Engine(config, fusor=fusor) as engine:
        remember_settings(config)
        is_read = size != StreamSize()
        with IngestProgress(size) as progress:
            report = engine.ingest_stream(stream if is_read else (), progress)
        report = replace(report, deleted=_prune(engine, stream, all_others=prune) if is_read else 0)
        return report + _follow(engine, folders, stream.report) if folders else report


def _load(
    config: EngineConfig, tokens: Callable[[Any], int | None], *, yes: bool, rewrites: bool = False
) -> tuple[EngineConfig, Fusor]:
    """Load the model, and agree on the disk for the KV of so many `tokens`, found by the tokenizer."""
    with terminal.shown_stages():
        fusor = load_fusor(config)
    if fusor.exact_reason is not None:
        terminal.note(f"only texts and index are stored: {fusor.exact_reason}")
    else:
        _agree(config, fusor.decoder.geometry, tokens(fusor.tokenizer), yes=yes, rewrites=rewrites)
    # Nobody reads here, and memory that is used again costs less than new.
    return replace(config, store=replace(config.store, ram_budget_bytes=1)), fusor


def _prune(engine: Engine, stream: DocumentStream, *, all_others: bool) -> int:
    """Delete the pages that files have no more; with `all_others` every document that was not read, unless a file was not.

    Returns:
        How many documents were deleted.
    """
    if all_others and not stream.ids:  # standard input is read once, and may have none
        raise InputError("no documents to ingest; nothing is pruned")
    unread = [*stream.report.faults, *(name for name, why in stream.report.skipped.items() if why == UNLISTED)]
    if all_others and unread:
        terminal.note(f"nothing is pruned, since {counted(len(unread), 'file')} could not be read, such as {unread[0]}")
    gone = engine.documents.prune(stream.ids, None if all_others and not unread else stream.files)
    if gone:
        more = f" and {len(gone) - NAMED:,} more" if len(gone) > NAMED else ""
        terminal.note(f"deleted, since no source has them any more: {', '.join(gone[:NAMED])}{more}")
    return len(gone)


def _follow(engine: Engine, folders: Sequence[str], found: SourceReport) -> IngestReport:
    """Follow folders until a signal; `found` then has the faults at the end."""
    from cacheblend.service.engine.folder_watch import FolderWatch

    total, watch = IngestReport(), FolderWatch(engine, folders)
    try:
        terminal.note(f"watching {', '.join(folders)}; Ctrl-C ends it")
        for report in watch.reports():
            total += report.ingested
            terminal.note(_summary(report.ingested))
            _print_faults(report.faults)
    except KeyboardInterrupt:
        terminal.note("stopped watching; the same command goes on from there")
    found.faults = watch.faults
    return total


def _ingest_on_ray(
    sources: Sequence[str], stream: DocumentStream, config: EngineConfig, ray: RayConfig, *, yes: bool
) -> IngestReport:
    from cacheblend.integrations.ray.ingest import ingest_on_ray  # Ray may not be installed

    # A URL is refused by the ingest, and not fetched before.
    size = None if any("://" in source for source in sources) else _measured(stream, config)
    stream.close()
    with terminal.shown_stages():
        from cacheblend.blend.loading import kv_geometry, load_tokenizer, read_config

        geometry = kv_geometry(read_config(config.model), config.resolve_device(), config.dtype)
        tokens = size.tokens(load_tokenizer(config.model)) if size else None
    _agree(config, geometry, tokens, yes=yes)
    stream.report = SourceReport()
    # What Ray says of a process that died would stand before the JSON object.
    with redirect_stdout(sys.stderr), IngestProgress(size) as progress:
        report = ingest_on_ray(sources, config, ray, report=stream.report, progress=progress)
    if size is None:
        _print_skipped(stream.report)
    return report


def _measured(stream: DocumentStream, config: EngineConfig | None = None) -> StreamSize | None:
    """Read all once; say what is left out, and how many documents there are. With a config, those in its store are not new."""
    files, known = count(), None
    with LiveLine() as line:
        if config and has_kv(config) and (folder := Path(config.store_dir, INDEX_FOLDER)).joinpath(INDEX_FILE).is_file():
            known = line.enter_context(IndexedDocuments.open(folder)).version
        size = stream.measure(lambda file: line.show(f"reading: {next(files):,} files, now {file}"), known)
    _print_skipped(stream.report)
    if size is not None and size.documents > (read := max(next(files), 1)):
        made = f"{counted(read, 'file')} read: {counted(size.documents, 'document')}"
        terminal.note(f"{made}, as a page, a slide, a sheet and a line is one each")
    return size


def _print_skipped(report: SourceReport) -> None:
    """Say what no document was made of, before the long work begins."""
    for why, files in groupby(sorted(report.skipped.items(), key=itemgetter(1)), key=itemgetter(1)):
        names = [name for name, _ in files]
        more = f" and {len(names) - NAMED:,} more" if len(names) > NAMED else ""
        terminal.note(f"skipped, {why}: {', '.join(names[:NAMED])}{more}")
    if report.faults:
        terminal.note(f"{counted(len(report.faults), 'file')} cannot be used; listed at the end")


def _agree(config: EngineConfig, geometry: KVGeometry, tokens: int | None, *, yes: bool, rewrites: bool = False) -> None:
    """Print how much disk the KV of about `tokens` new tokens needs, and ask where that is much; None if they are not known.

    With `rewrites` they are those of all documents, and come in place of what is stored.
    """
    folder, chunk_tokens = Path(config.store_dir), config.retriever.chunk_tokens
    token_bytes = stored_token_bytes(geometry, config.kv_cache_dtype, chunk_tokens)
    stored = sum(file.stat().st_size for file in (folder / KV_FOLDER).rglob("*") if file.is_file())
    above = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    room = min(config.store.nvme_budget_bytes, shutil.disk_usage(above).free + stored)
    need = max(0.0, (tokens or 0) * token_bytes - (stored if rewrites else 0))
    estimate = f"KV is {token_bytes / 1e3:.1f} kB a token ({config.kv_cache_dtype})"
    if tokens is not None:
        estimate += f": about {tokens:,} tokens, {decimal(int(need))} more in {folder}, which may hold {decimal(room)}"
    if need + stored > room:
        if room < config.store.nvme_budget_bytes and not yes:
            remedy = "free the disk, name another --store-dir, give --kv-cache-dtype int8 or int4, or --yes to try"
            raise StoreFullError(f"{estimate}; the disk has no room for it: {remedy}")
        estimate += "; what does not fit is evicted: give --kv-cache-dtype int8 or int4, raise --nvme-budget-bytes, ingest less"
    if need > ASK_FROM_BYTES and not yes:
        terminal.confirm(f"{estimate}. Go on?")
    else:
        terminal.note(estimate)


def _summary(report: IngestReport) -> str:
    speed = f", {report.tokens / report.seconds:,.0f} tokens/s" if report.computed else ""
    documents = counted(report.documents, "document")
    if report.added + report.replaced + report.unchanged + report.deleted:  # vLLM knows only chunks, and does not say
        changes = f"{report.added} new, {report.replaced} replaced, {report.unchanged} unchanged, {report.deleted} deleted"
        documents += f" ({changes})"
    computed = f"KV of {report.computed} computed, {report.already_stored} stored before"
    return f"{documents}, {counted(report.chunks, 'chunk')}: {computed} ({report.seconds:.1f} s{speed})"


def _print_faults(faults: Mapping[str, str]) -> None:
    for why in faults.values():
        print(terminal.visible(f"  {why}"), file=sys.stderr)  # also where `--quiet` was given
