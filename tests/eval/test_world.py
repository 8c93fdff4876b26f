"""The fictional encyclopedia: the same seed, the same bytes; no fact in two splits; what an article promises."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cacheblend.eval.world.article import Style, count_tokens, write_article
from cacheblend.eval.world.case import documents, write_corpus
from cacheblend.eval.world.names import PATTERNS, RESIDUES, Kind, Namer, Split, split_of
from cacheblend.eval.world.world import World, make_world


def _subjects(world: World) -> set[str]:
    return set(world.facts)


def test_a_seed_gives_the_same_articles_byte_for_byte_and_another_seed_others():
    one, again, other = (list(documents(make_world(seed, Split.TEST, 1, 3))) for seed in ("7", "7", "8"))
    assert one == again
    assert one != other


def test_every_residue_belongs_to_exactly_one_split():
    """What makes the splits disjoint for every seed: a name's split is a function of its part indices."""
    assert sorted(residue for residues in RESIDUES.values() for residue in residues) == list(range(10))


def test_no_two_pairs_of_parts_compose_the_same_name():
    """Else a name could belong to two splits after all."""
    for pattern in PATTERNS.values():
        names = {pattern.name(i, j) for i in range(len(pattern.fronts)) for j in range(len(pattern.backs))}
        assert len(names) == len(pattern.fronts) * len(pattern.backs)


def test_every_name_part_is_met_in_training():
    for pattern in PATTERNS.values():
        assert all(any(split_of(i, j) is Split.TRAIN for j in range(len(pattern.backs))) for i in range(len(pattern.fronts)))
        assert all(any(split_of(i, j) is Split.TRAIN for i in range(len(pattern.fronts))) for j in range(len(pattern.backs)))


def test_the_name_lists_compose_hundreds_of_thousands_of_names():
    assert sum(len(pattern.fronts) * len(pattern.backs) for pattern in PATTERNS.values()) > 200_000


@settings(max_examples=20, deadline=None)
@given(st.text(max_size=8), st.text(max_size=8), st.sampled_from([Split.VALIDATION, Split.TEST]))
def test_worlds_of_different_splits_share_no_subject(seed: str, other_seed: str, split: Split):
    assert not _subjects(make_world(seed, Split.TRAIN)) & _subjects(make_world(other_seed, split))


def test_subjects_of_a_world_have_the_split_that_was_asked():
    namer = Namer(random.Random(0), Split.VALIDATION)
    for (kind, pronoun), pattern in PATTERNS.items():
        front, _, back = namer.draw(kind, pronoun).partition(pattern.joint)
        assert split_of(pattern.fronts.index(front), pattern.backs.index(back)) is Split.VALIDATION


@pytest.fixture(scope="module")
def world() -> World:
    return make_world("articles", Split.TEST, 2, 5)


def test_a_group_shares_its_pronoun_and_no_two_of_it_share_a_value(world: World):
    for groups in world.groups.values():
        for group in groups:
            assert len({entity.pronoun for entity in group.entities}) == 1
            for place in range(len(world.facts[group.entities[0].name])):
                assert len({world.facts[entity.name][place].value for entity in group.entities}) == len(group.entities)


@pytest.mark.parametrize("chunk_tokens", [64, 128])
def test_articles_are_longer_than_a_chunk_and_name_their_subject_in_the_first_only(world: World, chunk_tokens: int):
    for groups in world.groups.values():
        for group in groups:
            for entity in group.entities:
                article = write_article(world, group, entity, Style(chunk_tokens=chunk_tokens))
                assert all(count_tokens(chunk) >= chunk_tokens and chunk.endswith("\n\n") for chunk in article.chunks)
                assert [entity.name in chunk for chunk in article.chunks] == [True, False]


def test_every_fact_is_told_once_and_its_flags_say_where_the_name_is(world: World):
    group = world.groups[Kind.PERSON][0]
    for entity in group.entities:
        article = write_article(world, group, entity, Style())
        assert sorted(told.fact.relation.key for told in article.told) == sorted(
            f.relation.key for f in world.facts[entity.name]
        )
        for told in article.told:
            chunk = article.chunks[told.chunk]
            (sentence,) = [s for s in chunk.split(".") if told.fact.value in s.split() or f" {told.fact.value}" in s][:1]
            assert (entity.name in sentence) == told.sentence_names
            assert (entity.name in chunk) == told.chunk_names


def test_a_corpus_has_at_least_as_many_articles_as_asked_and_overwrites_nothing(tmp_path):
    assert write_corpus(tmp_path / "corpus.jsonl", seed=1, articles=40) >= 40
    assert len((tmp_path / "corpus.jsonl").read_text().splitlines()) >= 40
    with pytest.raises(FileExistsError):
        write_corpus(tmp_path / "corpus.jsonl", seed=1, articles=40)
