"""`cacheblend ask`: a question over the ingested documents."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from cacheblend.base.errors import ConfigError, InputError
from cacheblend.retriever.metadata import MetadataFilter
from cacheblend.service.engine.config import METHODS, EngineConfig
from cacheblend.service.engine.document_sources import parse_json

from . import options, terminal
from .model import DEFAULT, choose_model

if TYPE_CHECKING:
    from cacheblend.service.engine.request import Answer

MAX_TOKENS = 512  # small models do not always end, and a prompt of thousands of tokens leaves room for minutes of text


def _show(piece: str) -> None:
    print(terminal.visible(piece), end="", flush=True)  # rich would make spaces of tabs


@options.accepts(EngineConfig, without=("find_passages", "index_budget_bytes"))
def ask(
    question: Annotated[str, typer.Argument(help="The question, in words.")],
    model: options.Model = None,
    store_dir: options.StoreDir = options.DEFAULT_STORE_DIR,
    method: Annotated[str, typer.Option(help="blend, full_recompute, prefix_cache or full_reuse.")] = "blend",
    num_chunks: Annotated[int, typer.Option(min=1, help="Chunks to retrieve, or as many as there are.")] = 6,
    filter: Annotated[
        str, typer.Option(help='Of documents\' metadata, such as {"year": {"gte": 2020}, "lang": ["de", "fr"]}.')
    ] = "{}",
    yes: options.Fetch = False,
    *,
    settings: options.Settings,
    as_json: options.Json = False,
) -> None:
    """Answer a question from the ingested documents' stored KV.

    The answer is shown as it comes, and ends after 512 tokens at the latest unless --max-tokens says otherwise.

    Examples:

        cacheblend ask "Who founded the company?"
        cacheblend ask "Who founded the company?" --method full_recompute --json
    """
    if not question.strip():
        raise InputError("the question is empty; ask something")
    if not store_dir.is_dir():
        raise InputError(f"there is no store at {store_dir}; `cacheblend ingest` makes one, or name another with --store-dir")
    if method not in METHODS:
        raise ConfigError("method", method, f"one of {', '.join(METHODS)}")
    MetadataFilter.of(wanted := parse_json(filter, "--filter"))
    config = settings.make(EngineConfig, model=model or DEFAULT, store_dir=store_dir)
    config = replace(config, model=choose_model(model, yes=yes), max_tokens=config.max_tokens or MAX_TOKENS)
    with terminal.shown_stages():
        from cacheblend.service.engine.engine import Engine
        from cacheblend.service.engine.request import Done

        opened = Engine(config)
    with opened as engine:
        if not as_json:
            terminal.note(f"answering from {terminal.counted(engine.retriever.count(), 'document')} in {store_dir}")
        request = engine.prepare(question, num_chunks=num_chunks, filter=wanted, method=method)
        for event in engine.stream(request):
            if not as_json:
                _show(event.last_text + "\n" if isinstance(event, Done) else event.text)
        assert isinstance(event, Done)
        answer = event.answer
        if config.max_tokens == len(answer.token_ids) == MAX_TOKENS:
            terminal.note(f"ended after {MAX_TOKENS} tokens; --max-tokens allows more")
        engine.drain()
    if as_json:
        terminal.print_json(answer.as_dict())
    else:
        _print_plan(answer)


def _print_plan(answer: Answer) -> None:
    """Print where the answer comes from, and how long the first token took."""
    plan, timings = answer.plan, answer.timings
    is_full = plan.method == "blend" and plan.recompute_ratio is None and bool(answer.chunks)
    how = " (computed in full)" if is_full else ""
    for scored in answer.chunks:
        title = scored.chunk.title or scored.chunk.document_id
        terminal.print_line(f"  - {title}{scored.place}, chunk {scored.chunk.position} (score {scored.score:.3f})")
    if not answer.chunks:
        terminal.print_line(f"  {plan.no_chunks_reason}: the answer is from none of the documents")
    terminal.print_line(
        f"{plan.method}{how}: first token after {timings.ttft_s:.3f} s; "
        f"{terminal.counted(plan.prompt_tokens, 'prompt token')}, {terminal.counted(plan.hits, 'chunk')} from the store, "
        f"{plan.misses} missed, {plan.recomputed_tokens} of {plan.reusable_tokens} reusable tokens recomputed; "
        f"retrieval {timings.retrieve_s:.3f} s"
    )
