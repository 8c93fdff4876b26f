"""`cacheblend demo`: the four methods side by side, on any machine."""

from __future__ import annotations

import dataclasses
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from . import cli_options as options
from .cli_options import DEFAULTS
from .document_files import read_documents

NOTE = (
    "If the model has random weights (scripts/make_random_model.py), its words mean nothing: compare times, recomputed tokens "
    "and logits here, not answers."
)


def demo(
    model: Annotated[str, typer.Argument(envvar="CACHEBLEND_MODEL", help="Model directory or hub id; a small one.")],
    passages: Annotated[
        str | None, typer.Option(help="File or folder of documents, as for ingest; left out, topics of Python's own manual.")
    ] = None,
    question: Annotated[
        list[str] | None, typer.Option("--question", help="A question to ask; may be given several times.")
    ] = None,
    store_dir: Annotated[
        Path | None, typer.Option("--store-dir", "-s", help="Keep the store here; left out, a folder that is removed.")
    ] = None,
    documents: Annotated[int, typer.Option(help="Most documents to ingest.")] = 60,
    top_k: Annotated[int, typer.Option(help="Chunks to retrieve.")] = 6,
    recompute_ratio: Annotated[
        float | None, typer.Option(help="Share of the reused tokens to recompute; left out, the controller picks it.")
    ] = DEFAULTS["recompute_ratio"],
    max_tokens: Annotated[int, typer.Option(help="Most tokens to generate.")] = 8,
    repeats: Annotated[int, typer.Option(help="Measured rounds.", min=1)] = 3,
    device: options.Device = DEFAULTS["device"],
    dtype: options.Dtype = DEFAULTS["dtype"],
    chunk_tokens: options.ChunkTokens = DEFAULTS["chunk_tokens"],
    embedder: options.EmbedderName = DEFAULTS["embedder"],
    allow_unverified: options.AllowUnverified = DEFAULTS["allow_unverified"],
    as_json: options.Json = False,
) -> None:
    """Ingest real passages, ask, and print the methods side by side: TTFT, tokens recomputed, distance from full prefill.

    Examples:
        python scripts/make_random_model.py ./model && cacheblend demo ./model

        cacheblend demo ./model --passages passages.jsonl --question "Who wrote it?" --json
    """
    options.hush_libraries()
    from .config import EngineConfig
    from .demo import QUESTIONS, compare_methods, default_documents
    from .engine import Engine

    corpus = (default_documents() if passages is None else list(read_documents(passages)))[:documents]
    questions = question or list(QUESTIONS)
    with ExitStack() as stack:
        folder = store_dir or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="cacheblend-demo-")))
        config = EngineConfig(
            model=model,
            store_dir=folder,
            device=device,
            dtype=dtype,
            chunk_tokens=chunk_tokens,
            embedder=embedder,
            recompute_ratio=recompute_ratio,
            max_tokens=max_tokens,
            allow_unverified=allow_unverified,
        )
        engine = stack.enter_context(Engine(config))
        progress = stack.enter_context(options.progress_bars())
        report = engine.ingest(corpus, progress)
        rows = compare_methods(engine, questions, top_k=top_k, repeats=repeats, on_progress=progress)
    if as_json:
        options.print_json(
            {
                "ingest": report.as_dict(),
                "questions": questions,
                "methods": {row.method: dataclasses.asdict(row) for row in rows},
                "note": NOTE,
            }
        )
        return
    out = options.stdout
    out.print(
        f"{report.documents} documents, {report.chunks} chunks precomputed in {report.seconds:.1f} s; "
        f"{len(questions)} questions over {top_k} chunks each, {rows[0].prompt_tokens:,.0f} prompt tokens",
        highlight=False,
    )
    table = Table("method", "TTFT", "speed-up", "recomputed", "logits off by", "same token")
    for row in rows:
        table.add_row(
            row.method,
            f"{row.ttft_s * 1000:,.0f} ms",
            f"{row.speedup:.2f} x",
            f"{row.tokens_recomputed:,.0f} ({row.tokens_recomputed / row.prompt_tokens:.0%})",
            f"{row.logit_difference:.2g}",
            f"{row.same_first_token} of {len(questions)}",
        )
    out.print(table)
    out.print(NOTE, highlight=False)
