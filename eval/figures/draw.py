"""All figures in one go: the runs that they need, the measurements, the files."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from cacheblend.blend import Fusor
from cacheblend.eval.data import FileSource, RequestSource, WorldSource
from cacheblend.eval.data.source import prompt_renderer
from cacheblend.eval.methods.method import ResidentRequest, StoredContexts
from cacheblend.eval.methods.registry import METHODS, EverythingCached
from cacheblend.eval.run.folder import EvalConfig, has_random_weights
from cacheblend.eval.run.report import ALL, metric_of
from cacheblend.eval.run.runner import evaluate, load_fusor
from cacheblend.retriever import Embedder

from .figure_file import new_figure, save_figure
from .quality_ttft import draw_methods, draw_ratios
from .time_figures import draw_batches, draw_tiers, measure_batches, measure_tiers
from .token_figures import (
    draw_attention_deviation,
    draw_distribution,
    draw_rank_correlation,
    measure_attention,
    token_deviations,
)

# Two chunks an article in the world; the paper's own numbers in the other sets.
WORLD_ARTICLES, TOP_K = (2, 3, 4, 5), (3, 6, 9, 12)
WORLD_CHUNK_TOKENS, CHUNK_TOKENS = (64, 96, 128), (300, 512, 600, 900)


def with_chunks(source: RequestSource) -> Mapping[str, RequestSource]:
    """The same data set with fewer and more chunks a prompt, named by their number."""
    if isinstance(source, WorldSource):
        return {str(2 * articles): replace(source, articles=articles) for articles in WORLD_ARTICLES}
    assert isinstance(source, FileSource)
    return {str(top_k): replace(source, preset=replace(source.preset, top_k=top_k)) for top_k in TOP_K}


def with_chunk_tokens(source: RequestSource) -> Mapping[str, RequestSource]:
    """The same data set in shorter and longer chunks, named by their tokens."""
    if isinstance(source, WorldSource):
        return {str(tokens): replace(source, chunk_tokens=tokens) for tokens in WORLD_CHUNK_TOKENS}
    assert isinstance(source, FileSource)
    return {str(tokens): replace(source, preset=replace(source.preset, chunk_tokens=tokens)) for tokens in CHUNK_TOKENS}


def draw_sweep(folder: Path, name: str, axis_title: str, summaries: Mapping[str, dict[str, Any]], measure: str) -> Path:
    """A line a method over what was swept.

    Args:
        folder: where to.
        name: of the files.
        axis_title: what was swept.
        summaries: by its value.
        measure: a key of the summaries: a metric, or `ttft_s_median`.
    """
    figure, (axis,) = new_figure()
    at = [int(value) for value in summaries]
    rows: list[tuple[object, ...]] = []
    for label in next(iter(summaries.values()))["methods"]:
        found = [summary["methods"][label][ALL][measure] for summary in summaries.values()]
        axis.plot(at, found, marker="o", label=label)
        rows += [(label, *pair) for pair in zip(at, found, strict=True)]
    axis.set_xlabel(axis_title)
    axis.set_ylabel("TTFT, median (s)" if measure == "ttft_s_median" else measure)
    axis.legend()
    return save_figure(folder, name, figure, ("method", axis_title, measure), rows)


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
    """Make the paper's figures for a model and a data set, each a PNG and its data as CSV.

    Args:
        config: model, data set and cases; methods and ratios are the figures' own.
        folder: where to. The runs are kept below `runs/`; called again with the same configuration, it goes on after their
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
    contexts = StoredContexts(fusor, prompt_renderer(fusor.tokenizer, config.source.wording).prefix)
    return [
        ResidentRequest(fusor, request, contexts, *EverythingCached().cached(request.prompt.chunks))
        for request in itertools.islice(requests, MEASURED_REQUESTS)
    ]
