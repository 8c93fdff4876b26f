"""Blended requests that are prefilled in full once more, when nothing else runs, and what the guard makes of that."""

from __future__ import annotations

import logging
import random
import threading
from collections import Counter, deque
from collections.abc import Callable, Generator, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace

from cacheblend.blend import Segment
from cacheblend.service.engine.request import Request, sampling_options

from .comparison import Comparison, compare, first_tokens
from .config import ServingConfig
from .guard import QualityGuard
from .request import ServedRequest

logger = logging.getLogger(__name__)
GUARD_TOKENS = 8  # first greedy tokens that are compared
GUARD_WINDOW = 20  # checked requests that the mean agreement is over
MOST_KEPT = 2  # prompts whose KV is kept for a check, running requests included; a long prompt's KV is large
CheckSteps = Generator[object, None, dict[str, Comparison]]


@dataclass(frozen=True, slots=True)
class GuardedRequest:
    """A request as the guard lets it run.

    Args:
        request: as it came.
        prepared: the request's own, with the ratio raised where the guard has raised it.
        level: the guard's, see `QualityGuard`.
        sampled: its prompt's KV is kept, to be checked.
    """

    request: ServedRequest
    prepared: Request
    level: float
    sampled: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckReport:
    """What became of a sampled request.

    Args:
        tenant: whose it was.
        outcome: "compared", "dropped" (`MOST_KEPT` were kept already) or "failed".
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
        checked: requests compared since the service started.
        agreement: mean over the last of them at the present ratio; None where there is none.
        first_token_kl_nats: mean of the first token's KL divergence over the same ones; None where there is none.
        floor: below it the ratio is raised.
        least_recompute_ratio: that blended requests run at; 0 where it is not raised.
        full_recompute: blending is given up until it agrees again.
    """

    checked: int
    agreement: float | None
    first_token_kl_nats: float | None
    floor: float
    least_recompute_ratio: float
    full_recompute: bool


class ShadowChecks:
    """Holds a sampled share of blended requests against full prefill, and a guard for each tenant to that.

    `status` is thread-safe; all else belongs to the scheduler's thread.

    Args:
        config: share, tokens, floor and window.
        observer: told of every sampled request's check. Must return at once.
    """

    def __init__(self, config: ServingConfig, observer: Callable[[CheckReport], None]) -> None:
        self._config, self._observer = config, observer
        self._lock = threading.Lock()
        self._guards: dict[str, QualityGuard] = {}
        self._checked: Counter[str] = Counter()
        self._waiting: deque[GuardedRequest] = deque()
        self._now: tuple[GuardedRequest, CheckSteps] | None = None

    @property
    def has_work(self) -> bool:
        """Whether a check waits or has begun."""
        return self._now is not None or bool(self._waiting)

    def admit(self, request: ServedRequest, running_kept: int) -> GuardedRequest:
        """Raise a request's ratio where the guard says so, and draw whether it is checked.

        Args:
            request: about to run.
            running_kept: running requests whose KV is kept.
        """
        prepared = request.prepared
        if prepared.method != "blend" or request.own_ratio:
            return GuardedRequest(request, prepared, 0.0, sampled=False)
        level = self._guard(request.tenant).level
        sampled = random.random() < self._config.guard_share
        if sampled and running_kept + len(self._waiting) + (self._now is not None) >= MOST_KEPT:
            sampled = False
            self._tell(request.tenant, "dropped")
        return GuardedRequest(request, _at(prepared, level), level, sampled)

    def add(self, guarded: GuardedRequest) -> None:
        """Have a sampled request that is answered checked some time; one whose prompt was not blended needs no check."""
        if guarded.prepared.fused.reusable_tokens or guarded.level >= 1:
            self._waiting.append(guarded)
        else:
            guarded.prepared.release()

    def step(self) -> None:
        """Run a layer, or a token, of a check; there must be one."""
        if self._now is None:
            guarded = self._waiting.popleft()
            self._now = guarded, self._check(guarded)
        guarded, steps = self._now
        try:
            next(steps)
        except StopIteration as done:
            self._end()
            self._see(guarded, done.value)
        except Exception:  # nobody waits for a check
            self._end()
            logger.exception("a request could not be held against full prefill")
            self._tell(guarded.request.tenant, "failed")

    def status(self, tenant: str) -> QualityStatus:
        """How a tenant's answers stand."""
        guard = self._guard(tenant)
        with self._lock:
            return QualityStatus(
                checked=self._checked[tenant],
                agreement=guard.agreement,
                first_token_kl_nats=guard.first_token_kl_nats,
                floor=self._config.guard_floor,
                least_recompute_ratio=guard.level,
                full_recompute=guard.level >= 1,
            )

    def close(self) -> None:
        """Drop what waits; a check in work frees what it holds."""
        while self._waiting:
            self._waiting.popleft().prepared.release()
        if self._now is not None:
            self._now[1].close()
            self._end()

    def _end(self) -> None:
        """Let go of the check in work."""
        if self._now is not None:
            self._now[0].prepared.release()
            self._now = None

    def _guard(self, tenant: str) -> QualityGuard:
        with self._lock:
            if tenant not in self._guards:
                self._guards[tenant] = QualityGuard(self._config.guard_floor, GUARD_WINDOW)
            return self._guards[tenant]

    def _check(self, guarded: GuardedRequest) -> CheckSteps:
        request, engine, served = guarded.request, guarded.request.engine, guarded.prepared
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

    def _see(self, guarded: GuardedRequest, comparisons: dict[str, Comparison]) -> None:
        if not comparisons:
            return
        tenant, level = guarded.request.tenant, guarded.level
        guard = self._guard(tenant)
        raised = lowered = False
        with self._lock:
            self._checked[tenant] += 1
            if served := comparisons.get("served"):
                raised = guard.see_served(
                    served.agreement, level=level, ratio=served.recompute_ratio, kl_nats=served.first_token_kl_nats
                )
            if (lower := comparisons.get("lower")) and not raised:
                lowered = guard.see_lower(lower.agreement, level=level)
        if raised or lowered:
            logger.warning(
                "the quality guard of %s: blended answers agree %s with full prefill's (guard_floor=%g); %s",
                f"tenant {tenant!r}" if tenant else "the service",
                "too little" if raised else "again",
                self._config.guard_floor,
                _meaning(guard.level),
            )
        self._tell(tenant, "compared", comparisons)

    def _tell(self, tenant: str, outcome: str, comparisons: Mapping[str, Comparison] | None = None) -> None:
        level = self._guard(tenant).level
        try:
            self._observer(CheckReport(tenant=tenant, outcome=outcome, comparisons=comparisons or {}, level=level))
        except Exception:  # requests go on
            logger.exception("a check could not be told")


def _at(prepared: Request, level: float) -> Request:
    """The request at a guard's level. Above 0 the loading controller is not asked: the level is above what it last chose."""
    if level >= 1:
        return replace(prepared, method="full_recompute", recompute_ratio=None)
    return replace(prepared, recompute_ratio=max(level, prepared.recompute_ratio or 0.0)) if level else prepared


def _meaning(level: float) -> str:
    if not level:
        return "requests run at the ratio that is planned for them"
    return "requests are recomputed in full" if level >= 1 else f"the recompute ratio is at least {level:g}"
