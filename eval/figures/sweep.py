"""Quality and TTFT against the number of chunks (paper figures 2 and 15a) and their length (15b)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from cacheblend.eval.data import FileSource, RequestSource, WorldSource
from cacheblend.eval.run.summary import ALL

from .figure_file import new_figure, save_figure

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
