"""`cacheblend demo`: the methods side by side, with a pretrained model, with the packaged reader, or on your passages."""

from __future__ import annotations

import dataclasses
import shlex
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from cacheblend.base.errors import InputError, ModelFetchError
from cacheblend.base.files import user_data_folder
from cacheblend.retriever import RetrieverConfig
from cacheblend.service.cli import options, terminal
from cacheblend.service.cli.model import fetch
from cacheblend.service.engine.config import EngineConfig
from cacheblend.service.engine.document_sources import read_documents

if TYPE_CHECKING:
    from .handbook_demo import AskedQuestion, MethodSummary

# The handbook's demo.
MODEL = "smollm2-135m"
CHUNK_TOKENS = 256
MAX_TOKENS = 24

PASSAGES_MAX_TOKENS = 8
BAR_WIDTH = 24

NOTE = (
    "prefix_cache is asked each prompt for the first time in a round: it finds what the questions before it left, as a service "
    "with changing questions does. prefix_cache has seen no prompt twice. The logits are compared with full recompute's, not "
    "with a right answer."
)

READER_NOTE = (
    "The reader is small and its prompts are short, so there is little to save: `scripts/bench_fusor.py` shows times at 3,105 "
    "tokens, and docs/benchmarks.md how it answers by class of question."
)
_STYLES = {"blend": "green", "full_recompute": "red", "full_reuse": "yellow"}
_OF_PASSAGES = ("question", "documents", "repeats")
_OF_MODELS = ("model", "passages", "store_dir", "max_tokens", "device", "dtype", "chunk_tokens", "allow_unverified")


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
    store_dir: Annotated[
        Path | None,
        typer.Option("--store-dir", "-s", help="Keep the store here; left out, a folder that is removed, or the demo's own."),
    ] = None,
    documents: Annotated[int, typer.Option(help="Most passages to ingest.")] = 60,
    top_k: Annotated[int, typer.Option(help="Chunks to retrieve.")] = 6,
    repeats: Annotated[int, typer.Option(help="Measured rounds over the passages.", min=1)] = 3,
    *,
    settings: options.Settings,
    as_json: options.Json = False,
) -> None:
    """Ingest documents, ask, and print the methods side by side.

    Without a model: SmolLM2-135M answers 40 questions about a handbook that comes with the package; where it cannot be
    fetched, and with --reader, the packaged reader is asked about its own corpus. With a model of yours: the handbook, or your
    passages with TTFT, tokens recomputed and distance from full prefill.

    Examples:
        cacheblend demo

        cacheblend demo --reader --json

        cacheblend demo ./model --passages passages.jsonl --question "Who wrote it?" --json
    """
    terminal.hush_libraries()
    if reader:
        _refuse(context, "the packaged reader's demo", (*_OF_MODELS, *_OF_PASSAGES))
        _reader_demo(settings, top_k, as_json)
        return
    if passages is None:
        _refuse(context, "the handbook's demo; it goes with --passages", _OF_PASSAGES)
    elif model is None:
        raise InputError("--passages goes with a model; give one, or use `cacheblend ingest` and `ask`")
    started = time.perf_counter()
    own = model is None and settings.values["chunk_tokens"] is None
    if model is None:
        model = _fetched_model()
    if model is None:
        _refuse(context, "the packaged reader's demo", _OF_MODELS)
        _reader_demo(settings, top_k, as_json)
        return
    if passages is None:
        folder = store_dir or (user_data_folder() / "demo" if own else None)
        _handbook_demo(_chosen(settings, model, CHUNK_TOKENS, MAX_TOKENS), folder, top_k, as_json, started)
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


