"""Calibration: what is measured, what is chosen, and `cacheblend calibrate` on a tiny model."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from fakes import FakeEmbedder

from cacheblend.base.errors import ConfigError
from cacheblend.blend import SELECTORS, Fusor
from cacheblend.eval.data import DocumentsSource
from cacheblend.eval.data.documents_source import chunk_questions, topic
from cacheblend.eval.method_plan import METHOD_OF_SELECTOR
from cacheblend.eval.run.calibration import Measures, Setting, Thresholds, calibration_config, choose, selector_beyond
from cacheblend.retriever import Chunk, RetrieverConfig
from cacheblend.service import Engine, EngineConfig

Run = Callable[..., tuple[int, str, str]]


def setting(
    context: str = "default",
    selector: str | None = "gradual",
    ratio: float = 0.1,
    *,
    kl: float = 0.01,
    compute: float = 0.2,
    ttft_s: float = 1.0,
    nll: float | None = None,
) -> Setting:
    measures = Measures(
        cases=8,
        first_token_kl_nats=kl,
        first_token_kl_low_nats=kl / 2,
        first_token_kl_high_nats=kl * 2,
        gold_nll_over_full_nats=nll,
        equal_greedy_tokens=0.9,
        compute_share=compute,
        ttft_s_median=ttft_s,
    )
    return Setting(context=context, selector=selector, ratio=ratio, measures=measures)


def test_the_choice() -> None:
    """Of the settings within both thresholds the cheapest is taken: by compute, then TTFT; a context costs nothing."""
    cheap, dear = setting(compute=0.1, kl=0.04), setting(ratio=0.3, compute=0.3, kl=0.001)
    lossy, wrong = setting(ratio=0.0, selector=None, compute=0.02, kl=0.06), setting(ratio=0.05, compute=0.05, nll=0.06)
    assert choose([dear, lossy, wrong, cheap], Thresholds()) == cheap
    assert choose([dear, lossy, wrong, cheap], Thresholds(max_kl=0.07)) == lossy
    assert choose([dear, lossy, wrong, cheap], Thresholds(max_kl=0.03)) == dear
    fast, slow = setting(selector="first_tokens", ttft_s=0.8), setting(kl=0.001)
    assert choose([slow, fast], Thresholds()) == fast, "at equal compute"
    noisy, near = setting("bos", kl=0.04, ttft_s=0.99), setting("default", kl=0.01, ttft_s=1.0)
    assert choose([noisy, near, setting("head", kl=0.06)], Thresholds()) == near, "noise in TTFT does not decide, but KL"
    least = setting(ratio=0.5, compute=0.6, kl=0.2, nll=1.0)
    assert choose([setting(kl=0.3), least, setting(kl=0.4)], Thresholds()) == least, "none is within"


def test_thresholds() -> None:
    """KL and the right answers' likelihood have a threshold each; the second counts where there are right answers."""
    allowed = Thresholds(max_kl=0.03, max_nll=0.01).allow
    measures = setting(kl=0.03).measures
    assert allowed(measures)
    assert allowed(replace(measures, gold_nll_over_full_nats=-0.5))
    assert not allowed(replace(measures, gold_nll_over_full_nats=0.02))
    assert not allowed(replace(measures, first_token_kl_nats=0.031))
    for name in ("max_kl", "max_nll"):
        for value in (-0.1, float("nan"), True, "0.1"):
            with pytest.raises(ConfigError, match=name):
                Thresholds(**{name: value})  # type: ignore[arg-type]  # what a caller may do


def test_the_selector_beyond_ratio_0() -> None:
    """Where nothing is selected, the selector for higher ratios is the best at the next one of that context."""
    reuse = setting(selector=None, ratio=0.0)
    best = setting(selector="first_tokens", kl=0.002)
    others = [setting(kl=0.003), setting(ratio=0.3, kl=0.0), setting("bos", "random", kl=0.0)]
    assert selector_beyond(reuse, [reuse, *others, best]) == "first_tokens"
    assert selector_beyond(reuse, [reuse]) is None


def test_every_setting_is_measured_once() -> None:
    """Each context with each selector at each ratio; at 0 one full reuse a context. Every selector has a method."""
    source = DocumentsSource(documents="d", questions=None)
    config = calibration_config(
        source, "m", contexts=("default", "bos"), selectors=("gradual", "first_tokens"), ratios=(0.0, 0.1, 0.2)
    )
    planned = [(method.name, method.context, method.ratio) for method in config.planned()]
    assert planned[0] == ("full_recompute", "default", None)
    assert len(set(planned)) == len(planned) == 1 + 2 + 2 * 2 * 2
    reused = calibration_config(source, "m", contexts=("head",), selectors=("gradual",), ratios=(0.0,))
    assert [method.label for method in reused.planned()] == ["full_recompute", "full_reuse+head"]
    assert set(METHOD_OF_SELECTOR) == set(SELECTORS)


