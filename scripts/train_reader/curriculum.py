"""The lessons' order: from short contexts of few articles to the test's, each stage until the reader passes it.

The reader learns first, on contexts of about a hundred tokens, what every later stage needs (find a fact by its subject's
name, carry a subject's name to where "she" stands); long contexts cost five times as much a lesson and teach it no better.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from transformers import PreTrainedTokenizerFast

from cacheblend.eval.world.article import Style
from cacheblend.eval.world.names import PATTERNS, Kind, Split
from cacheblend.eval.world.question import PLAIN, Question, QuestionClass, may_join
from cacheblend.eval.world.scene import Scene, group_scene, linked_scene
from cacheblend.eval.world.world import RELATIONS, make_world
from cacheblend.service.engine.config import INSTRUCTION

from .lesson import Batch, Lesson, make_batch, make_lesson

# Words that stand between a key and its value in sentences, and around it in questions.
_IDLE = ("is", "in", "the", "for", "has", "was", "by", "of", "who", "what", "which", "works", "first", "played", "employer")
_WORDS = tuple(sorted({word for pattern in PATTERNS.values() for word in (*pattern.fronts, *pattern.backs)}))


@dataclass(frozen=True, slots=True, kw_only=True)
class Recall:
    """Shape of recall lessons.

    Attributes:
        pairs: numbers of pairs; each lesson draws one.
        longest: words of a key, and of a value, at most.
        words: how many different words all lessons use together; with 100 the skill comes three times earlier than with all
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


