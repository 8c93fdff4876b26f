"""`cacheblend demo`: the methods side by side, with a pretrained model, with the packaged reader, or on your passages."""

from __future__ import annotations

import dataclasses
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from cacheblend.base.errors import ConfigError, InputError, ModelFetchError
from cacheblend.base.files import user_data_folder
from cacheblend.retriever import RetrieverConfig
from cacheblend.service.engine.config import EngineConfig, write_examples
from cacheblend.service.engine.document_sources import read_documents

from . import options, terminal
from .model import fetch

# The handbook's demo.
MODEL = "smollm2-135m"
CHUNK_TOKENS = 256
MAX_TOKENS = 24

PASSAGES_MAX_TOKENS = 8

NOTE = (
    "prefix_cache is asked each prompt for the first time in a round: it finds what the questions before it left, as a service "
    "with changing questions does. prefix_cache has seen no prompt twice. The logits are compared with full recompute's, not "
    "with a right answer."
)

READER_NOTE = (
    "The reader is small and its prompts are short, so there is little to save: `scripts/bench_fusor.py` shows times at 3,105 "
    "tokens, and docs/benchmarks.md how it answers by class of question."
)
_OF_PASSAGES = ("question", "documents", "repeats")
_OF_HANDBOOK = ("questions",)
_OF_MODELS = ("model", "passages", "max_tokens", "device", "dtype", "chunk_tokens", "allow_unverified")


@options.engine_options(
    only=("recompute_ratio", "chunk_tokens", "embedder", "max_tokens", *options.OF_MODELS), chunk_tokens=None, max_tokens=None
)
def demo(
    context: typer.Context,
    model: Annotated[
        str | None,
        typer.Argument(envvar="CACHEBLEND_MODEL", help=f"{options.MODEL_HELP[:-1]}; left out, {MODEL}, fetched once."),
    ] = None,
    reader: Annotated[bool, typer.Option("--reader", help="The packaged reader and its own corpus; fetch nothing.")] = False,
    passages: Annotated[
        str | None,
        typer.Option(help="File or folder of documents, as for ingest, for a model of yours; left out, the packaged handbook."),
    ] = None,
    question: Annotated[
        list[str] | None, typer.Option("--question", help="A question about the passages; may be given several times.")
    ] = None,
    questions: Annotated[
        str, typer.Option(metavar="N|all", help="Questions about the handbook, at even distances from its 40.")
    ] = "8",
    store_dir: Annotated[
        Path | None,
        typer.Option(
            "--store-dir",
            "-s",
            help="Keep the store here; left out, the demo's own folder, or of your model one that is removed.",
        ),
    ] = None,
    documents: Annotated[int, typer.Option(help="Most passages to ingest.")] = 60,
    top_k: Annotated[int, typer.Option(help="Chunks to retrieve.")] = 6,
    repeats: Annotated[int, typer.Option(help="Measured rounds over the passages.", min=1)] = 3,
    *,
    settings: options.Settings,
    as_json: options.Json = False,
) -> None:
    """Ingest documents, ask, and show the methods side by side.

    Without a model: SmolLM2-135M answers questions about a handbook that comes with the package, in two minutes on two cores;
    where it cannot be fetched, and with --reader, the packaged reader is asked about its own corpus. With a model of yours: the
    handbook, or your passages with TTFT, tokens recomputed and distance from full prefill.

    Examples:
        cacheblend demo

        cacheblend demo --questions all --json

        cacheblend demo --reader --json

        cacheblend demo ./model --passages passages.jsonl --question "Who wrote it?" --json
    """
    if reader:
        _refuse(context, "the packaged reader's demo", (*_OF_MODELS, *_OF_PASSAGES, *_OF_HANDBOOK))
        _reader_demo(settings, store_dir, top_k, as_json)
        return
    if passages is None:
        _refuse(context, "the handbook's demo; it goes with --passages", _OF_PASSAGES)
    elif model is None:
        raise InputError("--passages goes with a model; give one, or use `cacheblend ingest` and `ask`")
    else:
        _refuse(context, "a demo over your passages; see --question", _OF_HANDBOOK)
    if questions != "all" and not (questions.isdecimal() and int(questions)):
        raise ConfigError("questions", questions, "a number of at least 1, or all")
    count = None if questions == "all" else int(questions)
    started = time.perf_counter()
    own = model is None and settings.values["chunk_tokens"] is None
    if model is None:
        model = _fetched_model()
    if model is None:
        _refuse(context, "the packaged reader's demo", (*_OF_MODELS, *_OF_HANDBOOK))
        _reader_demo(settings, store_dir, top_k, as_json)
        return
    if passages is None:
        folder = store_dir or (user_data_folder() / "demo" if own else None)
        _handbook_demo(_chosen(settings, model, CHUNK_TOKENS, MAX_TOKENS), folder, top_k, count, as_json, started)
        return
    chosen = _chosen(settings, model, RetrieverConfig().chunk_tokens, PASSAGES_MAX_TOKENS)
    _passages_demo(chosen, store_dir, list(read_documents(passages))[:documents], question or [], top_k, repeats, as_json)


