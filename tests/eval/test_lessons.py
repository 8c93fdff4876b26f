"""The lessons: deterministic, of the stage's classes, and never with a name or wording that is held out."""

from __future__ import annotations

import random

import pytest

from cacheblend.eval.world.article import OPENERS, QUESTION_OPENERS, is_held_out, pick
from cacheblend.eval.world.names import Split
from cacheblend.eval.world.question import QuestionClass
from cacheblend.eval.world.tokens import make_tokenizer
from train_reader.curriculum import STAGES, Recall, Stage, draw_lesson, draw_recall

TOKENIZER = make_tokenizer()


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.name)
def test_a_lesson_is_the_same_for_the_same_seed_and_asks_no_class_its_stage_leaves_out(stage: Stage):
    for seed in "abcd":
        lesson = draw_lesson(TOKENIZER, stage, seed, Split.TRAIN)
        assert lesson == draw_lesson(TOKENIZER, stage, seed, Split.TRAIN)
        asked = {question.question_class for question in lesson.questions}
        assert asked
        assert not asked & stage.without
        assert len(lesson.questions) <= stage.questions


def test_the_last_stage_asks_every_class_of_the_test():
    asked = {
        question.question_class
        for seed in range(20)
        for question in draw_lesson(TOKENIZER, STAGES[-1], str(seed), Split.TRAIN).questions
    }
    assert {QuestionClass.INSIDE, QuestionClass.ACROSS, QuestionClass.TWO_HOP, QuestionClass.COMPARE} <= asked


@pytest.mark.parametrize(("openers", "period"), [(len(OPENERS), 5), (len(QUESTION_OPENERS), 4)])
def test_training_never_puts_an_opener_before_a_wording_that_is_held_out_and_the_test_does(openers: int, period: int):
    drawn = {
        split: {pick(random.Random(seed), split, openers, 3, period, plain=0.3) for seed in range(500)}
        for split in (Split.TRAIN, Split.TEST)
    }
    held_out = {pair for pair in drawn[Split.TEST] if is_held_out(*pair, period)}
    assert held_out
    assert drawn[Split.TRAIN] == drawn[Split.TEST] - held_out


def test_a_recall_lesson_has_every_key_once_and_its_value_behind_it():
    lesson = draw_recall(TOKENIZER, random.Random(0), Recall(pairs=(6,), longest=2))
    text = TOKENIZER.decode(lesson.chunks[0])
    assert all(text.count(f"{question.text} {question.answer}") == 1 for question in lesson.questions)
    assert len({question.text for question in lesson.questions}) == 6
    assert lesson.guess == (1 / 6,) * 6
