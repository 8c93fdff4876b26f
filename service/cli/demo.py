"""The four methods side by side on the same prompts."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from cacheblend.service.engine.engine import Engine
from cacheblend.service.engine.request import Answer

QUESTIONS = (
    "How does the import system find a module?",
    "What does a context manager do when an exception is raised?",
    "When is a class body executed?",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodRow:
    """One method over the demo's questions.

    Args:
        method: its name.
        ttft_s: median TTFT.
        speedup: full recompute's median TTFT over this one's.
        tokens_recomputed: tokens that went through attention and MLP, in the mean over layers 1 and up and over questions.
        prompt_tokens: mean tokens of a prompt.
        logit_difference: largest absolute difference of the first logits from full recompute's, over the questions.
        same_first_token: questions whose first token is full recompute's.
        text: the answer to the first question.
    """

    method: str
    ttft_s: float
    speedup: float
    tokens_recomputed: float
    prompt_tokens: float
    logit_difference: float
    same_first_token: int
    text: str


def compare_methods(
    engine: Engine,
    questions: Sequence[str],
    *,
    top_k: int,
    repeats: int = 3,
    on_progress: Callable[[str, int, int], None] = lambda *_: None,
) -> list[MethodRow]:
    """Ask every question by every method, interleaved; medians over questions and repeats, after one unmeasured round.

    The unmeasured round warms every method, so that prefix caching finds the prefix that an earlier request left.
    """
    methods = engine.methods
    answers: dict[str, list[Answer]] = {method: [] for method in methods}
    total = (repeats + 1) * len(questions) * len(methods)
    done = 0
    for repeat in range(repeats + 1):
        for question in questions:
            for method in methods:
                answer = engine.answer(question, top_k=top_k, method=method)
                if repeat == 0:
                    engine.drain()
                else:
                    answers[method].append(answer)
                done += 1
                on_progress("ask", done, total)
    full = answers["full_recompute"]
    full_s = statistics.median(answer.timings.ttft_s for answer in full)
    rows = []
    for method in methods:
        given = answers[method][: len(questions)]
        ttft_s = statistics.median(answer.timings.ttft_s for answer in answers[method])
        pairs = list(zip(given, full, strict=False))
        rows.append(
            MethodRow(
                method=method,
                ttft_s=ttft_s,
                speedup=full_s / ttft_s,
                tokens_recomputed=statistics.fmean(_rows_run(answer) for answer in given),
                prompt_tokens=statistics.fmean(answer.plan.prompt_tokens for answer in given),
                logit_difference=max(float((mine.first_logits - theirs.first_logits).abs().max()) for mine, theirs in pairs),
                same_first_token=sum(mine.token_ids[0] == theirs.token_ids[0] for mine, theirs in pairs),
                text=given[0].text,
            )
        )
    return rows


def _rows_run(answer: Answer) -> float:
    later: Sequence[Any] = answer.plan.recomputed[1:] or answer.plan.recomputed
    return statistics.fmean(len(positions) for positions in later)