_WEIGHTS = {
    QuestionClass.INSIDE: 1.0,
    QuestionClass.NEAR: 1.5,
    QuestionClass.ACROSS: 2.0,
    QuestionClass.REVERSE: 0.5,
    QuestionClass.TWO_HOP: 6.0,
    QuestionClass.COMPARE: 5.0,
    QuestionClass.CLOZE: 0.3,
    QuestionClass.BRIDGE: 2.0,
    QuestionClass.ORDER: 2.0,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One stage of the curriculum.

    Attributes:
        name: for the log.
        styles: how articles are written; each lesson draws one.
        articles: numbers of articles in a context; each lesson draws one.
        linked: share of contexts whose articles are pairs that a question of two hops joins.
        questions: at most this many questions a lesson.
        gaps: whether positions have random gaps (`make_lesson`).
        cut: share of lessons whose articles are cut as the engine cuts documents (`make_lesson`).
        without: classes that are not asked.
        plain_questions: share of questions without an opener; shorter questions, quicker steps.
        recall: what its recall lessons are like; None for lessons about articles.
        rows: the stage's lessons are so short that a step takes this many times as many.
        pass_mark: the stage ends when the recent accuracy of every class that counts (`trainer`) is at least this.
    """

    name: str
    styles: tuple[Style, ...] = (Style(),)
    articles: tuple[int, ...] = (3,)
    linked: float = 0.0
    questions: int = 16
    gaps: bool = False
    cut: float = 0.0
    without: frozenset[QuestionClass] = frozenset()
    plain_questions: float = PLAIN
    recall: Recall | None = None
    rows: int = 1
    pass_mark: float = 0.9
    kinds: tuple[Kind, ...] = field(default=tuple(Kind))


def _short(**changes: float) -> Style:
    settings: dict[str, float] = {"named_early": 0.5, "named_late": 0.2, "restated": 0.3, "plain": 0.8, **changes}
    return Style(chunks=2, chunk_tokens=0, facts=2, **settings)


def _brief(facts: int, named: float) -> Style:
    return Style(chunks=1, chunk_tokens=0, facts=facts, named_early=named, restated=0.2, plain=1.0)


_CUT_TOKENS = 48, 128
_LATER = frozenset({QuestionClass.COMPARE, QuestionClass.TWO_HOP})

STAGES: tuple[Stage, ...] = (
    Stage(name="few words", recall=Recall(pairs=(4,), words=100), rows=4, pass_mark=0.85),
    Stage(name="all words", recall=Recall(pairs=(4, 6)), rows=4, pass_mark=0.85),
    Stage(name="more pairs", recall=Recall(pairs=(4, 8), longest=2), rows=2, pass_mark=0.85),
    Stage(name="an idle word", recall=Recall(pairs=(4, 6), idle=1), rows=4, pass_mark=0.85),
    Stage(name="idle words", recall=Recall(pairs=(4, 6), idle=4), rows=2, pass_mark=0.85),
    Stage(name="one fact", styles=(_brief(1, 1.0),), articles=(4, 5), without=_LATER, plain_questions=1.0, pass_mark=0.8),
    Stage(name="two facts", styles=(_brief(2, 1.0),), articles=(3, 4), without=_LATER, plain_questions=1.0, pass_mark=0.8),
    Stage(
        name="names",
        styles=(_short(named_early=1.0, named_late=1.0, plain=1.0),),
        articles=(2, 3),
        without=_LATER,
        plain_questions=1.0,
        pass_mark=0.8,
    ),
    Stage(
        name="she",
        styles=(_brief(1, 0.2), _brief(2, 0.5)),
        articles=(3, 4),
        without=_LATER,
        plain_questions=1.0,
        pass_mark=0.85,
    ),
    Stage(name="pronouns", styles=(_short(),), articles=(2, 3), without=_LATER, plain_questions=1.0, pass_mark=0.85),
    Stage(
        name="numbers",
        styles=(_short(), _brief(2, 0.5)),
        articles=(2, 3),
        without=frozenset({QuestionClass.TWO_HOP}),
        plain_questions=1.0,
        pass_mark=0.85,
    ),
    Stage(
        name="links",
        styles=(_brief(2, 0.6),),
        articles=(2,),
        linked=1.0,
        questions=10,
        plain_questions=1.0,
        pass_mark=0.8,
    ),
    Stage(
        name="gaps",
        styles=(_short(named_late=0.1, restated=0.2), Style(chunks=2, chunk_tokens=0, facts=3, plain=0.6)),
        articles=(2, 3),
        linked=0.5,
        gaps=True,
        pass_mark=0.85,
    ),
    Stage(
        name="long",
        styles=(
            Style(chunks=2, chunk_tokens=32, plain=0.6, restated=0.15),
            Style(chunks=2),
            Style(chunks=3, chunk_tokens=48, restated=0.15),
        ),
        articles=(2, 3),
        linked=0.5,
        questions=24,
        gaps=True,
        cut=0.3,
        pass_mark=0.9,
    ),
    Stage(
        name="full",
        styles=(Style(), Style(restated=0.1), Style(chunk_tokens=96)),
        articles=(3,),
        linked=0.5,
        questions=32,
        gaps=True,
        cut=0.3,
        pass_mark=2.0,
    ),
)


def draw_batch(
    tokenizer: PreTrainedTokenizerFast, stage: Stage, *, seed: str, contexts: int, split: Split = Split.TRAIN
) -> Batch:
    """A batch of lessons of one stage; the same arguments give the same batch."""
    lessons = [draw_lesson(tokenizer, stage, f"{seed}/{row}", split) for row in range(contexts * stage.rows)]
    return make_batch(lessons, tokenizer)


def draw_lesson(tokenizer: PreTrainedTokenizerFast, stage: Stage, seed: str, split: Split) -> Lesson:
    """One lesson of a stage; the same arguments give the same lesson."""
    rng = random.Random(f"lesson/{stage.name}/{split}/{seed}")
    if stage.recall is not None:
        return draw_recall(tokenizer, rng, stage.recall)
    scene = _draw_scene(rng, stage, seed, split)
    asked = _choose(rng, scene, stage)
    preamble = INSTRUCTION if rng.random() < 0.5 else ""
    cut_at = rng.randint(*_CUT_TOKENS) if rng.random() < stage.cut else None
    return make_lesson(tokenizer, scene, asked, preamble=preamble, gaps=rng if stage.gaps else None, cut_at=cut_at)


def _draw_scene(rng: random.Random, stage: Stage, seed: str, split: Split) -> Scene:
    style, articles, kind = rng.choice(stage.styles), rng.choice(stage.articles), rng.choice(stage.kinds)
    world = make_world(seed, split, size=articles)
    group = world.groups[kind][0]
    if rng.random() >= stage.linked:
        return group_scene(rng, world, group, articles, style)
    first = rng.choice([relation for relation in RELATIONS[kind] if relation.target is not None])
    second = rng.choice([relation for relations in RELATIONS.values() for relation in relations if may_join(first, relation)])
    told = [r for g in (group, world.groups[second.kind][0]) for r in (*g.early[: style.facts], *g.late[: style.facts])]
    if style.chunks != 2 or first not in told or second not in told:
        return linked_scene(rng, world, group, first, None, articles, style)
    return linked_scene(rng, world, group, first, second, articles, style)


def _choose(rng: random.Random, scene: Scene, stage: Stage) -> Sequence[Question]:
    pools = scene.questions(rng, stage.plain_questions)
    pools = {each: pool for each, pool in pools.items() if pool and each not in stage.without}
    chosen: list[Question] = []
    while pools and len(chosen) < stage.questions:
        each = rng.choices(list(pools), [_WEIGHTS[each] for each in pools])[0]
        chosen.append(pools[each].pop(rng.randrange(len(pools[each]))))
        if not pools[each]:
            del pools[each]
    return chosen
