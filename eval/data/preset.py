"""How a data set becomes requests: the paper's two set-ups (§7.1), and what may be changed in them."""

from __future__ import annotations

from dataclasses import dataclass

from cacheblend.base.errors import ConfigError

from .wording import PROMPTS

CHUNKINGS = ("split", "passage")
ORDERS = ("retrieval", "reversed", "gold-middle")
SEARCHED_TOP_K = 6  # the paper's


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """Chunking, retrieval and what is cached before a request comes.

    Args:
        chunk_tokens: tokens of a chunk.
        top_k: chunks of a prompt; None for 6 where they are searched, else for all that fit.
        chunking: "split": passages are split into chunks; "passage": each passage of a case, title and text, is one chunk, in
            the file's order, without a search. None takes the data set's own.
        order: of a prompt's chunks. "retrieval": nearest first, or the file's; "reversed"; "gold-middle": the first chunk in
            which an answer stands moves to the middle. The chunks are the same in every order.
        prompt: one of `PROMPTS`.
        shared_corpus: chunks are searched among all cases' passages, the cases come in random order, and only what an
            earlier case used is cached; else a case has its own passages, and each of its chunks is cached.
        warm_up: share of the cases that only fill the cache, 0..1.
    """

    chunk_tokens: int = 512
    top_k: int | None = None
    chunking: str | None = None
    order: str = ORDERS[0]
    prompt: str = PROMPTS[0]
    shared_corpus: bool = False
    warm_up: float = 0.0

    def __post_init__(self) -> None:
        for field in ("chunk_tokens", "top_k"):
            value = getattr(self, field)
            if field == "top_k" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(field, value, "a whole number of at least 1")
        for field, allowed in (("chunking", (None, *CHUNKINGS)), ("order", ORDERS), ("prompt", PROMPTS)):
            if getattr(self, field) not in allowed:
                raise ConfigError(field, getattr(self, field), f"one of {', '.join(filter(None, allowed))}")
        if self.shared_corpus and self.chunking == "passage":
            raise ConfigError("chunking", self.chunking, "split where all cases share one corpus, which is searched in chunks")
        if not 0 <= self.warm_up < 1:
            raise ConfigError("warm_up", self.warm_up, "0 or above, below 1")


PRESETS = {
    "paper": Preset(),
    # The paper skips the first 1,000 of 6,000 queries.
    "extended": Preset(shared_corpus=True, warm_up=1 / 6),
}