def _handbook_demo(config: EngineConfig, store_dir: Path | None, top_k: int, as_json: bool, started: float) -> None:
    from cacheblend.service import Engine

    from .handbook import handbook_documents, handbook_questions
    from .handbook_demo import ask_handbook, closing_note, shown_questions, summarize

    with ExitStack() as stack:
        folder = stack.enter_context(_store_folder(store_dir))
        engine = stack.enter_context(Engine(dataclasses.replace(config, store_dir=folder)))
        setup_s = time.perf_counter() - started
        progress = stack.enter_context(terminal.progress_bars())
        report = engine.ingest(handbook_documents(), progress)
        kv_bytes = engine.store.stats().nvme.bytes
        asked = ask_handbook(engine, handbook_questions(), top_k=top_k, on_progress=progress)
        methods = summarize(asked)
        note = closing_note(engine, asked, methods)
        dtype = str(engine.fusor.decoder.dtype).removeprefix("torch.")
    total_s = time.perf_counter() - started
    tokens_per_s = report.tokens / report.seconds if report.computed else None
    if as_json:
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
    out = terminal.stdout
    speed = "no KV to compute" if tokens_per_s is None else f"{report.tokens:,} tokens at {tokens_per_s:,.0f} tokens/s"
    out.print(
        f"{config.model} ({dtype}): {report.documents} documents, {report.chunks} chunks, {speed}, "
        f"{kv_bytes / 1e6:,.0f} MB of KV; "
        f"{len(asked)} questions over {top_k} chunks each, about {asked[0].prompt_tokens:,} prompt tokens",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
    for each in shown_questions(asked):
        _print_question(each)
    out.print("\nTime to first token, the median of all questions:", highlight=False)
    slowest_s = max(row.ttft_s_median for row in methods.values())
    for method, row in methods.items():
        out.print(
            f"  {method:<15}",
            Text(_bar(row.ttft_s_median / slowest_s), style=_STYLES.get(method, "")),
            f"{row.ttft_s_median * 1000:>6,.0f} ms  {row.speedup:.1f} x",
            highlight=False,
        )
    out.print()
    out.print(_handbook_table(methods))
    out.print(note, highlight=False)
    if store_dir is not None:
        command = f"cacheblend serve --store-dir {shlex.quote(str(store_dir))}"
        told = f"Open the page over the same handbook: {command}, then http://127.0.0.1:8000/ in a browser"
        out.print(told, style="bold", highlight=False, soft_wrap=True)
    out.print(f"set-up (fetching and opening the model) {setup_s:.0f} s, the demo {total_s - setup_s:.0f} s", highlight=False)


def _bar(share: float) -> str:
    return ("█" * max(1, round(share * BAR_WIDTH))).ljust(BAR_WIDTH)


def _print_question(asked: AskedQuestion) -> None:
    item, out = asked.question, terminal.stdout
    slowest_s = max(reply.ttft_s for reply in asked.replies.values())
    asks = f"\n[{item.question_class}] {item.question}   (right: {item.answers[0]})"
    out.print(asks, highlight=False, markup=False, soft_wrap=True)
    for method, reply in asked.replies.items():
        mark = "+" if reply.has_answer else "-"
        line = Text(f"  {mark} {method:<15}")
        line.append(_bar(reply.ttft_s / slowest_s), style=_STYLES.get(method, ""))
        line.append(f"{reply.ttft_s * 1000:>6,.0f} ms   {reply.text}")
        out.print(line, no_wrap=True, overflow="ellipsis")


def _handbook_table(methods: Mapping[str, MethodSummary]) -> Table:
    table = Table("", title="means over all questions", title_justify="left")
    for method in methods:
        table.add_column(method, justify="right")
    rows = list(methods.values())
    table.add_row("answers that hold a right one", *(f"{row.answer_share:.0%}" for row in rows))
    for name in rows[0].answer_share_by_class:
        table.add_row(f"  {name}", *(f"{row.answer_share_by_class[name]:.0%}" for row in rows))
    table.add_row("F1", *(f"{row.f1:.2f}" for row in rows))
    table.add_row("TTFT, median", *(f"{row.ttft_s_median * 1000:,.0f} ms" for row in rows))
    table.add_row("speed-up", *(f"{row.speedup:.1f} x" for row in rows))
    table.add_row("first-token KL, nats", *(f"{row.first_token_kl_nats:.3f}" for row in rows))
    table.add_row("gold NLL over full, nats", *(f"{row.gold_nll_over_full_nats:+.2f}" for row in rows))
    table.add_row("equal greedy tokens", *(f"{row.equal_greedy_tokens:.0%}" for row in rows))
    table.add_row("recomputed share", *(f"{row.recomputed_share:.0%}" for row in rows))
    return table


def _passages_demo(
    config: EngineConfig,
    store_dir: Path | None,
    corpus: list[dict[str, Any]],
    asked: list[str],
    top_k: int,
    repeats: int,
    as_json: bool,
) -> None:
    from cacheblend.service import Engine

    from .demo import PASSAGE_QUESTIONS, compare_methods

    questions = asked or list(PASSAGE_QUESTIONS)
    with ExitStack() as stack:
        folder = stack.enter_context(_store_folder(store_dir))
        engine = stack.enter_context(Engine(dataclasses.replace(config, store_dir=folder)))
        progress = stack.enter_context(terminal.progress_bars())
        report = engine.ingest(corpus, progress)
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


def _reader_demo(settings: options.Settings, top_k: int, as_json: bool) -> None:
    from cacheblend.service import Engine
    from cacheblend.service.cli.model import CHUNK_TOKENS, bundled_corpus, default_model

    from .demo import CLASSES, ask_all, blended_ratio, bundled_questions, marked_tokens

    corpus, questions = bundled_corpus(), bundled_questions()
    with tempfile.TemporaryDirectory(prefix="cacheblend-demo-") as folder, terminal.progress_bars() as progress:
        given = options.Settings({name: settings.values[name] for name in ("embedder", "recompute_ratio")})
        config = given.make(
            EngineConfig, model=default_model(), store_dir=Path(folder), chunk_tokens=CHUNK_TOKENS, max_tokens=16
        )
        with Engine(config) as engine:
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
