"""Shadow evaluation: a sample of blended requests is compared with full prefill, and a guard acts on the result."""

from __future__ import annotations

import logging
import random
from collections import deque
from collections.abc import Callable, Generator
from contextlib import closing
from statistics import fmean
from typing import Any

from cacheblend.blend import Segment
from cacheblend.blend.fidelity import Comparison, compare_steps
from cacheblend.service.engine.decoding import Sampling
from cacheblend.service.engine.request import Request

logger = logging.getLogger(__name__)
# Called with a sampled request's tenant, the comparison, None if it failed, and whether the tenant's prompts are recomputed in
# full from now on. Must return at once.
ShadowObserver = Callable[[str, Comparison | None, bool], None]


class QualityGuard:
    """Switches one tenant to full recompute if its blended prompts agree too little with full prefill.

    While prompts are recomputed in full, sampled ones are blended in the shadow. The guard judges full windows, and a switch
    begins a new one. One thread records; `status` may be called from others.

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
        last = self._last.copy()
        names = "agreement", "first_token_kl_nats"
        means = {name: fmean(getattr(one, name) for one in last) if last else None for name in names}
        return {"evaluated": self._evaluated, **means, "floor": self._floor, "full_recompute": self.full_recompute}


class ShadowEvaluation:
    """Compares sampled requests with full prefill, and has a guard for each tenant; belongs to the scheduler's thread.

    One request at a time is sampled, since its prompt's KV waits for the comparison.

    Args:
        share: of blended requests that are sampled.
        floor, window: see `QualityGuard`.
        tokens: first greedy tokens that are compared.
        observer: of every comparison.
    """

    def __init__(self, *, share: float, floor: float, window: int, tokens: int, observer: ShadowObserver) -> None:
        self._share, self._floor, self._tokens, self._observer = share, floor, tokens, observer
        self._window = window
        self._guards: dict[str, QualityGuard] = {}
        self._sampled: Request | None = None  # from its prefill to the end of its comparison
        self._steps: Generator[object, None, Comparison | None] | None = None

    @property
    def has_work(self) -> bool:
        """Whether a comparison waits or has begun."""
        return self._steps is not None

    def guard(self, tenant: str) -> QualityGuard:
        """The tenant's guard, made at its first use. Thread-safe."""
        return self._guards.setdefault(tenant, QualityGuard(self._floor, self._window))

    def admit(self, request: Request) -> None:
        """Sample some requests before their prefill, and switch all to full recompute if the guard says so."""
        if request.method != "blend" or request.asked.recompute_ratio is not None:  # which the caller chose
            return
        if self.guard(request.tenant).full_recompute:
            request.method = "full_recompute"
        if self._sampled is None and request.leader is None and random.random() < self._share:
            request.holds_kv, self._sampled = True, request

    def leave(self, request: Request, *, answered: bool) -> None:
        """A request ended; if it is sampled and was answered, its comparison waits from now on."""
        if request is self._sampled:
            # A blended prompt without stored KV is full prefill.
            is_same = answered and request.method == "blend" and not request.fused.reusable_tokens
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

    def close(self) -> None:
        """Drop the comparison, and free what it holds."""
        if self._steps is not None:
            self._steps.close()
        if self._sampled is not None:
            self._sampled.release()
        self._sampled = self._steps = None

    def _compare(self, request: Request) -> Generator[object, None, Comparison | None]:
        """Prefill the prompt in the way that it was not served, and compare; None if blending reused nothing."""
        engine = request.engine
        if request.method == "blend":
            blended, full = request.fused, (yield from engine.fusor.fuse_steps([Segment(request.fused.token_ids)]))
        else:
            shadow = request.fresh("blend")
            with closing(engine.prefill_steps(shadow)) as steps:
                yield from steps
            blended, full = shadow.fused, request.fused
            if not blended.reusable_tokens:
                return None
        greedy = Sampling().generation_options(engine.fusor.tokenizer)
        return (yield from compare_steps(engine.fusor, full, blended, self._tokens, greedy))

    def _record(self, comparison: Comparison | None) -> None:
        assert self._sampled is not None
        tenant, blended = self._sampled.tenant, self._sampled.method == "blend"
        guard = self.guard(tenant)
        if comparison is not None and blended is not guard.full_recompute and guard.record(comparison):
            logger.warning(
                "the quality guard of %s: blended answers agree %s with full prefill's (guard_floor=%g); prompts are %s",
                f"tenant {tenant!r}" if tenant else "the service",
                "too little" if guard.full_recompute else "again",
                self._floor,
                "recomputed in full" if guard.full_recompute else "blended",
            )
        try:
            self._observer(tenant, comparison, guard.full_recompute)
        except Exception:  # requests go on
            logger.exception("the observer of shadow evaluations failed")
