"""Search by words beside search by meaning, its second round, and the order of what is found."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from fakes import BlindEmbedder, tiny_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from cacheblend.retriever import Chunk, Retriever, RetrieverConfig, ScoredChunk, in_reading_order
from cacheblend.retriever.index import MAX_WORDS, VectorIndex, WordIndex, fuse_rankings

FILLER = [
    {"id": f"filler-{n}", "text": f"Page {n} has some remarks about the weather of this and that year."} for n in range(30)
]
VALVE = {"id": "valve", "text": "The valve XR-7719 must be opened before the pump starts."}


def open_retriever(directory: Path | None = None, **config: object) -> Retriever:
    settings = RetrieverConfig(directory=directory, **{"chunk_tokens": 60, **config})  # type: ignore[arg-type]
    return Retriever(settings, tiny_tokenizer(), BlindEmbedder("blind"))


@pytest.fixture
def retriever() -> Iterator[Retriever]:
    with open_retriever() as opened:
        opened.add([*FILLER, VALVE])
        yield opened


def best(retriever: Retriever, question: str, num_chunks: int = 1) -> list[str]:
    return [hit.chunk.document_id for hit in retriever.search(question, num_chunks)]


def test_a_word_finds_what_meaning_does_not(retriever: Retriever) -> None:
    """A part's number leads to its page."""
    assert best(retriever, "What about XR-7719?") == ["valve"]


def test_every_chunk_is_found_by_its_title() -> None:
    """The words of a document's title find its later chunks as well, where the title does not stand."""
    text = " ".join(f"Nothing here says what it is about, page after page {page}." for page in range(12))
    with open_retriever() as retriever:
        retriever.add([*FILLER, {"id": "long", "title": "Zephyr manual", "text": text}])
        found = retriever.search("zephyr", 3)
        assert [hit.chunk.document_id for hit in found] == ["long"] * 3
        assert any(hit.chunk.position > 0 for hit in found)


def test_names_lead_to_the_second_document() -> None:
    """The question names the film alone; its page names the director, and the director's page is found by that."""
    film = {"id": "film", "text": "The film Nightbridge was made in 1961. Its director was Ilse Tannhof."}
    person = {"id": "person", "text": "Ilse Tannhof was born in a small town near Graz, and died in Bern."}
    question = "Where was the one who made the film Nightbridge born?"
    with open_retriever() as two, open_retriever(search_rounds=1) as one:
        for each in (one, two):
            each.add([*FILLER, *({"id": f"born-{n}", "text": f"Number {n} was born where one was made."} for n in range(8))])
            each.add([film, person])
        assert "person" not in best(one, question, 3)
        assert best(two, question, 3)[0] == "film"
        assert "person" in best(two, question, 3)


def test_changes_are_followed(tmp_path: Path) -> None:
    """What was deleted or replaced is found no more, what came is, also where another process changed it."""
    with open_retriever(tmp_path) as retriever, open_retriever(tmp_path) as other:
        retriever.add([*FILLER, VALVE])
        assert best(retriever, "XR-7719") == best(other, "XR-7719") == ["valve"]
        retriever.add(
            [{"id": "valve", "text": "The valve QZ-88 replaces the older one."}, {"id": "new", "text": "A KB-90 gauge."}]
        )
        for each in (retriever, other):
            assert best(each, "QZ-88") == ["valve"]
            assert best(each, "KB-90") == ["new"]
            assert best(each, "XR-7719") == ["filler-0"]
        other.delete("new")
        for each in (retriever, other):
            assert best(each, "KB-90") == ["filler-0"]


@settings(max_examples=60, deadline=None)
@given(question=st.text(min_size=1, max_size=200).filter(lambda text: bool(text.strip())))
def test_a_question_is_no_query_language(question: str) -> None:
    """Whatever a question holds, quotes and operators included, is looked up as words."""
    with open_retriever() as retriever:
        retriever.add(FILLER[:3])
        assert len(best(retriever, f'{question} AND NEAR("x" *) -text: ^weather', 2)) == 2


