"""Shadow evaluation: a sample of blended requests beside full prefill, and the guard that raises the ratio by it."""

from __future__ import annotations

import logging
import random
import threading
from collections import Counter, deque
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch

from cacheblend.blend import FusionResult, Fusor, NextToken, Segment, SequenceKV
from cacheblend.service.engine.request import Request, sampling_options

from .config import ServingConfig
from .request import ServedRequest

if TYPE_CHECKING:
    from transformers import DynamicCache

STEP = 0.25  # of the ratio: from the paper's 0.15 to full recompute in four
logger = logging.getLogger(__name__)
GUARD_TOKENS = 8  # first greedy tokens that are compared
GUARD_WINDOW = 20  # shadow evaluations that the mean agreement is over
MAX_SAMPLED = 2  # prompts whose KV is kept for a check, running requests included; a long prompt's KV is large


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A blended prompt beside the same prompt prefilled in full.

    Args:
        agreement: share of full prefill's first greedy tokens that blending gives too, before the first that differs, 0..1.
        first_token_kl_nats: Kullback-Leibler divergence of the first token's distribution, full from blended.
        relative_kv_error: squared difference of the prompt's KV over its squared size; 0 is none left (paper §4.1).
        recompute_ratio: that the blended prompt ran at.
    """

    agreement: float
    first_token_kl_nats: float
    relative_kv_error: float
    recompute_ratio: float


def first_tokens(
    fusor: Fusor, prompts: Sequence[FusionResult], tokens: int, greedy: Mapping[str, Any]
) -> Generator[None, None, list[list[int]]]:
    """Each prompt's first greedy tokens, all of them a token a step; the prompts' caches stay as they are.

    Args:
        fusor: the model.
        prompts: prefilled.
        tokens: at most so many each.
        greedy: see `NextToken`; no sampling.
    """
    drawn = [NextToken(fusor.model, fused.token_ids, tokens, **greedy) for fused in prompts]
    kv = [SequenceKV(fused, fusor.decoder.windows) for fused in prompts]
    for own, fused in zip(drawn, prompts, strict=True):
        own.draw(fused.logits)
    while running := [index for index, own in enumerate(drawn) if own.finish_reason is None]:
        yield
        logits_RV = fusor.decoder.decode([drawn[index].token_ids[-1] for index in running], [kv[index] for index in running])
        for index, logits_V in zip(running, logits_RV, strict=True):
            drawn[index].draw(logits_V)
    return [own.token_ids for own in drawn]


def compare(
    full: FusionResult, full_tokens: Sequence[int], blended: FusionResult, blended_tokens: Sequence[int], recompute_ratio: float
) -> Comparison:
    """Hold a blended prompt against full prefill.

    Args:
        full: prefilled in full.
        full_tokens: its first greedy tokens, at least one; they end with the end of sequence where that came.
        blended: the same prompt, blended.
        blended_tokens: its first greedy tokens, no fewer unless it ended.
        recompute_ratio: that it ran at.
    """
    return Comparison(
        agreement=equal_tokens_share(full_tokens, blended_tokens),
        first_token_kl_nats=first_token_kl_nats(full.logits, blended.logits),
        relative_kv_error=relative_kv_error(blended.cache, full.cache),
        recompute_ratio=recompute_ratio,
    )


def relative_kv_error(cache: DynamicCache, full: DynamicCache) -> float:
    """Squared difference of all keys and values over the squared size of full recompute's: 0 is none left.

    Sums run over layers, heads, tokens and head size, in float32; relative, so that models can be compared. Layers with a
    sliding window are compared within it.
    """
    difference = size = 0.0
    ours: list[Any] = cache.layers
    theirs: list[Any] = full.layers
    for mine, own in zip(ours, theirs, strict=True):
        for x, y in ((mine.keys, own.keys), (mine.values, own.values)):
            # Generation appends to copies of the layers or after them, never to these tensors.
            difference += float((x.float() - y.float()).square().sum())
            size += float(y.float().square().sum())
    return difference / size


def first_token_kl_nats(full_V: torch.Tensor, blended_V: torch.Tensor) -> float:
    """KL(full || blended) of the answer's first token, in nats, from float32 logits (V,); 0 where they are the same."""
    full, blended = (torch.log_softmax(logits_V.double(), dim=-1) for logits_V in (full_V, blended_V))
    # Rounding alone may bring it below 0.
    return max(0.0, float(torch.nn.functional.kl_div(blended, full, reduction="sum", log_target=True)))


