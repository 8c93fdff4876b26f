"""Shadow evaluation: a sample of blended requests is compared with full prefill, and a guard acts on the result."""

from __future__ import annotations

import logging
import random
import threading
from collections import deque
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from cacheblend.blend import Segment
from cacheblend.blend.fidelity import Comparison, compare_steps
from cacheblend.service.engine.request import sampling_options

from .config import ServingConfig
from .served_request import ServedRequest

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ShadowReport:
    """Outcome of a sampled request.

    Args:
        tenant: whose request it was.
        comparison: None if the comparison failed.
        full_recompute: the guard's state after it; see `QualityGuard`.
    """

    tenant: str
    comparison: Comparison | None
    full_recompute: bool

    @property
    def outcome(self) -> str:
        """Either "compared" or "failed"."""
        return "failed" if self.comparison is None else "compared"


class QualityGuard:
    """Switches one tenant to full recompute if its blended prompts agree too little with full prefill. Not thread-safe.

    While prompts are recomputed in full, sampled ones are blended in the shadow. The guard judges full windows, and a switch
    begins a new one.

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
    """Compares sampled requests with full prefill, and has a guard for each tenant.

    One request at a time is sampled, since its prompt's KV waits for the comparison. `status` is thread-safe; everything else
    belongs to the scheduler's thread.

    Args:
        config: share, floor, window and tokens.
        observer: called with every report. Must return at once.
    """

    def __init__(self, config: ServingConfig, observer: Callable[[ShadowReport], None]) -> None:
        self._config, self._observer = config, observer
        self._lock = threading.Lock()
        self._guards: dict[str, QualityGuard] = {}
        self._sampled: ServedRequest | None = None  # from its prefill to the end of its comparison
        self._steps: Generator[object, None, Comparison | None] | None = None

    @property
    def has_work(self) -> bool:
        """Whether a comparison waits or has begun."""
        return self._steps is not None

    def admit(self, request: ServedRequest) -> None:
        """Sample some requests before their prefill, and switch all to full recompute if the guard says so."""
        if request.prepared.method != "blend" or request.own_ratio:
            return
        if self._guard(request.tenant).full_recompute:
            request.prepared = replace(request.prepared, method="full_recompute")
        if self._sampled is None and not request.is_follower and random.random() < self._config.guard_share:
            request.sampled, self._sampled = True, request

    def leave(self, request: ServedRequest, *, answered: bool) -> None:
        """A request ended; if it is sampled and was answered, its comparison waits from now on."""
        if request is self._sampled:
            # A blended prompt without stored KV is full prefill.
            is_same = answered and request.prepared.method == "blend" and not request.prepared.fused.reusable_tokens
            self._steps = self._compare(request) if answered and not is_same else None
            if self._steps is None:
                self.close()

    def step(self) -> None:
        """Run a layer, or a token, of the comparison; there must be one."""
        assert self._steps is not None
        try:
            next(self._steps)
            return
        except StopIteration as done:
            if done.value is not None:
                self._record(done.value)
        except Exception:  # no client waits for it
            logger.exception("a request could not be compared with full prefill")
            self._record(None)
        self.close()

    def status(self, tenant: str) -> dict[str, Any]:
        guard = self._guard(tenant)
        with self._lock:
            return guard.status()

    def close(self) -> None:
        """Drop the comparison, and free what it holds."""
        if self._steps is not None:
            self._steps.close()
        if self._sampled is not None:
            self._sampled.prepared.release()
        self._sampled = self._steps = None

    def _guard(self, tenant: str) -> QualityGuard:
        with self._lock:
            return self._guards.setdefault(tenant, QualityGuard(self._config.guard_floor, self._config.guard_window))

    def _compare(self, request: ServedRequest) -> Generator[object, None, Comparison | None]:
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
        return (yield from compare_steps(engine.fusor, full, blended, self._config.guard_tokens, greedy))

    def _record(self, comparison: Comparison | None) -> None:
        assert self._sampled is not None
        tenant, blended = self._sampled.tenant, self._sampled.prepared.method == "blend"
        guard = self._guard(tenant)
        with self._lock:
            switched = comparison is not None and blended is not guard.full_recompute and guard.record(comparison)
        if switched:
            logger.warning(
                "the quality guard of %s: blended answers agree %s with full prefill's (guard_floor=%g); prompts are %s",
                f"tenant {tenant!r}" if tenant else "the service",
                "too little" if guard.full_recompute else "again",
                self._config.guard_floor,
                "recomputed in full" if guard.full_recompute else "blended",
            )
        try:
            self._observer(ShadowReport(tenant, comparison, guard.full_recompute))
        except Exception:  # requests go on
            logger.exception("the observer of shadow evaluations failed")
