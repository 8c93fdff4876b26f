"""Shadow evaluation: a sample of blended requests is compared with full prefill."""

import logging
import random
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Generator
from statistics import fmean
from typing import Any

from cacheblend.blend import Segment
from cacheblend.blend.fidelity import Comparison, compare_steps
from cacheblend.service.engine.decoding import Sampling
from cacheblend.service.engine.request import Request

from .config import ServingConfig

logger = logging.getLogger(__name__)
GUARD_TOKENS = 8  # first greedy ones that are compared
GUARD_WINDOW = 20  # comparisons that the mean agreement is over
# Called with a sampled request's tenant and the comparison, None if it failed. Must return at once.
ShadowObserver = Callable[[str, Comparison | None], None]


class ShadowEvaluation:
    """Compares sampled requests with full prefill, for each tenant by itself; belongs to the scheduler's thread.

    One request at a time is sampled, since its prompt's KV waits for the comparison.

    Args:
        config: how many requests are sampled, and what is compared.
        observer: of every comparison.
    """

    def __init__(self, config: ServingConfig, observer: ShadowObserver) -> None:
        self._config, self._observer = config, observer
        self._last = defaultdict[str, deque[Comparison]](lambda: deque(maxlen=GUARD_WINDOW))  # by tenant
        self._evaluated = Counter[str]()
        self._sampled: Request | None = None  # from its prefill to the end of its comparison
        self._steps: Generator[object, None, Comparison] | None = None

    @property
    def has_work(self) -> bool:
        """Whether a comparison waits or has begun."""
        return self._steps is not None

    def status(self, tenant: str) -> dict[str, Any]:
        """A tenant's comparisons since the start; the window's means, None before its first. Thread-safe."""
        last = tuple(self._last.get(tenant, ()))
        names = "agreement", "first_token_kl_nats"
        means = {name: fmean(getattr(one, name) for one in last) if last else None for name in names}
        return {"evaluated": self._evaluated[tenant], **means}

    def admit(self, request: Request) -> None:
        """Sample some requests before their prefill."""
        if request.method != "blend" or request.asked.recompute_ratio is not None:  # which the caller chose
            return
        if self._sampled is None and request.leader is None and random.random() < self._config.guard_share:
            request.holds_kv, self._sampled = True, request

    def leave(self, request: Request, *, answered: bool) -> None:
        """A request ended; if it is sampled and was answered, its comparison waits from now on."""
        if request is self._sampled:
            # A blended prompt without stored KV is full prefill.
            self._steps = self._compare(request) if answered and request.fused.reusable_tokens else None
            if self._steps is None:
                self.close()

    def step(self) -> None:
        """Run a layer, or a token, of the comparison; there must be one."""
        assert self._steps is not None
        try:
            next(self._steps)
            return
        except StopIteration as done:
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

    def _compare(self, request: Request) -> Generator[object, None, Comparison]:
        """Prefill the prompt in full, and compare."""
        engine, blended = request.engine, request.fused
        full = yield from engine.fusor.fuse_steps([Segment(blended.token_ids)])
        greedy = Sampling().generation_options(engine.fusor.tokenizer)
        return (yield from compare_steps(engine.fusor, full, blended, GUARD_TOKENS, greedy))

    def _record(self, comparison: Comparison | None) -> None:
        assert self._sampled is not None
        tenant = self._sampled.tenant
        if comparison is not None:
            self._last[tenant].append(comparison)
            self._evaluated[tenant] += 1
        try:
            self._observer(tenant, comparison)
        except Exception:  # requests go on
            logger.exception("the observer of shadow evaluations failed")
