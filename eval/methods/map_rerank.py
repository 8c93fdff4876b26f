"""MapRerank: an answer from each chunk alone; the most confident one counts (paper §7.1, after LangChain)."""

from __future__ import annotations

import time

from cacheblend.blend import Fusor

from .lone_chunk import read_chunk
from .method import MethodAnswer
from .resident import ResidentRequest


class MapRerank:
    """Confidence is the mean log-probability of an answer's tokens. LangChain asks the model to write a score, which takes a
    model that follows instructions; the log-probability exists for every model.

    Args:
        fusor: the model.
    """

    def __init__(self, fusor: Fusor) -> None:
        self._fusor = fusor

    def prepare(self, resident: ResidentRequest) -> None:
        """KV of the head with each chunk."""
        _ = resident.lone_kv

    def answer(self, resident: ResidentRequest, max_new_tokens: int) -> MethodAnswer:
        """The TTFT ends when the answer is chosen: no token of it can be shown before."""
        started = time.perf_counter()
        chunks, tail = range(len(resident.pieces.chunks)), resident.pieces.tail
        answers = [read_chunk(self._fusor, resident, index, tail, max_new_tokens) for index in chunks]
        best = max(answers, key=lambda answer: answer.confidence)
        return MethodAnswer(
            token_ids=best.token_ids,
            ttft_s=time.perf_counter() - started,
            recomputed_tokens=sum(answer.recomputed_tokens for answer in answers),
            loaded_bytes=sum(answer.loaded_bytes for answer in answers),
            fused=None,
        )