def equal_tokens_share(full_ids: Sequence[int], blended_ids: Sequence[int]) -> float:
    """Share of full prefill's greedy tokens that blending gives too, up to the first that differs; 0..1.

    Tokens after the first difference do not count: they follow other texts.

    Args:
        full_ids: at least one; they end with the end of sequence where that came.
        blended_ids: no fewer unless they ended.
    """
    differs = [one != other for one, other in zip(full_ids, blended_ids, strict=False)]
    return (differs.index(True) if True in differs else len(differs)) / len(full_ids)


class QualityGuard:
    """Raises one tenant's recompute ratio while its blended answers agree too little with full prefill's. Not thread-safe.

    A level is the least ratio that blended requests run at: 0 leaves them as they are planned, 1 is full recompute. Only checks
    of requests that ran at the level count, so a raise is judged anew. Raised, the level below is tried out on checked requests
    in the shadow of the served ones, and taken again once those agree: at full recompute nothing else could show it. It must
    agree better than the floor asks for, half-way to 1, so that the guard does not swing between two levels.

    Args:
        floor: least mean agreement, 0..1; 0 never raises.
        window: checks that a mean is over.
    """

    def __init__(self, floor: float, window: int) -> None:
        self._floor, self._window = floor, window
        self._levels = [0.0]
        self._served: deque[tuple[float, float]] = deque(maxlen=window)  # agreement, and the ratio it was served at
        self._kl_nats: deque[float] = deque(maxlen=window)
        self._lower: deque[float] = deque(maxlen=window)

    @property
    def level(self) -> float:
        """The least ratio that blended requests run at now."""
        return self._levels[-1]

    @property
    def lower_level(self) -> float | None:
        """The level to try out in the shadow; None where the ratio is not raised."""
        return self._levels[-2] if len(self._levels) > 1 else None

    @property
    def agreement(self) -> float | None:
        """Mean agreement of the last `window` requests served at this level; None where none was checked."""
        return fmean(agreement for agreement, _ in self._served) if self._served else None

    @property
    def first_token_kl_nats(self) -> float | None:
        """Mean first-token KL of the requests that `agreement` is of; it is reported, and raises nothing."""
        return fmean(self._kl_nats) if self._kl_nats else None

    def record_served(self, agreement: float, *, level: float, ratio: float, kl_nats: float | None = None) -> bool:
        """A request was checked. True where that raises the level.

        Args:
            agreement: of its first tokens with full prefill's, 0..1.
            level: at which it was served; the level may have changed since.
            ratio: recompute ratio that it ran at.
            kl_nats: its first-token KL; None where it was not measured.
        """
        if level != self.level or level >= 1:
            return False
        if kl_nats is not None:
            self._kl_nats.append(kl_nats)
        self._served.append((agreement, ratio))
        # As soon as a window full of agreement from here on would not reach the floor; with a full window, its mean.
        missing = self._window - len(self._served)
        if sum(one for one, _ in self._served) + missing >= self._floor * self._window:
            return False
        self._levels.append(min(1.0, max(ratio for _, ratio in self._served) + STEP))
        self._forget()
        return True

    def record_lower(self, agreement: float, *, level: float) -> bool:
        """The level below `level` was tried out on a request that was served at `level`. True where it is taken again."""
        if level != self.level or len(self._levels) == 1:
            return False
        self._lower.append(agreement)
        if len(self._lower) < self._window or fmean(self._lower) < (1 + self._floor) / 2:
            return False
        self._levels.pop()
        self._forget()
        return True

    def _forget(self) -> None:
        self._served.clear()
        self._kl_nats.clear()
        self._lower.clear()


