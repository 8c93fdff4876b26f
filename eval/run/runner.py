"""An evaluation: requests through the methods, into a folder."""

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from cacheblend.base.errors import InputError
from cacheblend.blend import FusionResult, Fusor
from cacheblend.blend.fidelity import first_token_kl_nats, relative_kv_error
from cacheblend.eval.compute import ModelCompute, compute_share
from cacheblend.eval.data import Example, Request
from cacheblend.eval.data.source import answer_ids, prompt_renderer
from cacheblend.eval.methods import (
    CacheHistory,
    EverythingCached,
    MethodAnswer,
    ResidentRequest,
    SeenBefore,
    StoredContexts,
    generate,
    make_methods,
)
from cacheblend.eval.metrics import COMPARED_TOKENS, answer_nll_nats, equal_greedy_tokens, likeliest_answer, quality
from cacheblend.retriever import Embedder

from .folder import EvalConfig, Row, RunFolder, environment, has_random_weights
from .report import summarize


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reference:
    """Full recompute of a case, untimed: what every method is held against.

    Args:
        full: its prompt.
        token_ids: its first greedy tokens.
        gold_ids: the right answer that it finds likeliest; empty where there is none to go by.
        gold_nll_nats: of that answer.
    """

    full: FusionResult
    token_ids: list[int]
    gold_ids: Sequence[int] = ()
    gold_nll_nats: float = 0.0


class CaseRunner:
    """Runs the methods of a configuration on one request after another, and remembers what they leave in the cache.

    Args:
        config: methods, ratios, data set.
        fusor: the model.
    """

    def __init__(self, config: EvalConfig, fusor: Fusor) -> None:
        self._config, self._fusor = config, fusor
        self._wording = config.source.wording
        self._methods = make_methods(config.planned(), fusor)
        self._history: CacheHistory = EverythingCached() if config.source.caches_all else SeenBefore()
        self._is_random = has_random_weights(fusor)
        self._prompts = prompt_renderer(fusor.tokenizer, self._wording)
        self._contexts = StoredContexts(fusor, self._prompts.prefix)
        self._compute = ModelCompute.of(fusor.decoder)

    def warm_up(self, request: Request) -> None:
        """Run and mark every method once: what is missing shows at once, and no case has the times of first calls."""
        resident = self._resident(request)
        for method in self._methods.values():
            method.prepare(resident)
            answer = method.answer(resident, 1)
            quality(request.example, self._text(answer))

    def skip(self, request: Request) -> None:
        """Let a request fill the cache without running it."""
        self._history.remember(request.prompt.chunk_ids)

    def run(self, request: Request, index: int) -> Row:
        """Run a case and return its row. Each method goes first in turn, so that none always follows one neighbour."""
        resident = self._resident(request)
        for method in self._methods.values():
            method.prepare(resident)
        reference = self._reference(request)
        labels = list(self._methods)
        start = index % len(labels)
        results: dict[str, Any] = {}
        for label in labels[start:] + labels[:start]:
            self._settle()
            answer = self._methods[label].answer(resident, self._config.new_tokens)
            results[label] = self._result(request.example, answer, reference)
        self._history.remember(request.prompt.chunk_ids)
        return {
            "case": index,
            "id": request.example.id,
            "prompt_tokens": len(request.prompt.token_ids),
            "chunks": len(request.prompt.chunks),
            "dropped_chunks": request.dropped_chunks,
            "cut_tokens": request.cut_tokens,
            "methods": {label: results[label] for label in labels},
        }

    def _resident(self, request: Request) -> ResidentRequest:
        cached, prefix = self._history.cached(request.prompt.chunk_ids)
        return ResidentRequest(self._fusor, request, self._contexts, cached, prefix, self._config.kv_cache_dtype)

    def _reference(self, request: Request) -> _Reference:
        full = self._fusor.prefill(request.prompt.token_ids)
        token_ids, _ = generate(self._fusor, full, min(COMPARED_TOKENS, self._config.new_tokens))
        answers = () if self._is_random else request.example.answers
        found = likeliest_answer(self._fusor, full, [answer_ids(self._prompts, answer) for answer in answers])
        if found is None:
            return _Reference(full=full, token_ids=token_ids)
        nll_nats, gold_ids = found
        return _Reference(full=full, token_ids=token_ids, gold_ids=gold_ids, gold_nll_nats=nll_nats)

    def _result(self, example: Example, answer: MethodAnswer, reference: _Reference) -> dict[str, Any]:
        prediction = self._text(answer)
        found = quality(example, prediction)
        return {
            "prediction": prediction,
            "quality": dict.fromkeys(found) if self._is_random else found,
            "ttft_s": answer.ttft_s,
            "new_tokens": len(answer.token_ids),
            "recomputed_tokens": answer.recomputed_tokens,
            "loaded_bytes": answer.loaded_bytes,
            "is_widened": answer.fused.is_widened,
            **self._nearness(answer.fused, answer.token_ids, reference),
        }

    def _nearness(self, fused: FusionResult, token_ids: Sequence[int], reference: _Reference) -> dict[str, Any]:
        """Nearness to full recompute, and the compute that the method needed."""
        gold_nll_nats = answer_nll_nats(self._fusor, fused, reference.gold_ids) if reference.gold_ids else None
        return {
            "relative_kv_error": relative_kv_error(fused.cache, reference.full.cache),
            "first_token_kl_nats": first_token_kl_nats(reference.full.logits, fused.logits),
            "gold_nll_nats": gold_nll_nats,
            "gold_nll_over_full_nats": None if gold_nll_nats is None else gold_nll_nats - reference.gold_nll_nats,
            "equal_greedy_tokens": equal_greedy_tokens(reference.token_ids, token_ids),
            "compute_share": compute_share(fused, self._compute),
        }

    def _text(self, answer: MethodAnswer) -> str:
        return self._wording.answer_in(self._fusor.tokenizer.decode(answer.token_ids, skip_special_tokens=True))

    def _settle(self) -> None:
        """A GPU may still be at the method before."""
        if self._fusor.decoder.device.type == "cuda":
            torch.cuda.synchronize(self._fusor.decoder.device)


