"""Shadow evaluation: a sample of blended requests is compared with full prefill, and a guard acts on the result."""

from __future__ import annotations

import logging
import random
import threading
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from cacheblend.blend import FusionResult, Fusor, NextToken, Segment, SequenceKV
from cacheblend.blend.fidelity import equal_tokens_share, first_token_kl_nats, relative_kv_error
from cacheblend.service.engine.request import sampling_options

from .config import ServingConfig
from .served_request import ServedRequest

MAX_SAMPLED = 2  # prompts whose KV waits for its evaluation, running requests included; a long prompt's KV is large
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A blended prompt beside the same prompt prefilled in full.

    Args:
        agreement: share of full prefill's first greedy tokens that blending draws too, before the first that differs, 0..1.
        first_token_kl_nats: Kullback-Leibler divergence of the first token's distribution, full from blended.
        relative_kv_error: squared difference of the prompt's KV over its squared size (paper §4.1).
    """

    agreement: float
    first_token_kl_nats: float
    relative_kv_error: float


@dataclass(frozen=True, slots=True)
class ShadowReport:
    """Outcome of a sampled request.

    Args:
        tenant: whose request it was.
        outcome: "compared", "dropped" (`MAX_SAMPLED` prompts waited already) or "failed".
        comparison: None if nothing was compared.
        full_recompute: the guard's state after it; see `QualityGuard`.
    """

    tenant: str
    outcome: str
    comparison: Comparison | None
    full_recompute: bool


class QualityGuard:
    """Switches one tenant to full recompute if its blended prompts agree too little with full prefill. Not thread-safe.

    While prompts are recomputed in full, sampled ones are blended in the shadow. The guard judges by full windows only, and
    after a switch the window begins anew.

    Args:
        floor: least mean agreement of a window, 0..1; 0 never switches.
        window: comparisons in a window.
    """

    def __init__(self, floor: float, window: int) -> None:
        self._floor = floor
        self._last: deque[Comparison] = deque(maxlen=window)
        self._evaluated, self.full_recompute = 0, False

    def record(self, comparison: Comparison) -> bool:
        """Add a comparison; True if it switches the state."""
        self._evaluated += 1
        self._last.append(comparison)
        passes = fmean(one.agreement for one in self._last) >= self._floor
        if len(self._last) < (self._last.maxlen or 1) or passes is not self.full_recompute:
            return False
        self.full_recompute = not passes
        self._last.clear()
        return True

    def status(self) -> dict[str, Any]:
        """The state; comparisons since the start; the window's means, None before its first; fields of `GET /v1/store`."""
        return {
            "evaluated": self._evaluated,
            "agreement": fmean(one.agreement for one in self._last) if self._last else None,
            "first_token_kl_nats": fmean(one.first_token_kl_nats for one in self._last) if self._last else None,
            "floor": self._floor,
            "full_recompute": self.full_recompute,
        }


