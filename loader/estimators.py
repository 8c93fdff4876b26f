"""The paper's two estimators, for a request's loading and for its recompute (§5.1), and both on one clock (figure 10a)."""

from __future__ import annotations

import itertools
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cacheblend.blend import Schedule
from cacheblend.blend.layer_passes import MAX_QUESTION_TOKENS

from .profile import Profile, TierSpeed

Read = tuple[str, int]
FITS = 8
# Without a profile, a pass through a layer is assumed to cost this many rows more than it runs: weights are read and operations
# begin whatever the rows. Measured on a CPU (docs/loader.md). On CUDA the estimate exceeds MAX_FIXED_ROWS, so MAX_FIXED_ROWS
# applies.
FIXED_ROWS, MAX_FIXED_ROWS = 64, 256
FIXED_MULTIPLY_ADDS = {"cpu": 66_000_000, "cuda": 60_000_000_000}
# Multiply-adds a second of a full prefill on a device without a profile: a low guess (two cores of a small server, a GPU of ten
# years ago), since a remote tier that is abandoned too early helps nobody.
SLOW_MULTIPLY_ADDS_PER_S = {"cpu": 1e10, "cuda": 2e12}
SLOW_START_S = 0.25
WORTH_BLENDING = 0.75  # maximum share of a full prefill's work: this is an estimate, and full recompute is exact
NOISE = 0.02  # relative error; smaller errors have equal weights


def load_seconds(reads: Iterable[Read], tiers: Mapping[str, TierSpeed]) -> dict[str, float]:
    """T_load(layer) by tier: a constant and bytes / throughput of the tier (paper footnote 6), summed over a layer's reads.

    A tier without a measurement has the slowest one's speed.
    """
    slowest = min(tiers.values(), key=lambda speed: speed.bytes_per_s)
    seconds: defaultdict[str, float] = defaultdict(float)
    for tier, count in reads:
        speed = tiers.get(tier, slowest)
        seconds[tier] += speed.read_s + count / speed.bytes_per_s
    return dict(seconds)


class RecomputeEstimator:
    """T_recompute(r) of each layer, and of a full prefill, from a profile.

    The paper's r x Prefill (footnote 5) leaves out the layer's own constant, the rotation of every stored key, checks (they
    project rows and then drop them), layer 0 (it runs all tokens or only the candidates), the last layer (it runs one row), and
    attention (contiguous rows need half the time of scattered ones). So seconds of a layer with some rows are a + b tokens +
    c rows + d rows x tokens + e projected, with another d for all rows; those of a full layer 0 and of a full prefill are
    a + b tokens + c tokens^2.
    Coefficients are at least 0 and have the least relative errors.

    Args:
        profile: the samples.
        schedule: the selector's schedule (`FusionConfig.schedule`).
    """

    def __init__(self, profile: Profile, schedule: Schedule) -> None:
        self.layers, self._schedule, self._logits_s = profile.layers, schedule, profile.logits_s
        all_rows = [sample for sample in profile.blend if sample.layer == 0]
        later = [sample for sample in profile.blend if sample.layer > 0]
        self._prefill = _fit_lengths([(sample.tokens, sample.seconds) for sample in profile.prefill])
        self._layer_0 = _fit_lengths([(sample.rows, sample.seconds) for sample in all_rows])
        rows = [_of_rows(sample.tokens, sample.rows, sample.projected) for sample in later]
        self._later = fit(rows, [sample.seconds for sample in later])

    def prefill_s(self, tokens: int) -> float:
        """Seconds of a full prefill, to the first logits."""
        return float(self._prefill @ _of_length(tokens))

    def steps(self, ratio: float, reusable: int, fresh: int, exact: int = 0) -> list[tuple[float, bool]]:
        """Seconds of each step of a blend with loaded KV, and whether the step is the first to read its layer.

        The steps are the layers of the question's pass, if the selector has one, and then those of the blend.

        Args:
            ratio: recompute ratio.
            reusable: tokens with stored KV that the ratio counts.
            fresh: tokens without stored KV.
            exact: tokens of exact segments, of which only the KV is read.
        """
        asked: list[float] = []
        if self._schedule.uses_question_attention and reusable and 0 < ratio < 1:
            rows = max(1, min(fresh, MAX_QUESTION_TOKENS))
            layer_s = float(self._later @ _of_rows(reusable + fresh + exact, rows, 0))
            asked = [layer_s] * (self.layers - 1)
        runs_all = not asked and self._schedule.counts(reusable, self.layers, ratio)[0] == reusable
        first = max(len(asked), int(runs_all))
        blended = enumerate(self.layer_s(ratio, reusable, fresh, exact))
        return [*((seconds, True) for seconds in asked), *((seconds, layer >= first) for layer, seconds in blended)]

    def layer_s(self, ratio: float, reusable: int, fresh: int, exact: int = 0) -> list[float]:
        """Seconds of each layer of a blend with loaded KV; the last layer's include the logits. Arguments as in `steps`."""
        tokens = reusable + fresh + exact
        counts = self._schedule.counts(reusable, self.layers, ratio)
        rows = counts[0] + fresh
        is_contiguous = counts[0] in (0, reusable)  # fresh tokens are mostly contiguous too
        seconds = [float(self._layer_0 @ _of_length(rows) if is_contiguous else self._later @ _of_rows(tokens, rows, 0))]
        for layer, (before, after) in enumerate(itertools.pairwise(counts), start=1):
            rows, projected = work_of(layer, self.layers, before + fresh, after + fresh)
            seconds.append(float(self._later @ _of_rows(tokens, rows, projected)))
        seconds[-1] += self._logits_s
        return seconds