def test_a_long_question_is_bounded(retriever: Retriever) -> None:
    """Of many words the rarest are looked up: the one that matters is among them."""
    assert best(retriever, "weather page remarks some year " * 400 + "XR-7719") == ["valve"]
    assert best(retriever, " ".join(f"word{n}" for n in range(50 * MAX_WORDS))) == ["filler-0"]
    assert best(retriever, " ".join(f"word{n}" for n in range(MAX_WORDS)) + " XR-7719") == ["valve"]


def test_a_common_word_with_an_accent_is_common() -> None:
    """It is counted as the index writes it, without the accent in Latin script, with it in Cyrillic."""
    words = WordIndex()
    words.update((), [(id_, str(id_), "", f"L'été à Йорк हिन्दी {'Zanzibar' * (id_ == 7)}") for id_ in range(40)])
    assert words.search("Zanzibar: été, à, Йорк?", 40) == [7]
    assert len(words.search("nowhere हिन्दी", 40)) == 40


def test_equal_texts_have_one_place(retriever: Retriever) -> None:
    """More copies of a text than a search ranks do not keep other texts from it."""
    copies = [{"id": f"copy {number}", "text": "Trains are booked early."} for number in range(60)]
    retriever.add([*copies, *({"id": f"other {letter}", "text": f"Trains to {letter * 3}."} for letter in "abcd")])
    assert len(retriever.search("Which trains are booked early?", 5)) == 5


def test_rankings_are_fused() -> None:
    """What both lists have high comes before what only one has; equals keep the order of adding."""
    assert fuse_rankings([[1, 2, 3], [2, 4]]) == [2, 1, 4, 3]
    assert fuse_rankings([[7], [5]]) == [5, 7]
    assert fuse_rankings([]) == []


def test_the_second_round_reads_all_that_was_found_of_the_best_document() -> None:
    """The name that leads on may stand in another chunk of the document than the best one."""
    poem = "The dream of the ladder is a long poem about a dream and a ladder. "
    bridge = "In those years a hall by the market had it. Then it went to Orvik, and there it still is. "
    documents = [
        {"id": "poem", "text": f"{poem}\n\n{bridge}"},
        *({"id": f"other-{n}", "text": f"A remark of year {n} about some hills and some rain."} for n in range(60)),
        {"id": "town", "text": "Orvik lies at Sillen, which is wide."},  # last: of equal ones the first are found
    ]
    question = "What about a dream and a ladder?"
    with open_retriever(chunk_tokens=40) as retriever:
        retriever.add(documents)
        assert "Orvik" not in retriever.search(question, 1)[0].chunk.text
        found = [hit.chunk for hit in retriever.search(question, 6)]
        assert "Orvik" not in found[0].text
        assert "town" in {chunk.document_id for chunk in found}


def vectors(count: int, dimensions: int = 16) -> np.ndarray:
    return np.random.default_rng(0).normal(size=(count, dimensions)).astype(np.float32)


@pytest.mark.parametrize("num_chunks", [1, 5, 150, 200])
def test_equals_come_in_the_order_of_their_ids(num_chunks: int) -> None:
    """Among equal vectors the lowest ids are found, in order, also where not all of them fit."""
    index = VectorIndex(16)
    index.add(range(10, 210), np.repeat(vectors(1), 200, axis=0))
    assert index.search(vectors(1)[0] + 1, num_chunks) == list(range(10, 10 + num_chunks))


def test_chunks_of_a_document_stand_in_its_order_and_documents_by_their_nearest_chunk() -> None:
    """Chunks of a document stand together, in its order; documents by their nearest chunk."""
    places = [("b", 1), ("a", 0), ("b", 0), ("c", 2), ("a", 3)]
    found = [ScoredChunk(Chunk(id_, "v", position, "", "text", (1,)), 0.1) for id_, position in places]
    order = [(each.chunk.document_id, each.chunk.position) for each in in_reading_order(found)]
    assert order == [("b", 0), ("b", 1), ("a", 0), ("a", 3), ("c", 2)]
    assert in_reading_order([]) == []
