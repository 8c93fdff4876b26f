"""Calibration: which context, selector and ratio lose little enough on a user's documents, and cost least."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cacheblend.base.errors import ConfigError
from cacheblend.base.options import is_number
from cacheblend.blend import DEFAULT_RATIO, Fusor
from cacheblend.eval.data import DocumentsSource
from cacheblend.eval.data.source import prompt_renderer
from cacheblend.eval.method_plan import FULL_REUSE, METHOD_OF_SELECTOR
from cacheblend.eval.metrics import COMPARED_TOKENS
from cacheblend.loader import Calibration
from cacheblend.loader.profile import prefix_digest
from cacheblend.retriever import Embedder

from .folder import EvalConfig
from .report import REFERENCE
from .runner import Progress, evaluate


@dataclass(frozen=True, slots=True, kw_only=True)
class Measures:
    """A setting's losses against full recompute, in the mean over the questions of a calibration."""

    cases: int  # questions
    first_token_kl_nats: float  # KL of the first token's distribution from full recompute's
    first_token_kl_low_nats: float | None  # lower end of its 95 % bootstrap interval; None for one case
    first_token_kl_high_nats: float | None
    gold_nll_over_full_nats: float | None  # negative log-likelihood of the right answer above full recompute's, if there is one
    equal_greedy_tokens: float  # share of full recompute's first greedy tokens, 0..1
    compute_share: float  # multiply-adds between question and first token over full prefill's, 0..1
    ttft_s_median: float  # to the first token, stored KV in RAM


