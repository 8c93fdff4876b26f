"""The interface of a method, and what most of them share: one prefill, then greedy decoding."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Protocol

from cacheblend.blend import FusedPrompt, Fusor
from cacheblend.service.engine.request import FirstTokenClock

from .resident import ResidentRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodAnswer:
    """What a method gives for one request.

    Args:
        token_ids: the generated token ids.
        ttft_s: question and stored KV in RAM -> first token id of the answer on the host (`service.first_token`). Retrieval
            and tokenising, which are the same for all methods, are not in it.
        recomputed_tokens: tokens that ran through a layer before the first token, in the mean over layers 1 and up.
        loaded_bytes: stored KV that was read.
        fused: the prompt's cache; None where the method reads another prompt than the request's.
    """

    token_ids: list[int]
    ttft_s: float
    recomputed_tokens: float
    loaded_bytes: int
    fused: FusedPrompt | None


class Method(Protocol):
    """One way to answer a request. Two calls, so that what is computed before a question comes is not timed."""

    def prepare(self, resident: ResidentRequest) -> None:
        """Have the KV that this method finds in the cache computed."""

    def answer(self, resident: ResidentRequest, max_new_tokens: int) -> MethodAnswer:
        """Answer it, timed."""


class PrefillMethod(ABC):
    """A method that differs from full recompute by its prefill alone: the token ids are the same."""

    def __init__(self, fusor: Fusor) -> None:
        self._fusor = fusor

    def prepare(self, resident: ResidentRequest) -> None:  # noqa: B027  # most methods need nothing more
        """Nothing, unless a method says otherwise."""

    @abstractmethod
    def prefill(self, resident: ResidentRequest) -> FusedPrompt:
        """The prompt's cache and first logits."""

    def answer(self, resident: ResidentRequest, max_new_tokens: int) -> MethodAnswer:
        """Prefill, then decode greedily."""
        started = time.perf_counter()
        fused = self.prefill(resident)
        token_ids, first_token = generate(self._fusor, fused, max_new_tokens)
        return MethodAnswer(
            token_ids=token_ids,
            ttft_s=first_token - started,
            recomputed_tokens=rows_run(fused),
            loaded_bytes=self.loaded_bytes(resident, fused),
            fused=fused,
        )

    def loaded_bytes(self, resident: ResidentRequest, fused: FusedPrompt) -> int:
        """Bytes of stored KV that the prefill read; none, unless a method says otherwise."""
        return 0


def generate(fusor: Fusor, fused: FusedPrompt, max_new_tokens: int, **kwargs: Any) -> tuple[list[int], float]:
    """Greedy token ids, and when the first was on the host, on `time.perf_counter`'s clock."""
    clock = FirstTokenClock()
    config: Any = fusor.model.generation_config
    ends = config.eos_token_id
    end = ends[0] if isinstance(ends, list) else ends
    pad = next((token for token in (config.pad_token_id, end) if token is not None), 0)
    token_ids = fusor.generate(
        fused,
        max_new_tokens,
        streamer=clock,
        pad_token_id=pad,
        do_sample=False,
        temperature=None,
        top_p=None,
        top_k=None,
        **kwargs,
    )
    return token_ids, clock.first_token


def rows_run(fused: FusedPrompt) -> float:
    """Tokens that ran through a layer, in the mean over layers 1 and up."""
    return fmean(len(positions) for positions in fused.recomputed[1:] or fused.recomputed)
