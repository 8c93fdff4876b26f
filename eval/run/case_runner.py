"""One case through every method."""

from __future__ import annotations

from typing import Any

import torch

from cacheblend.blend import FusedPrompt, Fusor
from cacheblend.eval.data import Example, Request
from cacheblend.eval.data.source import prompt_builder
from cacheblend.eval.methods import CacheHistory, EverythingCached, MethodAnswer, ResidentRequest, SeenBefore, make_methods
from cacheblend.eval.metrics import deviation_left, quality

from .config import EvalConfig
from .environment import has_random_weights
from .folder import Row


class CaseRunner:
    """Runs the methods of a configuration on one request after another, and remembers what they leave in the cache.

    Args:
        config: methods, ratios, data set.
        fusor: the model.
    """

    def __init__(self, config: EvalConfig, fusor: Fusor) -> None:
        self._config, self._fusor = config, fusor
        self._wording = config.source.wording
        self._methods = make_methods(config.planned(), fusor, self._wording)
        self._history: CacheHistory = EverythingCached() if config.source.caches_all else SeenBefore()
        self._is_random = has_random_weights(fusor)
        self._chunk_prefix_ids = prompt_builder(fusor.tokenizer, self._wording).chunk_prefix_ids

    def warm_up(self, request: Request) -> None:
        """Run and mark every method once: what is missing shows at once, and no case has the times of first calls."""
        resident = self._resident(request)
        for method in self._methods.values():
            method.prepare(resident)
            answer = method.answer(resident, 1)
            quality(request.example, self._text(answer))

    def skip(self, request: Request) -> None:
        """Let a request fill the cache without running it."""
        self._history.remember(request.pieces.chunks)

    def run(self, request: Request, index: int) -> Row:
        """The case's row. Methods take turns at going first, so that none has the caches warmed by the same neighbour."""
        resident = self._resident(request)
        for method in self._methods.values():
            method.prepare(resident)
        full = self._fusor.prefill(request.pieces.token_ids)  # for the deviation, and untimed
        labels = list(self._methods)
        start = index % len(labels)
        results: dict[str, Any] = {}
        for label in labels[start:] + labels[:start]:
            self._settle()
            answer = self._methods[label].answer(resident, self._config.new_tokens)
            results[label] = self._result(request.example, answer, full)
        self._history.remember(request.pieces.chunks)
        return {
            "case": index,
            "id": request.example.id,
            "class": request.example.category,
            "prompt_tokens": len(request.pieces.token_ids),
            "chunks": len(request.pieces.chunks),
            "dropped_chunks": request.dropped_chunks,
            "cut_tokens": request.cut_tokens,
            "methods": {label: results[label] for label in labels},
        }

    def _resident(self, request: Request) -> ResidentRequest:
        cached, prefix = self._history.cached(request.pieces.chunks)
        return ResidentRequest(self._fusor, request, self._chunk_prefix_ids, cached, prefix)

    def _result(self, example: Example, answer: MethodAnswer, full: FusedPrompt) -> dict[str, Any]:
        prediction = self._text(answer)
        found = quality(example, prediction)
        return {
            "prediction": prediction,
            "quality": dict.fromkeys(found) if self._is_random else found,
            "ttft_s": answer.ttft_s,
            "new_tokens": len(answer.token_ids),
            "recomputed_tokens": answer.recomputed_tokens,
            "loaded_bytes": answer.loaded_bytes,
            "deviation_left": None if answer.fused is None else deviation_left(answer.fused.cache, full.cache),
        }

    def _text(self, answer: MethodAnswer) -> str:
        return self._wording.answer_in(self._fusor.tokenizer.decode(answer.token_ids, skip_special_tokens=True))

    def _settle(self) -> None:
        """A GPU may still be at the method before."""
        if self._fusor.decoder.device.type == "cuda":
            torch.cuda.synchronize(self._fusor.decoder.device)
