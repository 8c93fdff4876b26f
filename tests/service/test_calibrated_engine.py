"""An engine that finds a calibration beside its store: what it takes from it, and what the user's own settings keep."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
from engines import BROUGHT, OpenEngine, ask, use_profile
from profiles import linear_profile

from cacheblend.blend import DEFAULT_RATIO, DEFAULT_SELECTOR, Fusor
from cacheblend.loader import Calibration, LoaderConfig, Measures, Thresholds, describe_device, write_calibration
from cacheblend.loader.calibration import prefix_digest
from cacheblend.service import Engine, EngineConfig
from cacheblend.service.engine.prompt import PromptRenderer

MEASURES = Measures(
    cases=2,
    first_token_kl_nats=0.01,
    first_token_kl_low_nats=None,
    first_token_kl_high_nats=None,
    gold_nll_over_full_nats=None,
    equal_greedy_tokens=1,
    compute_share=0.1,
    ttft_s_median=0.1,
)


@pytest.fixture
def calibration(fusor: Fusor) -> Calibration:
    """Of the tests' model behind the engine's own instruction."""
    head = PromptRenderer(fusor.tokenizer, EngineConfig(model="m", store_dir=".").instruction).prefix
    return Calibration(
        model=fusor.fingerprint,
        prefix=prefix_digest(head),
        context="default",
        selector="gradual",
        ratio=0.4,
        measures=MEASURES,
        thresholds=Thresholds(),
    )


@pytest.fixture
def calibrated_engine(open_engine: OpenEngine, calibration: Calibration) -> OpenEngine:
    """`open_engine` on a folder with that calibration; the ratio is left open."""

    def open_one(calibration: Calibration = calibration, **options: object) -> Engine:
        config = EngineConfig(model="m", store_dir=open_engine().config.store_dir)
        write_calibration(config.profile_dir, calibration)
        return open_engine(**{"recompute_ratio": None, **options})

    return open_one


def taken(engine: Engine) -> tuple[float, object]:
    """Ratio and selector where a question asks for neither."""
    config = engine.config.fusion_config(engine.config.recompute_ratio)
    return config.recompute_ratio, config.selector


def blended(engine: Engine, **options: object) -> float | None:
    """The ratio of an answer over stored KV."""
    ask(engine, documents=BROUGHT)
    engine.drain()
    plan = ask(engine, documents=BROUGHT, **options).plan
    assert plan.hits == 1
    return plan.recompute_ratio


def test_r_star_and_selector(calibrated_engine: OpenEngine) -> None:
    """Without a profile, ratio and selector of the calibration are served."""
    engine = calibrated_engine()
    assert taken(engine) == (0.4, "gradual")
    assert blended(engine) == 0.4


def test_without_one(open_engine: OpenEngine) -> None:
    """Without a calibration the defaults hold."""
    assert taken(open_engine(recompute_ratio=None)) == (LoaderConfig().quality_ratio, DEFAULT_SELECTOR)


def test_the_controller_takes_it(calibrated_engine: OpenEngine) -> None:
    """With a profile, the controller's r* is the calibrated ratio, and its cap stays above."""
    engine = calibrated_engine()
    geometry = engine.fusor.decoder.geometry
    use_profile(
        engine,
        linear_profile(
            layers=geometry.layers,
            model=engine.fusor.fingerprint,
            device=describe_device(geometry.device),
            layer_token_bytes=geometry.layer_bytes(1),
            bytes_per_s=1e15,
        ),
    )
    assert engine.controller is not None
    assert (engine.controller.config.quality_ratio, engine.controller.config.max_ratio) == (0.4, 1.0)
    assert blended(engine) == 0.4


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"recompute_ratio": 0.15}, (0.15, "gradual")),
        ({"selector": "first_tokens"}, (0.4, "first_tokens")),
        ({"selector": DEFAULT_SELECTOR}, (0.4, DEFAULT_SELECTOR)),
        ({"loader": LoaderConfig(quality_ratio=0.25)}, (0.25, "gradual")),
        ({"loader": LoaderConfig(max_ratio=0.3)}, (0.3, "gradual")),
    ],
)
def test_explicit_settings_win(
    calibrated_engine: OpenEngine, options: dict[str, object], expected: tuple[float, object]
) -> None:
    """A ratio, a selector, an r* or a cap that the user set stays, and the rest is the calibration's."""
    engine = calibrated_engine(**options)
    assert taken(engine) == expected
    assert blended(engine, recompute_ratio=0.6) == 0.6


def test_ratio_0(calibrated_engine: OpenEngine, calibration: Calibration) -> None:
    """A calibrated ratio of 0 is full reuse."""
    assert blended(calibrated_engine(replace(calibration, ratio=0.0))) == 0.0


def test_of_another_model(calibrated_engine: OpenEngine, calibration: Calibration, caplog: pytest.LogCaptureFixture) -> None:
    """Another model's or prefix's calibration is none of this engine's, silently; its name on this one's file is told."""
    for field in ("model", "prefix"):
        assert taken(calibrated_engine(replace(calibration, **{field: "f" * 64}))) == (
            DEFAULT_RATIO,
            DEFAULT_SELECTOR,
        )
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    same_name = calibration.model[:16] + "f" * 48
    assert taken(calibrated_engine(replace(calibration, model=same_name))) == (
        DEFAULT_RATIO,
        DEFAULT_SELECTOR,
    )
    assert "another model" in caplog.text


def test_damaged(calibrated_engine: OpenEngine, open_engine: OpenEngine, caplog: pytest.LogCaptureFixture) -> None:
    """A damaged calibration is left with a warning that names the remedy, and the engine starts."""
    (path,) = calibrated_engine().config.profile_dir.glob("*.calibration.json")
    path.write_text("{")
    assert taken(open_engine(recompute_ratio=None)) == (DEFAULT_RATIO, DEFAULT_SELECTOR)
    assert "cacheblend calibrate" in caplog.text


@pytest.mark.parametrize(
    ("context", "options", "says"),
    [
        ("default", {}, None),
        ("head", {}, "--context-filler none --context-document-tokens 0"),
        ("document", {}, "--context-filler none --context-document-tokens 2048"),
        ("filler", {}, "--context-filler auto --context-document-tokens 0"),
        ("default", {"context_filler": "none"}, "--context-filler auto --context-document-tokens 2048"),
        ("document", {"context_filler": "none"}, None),
        ("bos", {}, "an engine does not have"),
    ],
)
def test_another_context(
    calibrated_engine: OpenEngine,
    calibration: Calibration,
    caplog: pytest.LogCaptureFixture,
    context: str,
    options: dict[str, object],
    says: str | None,
) -> None:
    """The context is never switched: where the calibrated one is another, a warning names the options, the rest holds."""
    engine = calibrated_engine(replace(calibration, context=context), **options)
    assert engine.config.context_filler == options.get("context_filler", "auto")
    assert taken(engine) == (0.4, "gradual")
    assert (says in caplog.text) if says else not caplog.text
