"""The methods by name. The methods themselves, and with them the model libraries, are imported where one is made."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from cacheblend.base.errors import ConfigError
from cacheblend.blend import DEFAULT_SELECTOR, SELECTORS, FusionConfig

if TYPE_CHECKING:
    from cacheblend.blend import Fusor
    from cacheblend.eval.data import Wording

    from .method import Method

CONTEXTS = ("default", "filler", "document", "neighbour", "head", "bos")  # what chunks' KV is computed after
# Blending by the selector that picks the tokens; "blend" has the default one, and a selector without a name here its own.
_NAMED = {
    "blend": DEFAULT_SELECTOR,
    "blend_hkvd": "gradual",
    "blend_single_shot": "single_shot",
    "blend_product": "attention_deviation",
    "epic": "first_tokens",
    "random_tokens": "random",
}
_SELECTORS = {**_NAMED, **{f"blend_{name}": name for name in SELECTORS if name not in _NAMED.values()}}
METHOD_OF_SELECTOR = {selector: name for name, selector in reversed(_SELECTORS.items())}
FULL_REUSE = "full_reuse"
ORACLE = "oracle"
# What no recompute ratio and no context of the chunks' KV applies to; full reuse takes a context alone.
_PLAIN = ("full_recompute", "prefix_cache", "map_reduce", "map_rerank")
METHODS = (*_PLAIN[:2], FULL_REUSE, *_SELECTORS, ORACLE, *_PLAIN[2:])


@dataclass(frozen=True, slots=True)
class PlannedMethod:
    """A method of a run: its label in results, its name, and its ratio and context where they apply."""

    label: str
    name: str
    ratio: float | None
    context: str = CONTEXTS[0]

    def make(self, fusor: Fusor, wording: Wording) -> Method:
        """The method itself."""
        from .map_reduce import MapReduce, MapRerank
        from .reuse import Blend, FullRecompute, OracleBlend, PrefixCache

        if self.name == FULL_REUSE:
            return Blend(fusor, FusionConfig(recompute_ratio=0.0), self.context)
        if self.ratio is None:
            plain: dict[str, Callable[[], Method]] = {
                "full_recompute": lambda: FullRecompute(fusor),
                "prefix_cache": lambda: PrefixCache(fusor),
                "map_reduce": lambda: MapReduce(fusor, wording),
                "map_rerank": lambda: MapRerank(fusor),
            }
            return plain[self.name]()
        if self.name == ORACLE:
            return OracleBlend(fusor, FusionConfig(recompute_ratio=self.ratio), self.context)
        return Blend(fusor, FusionConfig(recompute_ratio=self.ratio, selector=_SELECTORS[self.name]), self.context)


def plan_methods(
    names: Sequence[str], ratios: Sequence[float], contexts: Sequence[str] = CONTEXTS[:1]
) -> tuple[PlannedMethod, ...]:
    """Every method, those that reuse chunks over KV of every context, and those with a ratio at every ratio.

    The label is `name`, with `+context` after it for another context than the default, and `@ratio` where there are several.

    Raises:
        ConfigError: an unknown method or context, one given twice, none at all, or a ratio outside 0..1.
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
            if name == FULL_REUSE:
                planned.append(PlannedMethod(label, name, None, context))
                continue
            for ratio in ratios:
                planned.append(PlannedMethod(label if len(ratios) == 1 else f"{label}@{ratio}", name, ratio, context))
    return tuple(planned)


def make_methods(planned: Sequence[PlannedMethod], fusor: Fusor, wording: Wording) -> Mapping[str, Method]:
    """The methods by label."""
    return {method.label: method.make(fusor, wording) for method in planned}


Chunk = tuple[int, ...]


class CacheHistory(Protocol):
    """Says which chunks and which prefixes earlier requests left in the cache."""

    def cached(self, chunks: Sequence[Chunk]) -> tuple[tuple[bool, ...], int]:
        """Per chunk whether its KV is there, and how many leading chunks a prefix cache has."""

    def remember(self, chunks: Sequence[Chunk]) -> None:
        """A request over these chunks is done."""


class EverythingCached:
    """Every chunk was computed before, and some other request began with the same first chunk: the paper's set-up.

    That flatters prefix caching, as the paper does: its first chunk always hits. What stands after the first chunk never
    does, since no other request has the same two chunks in the same order.
    """

    def cached(self, chunks: Sequence[Chunk]) -> tuple[tuple[bool, ...], int]:
        """All of them, and the first."""
        return (True,) * len(chunks), min(1, len(chunks))

    def remember(self, chunks: Sequence[Chunk]) -> None:
        """Nothing to add."""


class SeenBefore:
    """Chunks that earlier requests of the run had, as if the cache had room for all of it; only token ids are held here."""

    def __init__(self) -> None:
        self._chunks: set[Chunk] = set()
        self._prefixes: set[tuple[Chunk, ...]] = set()

    def cached(self, chunks: Sequence[Chunk]) -> tuple[tuple[bool, ...], int]:
        """Chunks seen anywhere, and the longest run of leading chunks that a request began with."""
        prefix = 0
        while prefix < len(chunks) and tuple(chunks[: prefix + 1]) in self._prefixes:
            prefix += 1
        return tuple(chunk in self._chunks for chunk in chunks), prefix

    def remember(self, chunks: Sequence[Chunk]) -> None:
        """Add a request's chunks and prefixes."""
        self._chunks.update(chunks)
        self._prefixes.update(tuple(chunks[:length]) for length in range(1, len(chunks) + 1))
