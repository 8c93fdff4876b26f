"""The retriever as its users see it, with a fake embedder."""

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from fakes import FakeEmbedder, tiny_tokenizer

from cacheblend.base.errors import InputError, RetrieverError, StoreFullError
from cacheblend.retriever import Document, Retriever, RetrieverConfig

CATS = {"id": "cats", "title": "Cats", "text": "A cat sleeps on the warm roof."}
DOGS = {"id": "dogs", "title": "Dogs", "text": "A dog runs through the cold river."}
BIRDS = {"id": "birds", "title": "Birds", "text": "Birds fly over the mountain in autumn."}


def open_retriever(
    directory: Path | None = None, embedder: FakeEmbedder | None = None, vocab: int = 600, **config: object
) -> Retriever:
    settings = RetrieverConfig(directory=directory, **{"chunk_tokens": 12, **config})  # type: ignore[arg-type]
    return Retriever(settings, tiny_tokenizer(vocab), embedder or FakeEmbedder())


@pytest.fixture
def retriever() -> Iterator[Retriever]:
    with open_retriever() as opened:
        yield opened


def found(retriever: Retriever, question: str, num_chunks: int = 3) -> list[tuple[str, int]]:
    return [(hit.chunk.document_id, hit.chunk.position) for hit in retriever.search(question, num_chunks)]


@pytest.mark.parametrize(
    ("earlier", "question", "found"),
    [
        ("What does the dog do at the river?", "Is that so?", "dogs"),
        ("What does the cat do on the roof?", "Is that so?", "cats"),
        ("What does the dog do at the river?", "And birds in autumn?", "birds"),
        ("What does the cat do on the roof?".ljust(1000) + "dog river " * 9, "Is that so?", "cats"),  # it is cut
    ],
)
def test_a_question_that_follows_up(earlier: str, question: str, found: str) -> None:
    """It is searched for together with the one before, and by itself, so that a new subject is found too."""
    with open_retriever() as retriever:
        retriever.add([CATS, DOGS, BIRDS])
        assert retriever.search(question, 1, earlier_question=earlier)[0].chunk.document_id == found


def test_distances_of_what_is_found() -> None:
    """Each chunk found has its squared L2 distance from the question, as brute force has it; the nearest comes first."""
    with open_retriever() as retriever:
        retriever.add([CATS, DOGS, BIRDS])
        hits = retriever.search("the dog runs through the river", 3)
        chunks = retriever.chunks()
    # Every chunk is found by its document's title as well; in the first one's text it stands already.
    texts = [chunk.text if chunk.position == 0 else f"{chunk.title}\n{chunk.text}" for chunk in chunks]
    vectors_ND = FakeEmbedder().encode(texts)
    distances = ((vectors_ND - FakeEmbedder().encode(["the dog runs through the river"])) ** 2).sum(axis=1)
    at = [chunks.index(hit.chunk) for hit in hits]
    np.testing.assert_allclose([hit.distance for hit in hits], distances[at], atol=1e-6)
    assert at[0] == np.argmin(distances)
    assert hits[0].chunk.document_id == "dogs"


def test_adding_again_skips_or_replaces(retriever: Retriever) -> None:
    """A document known already is skipped, one with a known id and another text replaces it."""
    first = retriever.add([CATS, DOGS, CATS])
    assert first == retriever.chunks()
    new_cats = {**CATS, "text": "Cats now live on the moon. " * 6}
    second = retriever.add([new_cats, DOGS, BIRDS])
    assert {chunk.document_id for chunk in second} == {"cats", "birds"}
    assert [document.id for document in retriever.documents()] == ["dogs", "cats", "birds"]
    assert {chunk.version for chunk in retriever.chunks("cats")} == {Document.of(new_cats).version}
    assert all("roof" not in hit.chunk.text for hit in retriever.search("cat sleeps on the warm roof", len(retriever.chunks())))