Progress = Callable[[str, int, int], None]


def evaluate(
    config: EvalConfig,
    folder: Path,
    *,
    resume: bool = False,
    fusor: Fusor | None = None,
    embedder: Embedder | None = None,
    on_progress: Progress = lambda *_: None,
) -> dict[str, Any]:
    """Run an evaluation and give its summary, see `summarize`; rows and summary are in the folder as well.

    Args:
        config: what to run.
        folder: a new folder for the run; with `resume` the folder of one that was cut off.
        resume: go on after the last complete case; the set-up must be equal.
        fusor: in place of the model that the config names.
        embedder: in place of the retriever's own.
        on_progress: called with the stage, the work done, and all of its work.

    Raises:
        InputError: the folder exists, or is no run to go on with; no model or data set there; a line of it is no example.
        UnsupportedModelError: the model cannot be blended.
    """
    if folder.exists() and not resume:
        raise InputError(f"{folder} exists; choose another --out, or go on with that run by --resume")
    fusor = fusor or load_fusor(config)
    limit = None if fusor.max_positions is None else fusor.max_positions - config.new_tokens
    # What is wrong with data, model or packages shows before a folder is made.
    requests = config.source.requests(fusor.tokenizer, limit, embedder, functools.partial(on_progress, "corpus"))
    first = next(requests, None)
    if first is None:
        raise InputError(f"the data set {config.source.name} holds no case")
    cases = CaseRunner(config, fusor)
    cases.warm_up(first)
    setup = {"config": config.as_dict(), **environment(fusor)}
    run = RunFolder.resume(folder, setup) if resume else RunFolder.create(folder, setup)
    done = {row["case"] for row in run.rows()}
    for index, request in enumerate(itertools.chain([first], requests)):
        if request.is_warm_up or index in done:
            cases.skip(request)
        else:
            run.append(cases.run(request, index))
        on_progress("cases", index + 1, max(index + 1, config.source.count))
    summary = summarize(run)
    run.write_summary(summary)
    return summary


def load_fusor(config: EvalConfig, **kwargs: Any) -> Fusor:
    """The model that a configuration names; `kwargs` go to transformers.

    Raises:
        InputError: no model there, or one without a tokenizer.
        UnsupportedModelError: it cannot be blended.
    """
    fusor = Fusor.from_pretrained(config.model, config.device, config.dtype, allow_unverified=config.allow_unverified, **kwargs)
    if fusor.tokenizer is None:
        raise InputError(f"the model at {config.model!r} has no tokenizer; save one beside it")
    _ = fusor.runner  # a hybrid has none
    return fusor
