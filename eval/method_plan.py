"""The methods' names: which there are, and how a run plans them over ratios and contexts."""

from collections.abc import Sequence
from dataclasses import dataclass

from cacheblend.base.errors import ConfigError
from cacheblend.blend.config import DEFAULT_RATIO, DEFAULT_SELECTOR, SELECTOR_NAMES, FusionConfig

CONTEXTS = ("default", "filler", "document", "neighbour", "head", "bos")  # what chunks' KV is computed after
# Blending by the selector that picks the tokens; "blend" has the default one, and a selector without a name here its own.
_NAMED = {"blend": DEFAULT_SELECTOR, "blend_hkvd": "gradual", "blend_single_shot": "single_shot", "epic": "first_tokens"}
SELECTOR_OF_METHOD = {**_NAMED, **{f"blend_{name}": name for name in SELECTOR_NAMES if name not in _NAMED.values()}}
METHOD_OF_SELECTOR = {selector: name for name, selector in reversed(SELECTOR_OF_METHOD.items())}
FULL_REUSE = "full_reuse"
# What an engine does for requests that name no ratio: a blend at r*, widened where its first token moves too far.
WIDENED = ("balanced", "high")
# Methods without a recompute ratio and without a context of the chunks' KV; full reuse, and what is widened, has a context.
_PLAIN = ("full_recompute", "prefix_cache")
METHODS = (*_PLAIN, FULL_REUSE, *WIDENED, *SELECTOR_OF_METHOD)


@dataclass(frozen=True, slots=True)
class PlannedMethod:
    """A method of a run: its label in results, its name, and its ratio and context where they apply."""

    label: str
    name: str
    ratio: float | None
    context: str = CONTEXTS[0]


def plan_methods(
    names: Sequence[str], ratios: Sequence[float], contexts: Sequence[str] = CONTEXTS[:1]
) -> tuple[PlannedMethod, ...]:
    """Every method, those that reuse chunks over KV of every context, and those with a ratio at every ratio.

    The label is `name`, with `+context` after it for another context than the default, and `@ratio` where there are several.

    Raises:
        ConfigError: an unknown method or context, one given twice, none at all, or a ratio outside 0..1 or for no method.
    """
    for field, values, allowed in (("methods", names, METHODS), ("contexts", contexts, CONTEXTS)):
        for name in values:
            if name not in allowed:
                raise ConfigError(field, name, f"any of {', '.join(allowed)}")
    for field, given in (("methods", names), ("ratios", ratios), ("contexts", contexts)):
        if not given or len(set(given)) < len(given):
            raise ConfigError(field, ",".join(map(str, given)), "at least one, each once")
    for ratio in ratios:
        FusionConfig(recompute_ratio=ratio)
    planned: list[PlannedMethod] = []
    for name in names:
        if name in _PLAIN:
            planned.append(PlannedMethod(name, name, None))
            continue
        for context in contexts:
            label = name if context == CONTEXTS[0] else f"{name}+{context}"
            if name in (FULL_REUSE, *WIDENED):
                planned.append(PlannedMethod(label, name, None, context))
                continue
            for ratio in ratios:
                planned.append(PlannedMethod(label if len(ratios) == 1 else f"{label}@{ratio}", name, ratio, context))
    if tuple(ratios) != (DEFAULT_RATIO,) and all(one.ratio is None for one in planned):
        raise ConfigError("ratios", ",".join(map(str, ratios)), "for methods that take one; name `blend` among the methods")
    return tuple(planned)


def listed(text: str) -> list[str]:
    """Split a comma-separated option."""
    return [part.strip() for part in text.split(",") if part.strip()]


def numbers(name: str, text: str) -> list[float]:
    """Read the numbers of a comma-separated option; raises ConfigError where one is none."""
    try:
        return [float(part) for part in listed(text)]
    except ValueError as error:
        raise ConfigError(name, text, "numbers, separated by commas") from error
