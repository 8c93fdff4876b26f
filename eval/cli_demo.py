"""`cacheblend demo`: the four methods side by side, on any machine: the packaged reader's answers, or any model's times."""

from __future__ import annotations

import dataclasses
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from cacheblend.service import cli_options as options
from cacheblend.service.cli_options import DEFAULTS
from cacheblend.service.document_files import read_documents
from cacheblend.store.errors import InputError

NOTE = (
    "If the model has random weights (scripts/make_random_model.py), its words mean nothing: compare times, recomputed tokens "
    "and logits here, not answers."
)

READER_NOTE = (
    "The reader is small and its prompts are short, so there is little to save: `scripts/bench_fusor.py` shows times at 3,105 "
    "tokens. It reads single facts, has not learnt two_hop and compare, and blending does not yet keep what full recompute "
    "reads across chunks (docs/experiments.md)."
)


def demo(
    model: Annotated[
        str | None,
        typer.Argument(envvar="CACHEBLEND_MODEL", help=f"{options.MODEL_HELP[:-1]}; left out, the packaged reader."),
    ] = None,
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
    """Ingest passages, ask, and print the methods side by side: with the packaged reader F1 and TTFT of every class of
    question, with a model of yours TTFT, tokens recomputed and distance from full prefill.

    Examples:
        cacheblend demo

        cacheblend demo ./model --passages passages.jsonl --question "Who wrote it?" --json
    """
    options.hush_libraries()
    if model is None:
        if passages is not None or question:
            raise InputError("--passages and --question go with a model; give one, or use `cacheblend ingest` and `ask`")
        _reader_demo(embedder, top_k, recompute_ratio, as_json)
        return
    from cacheblend.service import Engine, EngineConfig
    from cacheblend.service.demo import QUESTIONS, compare_methods, default_documents

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


def _reader_demo(embedder: str, top_k: int, recompute_ratio: float | None, as_json: bool) -> None:
    from cacheblend.service import Engine, EngineConfig
    from cacheblend.service.default_model import CHUNK_TOKENS, bundled_corpus, default_model

    from .demo import CLASSES, ask_all, bundled_questions, marked_tokens

    corpus, questions = bundled_corpus(), bundled_questions()
    with tempfile.TemporaryDirectory(prefix="cacheblend-demo-") as folder, options.progress_bars() as progress:
        config = EngineConfig(
            model=default_model(), store_dir=Path(folder), chunk_tokens=CHUNK_TOKENS, embedder=embedder, max_tokens=16
        )
        with Engine(config) as engine:
            report = engine.ingest(corpus, progress)
            result = ask_all(engine, questions, top_k=top_k, recompute_ratio=recompute_ratio, on_progress=progress)
            shown = next(item for item in questions if item.question_class == "across")
            answer = engine.answer(shown.question, top_k=top_k, method="blend", recompute_ratio=recompute_ratio)
            marks = marked_tokens(engine, answer)
    if as_json:
        options.print_json({"ingest": report.as_dict(), **result.as_dict(), "question": shown.question, "answer": answer.text})
        return
    out = options.stdout
    out.print(
        f"{report.documents} articles, {report.chunks} chunks in {report.seconds:.1f} s; {len(questions)} questions, "
        f"{top_k} chunks retrieved for each: F1, and the median TTFT",
        highlight=False,
    )
    table = Table("method", *CLASSES, "all", "TTFT", "sooner", padding=(0, 0, 0, 1))
    for method, row in result.methods.items():
        quicker = result.methods["full_recompute"]["all"].ttft_s_median / row["all"].ttft_s_median
        scores = (f"{row[each].f1:.2f}" for each in (*CLASSES, "all"))
        table.add_row(method, *scores, f"{row['all'].ttft_s_median * 1000:,.0f} ms", f"{quicker:.2f} x")
    table.add_row("gold found", *(f"{result.recall[each]:.2f}" for each in (*CLASSES, "all")), "", "", style="dim")
    out.print(table)
    out.print(READER_NOTE, highlight=False)
    out.print(f"\n{shown.question}  ->  {answer.text}   (right: {shown.answers[0]})", highlight=False, markup=False)
    out.print("The retrieved chunks; the tokens that blending recomputed in layer 1 are reversed:", highlight=False)
    for title, tokens in marks:
        line = Text(f"[{title}] ", style="dim")
        for text, is_recomputed in tokens:
            line.append(text, style="reverse" if is_recomputed else "")
        out.print(line)