@dataclass(frozen=True, slots=True, kw_only=True)
class Thresholds:
    """The loss against full recompute that a user accepts, in nats.

    Raises:
        ConfigError: a value is not a number of at least 0.
    """

    max_kl: float = 0.05  # of the first token, in the mean
    max_nll: float = 0.05  # of the right answer above full recompute's, in the mean

    def __post_init__(self) -> None:
        for name in ("max_kl", "max_nll"):
            value = getattr(self, name)
            if not is_number(value) or value < 0:
                raise ConfigError(name, value, "nats, 0 or more")

    def allow(self, measures: Measures) -> bool:
        """Whether a setting's loss is accepted; right answers count if there are any."""
        nll_nats = measures.gold_nll_over_full_nats
        return measures.first_token_kl_nats <= self.max_kl and (nll_nats is None or nll_nats <= self.max_nll)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A point of a calibration's curves.

    Args:
        context: what chunks' KV was computed after, of `CONTEXTS`.
        selector: one of `SELECTORS`; None at ratio 0, where nothing is selected.
        ratio: recompute ratio, 0..1.
        measures: against full recompute.
    """

    context: str
    selector: str | None
    ratio: float
    measures: Measures

    def as_dict(self) -> dict[str, Any]:
        """Plain values, the measures among them."""
        return {"context": self.context, "selector": self.selector, "ratio": self.ratio, **asdict(self.measures)}


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationRun:
    """Measurements and choice of a calibration.

    Args:
        calibration, chosen: the choice, as it is written and as it was measured.
        thresholds: the loss that is accepted.
        is_within: it is within the thresholds; else no setting was, and it is the one of least KL.
        curves: every setting, full recompute left out.
        full_ttft_s_median: seconds to the first token of full recompute.
        folder: of the run.
    """

    calibration: Calibration
    chosen: Setting
    thresholds: Thresholds
    is_within: bool
    curves: tuple[Setting, ...]
    full_ttft_s_median: float
    folder: Path


def calibration_config(
    source: DocumentsSource,
    model: str,
    *,
    contexts: Sequence[str],
    selectors: Sequence[str],
    ratios: Sequence[float],
    device: str = "cpu",
    dtype: str = "auto",
    kv_cache_dtype: str = "raw",
    allow_unverified: bool = False,
) -> EvalConfig:
    """The run that measures every context with every selector at every ratio; at ratio 0 no selector is asked.

    Raises:
        ConfigError: none of them, one twice, an unknown one, or a ratio outside 0..1.
    """
    for name in selectors:
        if name not in METHOD_OF_SELECTOR:
            raise ConfigError("selectors", name, f"any of {', '.join(METHOD_OF_SELECTOR)}")
    for field, given in (("selectors", selectors), ("ratios", ratios)):
        if not given or len(set(given)) < len(given):
            raise ConfigError(field, ",".join(map(str, given)), "at least one, each once")
    above_0 = tuple(ratio for ratio in ratios if ratio)
    methods = [REFERENCE, *([FULL_REUSE] if 0 in ratios else []), *(METHOD_OF_SELECTOR[name] for name in selectors if above_0)]
    return EvalConfig(
        source=source,
        model=model,
        methods=tuple(methods),
        ratios=above_0 or (DEFAULT_RATIO,),
        contexts=tuple(contexts),
        max_new_tokens=COMPARED_TOKENS,
        device=device,
        dtype=dtype,
        kv_cache_dtype=kv_cache_dtype,
        allow_unverified=allow_unverified,
    )


def calibrate(
    config: EvalConfig,
    thresholds: Thresholds,
    folder: Path,
    fusor: Fusor,
    *,
    selectors: Sequence[str],
    embedder: Embedder | None = None,
    on_progress: Progress = lambda *_: None,
) -> CalibrationRun:
    """Run a configuration of `calibration_config`, and choose.

    Args:
        config: what is measured.
        thresholds: the loss that is accepted.
        folder: a new folder for the run.
        fusor: the model that the config names.
        selectors: as `calibration_config` was given them; the first is taken where none was measured.
        embedder: in place of the retriever's own.
        on_progress: see `evaluate`.

    Raises:
        InputError: see `evaluate`.
    """
    summary = evaluate(config, folder, fusor=fusor, embedder=embedder, on_progress=on_progress)
    curves = curves_of(config, summary)
    chosen = choose(curves, thresholds)
    selector = chosen.selector or selector_beyond(chosen, curves) or selectors[0]
    calibration = Calibration(
        model=fusor.fingerprint,
        prefix=prefix_digest(prompt_renderer(fusor.tokenizer, config.source.wording).prefix),
        context=chosen.context,
        selector=selector,
        ratio=chosen.ratio,
        measures=asdict(chosen.measures),
        thresholds=asdict(thresholds),
    )
    return CalibrationRun(
        calibration=calibration,
        chosen=chosen,
        thresholds=thresholds,
        is_within=thresholds.allow(chosen.measures),
        curves=curves,
        full_ttft_s_median=summary["methods"][REFERENCE]["ttft_s_median"],
        folder=folder,
    )


def curves_of(config: EvalConfig, summary: dict[str, Any]) -> tuple[Setting, ...]:
    """The settings of a run's summary, in the run's order."""
    selector_of = {method: selector for selector, method in METHOD_OF_SELECTOR.items()}
    return tuple(
        Setting(
            context=planned.context,
            selector=selector_of.get(planned.name),
            ratio=planned.ratio or 0.0,
            measures=_measures(summary["methods"][planned.label]),
        )
        for planned in config.planned()
        if planned.name != REFERENCE
    )


def choose(curves: Sequence[Setting], thresholds: Thresholds) -> Setting:
    """The cheapest setting within the thresholds, by compute, then TTFT; the one of least KL where none is within.

    A context costs nothing when a question comes: of several with the cheapest selector and ratio, the one of least KL counts.
    """

    def kl_nats(setting: Setting) -> float:
        return setting.measures.first_token_kl_nats

    within = [setting for setting in curves if thresholds.allow(setting.measures)]
    if not within:
        return min(curves, key=kl_nats)
    cheapest = min(within, key=lambda setting: (setting.measures.compute_share, setting.measures.ttft_s_median))
    cost = cheapest.selector, cheapest.ratio
    return min((setting for setting in within if (setting.selector, setting.ratio) == cost), key=kl_nats)


def selector_beyond(chosen: Setting, curves: Sequence[Setting]) -> str | None:
    """The selector for where the controller asks for more than a chosen ratio of 0: of least KL at the next ratio."""
    above = [setting for setting in curves if setting.context == chosen.context and setting.selector is not None]
    if not above:
        return None
    return min(above, key=lambda setting: (setting.ratio, setting.measures.first_token_kl_nats)).selector


def _measures(found: dict[str, Any]) -> Measures:
    kl = found["first_token_kl_nats_difference"]
    return Measures(
        cases=found["cases"],
        first_token_kl_nats=found["first_token_kl_nats"],
        first_token_kl_low_nats=kl["low"],
        first_token_kl_high_nats=kl["high"],
        gold_nll_over_full_nats=found["gold_nll_over_full_nats"],
        equal_greedy_tokens=found["equal_greedy_tokens"],
        compute_share=found["compute_share"],
        ttft_s_median=found["ttft_s_median"],
    )