def test_ids_that_begin_with_a_text(retriever: Retriever) -> None:
    """Ids are found by their beginning, letter by letter as they are written, in the order of adding."""
    retriever.add([{"id": id_, "text": "some text"} for id_ in ("a#é", "a", "A#1", "a$", "a#1", "a #1", "á#1", "b#1")])
    assert retriever.ids("a#") == ["a#é", "a#1"]
    assert retriever.ids("a") == ["a#é", "a", "a$", "a#1", "a #1"]
    assert retriever.ids("c") == []


def test_deleted_document_is_not_found(retriever: Retriever) -> None:
    """A deleted document leaves neither chunks nor hits, and can be added anew."""
    retriever.add([CATS, DOGS])
    retriever.delete("dogs")
    assert {id_ for id_, _ in found(retriever, "dog", len(retriever.chunks()))} == {"cats"}
    for call in (retriever.delete, retriever.chunks):
        with pytest.raises(InputError, match="no document 'dogs'"):
            call("dogs")
    assert retriever.add([DOGS])
    assert found(retriever, "dog runs", 1)[0][0] == "dogs"


def test_everything_is_there_after_reopening(tmp_path: Path) -> None:
    """A directory opened again has the same documents, chunks and hits."""
    with open_retriever(tmp_path / "a" / "b") as retriever:
        retriever.add([CATS, {**BIRDS, "text": "漢字 😀 \x00 " + BIRDS["text"]}])
        before = retriever.documents(), retriever.chunks(), retriever.search("cat on a roof", 3)
    with open_retriever(tmp_path / "a" / "b") as retriever:
        assert (retriever.documents(), retriever.chunks(), retriever.search("cat on a roof", 3)) == before
        retriever.add([DOGS])
        assert found(retriever, "dog river", 1)[0][0] == "dogs"


def test_two_open_retrievers_see_each_others_documents(tmp_path: Path) -> None:
    """What one process adds or deletes, another that has the directory open finds at its next search."""
    with open_retriever(tmp_path) as one, open_retriever(tmp_path) as two:
        one.add([CATS])
        assert found(two, "cat", 1)[0][0] == "cats"
        two.add([DOGS])
        assert found(one, "dog runs", 1)[0][0] == "dogs"
        one.delete("cats")
        assert {id_ for id_, _ in found(two, "cat", len(two.chunks()))} == {"dogs"}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"chunk_tokens": 20}, "built with chunk_tokens '12', and this run has '20'.*another folder"),
        ({"embedder": FakeEmbedder("other")}, "embedder 'fake', and this run has 'other'.*cacheblend reindex"),
        ({"vocab": 500}, "built with another model; .*cacheblend reindex"),
    ],
)
def test_other_settings_are_refused(tmp_path: Path, change: dict[str, object], says: str) -> None:
    """A directory with documents refuses other settings with the remedy; an empty one takes them."""
    with open_retriever(tmp_path):
        pass
    with open_retriever(tmp_path, chunk_tokens=99) as retriever:
        assert retriever.documents() == []
    with open_retriever(tmp_path) as retriever:
        retriever.add([CATS])
    with pytest.raises(RetrieverError, match=says):
        open_retriever(tmp_path, **change)  # type: ignore[arg-type]


def test_vectors_of_another_length_are_refused(tmp_path: Path) -> None:
    """An embedder of the same name with other dimensions can neither add nor search, until the directory is empty."""
    with open_retriever(tmp_path) as retriever:
        retriever.add([CATS])
    with open_retriever(tmp_path, FakeEmbedder(dimensions=32)) as retriever:
        with pytest.raises(RetrieverError, match="32"):
            retriever.add([DOGS])
        with pytest.raises(RetrieverError, match="32 dimensions, the index has 64"):
            retriever.search("cat", 1)
        retriever.delete("cats")
        retriever.add([DOGS])
        assert found(retriever, "dog", 1)[0][0] == "dogs"


@pytest.mark.parametrize(
    ("question", "num_chunks", "says"),
    [
        *(("cat", count, f"num_chunks={count!r}") for count in (0, -1, 1.0, True, None, "3")),
        *((question, 1, "question") for question in ("", " \n", None)),
    ],
)
def test_bad_searches_are_refused(retriever: Retriever, question: object, num_chunks: object, says: str) -> None:
    """A num_chunks that is no count is refused by its value, and so is a question without words."""
    retriever.add([CATS])
    with pytest.raises(InputError, match=says):
        retriever.search(question, num_chunks)  # type: ignore[arg-type]  # on purpose


