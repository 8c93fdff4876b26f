"""The first lessons: pairs of random names and words, to be completed when the first of a pair is given.

They teach nothing of the world but the one skill that everything rests on, to find a token again and copy what stood behind
it. Here it comes within some hundred quick steps; among articles it had not come in 1,300.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from transformers import PreTrainedTokenizerFast

from .lesson import Lesson
from .names import PATTERNS
from .question import Question, QuestionClass

# Words that stand between a key and its value in sentences, and around it in questions.
_IDLE = ("is", "in", "the", "for", "has", "was", "by", "of", "who", "what", "which", "works", "first", "played", "employer")
_WORDS = tuple(sorted({word for pattern in PATTERNS.values() for word in (*pattern.fronts, *pattern.backs)}))


@dataclass(frozen=True, slots=True, kw_only=True)
class Recall:
    """What recall lessons look like.

    Attributes:
        pairs: numbers of pairs; each lesson draws one.
        longest: words of a key, and of a value, at most.
        words: how many different words all lessons use together; with 100 the skill comes three times sooner than with all
            1,700, and carries over.
        idle: at most so many idle words between a key and its value, and on either side of the key where it is asked: the
            step from completing a pair to finding a name's fact.
    """

    pairs: tuple[int, ...]
    longest: int = 1
    words: int = len(_WORDS)
    idle: int = 0


def draw_recall(tokenizer: PreTrainedTokenizerFast, rng: random.Random, recall: Recall) -> Lesson:
    """A lesson of some pairs, every key asked once."""
    pairs = rng.choice(recall.pairs)
    lengths = [(rng.randint(1, recall.longest), rng.randint(1, recall.longest)) for _ in range(pairs)]
    # Every so many-th word, so that few words are of all lists.
    words = iter(rng.sample(_WORDS[:: len(_WORDS) // recall.words], sum(key + value for key, value in lengths)))
    told = [tuple(" ".join(next(words) for _ in range(length)) for length in both) for both in lengths]
    asked = tuple(
        Question(_idle(rng, recall, after=" ") + key + _idle(rng, recall, before=" "), value, QuestionClass.RECALL, ())
        for key, value in rng.sample(told, pairs)
    )
    texts = [", ".join(f"{key} {_idle(rng, recall, after=' ')}{value}" for key, value in told) + ".\n"]
    texts += [question.text for question in asked] + [question.written for question in asked]
    ids = [encoding.ids for encoding in tokenizer.backend_tokenizer.encode_batch(texts, add_special_tokens=False)]
    return Lesson([ids[0]], [0, 0], ids[1 : 1 + pairs], ids[1 + pairs :], asked, (1 / pairs,) * pairs)


def _idle(rng: random.Random, recall: Recall, before: str = "", after: str = "") -> str:
    words = rng.choices(_IDLE, k=rng.randint(0, recall.idle))
    return before + " ".join(words) + after if words else ""