def work_of(layer: int, layers: int, before: int, rows: int) -> tuple[int, int]:
    """Rows that a later layer runs, and rows of which it projects K and V alone, after a layer that ran `before` rows.

    A layer that drops rows has compared them all. The last layer runs the prompt's last position, and projects the others.
    """
    projected = before if rows < before else 0
    return (1, projected or rows) if layer == layers - 1 else (rows, projected)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkEstimator:
    """Guesses a prompt's seconds without a profile, by counting rows through layers."""

    schedule: Schedule  # of the selector (`FusionConfig.schedule`)
    layers: int
    row_multiply_adds: int  # of one row through one layer
    device_type: str  # "cpu" or "cuda"

    def full_s(self, tokens: int) -> float:
        """Generous guess of a full prefill's seconds."""
        return SLOW_START_S + self.row_multiply_adds * self.layers * tokens / SLOW_MULTIPLY_ADDS_PER_S[self.device_type]

    def is_short(self, ratio: float, reusable: int, fresh: int, exact: int = 0) -> bool:
        """Whether a full prefill is worth its work, next to a blend.

        Args:
            ratio: recompute ratio.
            reusable: tokens with stored KV that the ratio counts; with 0 there is no choice, and the result is False.
            fresh: tokens without stored KV.
            exact: tokens of exact segments, which a full prefill computes as well.
        """
        fixed = min(FIXED_ROWS + FIXED_MULTIPLY_ADDS[self.device_type] / self.row_multiply_adds, MAX_FIXED_ROWS)
        passes = [count + fresh for count in self.schedule.counts(reusable, self.layers, ratio)]
        if self.schedule.uses_question_attention and 0 < ratio < 1:
            passes += [min(fresh, MAX_QUESTION_TOKENS)] * (self.layers - 1)
        full = self.layers * (reusable + fresh + exact + fixed)
        return bool(reusable) and sum(passes) + fixed * len(passes) > WORTH_BLENDING * full


def fit(features: Sequence[Sequence[float]], seconds: Sequence[float]) -> NDArray[np.float64]:
    """Coefficients (F,) of at least 0 with the smallest relative errors; zeros without measurements.

    Errors count by their size and not by its square, through weights from the previous fit: a sample that other
    work slowed down does not bend the fit.
    """
    width = len(features[0]) if features else len(_of_rows(0, 0, 0))
    found = np.zeros(width)
    if not seconds or max(seconds) <= 0:
        return found
    a_SF = np.asarray(features, dtype=np.float64) / np.maximum(np.asarray(seconds), 1e-9)[:, None]
    weights_S = np.ones(len(seconds))
    for _ in range(FITS):
        found = _least_squares(a_SF * weights_S[:, None], weights_S)
        weights_S = 1 / np.sqrt(np.maximum(np.abs(a_SF @ found - 1), NOISE))
    return found


def _least_squares(a_SF: NDArray[np.float64], b_S: NDArray[np.float64]) -> NDArray[np.float64]:
    """The x of at least 0 for which `a_SF @ x` is nearest `b_S`; every subset of the few features is solved."""
    best, best_error = np.zeros(a_SF.shape[1]), np.inf
    for size in range(1, min(a_SF.shape[1], len(b_S)) + 1):
        for chosen in itertools.combinations(range(a_SF.shape[1]), size):
            solved = np.linalg.lstsq(a_SF[:, chosen], b_S, rcond=None)[0]
            error = float(np.square(a_SF[:, chosen] @ solved - b_S).sum())
            if solved.min() >= 0 and error < best_error * (1 - 1e-9):
                best, best_error = np.zeros(a_SF.shape[1]), error
                best[list(chosen)] = solved
    return best


def _fit_lengths(samples: Sequence[tuple[int, float]]) -> NDArray[np.float64]:
    """`fit` by length. With one measured length, seconds are proportional to it: a constant would fit every length alike."""
    lengths = [tokens for tokens, _ in samples]
    if len(set(lengths)) == 1:
        return np.array([0.0, statistics.median(seconds for _, seconds in samples) / lengths[0], 0.0])
    return fit([_of_length(tokens) for tokens in lengths], [seconds for _, seconds in samples])


def _of_length(tokens: int) -> list[float]:
    return [1.0, tokens, tokens * tokens]


def _of_rows(tokens: int, rows: int, projected: int) -> list[float]:
    pairs = rows * tokens
    return [1.0, tokens, rows, *((0, pairs) if rows == tokens else (pairs, 0)), projected]


@dataclass(frozen=True, slots=True)
class Pipeline:
    """A request's layers on one clock, loading beside computing."""

    total_s: float  # from the start to the end of the last layer
    waits_for_last: bool  # the fusor reaches the last layer before its KV: loading is the longer side

    @classmethod
    def from_layers(cls, load_s: Sequence[float], compute_s: Sequence[float], lookahead_layers: int) -> Pipeline:
        """Walk through the layers.

        Args:
            load_s: seconds to load each layer.
            compute_s: seconds to compute it once it is there.
            lookahead_layers: number of loaded layers that may wait for the fusor.
        """
        loaded = done = 0.0
        taken: list[float] = []
        waits = False
        for layer, (load, compute) in enumerate(zip(load_s, compute_s, strict=True)):
            has_room = taken[layer - lookahead_layers] if layer >= lookahead_layers else 0.0
            loaded = max(loaded, has_room) + load
            waits = load > 0 and loaded > done
            taken.append(max(loaded, done))
            done = taken[-1] + compute
        return cls(done, waits)
