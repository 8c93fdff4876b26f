"""`cacheblend ingest`: documents of files, folders and URLs into index and store, here, on Ray or in a running vLLM."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass, replace
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cacheblend.base.checks import GIB
from cacheblend.base.errors import InputError
from cacheblend.integrations.ray import RayConfig
from cacheblend.service.engine.config import KV_FOLDER, EngineConfig, load_fusor
from cacheblend.service.engine.document_sources import DocumentStream, SourceReport, StreamSize
from cacheblend.service.engine.ingest import IngestReport
from cacheblend.service.engine.vllm_upload import VllmConfig, upload_documents
from cacheblend.service.engine.web_pages import WebFiles
from cacheblend.store.codecs import CODECS, LayerShape

from . import options, terminal
from .terminal import IngestProgress, ReadingProgress, counted

if TYPE_CHECKING:
    from cacheblend.blend import KVGeometry
    from cacheblend.service.engine.engine import Engine

NOT_OF_INGEST = (
    "preset",
    "max_tokens",
    "prefix_budget_bytes",
    "ram_budget_bytes",
    "direct_reads",
    "recompute_ratio",
    "selector",
    "min_score",
    "reranker",
)


@options.accepts(EngineConfig, RayConfig, VllmConfig, without=NOT_OF_INGEST)
def ingest(
    context: typer.Context,
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE|DIR|URL|-...", help="Text, code, PDF, Office, HTML, EPUB, JSON lines; folders, patterns, URLs, -."
        ),
    ],
    model: Annotated[
        str | None, typer.Option("--model", "-m", envvar="CACHEBLEND_MODEL", help=f"{options.MODEL_HELP} Not with --vllm.")
    ] = None,
    store_dir: options.StoreDir = options.DEFAULT_STORE_DIR,
    *,
    settings: options.Settings,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask, however much disk the KV takes.")] = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="Stay, and follow the folders' changes until Ctrl-C or SIGTERM.")
    ] = False,
    allow_private_urls: Annotated[
        bool, typer.Option("--allow-private-urls", help="Fetch URLs of this machine and of private networks, too.")
    ] = False,
    as_json: options.Json = False,
) -> None:
    """Split, index and precompute documents. What is stored already is skipped, so an interrupted run goes on where it was.

    Documents are read one by one, files twice: once to check and count them all, before the model is loaded. Of several files,
    those that cannot be used are listed at the end, and the exit code is 1. Hidden and ignored files are left out.

    Examples:
        cacheblend ingest handbook/ --model ./model

        cacheblend ingest "papers/**/*.pdf" notes.docx --model ./model

        cacheblend ingest https://example.org/handbook.html --model ./model

        cacheblend ingest handbook/ --model ./model --watch

        cacheblend ingest passages.jsonl -m ./model -s ./store --chunk-tokens 256 --json

        cacheblend ingest corpus/ "s3://bucket/corpus" -m ./model --ray local --ray-actors 2

        cacheblend ingest handbook/ --vllm http://localhost:8000
    """
    ray, vllm = settings.make(RayConfig), settings.make(VllmConfig)
    _check_together(sources, store_dir, ray, vllm, watch=watch)
    wanted = _Wanted(context=context, settings=settings, model=model, store_dir=store_dir, yes=yes, as_json=as_json)
    web = WebFiles(allow_private=allow_private_urls)
    try:
        with closing(DocumentStream(sources, web)) as stream, _interrupted_by_sigterm() if watch else nullcontext():
            if vllm.vllm is not None:
                _ingest_into_vllm(stream, vllm, as_json=as_json)
            elif ray.ray is not None:
                _ingest_on_ray(sources, stream, ray, wanted)
            else:
                _ingest_here(stream, sources if watch else (), wanted)
    except KeyboardInterrupt:
        terminal.note("interrupted; what was done is stored, and the same command goes on from there")
        if not watch:  # which ends by a signal and in no other way
            raise


def _check_together(sources: Sequence[str], store_dir: Path, ray: RayConfig, vllm: VllmConfig, *, watch: bool) -> None:
    """Refuse options that exclude each other, and folders that cannot be watched."""
    if vllm.vllm is not None and (watch or ray.ray is not None):
        raise InputError("--vllm cannot be given with --watch or --ray; vLLM itself computes, when it is told to")
    if ray.ray is not None and watch:
        raise InputError("--watch cannot be given with --ray; run the command again after a change")
    if watch:
        from cacheblend.service.engine.folder_watch import check_folders

        check_folders(sources, store_dir)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wanted:
    """What the user asks of an ingest: the command's own parameters, see `ingest`."""

    context: typer.Context
    settings: options.Settings
    model: str | None
    store_dir: Path
    yes: bool
    as_json: bool

    def config(self, **fixed: int) -> EngineConfig:
        """The engine's configuration; raises InputError if no model is named."""
        if self.model is None:
            raise InputError("no model is named; give --model, or set CACHEBLEND_MODEL")
        return self.settings.make(EngineConfig, model=self.model, store_dir=self.store_dir, **fixed)

    @property
    def codec_is_free(self) -> bool:
        """Whether nobody named the codec."""
        source = self.context.get_parameter_source("kv_cache_dtype")
        return source is not None and source.name == "DEFAULT"


