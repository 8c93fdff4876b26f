"""All figures in one go: the runs that they need, the measurements, the files."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from cacheblend.blend import Fusor
from cacheblend.eval.data import RequestSource
from cacheblend.eval.data.source import prompt_builder
from cacheblend.eval.methods import METHODS, EverythingCached, ResidentRequest, StoredContexts
from cacheblend.eval.run import EvalConfig, evaluate, load_fusor
from cacheblend.eval.run.environment import has_random_weights
from cacheblend.eval.run.report import metric_of
from cacheblend.retriever import Embedder

from .attention_deviation import draw_attention_deviation, measure_attention
from .batch_times import draw_batches, measure_batches
from .quality_ttft import draw_methods, draw_ratios
from .sweep import draw_sweep, with_chunk_tokens, with_chunks
from .tier_times import draw_tiers, measure_tiers
from .token_deviation import draw_distribution, draw_rank_correlation, token_deviations

RATIOS = (0.05, 0.1, 0.15, 0.2, 0.3, 0.5)
MEASURED_REQUESTS = 8  # of which deviations are taken
RANDOM = "the model's weights are random, so its answers have no quality"
WINDOWS = "the model's layers have sliding windows, so their caches do not hold every token"

Progress = Callable[[str, int, int], None]


def draw_figures(
    config: EvalConfig,
    folder: Path,
    *,
    fusor: Fusor | None = None,
    embedder: Embedder | None = None,
    on_progress: Progress = lambda *_: None,
) -> dict[str, str]:
    """Make the paper's figures for a model and a data set, each a PNG and the CSV behind it.

    Args:
        config: model, data set and cases; methods and ratios are the figures' own.
        folder: where to. The runs are kept below `runs/`; called again with the same configuration, it goes on behind their
            last whole cases and draws anew.
        fusor: in place of the model that the config names.
        embedder: in place of the retriever's own.
        on_progress: called with the run and its stage, what of it is done, and how much it is.

    Returns:
        By figure the path of its PNG, or why it was left out.

    Raises:
        ConfigError: matplotlib or scipy is not installed.
        InputError, UnsupportedModelError: as `evaluate`.
    """
    fusor = fusor or load_fusor(config)
    has_quality = not has_random_weights(fusor)
    made: dict[str, str] = {}

    def run(name: str, source: RequestSource, methods: tuple[str, ...], ratios: tuple[float, ...]) -> dict[str, Any]:
        asked = replace(config, source=source, methods=methods, ratios=ratios)
        path = folder / "runs" / name
        return evaluate(
            asked,
            path,
            resume=path.exists(),
            fusor=fusor,
            embedder=embedder,
            on_progress=lambda stage, done, total: on_progress(f"{name}, {stage}", done, total),
        )

    def sweep(name: str, sources: Mapping[str, RequestSource]) -> dict[str, dict[str, Any]]:
        methods = ("full_recompute", "full_reuse", "blend")
        return {value: run(f"{name}-{value}", source, methods, config.ratios[:1]) for value, source in sources.items()}

    methods = run("methods", config.source, METHODS, config.ratios[:1])
    for name, with_map in (("fig12_quality_ttft", False), ("fig13_rag_methods", True)):
        made[name] = str(draw_methods(folder, name, methods, with_map_methods=with_map)) if has_quality else RANDOM
    ratios = run("ratios", config.source, ("full_recompute", "blend", "random_tokens"), RATIOS)
    made["fig16_ratio"] = str(draw_ratios(folder, "fig16_ratio", ratios, list(RATIOS)))
    chunks = sweep("chunks", with_chunks(config.source))
    metric = metric_of(methods)
    name = "fig2_quality_by_chunks"
    made[name] = RANDOM if metric is None else str(draw_sweep(folder, name, "chunks", chunks, metric))
    name = "fig15a_ttft_by_chunks"
    made[name] = str(draw_sweep(folder, name, "chunks", chunks, "ttft_s_median"))
    lengths = sweep("chunk-tokens", with_chunk_tokens(config.source))
    name = "fig15b_ttft_by_chunk_tokens"
    made[name] = str(draw_sweep(folder, name, "chunk tokens", lengths, "ttft_s_median"))
    return made | _draw_measured(config, folder, fusor, embedder)


def _draw_measured(config: EvalConfig, folder: Path, fusor: Fusor, embedder: Embedder | None) -> dict[str, str]:
    """The figures that look inside the model or at a prefill alone."""
    residents = _residents(config, fusor, embedder)
    made = {
        "fig15c_batch": str(draw_batches(folder, "fig15c_batch", measure_batches(fusor, residents[0]))),
        "fig17_tiers": str(draw_tiers(folder, "fig17_tiers", measure_tiers(fusor, residents[0]))),
    }
    if any(window is not None for window in fusor.decoder.windows):
        return made | dict.fromkeys(("fig6_attention_deviation", "fig7_kv_deviation", "fig8_rank_correlation"), WINDOWS)
    deviations = [token_deviations(fusor, resident) for resident in residents]
    made["fig7_kv_deviation"] = str(draw_distribution(folder, "fig7_kv_deviation", deviations))
    made["fig8_rank_correlation"] = str(draw_rank_correlation(folder, "fig8_rank_correlation", deviations))
    eager = load_fusor(config, attn_implementation="eager")  # the only implementation that tells its attention weights
    measured = measure_attention(eager, _residents(config, eager, embedder), config.source.wording)
    made["fig6_attention_deviation"] = str(draw_attention_deviation(folder, "fig6_attention_deviation", measured))
    return made


def _residents(config: EvalConfig, fusor: Fusor, embedder: Embedder | None) -> list[ResidentRequest]:
    """The first requests with all their chunks cached."""
    limit = None if fusor.max_positions is None else fusor.max_positions - config.new_tokens
    requests = config.source.requests(fusor.tokenizer, limit, embedder)
    contexts = StoredContexts(fusor, prompt_builder(fusor.tokenizer, config.source.wording).head)
    return [
        ResidentRequest(fusor, request, contexts, *EverythingCached().cached(request.pieces.chunks))
        for request in itertools.islice(requests, MEASURED_REQUESTS)
    ]
