"""The profile and the calibration beside a store: the ratio that the controller picks, what it learns, r* and selector."""

import logging
from dataclasses import replace
from typing import Any

import pytest
from engines import BROUGHT, DOCUMENTS, OpenEngine, ask, furthest, profile_of, use_profile

from cacheblend.blend import DEFAULT_RATIO, DEFAULT_SELECTOR, Fusor
from cacheblend.blend.widening import FIRST_RATIO, WIDE_RATIO
from cacheblend.loader import Calibration, LoaderConfig, write_calibration, write_profile
from cacheblend.loader.profile import prefix_digest
from cacheblend.service import Engine, EngineConfig
from cacheblend.service.engine.profiles import find_controller
from cacheblend.service.engine.prompt import PromptRenderer

QUALITY_RATIO = LoaderConfig().quality_ratio
DEFAULTS = (DEFAULT_RATIO, DEFAULT_SELECTOR)


class TestController:
    """The ratio is left to the loading controller; its profile is made up here."""

    @staticmethod
    def prepared(open_engine: OpenEngine, load_share: float, *, ram_bytes: int = 1, selector: str | None = None) -> Engine:
        """An engine whose profile says that loading a layer of `BROUGHT`, by default from NVMe, is this share of prefill."""
        engine = open_engine(recompute_ratio=None, ram_budget_bytes=ram_bytes, selector=selector)
        ask(engine, "full_reuse", documents=BROUGHT)
        engine.drain()
        tokens = [len(segment.token_ids) for segment in ask(engine, "full_reuse", documents=BROUGHT).plan.segments]
        loaded = engine.fusor.decoder.geometry.layer_bytes(tokens[1])
        use_profile(engine, profile_of(engine, row_s=1 / sum(tokens), bytes_per_s=loaded / load_share))
        return engine

    def test_profile_beside_the_store(self, open_engine: OpenEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        """A profile that was measured before is found at the next start, and a damaged one is left with a warning."""
        engine = open_engine(recompute_ratio=None)
        assert engine.controller is None
        profile = profile_of(engine)
        path = write_profile(engine.config.profile_dir, profile)
        engine.close()
        monkeypatch.setattr("cacheblend.loader.profiler.measure_profile", None)
        engine = open_engine(recompute_ratio=None)
        assert engine.controller is not None
        assert engine.controller.profile == profile
        engine.close()
        with open_engine(recompute_ratio=None, store_dir=path.parents[1] / "tenants" / "a") as of_tenant:
            assert of_tenant.controller is not None
            of_tenant.config.profile_dir.mkdir()  # as its own calibration does, which is no profile
            assert find_controller(of_tenant.config, of_tenant.fusor) is not None
            assert of_tenant.config.profile_dir != path.parent
        path.write_text("{")
        assert open_engine(recompute_ratio=None).controller is None

    def test_widening(self, open_engine: OpenEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        """A small model's blend is widened where a request asks for it, or the engine; not where a ratio is named."""
        engine = self.prepared(open_engine, load_share=0.001)
        documents = [{"text": text} for text in ("brought along", "quite another", "from elsewhere", "some more")]
        ask(engine, documents=documents)
        engine.drain()
        least: dict[str, Any] = {"max_loss_nats": 1e-9}
        asked: list[dict[str, Any]] = [{}, least, {"recompute_ratio": 0.1}, {"recompute_ratio": 0.1, **least}]
        plans = [ask(engine, documents=documents, **options).plan for options in asked]
        assert [plan.recompute_ratio for plan in plans] == [QUALITY_RATIO, WIDE_RATIO, 0.1, WIDE_RATIO]
        assert [plan.moved_nats is None for plan in plans] == [True, False, True, False]
        engine.close()
        asking = open_engine(recompute_ratio=None, max_loss_nats=50.0)
        use_profile(asking, profile_of(asking))
        plan = ask(asking, documents=documents).plan
        assert (plan.recompute_ratio, plan.moved_nats is None) == (FIRST_RATIO, False)
        asking.close()
        monkeypatch.setattr("cacheblend.service.engine.profiles.WIDENED_PARAMETERS", 0)
        assert open_engine(recompute_ratio=None, selector="gradual").config.fusion.max_loss_nats is None

    @pytest.mark.parametrize(("selector", "layers_read"), [("question_attention", 4), ("gradual", 3)])
    def test_fast_loading(self, open_engine: OpenEngine, selector: str, layers_read: int) -> None:
        """Where loading is fast the ratio is r*; what was predicted stands beside what was measured."""
        answer = ask(self.prepared(open_engine, load_share=0.001, selector=selector), documents=BROUGHT)
        loading = answer.plan.loading
        assert loading is not None
        assert (loading.ratio, answer.plan.recompute_ratio, loading.full_recompute) == (QUALITY_RATIO, QUALITY_RATIO, False)
        assert loading.load_s == pytest.approx(0.001 * layers_read)
        assert loading.full_s == pytest.approx(4)

    @pytest.mark.parametrize(("selector", "load_share"), [("question_attention", 0.2), ("gradual", 0.5)])
    def test_slow_copies(self, open_engine: OpenEngine, selector: str, load_share: float) -> None:
        """What is in RAM a CPU copies between two layers: nothing hides behind that, however slow it is."""
        plan = ask(self.prepared(open_engine, load_share, ram_bytes=2**30, selector=selector), documents=BROUGHT).plan
        assert plan.loading is not None
        assert plan.loading.load_s_by_tier.keys() == {"ram"}
        assert plan.recompute_ratio == QUALITY_RATIO
        assert plan.loading.prefill_s == pytest.approx(plan.loading.recompute_s + plan.loading.load_s)

    def test_the_controller_learns(self, open_engine: OpenEngine) -> None:
        """Requests that all take far less than the profile says move the prediction towards what they take."""
        engine = self.prepared(open_engine, load_share=0.001)
        first = ask(engine, documents=BROUGHT).plan.loading
        for _ in range(8):
            last = ask(engine, documents=BROUGHT).plan.loading
        assert first is not None
        assert last is not None
        assert last.prefill_s < first.prefill_s / 2

    def test_loading_slower_than_prefill(self, open_engine: OpenEngine) -> None:
        """Where loading takes longer than prefill, the prompt is prefilled without hits, and what is missing filled later."""
        engine = self.prepared(open_engine, load_share=20)
        documents = [*BROUGHT, {"text": "not seen before"}]
        answer = ask(engine, documents=documents)
        plan = answer.plan
        assert plan.loading is not None
        assert plan.loading.full_recompute
        assert (plan.hits, plan.misses, plan.recompute_ratio) == (0, 1, None)
        assert [len(positions) for positions in plan.recomputed] == [plan.prompt_tokens] * 4
        assert furthest(answer, ask(engine, "full_recompute", documents=documents)) <= 1e-6
        engine.drain()
        assert ask(engine, documents=documents, recompute_ratio=0.15).plan.hits == 2


@pytest.fixture
def calibration(fusor: Fusor) -> Calibration:
    """Of the tests' model after the engine's own instruction."""
    head = PromptRenderer(fusor.tokenizer, EngineConfig(model="m", store_dir=".").instruction).prefix
    return Calibration(
        model=fusor.fingerprint,
        prefix=prefix_digest(head),
        context="default",
        selector="gradual",
        ratio=0.4,
        measures={},
        thresholds={},
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
    ratio, config = engine.config.recompute_ratio, engine.config
    return config.loader.quality_ratio if ratio is None else ratio, config.fusion.selector or DEFAULT_SELECTOR


def blended(engine: Engine, *, documents: list[dict[str, str]] = BROUGHT, **options: object) -> float | None:
    """The ratio of an answer over stored KV."""
    ask(engine, documents=documents)
    engine.drain()
    plan = ask(engine, documents=documents, **options).plan
    assert plan.hits
    return plan.recompute_ratio


def test_short_prompts_are_computed_in_full(open_ingested: OpenEngine) -> None:
    """Without a profile a prompt too short to gain is full recompute, KV stored or not; a ratio that is asked for holds."""
    engine = open_ingested(recompute_ratio=None)
    full, short, asked = ask(engine, "full_recompute"), ask(engine), ask(engine, recompute_ratio=0.15)
    assert short.token_ids == full.token_ids
    assert (short.first_logits - full.first_logits).abs().max() < 1e-4
    assert all(len(positions) == short.plan.prompt_tokens for positions in short.plan.recomputed[:-1])
    assert (short.plan.hits, short.plan.misses, short.plan.recompute_ratio) == (0, 0, None)
    assert (asked.plan.hits, asked.plan.recompute_ratio) == (len(asked.chunks), 0.15)


@pytest.mark.parametrize("ratio", [0.4, 0.0])
def test_r_star_and_selector(calibrated_engine: OpenEngine, calibration: Calibration, ratio: float) -> None:
    """Without a profile, ratio and selector of the calibration are served; 0 is full reuse."""
    engine = calibrated_engine(replace(calibration, ratio=ratio))
    assert taken(engine) == (ratio, "gradual")
    documents = [{"text": str(one["text"])} for one in DOCUMENTS[:2]]
    assert [blended(engine, documents=documents, max_loss_nats=nats) for nats in (None, 50.0)] == [ratio, ratio]


def test_the_controller_takes_it(calibrated_engine: OpenEngine) -> None:
    """With a profile, the controller's r* is the calibrated ratio."""
    engine = calibrated_engine()
    use_profile(engine, profile_of(engine, bytes_per_s=1e15))
    assert engine.controller is not None
    assert engine.controller.config.quality_ratio == 0.4
    assert blended(engine) == 0.4


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"recompute_ratio": 0.15}, (0.15, "gradual")),
        ({"selector": "first_tokens"}, (0.4, "first_tokens")),
        ({"selector": DEFAULT_SELECTOR}, (0.4, DEFAULT_SELECTOR)),
        ({"loader": LoaderConfig(quality_ratio=0.25)}, (0.25, "gradual")),
    ],
)
def test_explicit_settings_win(
    calibrated_engine: OpenEngine, options: dict[str, object], expected: tuple[float, object]
) -> None:
    """A ratio, a selector or an r* that the user set stays, and the rest is the calibration's."""
    engine = calibrated_engine(**options)
    assert taken(engine) == expected
    assert (engine.config.loader.quality_ratio == 0.4) == (expected[0] == 0.4)
    assert blended(engine, recompute_ratio=0.6) == 0.6


