"""What the loading controller does to answers: the ratio it picks, full recompute where that is sooner, and what it learns."""

import dataclasses

import pytest
from engines import BROUGHT, OpenEngine, ask, furthest, key_of, use_profile
from profiles import linear_profile

from cacheblend.base.errors import ProfileError
from cacheblend.loader import LoaderConfig, Profile, describe_device, write_profile
from cacheblend.service import Engine

QUALITY_RATIO = LoaderConfig().quality_ratio


def profile_of(engine: Engine, **speeds: float) -> Profile:
    """A profile of the engine's model on this device, with made-up speeds."""
    geometry = engine.fusor.decoder.geometry
    return linear_profile(
        layers=geometry.layers,
        model=engine.fusor.fingerprint,
        device=describe_device(geometry.device),
        layer_token_bytes=geometry.layer_bytes(1),
        **speeds,
    )


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

    def test_without_a_profile(self, open_engine: OpenEngine) -> None:
        """An engine that finds no profile takes r*, predicts nothing, and measures nothing."""
        answer = ask(open_engine(recompute_ratio=None), documents=BROUGHT)
        assert (answer.plan.recompute_ratio, answer.plan.loading) == (QUALITY_RATIO, None)
        assert (answer.timings.predicted_prefill_s, answer.timings.predicted_load_s) == (None, None)

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
        path.write_text("{")
        assert open_engine(recompute_ratio=None).controller is None

    def test_profile_of_another_model(self, open_engine: OpenEngine) -> None:
        """A profile of another model or device is refused with both names."""
        engine = open_engine(recompute_ratio=None)
        for part in ("model", "device"):
            with pytest.raises(ProfileError, match=f"another {part}: 'other'"):
                use_profile(engine, dataclasses.replace(profile_of(engine), **{part: "other"}))

    @pytest.mark.parametrize(("selector", "layers_read"), [("question_attention", 4), ("gradual", 3)])
    def test_fast_loading(self, open_engine: OpenEngine, selector: str, layers_read: int) -> None:
        """Where loading is fast the ratio is r*; what was predicted stands beside what was measured."""
        answer = ask(self.prepared(open_engine, load_share=0.001, selector=selector), documents=BROUGHT)
        loading = answer.plan.loading
        assert loading is not None
        assert (loading.ratio, answer.plan.recompute_ratio, loading.full_recompute) == (QUALITY_RATIO, QUALITY_RATIO, False)
        assert loading.load_s == pytest.approx(0.001 * layers_read)
        assert loading.full_s == pytest.approx(4)
        assert answer.timings.predicted_prefill_s == loading.prefill_s
        assert answer.timings.predicted_load_s == loading.load_s

    def test_slow_loading(self, open_engine: OpenEngine) -> None:
        """Where loading is slow the ratio is the one whose recompute hides behind it."""
        engine = self.prepared(open_engine, load_share=0.001, selector="gradual")
        head, chunk, tail = (len(segment.token_ids) for segment in ask(engine, documents=BROUGHT).plan.segments)
        # Three layers are loaded while layer 0 and, at ratio 0.5, two later ones are computed.
        load_share = (chunk + tail + 2 * (0.5 * chunk + tail)) / 3 / (head + chunk + tail)
        plan = ask(self.prepared(open_engine, load_share, selector="gradual"), documents=BROUGHT).plan
        assert plan.loading is not None
        assert 0.3 < plan.loading.ratio <= 0.5  # the earlier layers recompute more than the mean
        assert plan.recompute_ratio == plan.loading.ratio
        assert plan.recomputed_tokens == pytest.approx(plan.recompute_ratio * plan.reusable_tokens, abs=1)

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
        first = ask(engine, documents=BROUGHT).timings
        for _ in range(8):
            last = ask(engine, documents=BROUGHT).timings
        assert first.predicted_prefill_s is not None
        assert last.predicted_prefill_s is not None
        assert last.predicted_prefill_s < first.predicted_prefill_s / 2

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

    def test_what_the_controller_is_told(self, open_ingested: OpenEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        """The controller plans with a layer's bytes of all stored chunks, by tier; misses and the question are fresh tokens."""
        engine = open_ingested(recompute_ratio=None)
        tokens = [len(segment.token_ids) for segment in ask(engine, "full_recompute").plan.segments]
        chunks = ask(engine, "full_recompute").chunks
        engine.store.get(key_of(engine, chunks[0].chunk))  # is in RAM from now on
        engine.store.delete(key_of(engine, chunks[2].chunk))
        told = []
        use_profile(engine, profile_of(engine))
        assert engine.controller is not None
        plan = engine.controller.plan
        monkeypatch.setattr(engine.controller, "plan", lambda **arguments: told.append(arguments) or plan(**arguments))
        ask(engine)
        layer_bytes = engine.fusor.decoder.geometry.layer_bytes
        (head, first, second, missed, fourth, tail) = tokens
        reads = [("ram", layer_bytes(first)), ("nvme", layer_bytes(second)), ("nvme", layer_bytes(fourth))]
        expected = {"reads": reads, "reusable": first + second + fourth, "fresh": missed + tail, "exact": head, "alone": []}
        assert told == [expected]

    def test_a_given_ratio_wins(self, open_engine: OpenEngine) -> None:
        """A ratio that is asked for is taken as it is; the controller is not asked."""
        engine = self.prepared(open_engine, load_share=20)
        plan = ask(engine, documents=BROUGHT, recompute_ratio=0.4).plan
        assert (plan.recompute_ratio, plan.loading, plan.hits) == (0.4, None, 1)