@contextmanager
def _interrupted_by_sigterm() -> Iterator[None]:
    """SIGTERM is as Ctrl-C: what is open is closed."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _ingest_here(stream: DocumentStream, folders: Sequence[str], wanted: _Wanted) -> None:
    """Ingest a stream, then follow the changes of folders, if there are any."""
    config = wanted.config(ram_budget_bytes=1)  # nobody reads here, and memory that is used again costs less than new
    try:
        size = _measured(stream)
    except InputError:
        if not folders:
            raise
        size = StreamSize()  # a folder that is filled later
    with terminal.shown_stages():
        from cacheblend.service.engine.config import remember_settings
        from cacheblend.service.engine.engine import Engine

        fusor = load_fusor(config)
    config = _agreed(wanted, config, fusor.decoder.geometry, size.tokens(fusor.tokenizer) if size else None)
    with Engine(config, fusor=fusor) as engine:
        remember_settings(config)
        with IngestProgress(terminal.stderr, stream, size) as progress:
            report = engine.ingest_stream(stream if size != StreamSize() else (), progress)
        if folders:
            _print_faults(stream.report)
            followed, stream.report.faults = _follow(engine, folders, stream.report.faults)
            report += followed
    _print_end(report, stream.report, as_json=wanted.as_json)
    if not folders:  # whose faults were printed when they came
        _end_with_faults(stream.report)


def _measured(stream: DocumentStream) -> StreamSize | None:
    """Read all once; say what is left out, and how many documents there are."""
    with ReadingProgress(terminal.stderr) as reading:
        stream.report.on_file = reading.update
        try:
            size = stream.measure()
        finally:
            stream.report.on_file = lambda _: None
    _print_skipped(stream.report)
    files = max(reading.files, 1)
    if size is not None and size.documents > files:
        made = f"{counted(files, 'file')} read: {counted(size.documents, 'document')}"
        terminal.note(f"{made}, as a page, a slide, a sheet and a line is one each")
    return size


def _ingest_into_vllm(stream: DocumentStream, vllm: VllmConfig, *, as_json: bool) -> None:
    """Have a running vLLM store the documents' KV; its own store and settings are what counts."""
    with IngestProgress(terminal.stderr, stream, _measured(stream)) as progress:
        report = upload_documents(stream, vllm, stream.report.faults, progress)
    _print_end(report, stream.report, as_json=as_json)
    _end_with_faults(stream.report)


def _ingest_on_ray(sources: Sequence[str], stream: DocumentStream, ray: RayConfig, wanted: _Wanted) -> None:
    from cacheblend.integrations.ray.ingest import ingest_on_ray  # Ray may not be installed

    config = wanted.config()
    # Objects in a store cost money to read twice.
    size = None if any("://" in source for source in sources) else _measured(stream)
    stream.close()
    with terminal.shown_stages():
        from cacheblend.blend.loading import kv_geometry, load_tokenizer
        from cacheblend.service.engine.config import torch_dtype

        geometry = kv_geometry(config.model, config.resolve_device(), torch_dtype(config.dtype))
        tokens = size.tokens(load_tokenizer(config.model)) if size else None
    config = _agreed(wanted, config, geometry, tokens)
    found = SourceReport()
    # What Ray says of a process that died would stand before the JSON object.
    with redirect_stdout(sys.stderr), IngestProgress(terminal.stderr, None, size) as progress:
        report = ingest_on_ray(sources, config, ray, report=found, progress=progress)
    if size is None:
        _print_skipped(found)
    _print_end(report, found, as_json=wanted.as_json)
    _end_with_faults(found)


def _print_end(report: IngestReport, found: SourceReport, *, as_json: bool) -> None:
    if as_json:
        terminal.print_json({**report.as_dict(), **found.as_dict()})
        return
    speed = f", {report.tokens / report.seconds:,.0f} tokens/s" if report.computed else ""
    documents = counted(report.documents, "document")
    if report.added + report.replaced + report.unchanged:  # which vLLM, that knows chunks alone, does not say
        documents += f" ({report.added} new, {report.replaced} replaced, {report.unchanged} unchanged)"
    terminal.print_line(
        f"{documents}, {counted(report.chunks, 'chunk')}: "
        f"KV of {report.computed} computed, {report.already_stored} stored before ({report.seconds:.1f} s{speed})"
    )