def test_search_beyond_the_corpus_gives_what_there_is(retriever: Retriever) -> None:
    """An empty corpus says to ingest; a num_chunks above the corpus gives all of it."""
    with pytest.raises(InputError, match="ingest"):
        retriever.search("cat", 1)
    retriever.add([CATS])
    chunks = len(retriever.chunks())
    assert len(retriever.search("cat", chunks)) == chunks
    assert len(retriever.search("cat", chunks + 1000)) == chunks
    retriever.delete("cats")
    with pytest.raises(InputError, match="ingest"):
        retriever.search("cat", 1)


def test_interrupted_add_keeps_whole_documents(tmp_path: Path) -> None:
    """When adding stops midway, documents are there whole or not at all, and adding again goes on."""
    documents = [{"id": str(number), "text": f"Document {number}. " * 40} for number in range(12)]

    def interrupt(done: int, total: int) -> None:
        if (done, total) == (5, 12):
            raise KeyboardInterrupt

    with open_retriever(tmp_path) as retriever:
        with pytest.raises(KeyboardInterrupt):
            retriever.add(documents, on_progress=interrupt)
        assert [document.id for document in retriever.documents()] == [str(number) for number in range(5)]
        assert len(retriever.search("Document 3", len(retriever.chunks()))) == len({one.text for one in retriever.chunks()})
    progress: list[tuple[int, int]] = []
    with open_retriever(tmp_path) as retriever:
        new = retriever.add(documents, on_progress=lambda done, total: progress.append((done, total)))
    assert [*dict.fromkeys(chunk.document_id for chunk in new)] == [str(number) for number in range(5, 12)]
    assert progress == [(done, 12) for done in range(5, 13)]


def test_failing_write_changes_nothing() -> None:
    """A replacement that fails halfway leaves the old version in place and searchable."""
    with open_retriever(index_budget_bytes=60_000) as retriever:
        retriever.add([CATS])
        before = retriever.chunks()
        with pytest.raises(StoreFullError, match="index_budget_bytes=60000"):
            retriever.add([{**CATS, "text": "other words " * 2000}])
        assert retriever.chunks() == before
        assert {hit.chunk for hit in retriever.search("cat", len(before))} == set(before)


def test_threads_add_and_search_at_once(retriever: Retriever) -> None:
    """Threads that add, delete and search at once neither fail nor lose a document."""
    retriever.add([CATS])
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for step in range(6):
                retriever.add([{"id": f"{number}-{step}", "text": f"Thread {number} wrote sentence {step}."}])
                retriever.search("sentence", 1)
                if step % 2:
                    retriever.delete(f"{number}-{step}")
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert len(retriever.documents()) == 1 + 4 * 3
    assert len(retriever.search("cat", len(retriever.chunks()))) == len({one.text for one in retriever.chunks()})


def test_directory_that_is_not_a_retrievers_is_refused(tmp_path: Path) -> None:
    """A file in the directory's place, or a catalog that is not one, is refused with the remedy."""
    (tmp_path / "file").write_text("x")
    with pytest.raises(RetrieverError, match="choose another directory"):
        open_retriever(tmp_path / "file")
    (tmp_path / "catalogue.sqlite").write_text("not a database, " * 100)
    with pytest.raises(RetrieverError, match=r"not a database.*another directory"):
        open_retriever(tmp_path)


def test_bad_embedder_is_refused(retriever: Retriever, monkeypatch: pytest.MonkeyPatch) -> None:
    """Vectors of a wrong shape or with NaN are refused before anything is stored."""
    for vectors in (np.zeros((1, 64)), np.full((2, 64), np.nan), np.zeros((2, 63))):
        monkeypatch.setattr(retriever.embedder, "encode", lambda _, vectors=vectors: vectors)
        with pytest.raises(RetrieverError, match="embedder 'fake' gave"):
            retriever.add([CATS])
    assert retriever.documents() == []
