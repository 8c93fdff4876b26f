"""Test cases: each class is what its name says, and guessing gets little."""

from __future__ import annotations

import pytest

from cacheblend.base.errors import ConfigError
from cacheblend.eval.world.article import count_tokens
from cacheblend.eval.world.case import Case, CaseConfig, guessing_levels, make_cases, world_of
from cacheblend.eval.world.names import Split
from cacheblend.eval.world.question import TESTED, QuestionClass
from cacheblend.eval.world.world import World

COUNT = 80


@pytest.fixture(scope="module")
def cases() -> tuple[Case, ...]:
    return make_cases(3, COUNT)


@pytest.fixture(scope="module")
def world() -> World:
    return world_of(3, COUNT)


def _of(cases: tuple[Case, ...], wanted: QuestionClass) -> list[Case]:
    return [case for case in cases if case.question_class is wanted]


def _subject_of(case: Case, world: World) -> str:
    """The longest subject's name in the question."""
    return max((name for name in world.facts if name in case.question), key=len)


def test_the_same_seed_gives_the_same_cases_and_another_seed_others(cases):
    assert make_cases(3, COUNT) == cases
    assert make_cases(4, COUNT) != cases


def test_classes_come_in_turn(cases):
    assert [case.question_class for case in cases[:8]] == [*TESTED, *TESTED]


def test_contexts_have_six_chunks_or_more_of_64_tokens_in_article_order(cases):
    for case in cases:
        assert all(count_tokens(chunk.text) >= 64 for chunk in case.chunks)
        assert len(case.chunks) >= 6
        for document in {chunk.document for chunk in case.chunks}:
            places = [place for place, chunk in enumerate(case.chunks) if chunk.document == document]
            assert places == list(range(places[0], places[0] + len(places)))
            assert [case.chunks[place].index for place in places] == sorted(case.chunks[place].index for place in places)


def test_inside_has_one_gold_chunk_with_a_sentence_that_names_subject_and_value(cases, world):
    for case in _of(cases, QuestionClass.INSIDE):
        (gold,) = [chunk for chunk in case.chunks if chunk.is_gold]
        subject = _subject_of(case, world)
        assert any(subject in sentence and case.answers[0] in sentence for sentence in gold.text.split(". "))


def test_across_has_its_fact_in_a_chunk_that_never_names_its_subject_behind_one_that_does(cases, world):
    for case in _of(cases, QuestionClass.ACROSS):
        before, telling = [chunk for chunk in case.chunks if chunk.is_gold]
        subject = _subject_of(case, world)
        assert case.answers[0] in telling.text
        assert subject not in telling.text
        assert subject in before.text
        assert case.chunks.index(telling) == case.chunks.index(before) + 1


def test_across_has_rivals_of_the_same_relation_none_of_them_named_in_the_chunk_that_tells_it(cases):
    """Else full KV reuse could answer by elimination."""
    for case in _of(cases, QuestionClass.ACROSS):
        assert len(set(case.candidates)) == 3
        for candidate in case.candidates:
            (telling,) = [chunk for chunk in case.chunks if chunk.index == 1 and f" {candidate}" in chunk.text][:1]
            own = [chunk.document for chunk in case.chunks if chunk.document == telling.document]
            assert len(own) == 2


def test_two_hop_rests_on_two_articles_and_does_not_name_the_first_hops_value(cases):
    for case in _of(cases, QuestionClass.TWO_HOP):
        assert len({chunk.document for chunk in case.chunks if chunk.is_gold}) == 2
        assert case.answers[0] in " ".join(chunk.text for chunk in case.chunks if chunk.is_gold)


def test_compare_names_two_subjects_and_the_answer_is_one_of_them(cases):
    for case in _of(cases, QuestionClass.COMPARE):
        assert len(case.candidates) == 2
        assert all(candidate in case.question for candidate in case.candidates)
        assert case.answers[0] in case.candidates


def test_guessing_gets_a_third_where_three_articles_share_the_relation_and_half_in_a_comparison(cases):
    levels = guessing_levels(cases)
    assert set(levels) == set(TESTED)
    assert all(1 / 3 <= levels[each] < 0.45 for each in (QuestionClass.INSIDE, QuestionClass.ACROSS, QuestionClass.TWO_HOP))
    assert 0.5 <= levels[QuestionClass.COMPARE] < 0.6


def test_no_case_of_one_split_shares_a_subject_with_another_split(cases):
    others = make_cases(3, COUNT, Split.TRAIN)
    documents = {chunk.document for case in cases for chunk in case.chunks}
    assert not documents & {chunk.document for case in others for chunk in case.chunks}


@pytest.mark.parametrize("changes", [{"articles": 1}, {"articles": 99}, {"classes": ()}, {"classes": (QuestionClass.NEAR,)}])
def test_a_config_that_makes_no_cases_is_refused(changes):
    with pytest.raises(ConfigError):
        CaseConfig(**changes)


def test_no_cases_cannot_be_asked_for():
    with pytest.raises(ConfigError, match="count"):
        make_cases(0, 0)
