"""`cacheblend ask`: a question over the ingested documents."""

from __future__ import annotations

from typing import Annotated

import typer

from cacheblend.base.errors import InputError, RetrieverError

from . import options, terminal
from .options import DEFAULTS


def ask(
    question: Annotated[str, typer.Argument(help="The question, in words.")],
    model: options.OptionalModel = None,
    store_dir: options.StoreDir = options.DEFAULT_STORE_DIR,
    method: Annotated[str, typer.Option(help="blend, full_recompute, prefix_cache or full_reuse.")] = "blend",
    top_k: Annotated[int, typer.Option(help="Chunks to retrieve, or as many as there are.")] = 6,
    recompute_ratio: Annotated[
        float | None, typer.Option(help="Share of the reused tokens to recompute, 0..1; left out, the controller picks it.")
    ] = DEFAULTS["recompute_ratio"],
    max_tokens: Annotated[
        int | None, typer.Option(help="Most tokens to generate; left out, as many as fit in the model's context.")
    ] = DEFAULTS["max_tokens"],
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Sample from the most likely tokens of this total probability.")] = 1.0,
    device: options.Device = DEFAULTS["device"],
    dtype: options.Dtype = DEFAULTS["dtype"],
    chunk_tokens: options.ChunkTokens = DEFAULTS["chunk_tokens"],
    chunk_overlap_tokens: options.ChunkOverlapTokens = DEFAULTS["chunk_overlap_tokens"],
    embedder: options.EmbedderName = DEFAULTS["embedder"],
    ram_budget_bytes: options.RamBudget = DEFAULTS["ram_budget_bytes"],
    nvme_budget_bytes: options.NvmeBudget = DEFAULTS["nvme_budget_bytes"],
    direct_reads: options.DirectReads = DEFAULTS["direct_reads"],
    selector: options.Selector = DEFAULTS["selector"],
    context_filler: options.ContextFiller = DEFAULTS["context_filler"],
    context_document_tokens: options.ContextDocumentTokens = DEFAULTS["context_document_tokens"],
    kv_cache_dtype: options.KvCacheDtype = DEFAULTS["kv_cache_dtype"],
    allow_unverified: options.AllowUnverified = DEFAULTS["allow_unverified"],
    as_json: options.Json = False,
) -> None:
    """Answer a question from the ingested documents' stored KV.

    Examples:
        cacheblend ask "Who founded Novex Systems?"

        cacheblend ask "Who founded the company?" --model ./model

        cacheblend ask "Who founded the company?" -m ./model --method full_recompute --json
    """
    terminal.hush_libraries()
    from cacheblend.service.engine.config import EngineConfig
    from cacheblend.service.engine.engine import Engine

    from .model import bundled_corpus, choose_model

    if model is not None and not store_dir.is_dir():
        raise InputError(f"there is no store at {store_dir}; `cacheblend ingest` makes one, or name another with --store-dir")
    chosen = choose_model(model, chunk_tokens, store_dir)
    config = EngineConfig(
        model=chosen.model,
        store_dir=store_dir,
        device=device,
        dtype=dtype,
        chunk_tokens=chosen.chunk_tokens,
        chunk_overlap_tokens=chunk_overlap_tokens,
        embedder=embedder,
        ram_budget_bytes=ram_budget_bytes,
        nvme_budget_bytes=nvme_budget_bytes,
        direct_reads=direct_reads,
        selector=selector,
        context_filler=context_filler,
        context_document_tokens=context_document_tokens,
        kv_cache_dtype=kv_cache_dtype,
        max_tokens=max_tokens,
        allow_unverified=allow_unverified,
    )
    try:
        opened = Engine(config)
    except RetrieverError as error:
        if model is not None:
            raise
        hint = f"No --model was given, so this is the packaged reader; give the model that {store_dir} was made with"
        raise InputError(f"{error}. {hint}") from error
    with opened as engine:
        if chosen.wants_corpus:
            with terminal.progress_bars() as progress:
                engine.ingest(bundled_corpus(), progress)
        answer = engine.answer(
            question,
            top_k=top_k,
            method=method,
            recompute_ratio=recompute_ratio,
            temperature=temperature,
            top_p=top_p,
        )
        engine.drain()
    if as_json:
        terminal.print_json(answer.as_dict())
        return
    out, plan, timings = terminal.stdout, answer.plan, answer.timings
    out.print(answer.text, markup=False, highlight=False)
    for scored in answer.chunks:
        title = scored.chunk.title or scored.chunk.document_id
        out.print(f"  - {title}, chunk {scored.chunk.position} (distance {scored.distance:.3f})", markup=False, highlight=False)
    out.print(
        f"{plan.method}: first token after {timings.ttft_s:.3f} s; {plan.prompt_tokens} prompt tokens, "
        f"{plan.hits} chunks from the store, {plan.misses} not there, {plan.recomputed_tokens:.0f} of {plan.reusable_tokens} "
        f"reusable tokens recomputed; retrieval {timings.retrieve_s:.3f} s",
        markup=False,
        highlight=False,
    )