def test_questions_of_chunks() -> None:
    """As many chunks as wanted are asked about, the same each time, and all where there are fewer."""
    chunks = [Chunk("a.md", "v", place, "a", f"Place {place} holds it. More.", (1,)) for place in range(30)]
    made = chunk_questions(chunks, 5)
    assert made == chunk_questions(chunks, 5)
    assert len({example.id for example in made if example.answers == ()}) == 5
    place = made[0].id.removeprefix("a.md#")
    assert made[0].question == f"What does the text say about Place {place} holds it?"
    assert len(chunk_questions(chunks, 99)) == len(chunk_questions(chunks, None)) == 30
    assert topic("12-travel\n\n# Travel abroad\n\nIt is signed off.") == "Travel abroad"
    assert topic(" ".join("abcdefghijklmnopqrst")) == "a b c d e f g h i j k l"


@pytest.fixture
def run(cacheblend: Run, documents: Path) -> Run:
    """`cacheblend calibrate MODEL handbook`."""
    small = ("--chunk-tokens", 48, "--num-chunks", 2, "--cases", 2, "--store-dir", "store")
    return lambda model, *options: cacheblend("calibrate", model, documents, *small, *options)


def test_the_command_and_the_engine(run: Run, model_dir: Path, fusor: Fusor, embedder: FakeEmbedder, tmp_path: Path) -> None:
    """Over two documents without questions: one JSON object, a run's folder, and an engine that starts with the choice."""
    options = ("--contexts", "default,bos", "--selectors", "gradual,first_tokens", "--ratios", "0,0.5", "--json")
    code, out, err = run(model_dir, *options, "--max-kl", 100, "--out", "run")
    assert code == 0, err
    found = json.loads(out)
    curves = {(curve["context"], curve["selector"], curve["ratio"]) for curve in found["curves"]}
    assert curves == {
        (context, selector, ratio)
        for context in ("default", "bos")
        for selector, ratio in ((None, 0), ("gradual", 0.5), ("first_tokens", 0.5))
    }
    assert all(curve["cases"] == 2 and curve["gold_nll_over_full_nats"] is None for curve in found["curves"])
    chosen = found["chosen"]
    assert found["is_within"]
    cheapest = [curve for curve in found["curves"] if curve["ratio"] == 0]  # any loss is accepted
    assert (chosen["ratio"], chosen["context"]) == (0, min(cheapest, key=lambda one: one["first_token_kl_nats"])["context"])
    assert chosen["first_token_kl_nats"] <= chosen["first_token_kl_high_nats"]
    path = Path(found["path"])
    assert path.parent == Path("store/profiles")
    assert path.is_file()
    assert (tmp_path / "run" / "summary.json").is_file()
    config = EngineConfig(model=str(model_dir), store_dir="store", retriever=RetrieverConfig(chunk_tokens=48))
    with Engine(config, fusor=fusor, embedder=embedder) as engine:
        assert (engine.config.loader.quality_ratio, engine.config.fusion.selector) == (0, chosen["selector"])
    code, _, err = run(model_dir, *options, "--out", "run")
    assert code == 2
    assert "exists" in err


def test_right_answers_count(run: Run, model_dir: Path, documents: Path) -> None:
    """With a file of questions among the documents, right answers are measured; where nothing is within, that is said."""
    asked = documents / "asked.jsonl"
    lines = ({"question": "Where are rooms booked?", "answers": ["the front desk"]}, {"question": "Who signs off travel?"})
    asked.write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = ("--questions", asked, "--contexts", "bos", "--selectors", "gradual", "--ratios", "0,0.3", "--max-kl", 0)
    code, out, err = run(model_dir, *options)
    assert code == 0, err
    assert "no setting is within" in out
    assert "at most" in out
    code, out, _ = run(model_dir, *options, "--json", "--out", "again")
    found = json.loads(out)
    assert not found["is_within"]
    assert found["path"] is None
    assert not list(Path("store/profiles").glob("*.calibration.json"))
    least = min(found["curves"], key=lambda curve: curve["first_token_kl_nats"])
    assert found["chosen"]["ratio"] == least["ratio"]
    assert all(isinstance(curve["gold_nll_over_full_nats"], float) for curve in found["curves"])


def test_bad_options(run: Run, model_dir: Path) -> None:
    """An unknown, doubled or missing setting is refused before a model is loaded, by name."""
    for options, named in (
        (("--max-kl", -1), "max_kl"),
        (("--ratios", "0,half"), "ratios"),
        (("--ratios", "0.1,0.1"), "ratios"),
        (("--ratios", "0,1.5"), "recompute_ratio"),
        (("--selectors", "best"), "selectors"),
        (("--selectors", ""), "selectors"),
        (("--contexts", "best"), "contexts"),
        (("--cases", 0), "cases"),
    ):
        code, _, err = run(model_dir, *options)
        assert code == 2
        assert named in err


def test_the_prompt_is_the_services() -> None:
    """Calibration's source has the service's prompt: no worked examples stand in front of a plain text."""
    source = DocumentsSource(documents="d", questions=None, worked_examples=False)
    assert source.wording.text_instruction == EngineConfig(model="m", store_dir=".").instruction
    assert replace(source, worked_examples=True).wording.text_instruction != source.wording.text_instruction
