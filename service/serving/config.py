"""How many requests are served at once, and how long each may take."""

from __future__ import annotations

import math
from dataclasses import dataclass

from cacheblend.store.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingConfig:
    """Limits of a `Scheduler`.

    Args:
        max_running: requests that hold a KV cache at once: those that decode together, and the one that is prefilled.
        max_waiting: requests of one tenant that may wait; the next one is refused.
        deadline_s: a request that is not answered so long after it came is given up.
        grace_s: how long running requests may go on when the service stops.

    Raises:
        ConfigError: a value is not allowed.
    """

    max_running: int = 16
    max_waiting: int = 64
    deadline_s: float = 300.0
    grace_s: float = 30.0

    def __post_init__(self) -> None:
        for name in ("max_running", "max_waiting"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(name, value, "a whole number of at least 1")
        for name, least in (("deadline_s", "above 0"), ("grace_s", "0 or above")):
            value = getattr(self, name)
            number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
            if not number or value < 0 or (value == 0 and name == "deadline_s"):
                raise ConfigError(name, value, f"seconds, {least}")
