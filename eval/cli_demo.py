"""`cacheblend demo`: a model answers questions about a packaged handbook, by three methods side by side."""

import dataclasses
import tempfile
import time
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Annotated

import typer

from cacheblend.base.errors import ConfigError
from cacheblend.base.files import user_data_folder
from cacheblend.base.threads import Progress
from cacheblend.cli import options, terminal
from cacheblend.cli.model import choose_model
from cacheblend.service.engine.config import EngineConfig

CHUNK_TOKENS = 256
DEMO_MODEL = "qwen2.5-coder-0.5b"  # the smallest known one whose answers are mostly right
MAX_TOKENS = 32


@options.accepts(
    EngineConfig,
    only=("recompute_ratio", "chunk_tokens", "max_tokens", *options.OF_MODELS),
    chunk_tokens=CHUNK_TOKENS,
    max_tokens=MAX_TOKENS,
)
def demo(
    model: Annotated[
        str | None, typer.Argument(envvar="CACHEBLEND_MODEL", help=f"{options.MODEL_HELP[:-1]}; left out, {DEMO_MODEL}.")
    ] = None,
    questions: Annotated[
        str, typer.Option(metavar="N|all", help="Questions about the handbook, at even distances from its 40.")
    ] = "8",
    store_dir: Annotated[
        Path | None,
        typer.Option(
            "--store-dir", "-s", help="Keep the store here; left out, the demo's own folder, or of a MODEL a temporary one."
        ),
    ] = None,
    num_chunks: Annotated[int, typer.Option(help="Chunks to retrieve.")] = 6,
    small: Annotated[
        bool, typer.Option("--small", help="The default model of the other commands: a seventh of the memory, often wrong.")
    ] = False,
    yes: options.Fetch = False,
    *,
    settings: options.Settings,
    as_json: options.Json = False,
) -> None:
    """Ingest a handbook, ask questions about it, and show the methods side by side: two minutes on two cores.

    For documents and questions of your own see `cacheblend eval documents` and `cacheblend calibrate`.

    Examples:

        cacheblend demo
        cacheblend demo --small --yes --questions all --json
        cacheblend demo ./model
    """
    if questions != "all" and not (questions.isdecimal() and int(questions)):
        raise ConfigError("questions", questions, "a number of at least 1, or all")
    count = None if questions == "all" else int(questions)
    started = time.perf_counter()
    chosen = choose_model(model, yes=yes, default_name=None if small else DEMO_MODEL)
    if store_dir is None and model is None and settings.values["chunk_tokens"] == CHUNK_TOKENS:
        store_dir = user_data_folder() / "demo" / chosen
    config = settings.make(EngineConfig, model=chosen, store_dir="store")
    _handbook_demo(config, store_dir, num_chunks, count, as_json, started)


def _handbook_demo(
    config: EngineConfig, store_dir: Path | None, num_chunks: int, count: int | None, as_json: bool, started: float
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
        folder = store_dir or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="cacheblend-demo-")))
        with terminal.shown_stages():
            from cacheblend.service import Engine

            engine = stack.enter_context(Engine(dataclasses.replace(config, store_dir=folder)))
        setup_s = time.perf_counter() - started
        with terminal.progress_bars() as progress:
            report = engine.ingest(documents, Progress(progress))
        kv_bytes = engine.store.stats().nvme.bytes
        dtype = str(engine.fusor.decoder.dtype).removeprefix("torch.")
        tokens_per_s = report.tokens / report.seconds if report.computed else None
        if screen is not None:
            speed = "no KV to compute" if tokens_per_s is None else f"{report.tokens:,} tokens at {tokens_per_s:,.0f} tokens/s"
            screen.ingested(f"{dtype}, {report.chunks} chunks, {speed}, {kv_bytes / 1e6:,.0f} MB of KV")
        asked, answered = [], ask_handbook(engine, questions, num_chunks=num_chunks)
        for number in range(len(questions)):
            with terminal.stderr.status(f"question {number + 1}") if terminal.stderr.is_terminal else nullcontext():
                asked.append(next(answered))
            if screen is not None:
                screen.asked(asked[-1], number + 1)
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
    terminal.print_line(f"set-up (fetching and opening the model) {setup_s:.0f} s, the demo {total_s - setup_s:.0f} s")
