"""Methods side by side: the packaged reader on its bundled corpus, class by class; a model on the user's passages."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from cacheblend.cli.model import QUESTIONS
from cacheblend.eval.data.source import WORLD
from cacheblend.service import Answer, Engine

from .metrics.answers import f1
from .world.question import TESTED

CLASSES = tuple(str(each) for each in TESTED)


@dataclass(frozen=True, slots=True)
class DemoQuestion:
    """A question about the bundled corpus.

    Attributes:
        question: in words.
        answers: the right answers.
        question_class: one of `CLASSES`.
        gold: ids of the articles that the answer rests on.
    """

    question: str
    answers: tuple[str, ...]
    question_class: str
    gold: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Score:
    """One method on one class: mean F1, cases, median TTFT in seconds."""

    f1: float
    cases: int
    ttft_s_median: float


@dataclass(frozen=True, slots=True)
class DemoResult:
    """Scores by method and class (`all` for the whole), questions by class, and the share of gold articles retrieved."""

    methods: Mapping[str, Mapping[str, Score]]
    cases: Mapping[str, int]
    recall: Mapping[str, float]

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        methods = {method: {each: asdict(score) for each, score in row.items()} for method, row in self.methods.items()}
        return {"methods": methods, "recall": dict(self.recall)}


def bundled_questions() -> list[DemoQuestion]:
    """The questions that come with the corpus, the classes in turn."""
    return [
        DemoQuestion(line["question"], tuple(line["answers"]), line["class"], tuple(line["gold"]))
        for line in map(json.loads, QUESTIONS.read_text(encoding="utf-8").splitlines())
    ]


def ask_all(
    engine: Engine,
    questions: Sequence[DemoQuestion],
    *,
    top_k: int,
    on_progress: Callable[[str, int, int], None] = lambda *_: None,
) -> DemoResult:
    """Every question by every method, the methods taking turns at going first, after one unmeasured question."""
    methods, ratio = engine.methods, blended_ratio(engine)
    for method in methods:
        engine.answer(questions[0].question, top_k=top_k, method=method, recompute_ratio=ratio)
    engine.drain()
    rows: dict[str, list[tuple[str, float, float]]] = {method: [] for method in methods}
    found: list[tuple[str, float]] = []
    for index, item in enumerate(questions):
        start = index % len(methods)
        for method in methods[start:] + methods[:start]:
            answer = engine.answer(item.question, top_k=top_k, method=method, recompute_ratio=ratio)
            rows[method].append((item.question_class, f1(WORLD.answer_in(answer.text), item.answers), answer.timings.ttft_s))
        retrieved = {scored.chunk.document_id for scored in answer.chunks}
        found.append((item.question_class, len(retrieved & set(item.gold)) / len(set(item.gold))))
        on_progress("ask", index + 1, len(questions))
    return DemoResult(
        methods={method: {each: _score(given, each) for each in (*CLASSES, "all")} for method, given in rows.items()},
        cases={each: sum(item.question_class == each for item in questions) for each in CLASSES},
        recall={each: statistics.fmean(share for kind, share in found if each in (kind, "all")) for each in (*CLASSES, "all")},
    )


def blended_ratio(engine: Engine) -> float | None:
    """The ratio that `blend` is compared at: without a profile it is named, so that short prompts are blended as well."""
    if engine.controller is not None or engine.config.recompute_ratio is not None:
        return engine.config.recompute_ratio
    return engine.config.loader.quality_ratio


def marked_tokens(engine: Engine, answer: Answer) -> list[tuple[str, list[tuple[str, bool]]]]:
    """Per chunk of a blended answer its title and its tokens, each with whether layer 1 recomputed it."""
    recomputed = set(answer.plan.recomputed[1].tolist())
    decode: Callable[[list[int]], str] = engine.fusor.tokenizer.decode
    marked: list[tuple[str, list[tuple[str, bool]]]] = []
    chunks = {scored.chunk.token_ids: scored.chunk.title for scored in answer.chunks}
    position = 0
    for segment in answer.plan.segments:
        ids = segment.token_ids
        if ids in chunks:
            # A token's text is what it adds to the text before it, so that spaces come out right.
            ends = [decode(list(ids[: index + 1])) for index in range(len(ids))]
            texts = [end[len(before) :] for before, end in zip(["", *ends[:-1]], ends, strict=True)]
            marked.append(
                (chunks[ids], [(text, position + index in recomputed) for index, text in enumerate(texts) if text.strip("\n")])
            )
        position += len(ids)
    return marked


def _score(rows: Sequence[tuple[str, float, float]], question_class: str) -> Score:
    chosen = [(quality, ttft_s) for kind, quality, ttft_s in rows if question_class in (kind, "all")]
    return Score(
        statistics.fmean(quality for quality, _ in chosen), len(chosen), statistics.median(ttft_s for _, ttft_s in chosen)
    )


PASSAGE_QUESTIONS = (
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

    The methods take turns at going first. A round begins without prefix blocks, or prefix caching would find the very prompts
    of the round before; it finds what the other questions of its round left.
    """
    methods, ratio = engine.methods, blended_ratio(engine)
    answers: dict[str, list[Answer]] = {method: [] for method in methods}
    total = (repeats + 1) * len(questions) * len(methods)
    done = 0
    for repeat in range(repeats + 1):
        engine.prefixes.clear()
        for index, question in enumerate(questions):
            first = (repeat + index) % len(methods)
            for method in methods[first:] + methods[:first]:
                answer = engine.answer(question, top_k=top_k, method=method, recompute_ratio=ratio)
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
