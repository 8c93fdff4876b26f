"""`cacheblend ingest`: documents into the index, and their chunks' KV into the store."""

from __future__ import annotations

from typing import Annotated

import typer

from cacheblend.service.engine.document_sources import DocumentStream, Shard
from cacheblend.service.engine.ingest import IngestProgress

from . import options
from .options import DEFAULTS


def ingest(
    sources: Annotated[
        list[str],
        typer.Argument(metavar="FILE|DIR|-...", help="JSON lines (.jsonl, .jsonl.gz), .txt, .md, .rst, folders, or -."),
    ],
    model: options.Model,
    store_dir: options.StoreDir = options.DEFAULT_STORE_DIR,
    device: options.Device = DEFAULTS["device"],
    dtype: options.Dtype = DEFAULTS["dtype"],
    chunk_tokens: options.ChunkTokens = DEFAULTS["chunk_tokens"],
    chunk_overlap_tokens: options.ChunkOverlapTokens = DEFAULTS["chunk_overlap_tokens"],
    embedder: options.EmbedderName = DEFAULTS["embedder"],
    nvme_budget_bytes: options.NvmeBudget = DEFAULTS["nvme_budget_bytes"],
    codec: options.Codec = DEFAULTS["codec"],
    allow_unverified: options.AllowUnverified = DEFAULTS["allow_unverified"],
    context_filler: options.ContextFiller = DEFAULTS["context_filler"],
    context_document_tokens: options.ContextDocumentTokens = DEFAULTS["context_document_tokens"],
    shard: Annotated[
        str,
        typer.Option(metavar="I/N", help="Ingest the I-th of N shares; give each its own --store-dir, then `store merge`."),
    ] = "1/1",
    as_json: options.Json = False,
) -> None:
    """Split, index and precompute documents. What is stored already is skipped, so an interrupted run goes on where it was.

    Documents are read one by one, files twice: once to check and count them all, before the model is loaded.

    Examples:
        cacheblend ingest handbook/ --model ./model

        cacheblend ingest passages.jsonl -m ./model -s ./store --chunk-tokens 256 --json

        cacheblend ingest passages.jsonl -m ./model -s ./store-2 --shard 2/4
    """
    stream = DocumentStream(sources, Shard.parse(shard))
    size = stream.measure()
    options.hush_libraries()
    from cacheblend.service.engine.config import EngineConfig
    from cacheblend.service.engine.engine import Engine

    config = EngineConfig(
        model=model,
        store_dir=store_dir,
        device=device,
        dtype=dtype,
        chunk_tokens=chunk_tokens,
        chunk_overlap_tokens=chunk_overlap_tokens,
        embedder=embedder,
        ram_budget_bytes=1,  # nobody reads here, and memory that is used again costs less than new
        nvme_budget_bytes=nvme_budget_bytes,
        codec=codec,
        allow_unverified=allow_unverified,
        context_filler=context_filler,
        context_document_tokens=context_document_tokens,
    )
    try:
        with Engine(config) as engine, IngestProgress(options.stderr, stream, size) as progress:
            report = engine.ingest_stream(stream, progress.update)
    except KeyboardInterrupt:
        options.stderr.print("interrupted; what was done is kept, and the same command goes on from there", soft_wrap=True)
        raise
    if as_json:
        options.print_json(report.as_dict())
        return
    speed = f", {report.tokens / report.seconds:,.0f} tokens/s" if report.computed else ""
    options.stdout.print(
        f"{report.documents} documents ({report.added} new, {report.replaced} replaced, {report.unchanged} unchanged), "
        f"{report.chunks} chunks: KV of {report.computed} computed, {report.already_stored} stored before "
        f"({report.seconds:.1f} s{speed})",
        highlight=False,
    )
