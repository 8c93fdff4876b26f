"""A lesson: one context with many questions behind it.

Every question sees the context and itself, never another question or its answer, and its positions go on from the context's
last. So a lesson teaches what as many separate prompts would, at a fraction of their cost.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from transformers import PreTrainedTokenizerFast

from cacheblend.retriever import PlainTokenizer
from cacheblend.retriever.config import SEPARATOR

from .question import Question
from .scene import Scene


@dataclass(frozen=True, slots=True)
class Lesson:
    """Ids of a context and of the questions about it.

    Attributes:
        chunks: token ids of each chunk of the context, in order.
        gaps: positions left out before each chunk, and last before the questions.
        prompts: token ids of each question.
        answers: token ids of what is written to each, the working before the answer included, without EOS.
        questions: what is asked.
        guess: per question, the chance of a guess among the answers that its relation allows.
    """

    chunks: list[list[int]]
    gaps: list[int]
    prompts: list[list[int]]
    answers: list[list[int]]
    questions: tuple[Question, ...]
    guess: tuple[float, ...]


def make_lesson(
    tokenizer: PreTrainedTokenizerFast,
    scene: Scene,
    asked: Sequence[Question],
    *,
    preamble: str = "",
    gaps: random.Random | None = None,
    cut_at: int | None = None,
    longest: int = 2048,
) -> Lesson:
    """The lesson of a scene and the questions to ask about it.

    Args:
        tokenizer: the reader's.
        scene: the context.
        asked: the questions, at least one.
        preamble: text before the first chunk.
        gaps: a source of random gaps between the positions of neighbouring chunks, so that positions generalise to contexts
            longer than the lesson; None for none.
        cut_at: cut the articles, under a title line, into chunks of so many tokens, wherever that falls, as the engine cuts
            documents; None keeps the chunks as they were written.
        longest: no position reaches this.
    """
    written = [passage.text for passage in scene.passages] if cut_at is None else _cut(tokenizer, scene, cut_at)
    context = [text for text in (preamble, *written) if text]
    texts = list(context)
    texts += [question.prompt for question in asked] + [question.written for question in asked]
    encoded = [encoding.ids for encoding in tokenizer.backend_tokenizer.encode_batch(texts, add_special_tokens=False)]
    chunks, rest = encoded[: len(context)], encoded[len(context) :]
    prompts, answers = rest[: len(asked)], rest[len(asked) :]
    used = 2 + sum(map(len, chunks)) + max(len(p) + len(a) for p, a in zip(prompts, answers, strict=True))
    guess = tuple(1 / len(set(scene.candidates(question))) for question in asked)
    return Lesson(chunks, _gaps(gaps, len(chunks) + 1, longest - used), prompts, answers, tuple(asked), guess)


def _cut(tokenizer: PreTrainedTokenizerFast, scene: Scene, tokens: int) -> list[str]:
    """The scene's articles as the engine's retriever would cut them."""
    plain = PlainTokenizer(tokenizer)
    texts: list[str] = []
    for name, passages in groupby(scene.passages, key=lambda passage: passage.article.subject.name):
        content = f"{name}\n{''.join(passage.text for passage in passages)}"
        texts += [text + SEPARATOR for text in plain.cut(content, tokens, 0)]
    return texts


def _gaps(rng: random.Random | None, count: int, spare: int) -> list[int]:
    """`count` gaps that add up to at most `spare`; half the lessons have none."""
    if rng is None or spare <= 0 or rng.random() < 0.5:
        return [0] * count
    total = int(spare * rng.random() ** 2)
    cuts = sorted(rng.randint(0, total) for _ in range(count))
    return [high - low if rng.random() < 0.5 else 0 for low, high in zip([0, *cuts[:-1]], cuts, strict=True)]
