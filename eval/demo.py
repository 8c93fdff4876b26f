"""The packaged reader asked about its bundled corpus: F1 and TTFT of the four methods, class by class, end to end."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from cacheblend.eval.data.source import WORLD
from cacheblend.service import Answer, Engine
from cacheblend.service.cli.model import QUESTIONS

from .metrics import f1
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
    recompute_ratio: float | None = None,
    on_progress: Callable[[str, int, int], None] = lambda *_: None,
) -> DemoResult:
    """Every question by every method, the methods taking turns at going first, after one unmeasured question."""
    methods = engine.methods
    for method in methods:
        engine.answer(questions[0].question, top_k=top_k, method=method, recompute_ratio=recompute_ratio)
    engine.drain()
    rows: dict[str, list[tuple[str, float, float]]] = {method: [] for method in methods}
    found: list[tuple[str, float]] = []
    for index, item in enumerate(questions):
        start = index % len(methods)
        for method in methods[start:] + methods[:start]:
            answer = engine.answer(item.question, top_k=top_k, method=method, recompute_ratio=recompute_ratio)
            rows[method].append((item.question_class, f1(WORLD.answer_in(answer.text), item.answers), answer.timings.ttft_s))
        retrieved = {scored.chunk.document_id for scored in answer.chunks}
        found.append((item.question_class, len(retrieved & set(item.gold)) / len(set(item.gold))))
        on_progress("ask", index + 1, len(questions))
    return DemoResult(
        methods={method: {each: _score(given, each) for each in (*CLASSES, "all")} for method, given in rows.items()},
        cases={each: sum(item.question_class == each for item in questions) for each in CLASSES},
        recall={each: statistics.fmean(share for kind, share in found if each in (kind, "all")) for each in (*CLASSES, "all")},
    )


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