def _chosen(settings: options.Settings, model: str, chunk_tokens: int, max_tokens: int) -> EngineConfig:
    """The engine's configuration, with a demo's own defaults; its store's folder is yet to be set."""
    own = {"chunk_tokens": chunk_tokens, "max_tokens": max_tokens}
    left_out = {name: value for name, value in own.items() if settings.values[name] is None}
    return settings.make(EngineConfig, model=model, store_dir="store", **left_out)


def _refuse(context: typer.Context, mode: str, names: Sequence[str]) -> None:
    """Refuse options that stand on the command line and have no effect on a mode."""
    given = [name for name in names if _source(context, name) == "COMMANDLINE"]
    if given:
        named = ", ".join("MODEL" if name == "model" else f"--{name.replace('_', '-')}" for name in given)
        raise InputError(f"{named}: no effect on {mode}; leave it out, or see `cacheblend demo --help`")


def _source(context: typer.Context, name: str) -> str:
    """Where an option's value is from; typer may bring its own copy of click, so that the enum is compared by name."""
    source = context.get_parameter_source(name)
    return "" if source is None else source.name


def _fetched_model() -> str | None:
    """The known model, fetched unless it is there; None, and a line that says why, where it cannot be had."""
    with terminal.shown_stages():
        from cacheblend.blend.models import find_model
    try:
        fetch(find_model(MODEL))
    except (ModelFetchError, InputError) as error:
        why = f"{MODEL} cannot be fetched, so the packaged reader is asked instead: {error}"
        terminal.stderr.print(why, style="yellow", highlight=False, markup=False, soft_wrap=True)
        return None
    return MODEL


@contextmanager
def _store_folder(store_dir: Path | None) -> Iterator[Path]:
    with ExitStack() as stack:
        yield store_dir or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="cacheblend-demo-")))


def _handbook_demo(
    config: EngineConfig, store_dir: Path | None, top_k: int, count: int | None, as_json: bool, started: float
) -> None:
    from cacheblend.eval.demo_screen import DemoScreen
    from cacheblend.eval.handbook import handbook_documents, handbook_questions
    from cacheblend.eval.handbook_demo import ask_handbook, chosen_questions, closing_note, summarize

    documents, every = handbook_documents(), handbook_questions()
    questions = chosen_questions(every, count or len(every))
    screen = None if as_json else DemoScreen(terminal.stdout, len(questions))
    if screen is not None:
        screen.begin(config.model, len(documents))
    with ExitStack() as stack:
        folder = stack.enter_context(_store_folder(store_dir))
        with terminal.shown_stages():
            from cacheblend.service import Engine

            engine = stack.enter_context(Engine(dataclasses.replace(config, store_dir=folder)))
        setup_s = time.perf_counter() - started
        with terminal.progress_bars() as progress:
            report = engine.ingest(documents, progress)
        kv_bytes = engine.store.stats().nvme.bytes
        dtype = str(engine.fusor.decoder.dtype).removeprefix("torch.")
        tokens_per_s = report.tokens / report.seconds if report.computed else None
        if screen is not None:
            speed = "no KV to compute" if tokens_per_s is None else f"{report.tokens:,} tokens at {tokens_per_s:,.0f} tokens/s"
            screen.ingested(f"{dtype}, {report.chunks} chunks, {speed}, {kv_bytes / 1e6:,.0f} MB of KV")
        asked, answered = [], ask_handbook(engine, questions, top_k=top_k)
        for number in range(len(questions)):
            with terminal.stderr.status(f"question {number + 1}") if terminal.stderr.is_terminal else nullcontext():
                asked.append(next(answered))
            if screen is not None:
                screen.asked(asked[-1], number + 1)
        if store_dir is not None:
            right = [each.question.question for each in asked if each.replies["blend"].has_answer]
            write_examples(store_dir, right or [each.question.question for each in asked])
        methods = summarize(asked)
        note = closing_note(engine, asked, methods)
    total_s = time.perf_counter() - started
    if screen is None:
        terminal.print_json(
            {
                "model": config.model,
                "dtype": dtype,
                "ingest": {**report.as_dict(), "kv_bytes": kv_bytes, "tokens_per_s": tokens_per_s},
                "questions": [each.as_dict() for each in asked],
                "methods": {method: dataclasses.asdict(row) for method, row in methods.items()},
                "seconds": {"setup": setup_s, "demo": total_s - setup_s},
                "note": note,
            }
        )
        return
    screen.end(asked, methods, note, store_dir)
    duration_note = f"set-up (fetching and opening the model) {setup_s:.0f} s, the demo {total_s - setup_s:.0f} s"
    terminal.stdout.print(duration_note, highlight=False)