def _print_faults(found: SourceReport) -> None:
    if faults := found.faults:
        terminal.note(f"{counted(len(faults), 'file')} could not be used:")
        for why in faults.values():
            terminal.note(f"  {why}")


def _end_with_faults(found: SourceReport) -> None:
    """Print the files that could not be used; the exit code is 1 if there are any."""
    _print_faults(found)
    if found.faults:
        raise typer.Exit(1)


def _follow(engine: Engine, folders: Sequence[str], printed: Mapping[str, str]) -> tuple[IngestReport, dict[str, str]]:
    """Follow folders until a signal, and return the ingests' report and the faults at the end.

    Faults in `printed` are not printed again.
    """
    from cacheblend.service.engine.folder_watch import FolderWatch, FollowReport

    total, watch = IngestReport(), FolderWatch(engine, folders)
    printed_files = {os.path.abspath(name) for name in printed}

    def show_report(report: FollowReport) -> None:
        nonlocal total
        total += report.ingested
        terminal.note(str(report))
        for why in report.faults.values():
            terminal.note(f"  {why}")

    try:
        report = watch.follow()
        report.faults = {name: why for name, why in report.faults.items() if name not in printed_files}
        if report:
            show_report(report)
        terminal.note(f"watching {', '.join(folders)}; Ctrl-C ends it")
        watch.run(show_report)
    except KeyboardInterrupt:
        terminal.note("stopped watching; the same command goes on from there")
    return total, watch.faults


def _print_skipped(report: SourceReport) -> None:
    """Say what no document was made of, before the long work begins."""
    for why, files in groupby(sorted(report.skipped.items(), key=itemgetter(1)), key=itemgetter(1)):
        names = [name for name, _ in files]
        more = f" and {len(names) - NAMED:,} more" if len(names) > NAMED else ""
        terminal.note(f"skipped, {why}: {', '.join(names[:NAMED])}{more}")
    if report.faults:
        terminal.note(f"{counted(len(report.faults), 'file')} cannot be used; listed at the end")


NAMED = 10  # skipped files of each reason
ASK_FROM_BYTES = 2 * GIB
LOSSY = ("int8", "int4")  # tried in turn where raw KV does not fit


def _agreed(wanted: _Wanted, config: EngineConfig, geometry: KVGeometry, tokens: int | None) -> EngineConfig:
    """Print an ingest's need of disk, ask where that is much, and return the configuration with a codec that fits.

    Args:
        wanted: by the user.
        config: as it was asked for.
        geometry: of the model's KV.
        tokens: about so many are in the documents; None where that is not known.

    Raises:
        InputError: it is much, and nobody can be asked.
    """
    folder, chunk_tokens = Path(config.store_dir), config.retriever.chunk_tokens
    shape = LayerShape(geometry.kv_heads, chunk_tokens, geometry.head_dim, geometry.dtype)
    token_bytes = {name: geometry.layers * codec.encoded_shape(shape).nbytes / chunk_tokens for name, codec in CODECS.items()}
    stored = sum(file.stat().st_size for file in (folder / KV_FOLDER).rglob("*") if file.is_file())
    above = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    room = min(config.store.nvme_budget_bytes, shutil.disk_usage(above).free + stored)
    codec = config.kv_cache_dtype
    coming = tokens or 0
    if wanted.codec_is_free and coming * token_bytes[codec] > room:
        codec = next((name for name in LOSSY if coming * token_bytes[name] <= room), LOSSY[-1])
    need = max(0.0, coming * token_bytes[codec] - stored)
    estimate = f"KV is {token_bytes[codec] / 1e3:.1f} kB a token ({codec})"
    if tokens is not None:
        estimate += f": about {tokens:,} tokens, {need / 1e9:.1f} GB more in {folder}, which may hold {room / 1e9:.1f} GB"
    if codec != config.kv_cache_dtype:
        estimate += f"; raw KV, which is exact, would take {coming * token_bytes['raw'] / 1e9:.1f} GB"
    if need + stored > room:
        estimate += "; what does not fit is evicted: raise --nvme-budget-bytes, free the disk, or ingest less"
    if need > ASK_FROM_BYTES and not wanted.yes:
        terminal.confirm(f"{estimate}. Go on?")
    else:
        terminal.note(estimate)
    return replace(config, kv_cache_dtype=codec)
