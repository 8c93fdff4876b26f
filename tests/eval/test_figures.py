"""Figures: each is a PNG with its data as CSV, and says what it should on cases whose answer is known."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch

from cacheblend.blend import Fusor
from cacheblend.eval.data import WorldSource
from cacheblend.eval.figures import draw, draw_figures, figure_file, time_figures
from cacheblend.eval.figures.token_figures import (
    attention_deviation,
    draw_distribution,
    draw_rank_correlation,
    forward_attention,
    token_deviations,
)
from cacheblend.eval.methods.method import ResidentRequest, StoredContexts
from cacheblend.eval.methods.registry import EverythingCached
from cacheblend.eval.run.folder import EvalConfig

ALL = {
    "fig12_quality_ttft",
    "fig13_rag_methods",
    "fig2_quality_by_chunks",
    "fig6_attention_deviation",
    "fig7_kv_deviation",
    "fig8_rank_correlation",
    "fig15a_ttft_by_chunks",
    "fig15b_ttft_by_chunk_tokens",
    "fig15c_batch",
    "fig16_ratio",
    "fig17_tiers",
}


@pytest.fixture
def config(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> EvalConfig:
    """One case a run, short sweeps."""
    monkeypatch.setattr(draw, "MEASURED_REQUESTS", 1)
    monkeypatch.setattr(draw, "RATIOS", (0.1, 0.5))
    monkeypatch.setattr(draw, "WORLD_ARTICLES", (2, 3))
    monkeypatch.setattr(draw, "WORLD_CHUNK_TOKENS", (64, 80))
    monkeypatch.setattr(figure_file, "ROUNDS", 1)
    monkeypatch.setattr(time_figures, "BATCHES", (1, 2))
    return EvalConfig(source=WorldSource(cases=1), model=str(model_dir), max_new_tokens=1)


def rows(folder: Path, name: str) -> list[dict[str, str]]:
    with (folder / f"{name}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_all_figures_are_made(config: EvalConfig, fusor: Fusor, tmp_path: Path) -> None:
    """One call leaves every figure as PNG and CSV; a second one goes on from its runs."""
    made = draw_figures(config, tmp_path, fusor=fusor)
    assert set(made) == ALL
    for name in ALL:
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert rows(tmp_path, name)
    assert {row["method"] for row in rows(tmp_path, "fig12_quality_ttft")} == {
        "full_recompute",
        "prefix_cache",
        "full_reuse",
        "blend",
        "blend_hkvd",
        "blend_single_shot",
        "blend_product",
        "epic",
        "random_tokens",
        "oracle",
    }
    assert {row["chunks"] for row in rows(tmp_path, "fig2_quality_by_chunks")} == {"4", "6"}
    assert {row["tier"] for row in rows(tmp_path, "fig17_tiers")} == {"none", "ram", "nvme"}
    attention = {
        (row["method"], row["ratio"]): float(row["attention_deviation"]) for row in rows(tmp_path, "fig6_attention_deviation")
    }
    assert attention["blend", "1.0"] < 1e-3 < attention["blend", "0.15"] < attention["blend", "0.0"]
    before = (tmp_path / "fig12_quality_ttft.csv").read_bytes()
    assert draw_figures(config, tmp_path, fusor=fusor) == made
    assert (tmp_path / "fig12_quality_ttft.csv").read_bytes() == before


def test_random_weights_have_no_quality_figures(
    config: EvalConfig, fusor: Fusor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of random weights the figures of quality are left out, with the reason, and the others are made."""
    monkeypatch.setattr(fusor.model.config, "random_weights", True, raising=False)
    monkeypatch.setattr(draw, "_draw_measured", lambda *_: {})
    made = draw_figures(config, tmp_path, fusor=fusor)
    for name in ("fig12_quality_ttft", "fig13_rag_methods", "fig2_quality_by_chunks"):
        assert "random" in made[name]
        assert not (tmp_path / f"{name}.png").exists()
    assert set(rows(tmp_path, "fig16_ratio")[0]) == {"method", "ratio", "ttft_s_median"}


def test_deviations_begin_behind_the_first_chunk(fusor: Fusor) -> None:
    """Layer 0's stored KV is exact, and every layer's of a first chunk computed after the head; the others' is not."""
    request = next(WorldSource(cases=1).requests(fusor.tokenizer, None))
    cached = EverythingCached().cached(request.prompt.chunks)
    resident = ResidentRequest(fusor, request, StoredContexts(fusor, request.prompt.prefix), *cached)
    deviation_LR = token_deviations(fusor, resident, "head")
    first = len(request.prompt.chunks[0])
    assert deviation_LR.shape == (4, sum(map(len, request.prompt.chunks)))
    assert float(deviation_LR[0].max()) < 1e-8
    assert float(deviation_LR[:, :first].max()) < 1e-8
    assert float(deviation_LR[1:, first:].min()) > 1e-6


def test_forward_attention_is_the_models(model_dir: Path) -> None:
    """Over a full prefill the question's attention is what one forward of the whole prompt gives, rows that sum to 1."""
    eager = Fusor.from_pretrained(str(model_dir), attn_implementation="eager")
    request = next(WorldSource(cases=1).requests(eager.tokenizer, None))
    ids, question = request.prompt.token_ids, len(request.prompt.suffix)
    found = forward_attention(eager, eager.prefill(ids), question)
    whole = eager.model(torch.tensor([ids]), output_attentions=True).attentions
    for mine, own in zip(found, whole, strict=True):
        assert torch.allclose(mine, own[0, :, -question:], atol=1e-5)
        assert torch.allclose(mine.sum(-1), torch.ones(()), atol=1e-5)
    assert attention_deviation(found, found) == 0


def test_curves_of_known_deviations(tmp_path: Path) -> None:
    """One token that holds all deviation fills the curve at once; equal ranks correlate by 1, opposite ones by -1."""
    spike = torch.zeros(4, 100)
    spike[:, 7] = 1.0
    draw_distribution(tmp_path, "spike", [spike])
    shares = {(row["layer"], row["tokens_percent"]): float(row["share_of_deviation"]) for row in rows(tmp_path, "spike")}
    assert shares["1", "0"] == 0
    assert shares["3", "5"] == 1
    rising = torch.arange(100.0)
    draw_rank_correlation(tmp_path, "ranks", [torch.stack([rising, rising, rising**2, -rising])])
    assert [float(row["spearman"]) for row in rows(tmp_path, "ranks")] == pytest.approx([1, -1])