def test_of_another_model(calibrated_engine: OpenEngine, calibration: Calibration, caplog: pytest.LogCaptureFixture) -> None:
    """Another model's or prefix's calibration is none of this engine's, silently."""
    for field in ("model", "prefix"):
        assert taken(calibrated_engine(replace(calibration, **{field: "f" * 64}))) == DEFAULTS
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_damaged(
    calibrated_engine: OpenEngine, open_engine: OpenEngine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A damaged calibration is left with a warning that names the remedy, and the engine starts with the defaults."""
    (path,) = calibrated_engine().config.profile_dir.glob("*.calibration.json")
    path.write_text("{")
    assert taken(open_engine(recompute_ratio=None)) == DEFAULTS
    assert "cacheblend calibrate" in caplog.text
    monkeypatch.setattr("cacheblend.service.engine.profiles.WIDENED_PARAMETERS", 0)
    assert open_engine(recompute_ratio=None).config.fusion.max_loss_nats is not None


@pytest.mark.parametrize(
    ("context", "options", "says"),
    [
        ("default", {}, None),
        ("head", {}, "--context-filler none --context-document-tokens 0"),
        ("document", {}, "--context-filler none --context-document-tokens 2048"),
        ("filler", {}, "--context-filler auto --context-document-tokens 0"),
        ("default", {"context_filler": "none"}, "--context-filler auto --context-document-tokens 2048"),
        ("document", {"context_filler": "none"}, None),
        ("bos", {}, ": calibrate with --contexts default"),
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
