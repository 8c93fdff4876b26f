"""A calibration: the setting that `cacheblend calibrate` chose for a model and documents, and its file beside the profiles.

{"format", "model", "prefix", "context", "selector", "ratio", "measures": {..}, "thresholds": {..}, "curve": [[ratio, KL], ..]}
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from cacheblend.base.checks import is_number
from cacheblend.base.errors import ConfigError, ProfileError
from cacheblend.blend import SELECTORS

from .profile import read_object, write_object

CALIBRATION_FORMAT = 1
_MAY_BE_NONE = ("first_token_kl_low_nats", "first_token_kl_high_nats", "gold_nll_over_full_nats")


@dataclass(frozen=True, slots=True, kw_only=True)
class Measures:
    """A setting's losses against full recompute, over the questions of a calibration.

    Args:
        cases: number of questions.
        first_token_kl_nats: mean KL of the first token's distribution from full recompute's.
        first_token_kl_low_nats: lower end of its 95 % bootstrap interval; None for one case.
        first_token_kl_high_nats: upper end.
        gold_nll_over_full_nats: mean negative log-likelihood of the right answer above full recompute's; None without right
            answers.
        equal_greedy_tokens: mean share of full recompute's first greedy tokens, 0..1.
        compute_share: mean multiply-adds between question and first token over full prefill's, 0..1.
        ttft_s_median: seconds to the first token, stored KV in RAM.

    Raises:
        ProfileError: a value is not a finite number.
    """

    cases: int
    first_token_kl_nats: float
    first_token_kl_low_nats: float | None
    first_token_kl_high_nats: float | None
    gold_nll_over_full_nats: float | None
    equal_greedy_tokens: float
    compute_share: float
    ttft_s_median: float

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not (is_number(value) or (value is None and field.name in _MAY_BE_NONE)):
                raise ProfileError(f"a calibration has {field.name}={value!r}; run `cacheblend calibrate` again")


@dataclass(frozen=True, slots=True, kw_only=True)
class Thresholds:
    """The loss against full recompute that a user accepts.

    Args:
        max_kl: limit of the mean first-token KL, nats.
        max_nll: limit of the right answer's mean negative log-likelihood above full recompute's, nats.

    Raises:
        ConfigError: a value is not a number of at least 0.
    """

    max_kl: float = 0.05
    max_nll: float = 0.05

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
class Calibration:
    """The setting that a model is to serve with.

    Args:
        model: the model's fingerprint, which has the compute dtype in it.
        prefix: `prefix_digest` of the prompts.
        context: context of the chunks' KV: "default" (filler and document), "filler", "document", "head", or another
            measured one.
        selector: one of `SELECTORS`.
        ratio: r*, the recompute ratio, 0..1.
        measures: this setting's losses.
        thresholds: limits of the choice. If no setting was within them, the one of least KL was chosen.
        curve: the measured ratios of this context and selector, rising, each with its mean first-token KL in nats, of raw KV.

    Raises:
        ProfileError: the selector is unknown, the ratio outside 0..1, or the curve malformed.
    """

    model: str
    prefix: str
    context: str
    selector: str
    ratio: float
    measures: Measures
    thresholds: Thresholds
    curve: tuple[tuple[float, float], ...] = ()

    def __post_init__(self) -> None:
        for name in ("model", "prefix", "context"):
            if not isinstance(getattr(self, name), str):
                raise ProfileError(f"a calibration has {name}={getattr(self, name)!r}; run `cacheblend calibrate` again")
        if self.selector not in SELECTORS:
            known = ", ".join(SELECTORS)
            raise ProfileError(f"a calibration has selector={self.selector!r}, not one of {known}; run `cacheblend calibrate`")
        if not is_number(self.ratio) or not 0 <= self.ratio <= 1:
            raise ProfileError(f"a calibration has ratio={self.ratio!r}, not 0 to 1; run `cacheblend calibrate` again")
        ratios = [ratio for ratio, _ in self.curve]
        if not all(map(is_number, (*ratios, *(kl for _, kl in self.curve)))) or ratios != sorted(ratios):
            raise ProfileError(f"a calibration has curve={self.curve!r}; run `cacheblend calibrate` again")

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {"format": CALIBRATION_FORMAT, **asdict(self)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Calibration:
        """Make a calibration from the values of `as_dict`.

        Raises:
            ProfileError: the values are not a calibration's.
        """
        try:
            given = dict(values)
            if (found := given.pop("format")) != CALIBRATION_FORMAT:
                raise ProfileError(
                    f"the calibration has format {found!r}, not {CALIBRATION_FORMAT}; run `cacheblend calibrate` again"
                )
            given["measures"], given["thresholds"] = Measures(**given["measures"]), Thresholds(**given["thresholds"])
            given["curve"] = tuple((ratio, kl_nats) for ratio, kl_nats in given.get("curve", ()))
            return cls(**given)
        except (KeyError, TypeError, ValueError) as error:
            raise ProfileError(
                f"not a calibration: {type(error).__name__} {error}; run `cacheblend calibrate` again"
            ) from error


def prefix_digest(prefix_ids: Sequence[int]) -> str:
    """Digest of the token ids that every prompt begins with, instruction and chat template: 16 hex digits."""
    return hashlib.sha256(",".join(map(str, prefix_ids)).encode()).hexdigest()[:16]


def calibration_path(directory: Path, *, model: str, prefix: str) -> Path:
    """The file of a model's calibration after a prefix, in the folder of profiles."""
    return directory / f"{model[:16]}-{prefix}.calibration.json"


def read_calibration(directory: Path, *, model: str, prefix: str) -> Calibration | None:
    """Read the calibration of a model after a prefix; None if there is none.

    Args:
        directory: the folder of profiles.
        model: the model's fingerprint.
        prefix: `prefix_digest` of the prompts.

    Raises:
        ProfileError: the file is damaged, of another format, or of another model or prefix.
    """
    path = calibration_path(directory, model=model, prefix=prefix)
    if not path.is_file():
        return None
    values = read_object(path, "calibrate")
    try:
        calibration = Calibration.from_dict(values)
    except ProfileError as error:
        raise ProfileError(f"{path}: {error}") from error
    for what, own, wanted in (("model", calibration.model, model), ("prefix", calibration.prefix, prefix)):
        if own != wanted:
            raise ProfileError(f"{path} is of another {what}: {own!r}, and this is {wanted!r}; run `cacheblend calibrate` here")
    return calibration


def write_calibration(directory: Path, calibration: Calibration) -> Path:
    """Write a calibration, in place of an older one of that model and prefix; returns its path.

    Raises:
        ProfileError: the folder cannot be written.
    """
    path = calibration_path(directory, model=calibration.model, prefix=calibration.prefix)
    write_object(path, calibration.as_dict(), "calibration")
    return path
