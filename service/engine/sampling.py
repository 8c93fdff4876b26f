"""How the next token is drawn, in the words of `generate`."""

from __future__ import annotations

import math
from typing import Any

from cacheblend.base.errors import ConfigError

LEAST_TEMPERATURE = 1e-5  # logits over less leave float32's range, and the likeliest token is drawn anyway


def sampling_options(temperature: float, top_p: float, top_k: int = 0) -> dict[str, Any]:
    """Options for `Fusor.generate`.

    Args:
        temperature: below `LEAST_TEMPERATURE` greedy; above, tokens are sampled.
        top_p: sample from the most likely tokens of this total probability.
        top_k: sample from so many most likely tokens; 0 or -1 for all.

    Raises:
        ConfigError: a number outside its range.
    """
    if not isinstance(temperature, int | float) or not math.isfinite(temperature) or temperature < 0:
        raise ConfigError("temperature", temperature, "0 (greedy) or above")
    if not isinstance(top_p, int | float) or not 0 < top_p <= 1:
        raise ConfigError("top_p", top_p, "above 0, at most 1")
    if not isinstance(top_k, int) or isinstance(top_k, bool) or top_k < -1:
        raise ConfigError("top_k", top_k, "a whole number of at least 1, or 0 or -1 for all tokens")
    if temperature < LEAST_TEMPERATURE:
        return {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    return {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": max(0, top_k)}
