"""What was found, cut at a score."""

import pytest
from fakes import FakeEmbedder, tiny_tokenizer

from cacheblend.retriever import Retriever, RetrieverConfig

WORDS = ["dog", "cat", "river", "runs", "sleeps", "through", "the", "over", "under", "house", "with", "bird"]
DOCUMENTS = [
    {"id": f"{n}", "title": "Pets", "text": f"the {WORDS[n % 6]} {WORDS[3 + n % 5]} {WORDS[n % 11]} the {WORDS[n % 7]}"}
    for n in range(24)
]
QUESTION = "the dog runs through the river"


def open_retriever(**settings: object) -> Retriever:
    config = RetrieverConfig(**{"chunk_tokens": 60, "search_rounds": 1, **settings})  # type: ignore[arg-type]
    retriever = Retriever(config, tiny_tokenizer(), FakeEmbedder())
    retriever.add(DOCUMENTS)
    return retriever


def test_chunks_below_the_score_are_left_out() -> None:
    """The score is the cosine similarity, also of what its words have found; what is below is left out, if need be all."""
    with open_retriever() as retriever:
        every = retriever.search(QUESTION, 12)
    for hit in every:
        assert hit.score == pytest.approx(1 - hit.distance / 2)
    least = sorted(hit.score for hit in every)[6]
    for threshold, expected in ((least, [hit for hit in every if hit.score >= least]), (1, [])):
        with open_retriever(min_score=threshold) as retriever:
            found = retriever.search(QUESTION, 12)
        assert [hit.chunk.document_id for hit in found] == [hit.chunk.document_id for hit in expected]
