"""What a run is asked for."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from cacheblend.base.errors import ConfigError
from cacheblend.eval.data import RequestSource
from cacheblend.eval.methods import CONTEXTS, DEFAULT_RATIO, METHODS, PlannedMethod, plan_methods
from cacheblend.service.engine.config import DTYPES, check_max_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalConfig:
    """One data set, one model, several methods.

    Args:
        source: the data set in its set-up.
        model: directory, GGUF file, hub id or known name.
        methods: names, see `METHODS`; differences are taken against full_recompute where it is among them.
        ratios: recompute ratios, 0..1, of the methods that take one.
        contexts: what the stored KV was computed after, of `CONTEXTS`, for the methods that reuse it.
        max_new_tokens: most tokens of an answer; None takes the data set's.
        device: a torch device.
        dtype: auto, float32, bfloat16 or float16.
        allow_unverified: take a model of an unverified family if the built-in check passes.

    Raises:
        ConfigError: a value is not allowed.
    """

    source: RequestSource
    model: str
    methods: tuple[str, ...] = METHODS
    ratios: tuple[float, ...] = (DEFAULT_RATIO,)
    contexts: tuple[str, ...] = CONTEXTS[:1]
    max_new_tokens: int | None = None
    device: str = "cpu"
    dtype: str = "auto"
    allow_unverified: bool = False

    def __post_init__(self) -> None:
        self.planned()
        if self.dtype not in DTYPES:
            raise ConfigError("dtype", self.dtype, f"one of {', '.join(DTYPES)}")
        if self.max_new_tokens is not None:
            check_max_tokens(self.max_new_tokens)

    def planned(self) -> tuple[PlannedMethod, ...]:
        """Methods and ratios as they run."""
        return plan_methods(self.methods, self.ratios, self.contexts)

    @property
    def new_tokens(self) -> int:
        """Most tokens of an answer."""
        return self.max_new_tokens or self.source.new_tokens

    def as_dict(self) -> dict[str, Any]:
        """The resolved configuration as plain values."""
        return {
            **asdict(self),
            "source": {"data_set": self.source.name, **asdict(self.source)},  # type: ignore[call-overload]  # all are dataclasses
            "methods": list(self.methods),
            "ratios": list(self.ratios),
            "contexts": list(self.contexts),
            "max_new_tokens": self.new_tokens,
        }