class ShadowEvaluation:
    """Compares sampled requests with full prefill, a layer or a token at a time, and has a guard for each tenant.

    `status` is thread-safe; everything else belongs to the scheduler's thread.

    Args:
        config: share, floor, window and tokens.
        observer: called with every sampled request's report. Must return at once.
    """

    def __init__(self, config: ServingConfig, observer: Callable[[ShadowReport], None]) -> None:
        self._config, self._observer = config, observer
        self._lock = threading.Lock()
        self._guards: dict[str, QualityGuard] = {}
        self._waiting: deque[ServedRequest] = deque()
        self._now: tuple[ServedRequest, Generator[object, None, Comparison | None]] | None = None

    @property
    def has_work(self) -> bool:
        """Whether an evaluation waits or has begun."""
        return self._now is not None or bool(self._waiting)

    def admit(self, request: ServedRequest, running_sampled: int) -> None:
        """Draw whether a request is sampled, and switch it to full recompute if the guard says so.

        Args:
            request: about to be prefilled.
            running_sampled: running requests that are sampled.
        """
        if request.prepared.method != "blend" or request.own_ratio:
            return
        request.sampled = random.random() < self._config.guard_share
        if self._guard(request.tenant).full_recompute:
            request.prepared = replace(request.prepared, method="full_recompute")
        if request.sampled and running_sampled + len(self._waiting) + (self._now is not None) >= MAX_SAMPLED:
            request.sampled = False
            self._report(request.tenant, "dropped")

    def add(self, request: ServedRequest) -> None:
        """Queue a sampled request that is answered; a blended prompt without stored KV is equal to full prefill already."""
        if request.prepared.method == "blend" and not request.prepared.fused.reusable_tokens:
            request.prepared.release()
        else:
            self._waiting.append(request)

    def step(self) -> None:
        """Run a layer, or a token, of an evaluation; there must be one."""
        if self._now is None:
            request = self._waiting.popleft()
            self._now = request, self._evaluate(request)
        request, steps = self._now
        try:
            next(steps)
        except StopIteration as done:
            self._end()
            if done.value is not None:
                self._record(request, done.value)
        except Exception:  # no client waits for it
            self._end()
            logger.exception("a request could not be compared with full prefill")
            self._report(request.tenant, "failed")

    def status(self, tenant: str) -> dict[str, Any]:
        """See `QualityGuard.status`."""
        guard = self._guard(tenant)
        with self._lock:
            return guard.status()

    def close(self) -> None:
        """Drop the evaluations that wait or have begun, and free what they hold."""
        while self._waiting:
            self._waiting.popleft().prepared.release()
        if self._now is not None:
            self._now[1].close()
            self._end()

    def _end(self) -> None:
        if self._now is not None:
            self._now[0].prepared.release()
            self._now = None

    def _guard(self, tenant: str) -> QualityGuard:
        with self._lock:
            return self._guards.setdefault(tenant, QualityGuard(self._config.guard_floor, self._config.guard_window))

    def _evaluate(self, request: ServedRequest) -> Generator[object, None, Comparison | None]:
        """Prefill the prompt in the way that it was not served, and compare; None if blending reused nothing."""
        engine, served = request.engine, request.prepared
        if served.method == "blend":
            blended, full = served.fused, (yield from engine.fusor.fuse_steps([Segment(served.fused.token_ids)]))
        else:
            shadow = replace(served, method="blend")
            with closing(engine.prefill_steps(shadow)) as steps:
                yield from steps
            blended, full = shadow.fused, served.fused
            if not blended.reusable_tokens:
                return None
        greedy = {**served.sampling, **sampling_options(0.0, 1.0)}
        full_ids, blended_ids = yield from _first_tokens(engine.fusor, (full, blended), self._config.guard_tokens, greedy)
        return Comparison(
            agreement=equal_tokens_share(full_ids, blended_ids),
            first_token_kl_nats=first_token_kl_nats(full.logits, blended.logits),
            relative_kv_error=relative_kv_error(blended.cache, full.cache),
        )

    def _record(self, request: ServedRequest, comparison: Comparison) -> None:
        guard = self._guard(request.tenant)
        served_in_full = request.prepared.method != "blend"
        with self._lock:
            switched = served_in_full is guard.full_recompute and guard.record(comparison)
        if switched:
            logger.warning(
                "the quality guard of %s: blended answers agree %s with full prefill's (guard_floor=%g); prompts are %s",
                f"tenant {request.tenant!r}" if request.tenant else "the service",
                "too little" if guard.full_recompute else "again",
                self._config.guard_floor,
                "recomputed in full" if guard.full_recompute else "blended",
            )
        self._report(request.tenant, "compared", comparison)

    def _report(self, tenant: str, outcome: str, comparison: Comparison | None = None) -> None:
        report = ShadowReport(tenant, outcome, comparison, self._guard(tenant).full_recompute)
        try:
            self._observer(report)
        except Exception:  # requests go on
            logger.exception("the observer of shadow evaluations failed")


def _first_tokens(
    fusor: Fusor, prompts: Sequence[FusionResult], tokens: int, greedy: dict[str, Any]
) -> Generator[None, None, list[list[int]]]:
    """Up to `tokens` greedy tokens of each prompt, a token of all prompts a step; the prompts' caches do not change."""
    drawn = [NextToken(fusor.model, fused.token_ids, tokens, **greedy) for fused in prompts]
    kv = [SequenceKV(fused, fusor.decoder.windows) for fused in prompts]
    for own, fused in zip(drawn, prompts, strict=True):
        own.draw(fused.logits)
    while running := [index for index, own in enumerate(drawn) if own.finish_reason is None]:
        yield None
        logits_RV = fusor.decoder.decode([drawn[index].token_ids[-1] for index in running], [kv[index] for index in running])
        for index, logits_V in zip(running, logits_RV, strict=True):
            drawn[index].draw(logits_V)
    return [own.token_ids for own in drawn]