EvaluationSteps = Generator[object, None, dict[str, Comparison]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShadowReport:
    """Outcome of a sampled request.

    Args:
        tenant: whose it was.
        outcome: "compared", "dropped" (`MAX_SAMPLED` were kept already) or "failed".
        comparisons: "served", the prompt as the client got it, and "lower", at the guard's level below where that is tried out.
        level: the guard's, now.
    """

    tenant: str
    outcome: str
    comparisons: Mapping[str, Comparison] = field(default_factory=dict)
    level: float


@dataclass(frozen=True, slots=True, kw_only=True)
class QualityStatus:
    """A tenant's answers beside full prefill's; fields as `GET /v1/store` names them.

    Args:
        evaluated: requests compared since the service started.
        agreement: mean over the last of them at the present ratio; None where there is none.
        first_token_kl_nats: mean of the first token's KL divergence over the same ones; None where there is none.
        floor: below it the ratio is raised.
        least_recompute_ratio: that blended requests run at; 0 where it is not raised.
        full_recompute: blending is given up until it agrees again.
    """

    evaluated: int
    agreement: float | None
    first_token_kl_nats: float | None
    floor: float
    least_recompute_ratio: float
    full_recompute: bool


class ShadowEvaluation:
    """Holds a sampled share of blended requests against full prefill, and a guard for each tenant to that.

    `status` is thread-safe; all else belongs to the scheduler's thread.

    Args:
        config: share and floor.
        observer: called with every sampled request's check. Must return at once.
    """

    def __init__(self, config: ServingConfig, observer: Callable[[ShadowReport], None]) -> None:
        self._config, self._observer = config, observer
        self._lock = threading.Lock()
        self._guards: dict[str, QualityGuard] = {}
        self._evaluated: Counter[str] = Counter()
        self._waiting: deque[ServedRequest] = deque()
        self._now: tuple[ServedRequest, EvaluationSteps] | None = None

    @property
    def has_work(self) -> bool:
        """Whether a check waits or has begun."""
        return self._now is not None or bool(self._waiting)

    def admit(self, request: ServedRequest, running_sampled: int) -> None:
        """Raise a request's ratio where the guard says so, and draw whether it is checked.

        Args:
            request: about to run.
            running_sampled: running requests that are sampled.
        """
        prepared = request.prepared
        if prepared.method != "blend" or request.own_ratio:
            return
        request.level = self._guard(request.tenant).level
        request.as_run = _at(prepared, request.level)
        request.sampled = random.random() < self._config.guard_share
        if request.sampled and running_sampled + len(self._waiting) + (self._now is not None) >= MAX_SAMPLED:
            request.sampled = False
            self._report(request.tenant, "dropped")

    def add(self, request: ServedRequest) -> None:
        """Have a sampled request that is answered checked some time; one whose prompt was not blended needs no check."""
        if request.as_run.fused.reusable_tokens or request.level >= 1:
            self._waiting.append(request)
        else:
            request.as_run.release()

    def step(self) -> None:
        """Run a layer, or a token, of a check; there must be one."""
        if self._now is None:
            request = self._waiting.popleft()
            self._now = request, self._evaluate(request)
        request, steps = self._now
        try:
            next(steps)
        except StopIteration as done:
            self._end()
            self._record(request, done.value)
        except Exception:  # nobody waits for a check
            self._end()
            logger.exception("a request could not be held against full prefill")
            self._report(request.tenant, "failed")

    def status(self, tenant: str) -> QualityStatus:
        """How a tenant's answers stand."""
        guard = self._guard(tenant)
        with self._lock:
            return QualityStatus(
                evaluated=self._evaluated[tenant],
                agreement=guard.agreement,
                first_token_kl_nats=guard.first_token_kl_nats,
                floor=self._config.guard_floor,
                least_recompute_ratio=guard.level,
                full_recompute=guard.level >= 1,
            )

    def close(self) -> None:
        """Drop what waits; a check in work frees what it holds."""
        while self._waiting:
            self._waiting.popleft().as_run.release()
        if self._now is not None:
            self._now[1].close()
            self._end()

    def _end(self) -> None:
        """Let go of the check in work."""
        if self._now is not None:
            self._now[0].as_run.release()
            self._now = None

    def _guard(self, tenant: str) -> QualityGuard:
        with self._lock:
            if tenant not in self._guards:
                self._guards[tenant] = QualityGuard(self._config.guard_floor, GUARD_WINDOW)
            return self._guards[tenant]

    def _evaluate(self, request: ServedRequest) -> EvaluationSteps:
        engine, served = request.engine, request.as_run
        blended = {"served": served} if served.fused.reusable_tokens else {}
        full = served.fused  # at full recompute there is nothing to do again
        if blended:
            full = yield from engine.fusor.fuse_steps([Segment(served.fused.token_ids)])
        lower_level = self._guard(request.tenant).lower_level
        if lower_level is not None:
            lower = replace(_at(request.prepared, lower_level))
            with closing(engine.prefill_steps(lower)) as steps:
                yield from steps
            if lower.fused.reusable_tokens:
                blended["lower"] = lower
        greedy = {**request.prepared.sampling, **sampling_options(0.0, 1.0)}
        prompts = [full, *(one.fused for one in blended.values())]
        full_tokens, *tokens = yield from first_tokens(engine.fusor, prompts, GUARD_TOKENS, greedy)
        return {
            name: compare(full, full_tokens, one.fused, own, one.fused_ratio or 0.0)
            for (name, one), own in zip(blended.items(), tokens, strict=True)
        }

    def _record(self, request: ServedRequest, comparisons: dict[str, Comparison]) -> None:
        if not comparisons:
            return
        tenant, level = request.tenant, request.level
        guard = self._guard(tenant)
        raised = lowered = False
        with self._lock:
            self._evaluated[tenant] += 1
            if served := comparisons.get("served"):
                raised = guard.record_served(
                    served.agreement, level=level, ratio=served.recompute_ratio, kl_nats=served.first_token_kl_nats
                )
            if (lower := comparisons.get("lower")) and not raised:
                lowered = guard.record_lower(lower.agreement, level=level)
        if raised or lowered:
            logger.warning(
                "the quality guard of %s: blended answers agree %s with full prefill's (guard_floor=%g); %s",
                f"tenant {tenant!r}" if tenant else "the service",
                "too little" if raised else "again",
                self._config.guard_floor,
                _meaning(guard.level),
            )
        self._report(tenant, "compared", comparisons)

    def _report(self, tenant: str, outcome: str, comparisons: Mapping[str, Comparison] | None = None) -> None:
        level = self._guard(tenant).level
        try:
            self._observer(ShadowReport(tenant=tenant, outcome=outcome, comparisons=comparisons or {}, level=level))
        except Exception:  # requests go on
            logger.exception("the observer of checks failed")


def _at(prepared: Request, level: float) -> Request:
    """The request at a guard's level. Above 0 the loading controller is not asked: the level is above what it last chose."""
    if level >= 1:
        return replace(prepared, method="full_recompute", recompute_ratio=None)
    return replace(prepared, recompute_ratio=max(level, prepared.recompute_ratio or 0.0)) if level else prepared


def _meaning(level: float) -> str:
    if not level:
        return "requests run at the ratio that is planned for them"
    return "requests are recomputed in full" if level >= 1 else f"the recompute ratio is at least {level:g}"
