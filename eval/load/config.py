"""What a load run is asked for."""

from __future__ import annotations

import math
from dataclasses import dataclass

from cacheblend.base.errors import ConfigError
from cacheblend.eval.data import RequestSource


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadConfig:
    """Settings of a load run.

    Args:
        source: where the requests come from.
        rates_rps: arrivals a second, in the mean, each swept by every target.
        requests: requests of one rate; every rate has its own, and every target the same ones.
        warm_up: requests that each target gets before, one after the other and not measured; those that the source itself sets
            apart come in their place.
        max_tokens: most tokens of an answer.
        timeout_s: a request without a byte for so long has failed.
        seed: of the arrivals, and of the order of the documents that are ingested before.

    Raises:
        ConfigError: a value is not allowed.
    """

    source: RequestSource
    rates_rps: tuple[float, ...]
    requests: int = 50
    warm_up: int = 5
    max_tokens: int = 16
    timeout_s: float = 300.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.rates_rps or not all(math.isfinite(rate) and rate > 0 for rate in self.rates_rps):
            raise ConfigError("rates", self.rates_rps, "at least one number of requests a second, above 0")
        if len(set(self.rates_rps)) < len(self.rates_rps):
            raise ConfigError("rates", self.rates_rps, "each rate once")
        for name, least in (("requests", 1), ("warm_up", 0), ("max_tokens", 1)):
            if getattr(self, name) < least:
                raise ConfigError(name, getattr(self, name), f"at least {least}")
        if not math.isfinite(self.timeout_s) or self.timeout_s <= 0:
            raise ConfigError("timeout_s", self.timeout_s, "seconds, above 0")
