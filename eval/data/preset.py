"""How a data set becomes requests: the paper's two set-ups (§7.1)."""

from __future__ import annotations

from dataclasses import dataclass

from cacheblend.store.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """Chunking, retrieval and what is cached before a request comes.

    Args:
        chunk_tokens: tokens of a chunk.
        top_k: chunks of a prompt, nearest first.
        shared_corpus: chunks are searched among all cases' passages, the cases come in random order, and only what an
            earlier case used is cached; else a case has its own passages, and each of its chunks is cached.
        warm_up: share of the cases that only fill the cache, 0..1.
    """

    chunk_tokens: int = 512
    top_k: int = 6
    shared_corpus: bool = False
    warm_up: float = 0.0

    def __post_init__(self) -> None:
        for field in ("chunk_tokens", "top_k"):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(field, value, "a whole number of at least 1")
        if not 0 <= self.warm_up < 1:
            raise ConfigError("warm_up", self.warm_up, "0 or above, below 1")


PRESETS = {
    "paper": Preset(),
    # The paper skips the first 1,000 of 6,000 queries.
    "extended": Preset(shared_corpus=True, warm_up=1 / 6),
}
