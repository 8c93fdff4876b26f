"""Prediction of what a ratio costs and loses: from profile and calibration, or from what is known of the model."""

from __future__ import annotations

import csv
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from engines import OpenEngine, use_profile
from profiles import linear_profile

from cacheblend.blend import DEFAULT_SELECTOR, FusionConfig
from cacheblend.blend.models import KNOWN_MODELS
from cacheblend.loader import Calibration, Measures, Thresholds, describe_device, write_calibration
from cacheblend.loader.profile import prefix_digest
from cacheblend.service import EngineConfig
from cacheblend.service.engine.profiles import KNOWN_LOSSES, RATIOS, LossPoint, find_loss

FIGURE = Path(__file__).parents[3] / "docs" / "figures" / "loss_ttft.csv"
KNOWN = next(iter(KNOWN_LOSSES))
CALIBRATION = Calibration(
    model="m",
    prefix="p",
    context="default",
    selector=DEFAULT_SELECTOR,
    ratio=0.1,
    measures=Measures(
        cases=2,
        first_token_kl_nats=0.1,
        first_token_kl_low_nats=None,
        first_token_kl_high_nats=None,
        gold_nll_over_full_nats=None,
        equal_greedy_tokens=1,
        compute_share=0.1,
        ttft_s_median=0.1,
    ),
    thresholds=Thresholds(),
    curve=((0.0, 0.2), (0.1, 0.1)),
)


def config_of(model: str = "m", **options: object) -> EngineConfig:
    return EngineConfig(model=model, store_dir=".", **options)  # type: ignore[arg-type]  # what a test may do


def test_known_losses_are_the_benchmarks() -> None:
    """The losses that are shipped are those of the figure in the docs, rounded."""
    with FIGURE.open() as file:
        rows = [row for row in csv.DictReader(file) if row["method"] == "full_reuse" or row["method"].startswith("blend@")]
    found: dict[str, dict[float, float]] = {}
    for row in rows:
        kl_nats = round(float(row["first_token_kl_nats"]), 4)
        found.setdefault(row["model"], {})[float(row["method"].partition("@")[2] or 0)] = kl_nats
    assert found == KNOWN_LOSSES


def test_a_calibration_comes_first() -> None:
    """A calibration's curve is taken, up to ratio 1, and says how many questions it is over."""
    curve = find_loss(config_of(KNOWN), CALIBRATION)
    assert curve is not None
    assert [(point.ratio, point.first_token_kl_nats) for point in curve.points] == [(0.0, 0.2), (0.1, 0.1), (1.0, 0.0)]
    assert "2 questions" in curve.about


@pytest.mark.parametrize("change", [{"curve": ()}, {"context": "head"}, {"selector": "gradual"}])
def test_a_calibration_of_something_else(change: dict[str, object]) -> None:
    """One without a curve, or of another context or selector than the engine's, says nothing of its loss."""
    calibration = replace(CALIBRATION, **change)  # type: ignore[arg-type]  # fields by name
    assert find_loss(config_of(), calibration) is None
    known = find_loss(config_of(KNOWN), calibration)
    assert known is not None
    assert f"{KNOWN} on SQuAD" in known.about


def test_known_models() -> None:
    """A known model has a loss by its name and folder, with raw KV and the default context and selector alone."""
    for name in (KNOWN, str(KNOWN_MODELS[KNOWN].folder)):
        curve = find_loss(config_of(name), None)
        assert curve is not None
        assert curve.points[-1] == LossPoint(ratio=1.0, first_token_kl_nats=0.0)
    assert find_loss(config_of(KNOWN, context_filler="none"), None) is None
    for given in (None, CALIBRATION):
        assert find_loss(config_of(KNOWN, kv_cache_dtype="int4"), given) is None
        assert find_loss(config_of(KNOWN, context_filler="my.txt"), given) is None
    assert find_loss(config_of(KNOWN, fusion=FusionConfig(selector="gradual")), None) is None


def test_costs_without_a_profile(open_engine: OpenEngine) -> None:
    """Without a profile the share of the work is told, which grows with the ratio to that of full recompute."""
    predicted = open_engine().predict(3)
    assert (predicted.recompute_ratio, predicted.loss) == (0.15, None)
    assert [cost.ratio for cost in predicted.costs] == list(RATIOS)
    assert all(cost.prefill_s is None for cost in predicted.costs)
    blends = [cost.work_share for cost in predicted.costs[1:-1]]
    assert all(low < high for low, high in pairwise(blends))
    assert predicted.costs[0].work_share < blends[0]
    assert predicted.costs[-1].work_share == 1


def test_costs_with_a_profile(open_engine: OpenEngine) -> None:
    """With a profile the seconds are the controller's own."""
    engine = open_engine(recompute_ratio=None)
    geometry = engine.fusor.decoder.geometry
    profile = linear_profile(
        layers=geometry.layers,
        row_s=1e-3,
        bytes_per_s=1e12,
        model=engine.fusor.fingerprint,
        device=describe_device(geometry.device),
        layer_token_bytes=geometry.layer_bytes(1),
    )
    use_profile(engine, profile)
    predicted = engine.predict(3)
    assert predicted.prompt_tokens == 3 * engine.config.retriever.chunk_tokens + len(engine.prompts.prefix) + 32
    full = predicted.costs[-1]
    assert full.prefill_s == pytest.approx(4 * 1e-3 * predicted.prompt_tokens)
    seconds = [cost.prefill_s or 0 for cost in predicted.costs]
    assert 0 < seconds[0] < seconds[3] < seconds[6] < seconds[-1]


def test_the_engine_finds_its_calibration(open_engine: OpenEngine) -> None:
    """The curve that stands beside the store is what the engine predicts its loss by."""
    engine = open_engine(selector=None)
    own = replace(CALIBRATION, model=engine.fusor.fingerprint, prefix=prefix_digest(engine.prompts.prefix))
    write_calibration(engine.config.profile_dir, own)
    engine.close()
    loss = open_engine(selector=None).predict(1).loss
    assert loss is not None
    assert loss.points[1] == LossPoint(ratio=0.1, first_token_kl_nats=0.1)
