"""The methods by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from cacheblend.blend import FusionConfig, Fusor
from cacheblend.eval.data import Wording
from cacheblend.store.errors import ConfigError

from .blend import full_reuse, gradual, known_before, measured_alone, single_shot
from .epic import Epic
from .full_recompute import FullRecompute
from .map_reduce import MapReduce
from .map_rerank import MapRerank
from .method import Method
from .prefix_cache import PrefixCache
from .random_tokens import RandomTokens

# Methods that a recompute ratio applies to, and those that it does not.
_AT_A_RATIO: dict[str, Callable[[Fusor, float], Method]] = {
    "blend": gradual,
    "blend_hkvd": measured_alone,
    "blend_known": known_before,
    "blend_single_shot": single_shot,
    "epic": Epic,
    "random_tokens": RandomTokens,
}
_PLAIN: dict[str, Callable[[Fusor, Wording], Method]] = {
    "full_recompute": lambda fusor, _: FullRecompute(fusor),
    "prefix_cache": lambda fusor, _: PrefixCache(fusor),
    "full_reuse": lambda fusor, _: full_reuse(fusor),
    "map_reduce": MapReduce,
    "map_rerank": lambda fusor, _: MapRerank(fusor),
}
METHODS = ("full_recompute", "prefix_cache", "full_reuse", *_AT_A_RATIO, "map_reduce", "map_rerank")
DEFAULT_RATIO = FusionConfig().recompute_ratio


@dataclass(frozen=True, slots=True)
class PlannedMethod:
    """A method of a run: its label in results, its name, and its ratio where one applies."""

    label: str
    name: str
    ratio: float | None

    def make(self, fusor: Fusor, wording: Wording) -> Method:
        """The method itself."""
        if self.ratio is None:
            return _PLAIN[self.name](fusor, wording)
        return _AT_A_RATIO[self.name](fusor, self.ratio)


def plan_methods(names: Sequence[str], ratios: Sequence[float]) -> tuple[PlannedMethod, ...]:
    """Every method, and those with a ratio at every ratio. With one ratio the label is the name, else `name@ratio`.

    Raises:
        ConfigError: an unknown method, one given twice, none at all, or a ratio outside 0..1.
    """
    for name in names:
        if name not in METHODS:
            raise ConfigError("methods", name, f"any of {', '.join(METHODS)}")
    for field, values in (("methods", names), ("ratios", ratios)):
        if not values or len(set(values)) < len(values):
            raise ConfigError(field, ",".join(map(str, values)), "at least one, each once")
    for ratio in ratios:
        FusionConfig(recompute_ratio=ratio)
    planned: list[PlannedMethod] = []
    for name in names:
        if name in _PLAIN:
            planned.append(PlannedMethod(name, name, None))
        else:
            planned += [PlannedMethod(name if len(ratios) == 1 else f"{name}@{ratio}", name, ratio) for ratio in ratios]
    return tuple(planned)


def make_methods(planned: Sequence[PlannedMethod], fusor: Fusor, wording: Wording) -> Mapping[str, Method]:
    """The methods by label."""
    return {method.label: method.make(fusor, wording) for method in planned}