def _passages_demo(
    config: EngineConfig,
    store_dir: Path | None,
    corpus: list[dict[str, Any]],
    asked: list[str],
    top_k: int,
    repeats: int,
    as_json: bool,
) -> None:
    with ExitStack() as stack:
        folder = stack.enter_context(_store_folder(store_dir))
        with terminal.shown_stages():
            from cacheblend.eval.demo import PASSAGE_QUESTIONS, compare_methods
            from cacheblend.eval.demo_screen import page_note
            from cacheblend.service import Engine

            engine = stack.enter_context(Engine(dataclasses.replace(config, store_dir=folder)))
        questions = asked or list(PASSAGE_QUESTIONS)
        progress = stack.enter_context(terminal.progress_bars())
        report = engine.ingest(corpus, progress)
        if store_dir is not None:
            write_examples(store_dir, questions)
        rows = compare_methods(engine, questions, top_k=top_k, repeats=repeats, on_progress=progress)
    if as_json:
        terminal.print_json(
            {
                "ingest": report.as_dict(),
                "questions": questions,
                "methods": {row.method: dataclasses.asdict(row) for row in rows},
                "note": NOTE,
            }
        )
        return
    out = terminal.stdout
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
    out.print(page_note(store_dir), style="bold", highlight=False, soft_wrap=True)


def _reader_demo(settings: options.Settings, store_dir: Path | None, top_k: int, as_json: bool) -> None:
    folder = store_dir or user_data_folder() / "demo-reader"
    with ExitStack() as stack:
        with terminal.shown_stages():
            from cacheblend.eval.demo import CLASSES, ask_all, blended_ratio, bundled_questions, marked_tokens
            from cacheblend.eval.demo_screen import page_note
            from cacheblend.service import Engine

            from .model import CHUNK_TOKENS, bundled_corpus, default_model

            given = options.Settings({name: settings.values[name] for name in ("embedder", "recompute_ratio")})
            config = given.make(EngineConfig, model=default_model(), store_dir=folder, chunk_tokens=CHUNK_TOKENS, max_tokens=16)
            engine = stack.enter_context(Engine(config))
        progress = stack.enter_context(terminal.progress_bars())
        corpus, questions = bundled_corpus(), bundled_questions()
        report = engine.ingest(corpus, progress)
        result = ask_all(engine, questions, top_k=top_k, on_progress=progress)
        shown = next(item for item in questions if item.question_class == "across")
        answer = engine.answer(shown.question, top_k=top_k, recompute_ratio=blended_ratio(engine))
        marks = marked_tokens(engine, answer)
    if as_json:
        terminal.print_json({"ingest": report.as_dict(), **result.as_dict(), "question": shown.question, "answer": answer.text})
        return
    out = terminal.stdout
    out.print(
        f"{report.documents} articles, {report.chunks} chunks in {report.seconds:.1f} s; {len(questions)} questions, "
        f"{top_k} chunks retrieved for each: F1, and the median TTFT",
        highlight=False,
    )
    table = Table("method", *CLASSES, "all", "TTFT", "speed-up", padding=(0, 0, 0, 1))
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
    out.print(f"\n{page_note(folder)}", style="bold", highlight=False, soft_wrap=True)
