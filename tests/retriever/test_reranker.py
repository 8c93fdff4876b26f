"""What was found, ordered anew by a CrossEncoder, and cut at a score."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from fakes import FakeEmbedder, tiny_tokenizer
from transformers import BertConfig, BertForSequenceClassification, BertTokenizerFast

from cacheblend.base.errors import RetrieverError
from cacheblend.retriever import Retriever, RetrieverConfig
from cacheblend.retriever.embedder import CrossEncoderReranker

WORDS = ["dog", "cat", "river", "runs", "sleeps", "through", "the", "over", "under", "house", "with", "bird"]
DOCUMENTS = [
    {"id": f"{n}", "title": "Pets", "text": f"the {WORDS[n % 6]} {WORDS[3 + n % 5]} {WORDS[n % 11]} the {WORDS[n % 7]}"}
    for n in range(24)
]
QUESTION = "the dog runs through the river"


def make_reranker(folder: Path, labels: int = 1) -> Path:
    """A BERT of one layer with random, large weights and a tokenizer of a few words."""
    folder.mkdir()
    (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "pets", *WORDS]))
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    torch.manual_seed(3)
    model = BertForSequenceClassification(BertConfig(vocab_size=6 + len(WORDS), num_labels=labels, **sizes))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    model.save_pretrained(folder)
    BertTokenizerFast(vocab=str(folder / "vocab.txt"), model_max_length=64).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_reranker(tmp_path_factory.mktemp("models") / "reranker")


def open_retriever(**settings: object) -> Retriever:
    config = RetrieverConfig(**{"chunk_tokens": 60, "search_rounds": 1, **settings})  # type: ignore[arg-type]
    retriever = Retriever(config, tiny_tokenizer(), FakeEmbedder())
    retriever.add(DOCUMENTS)
    return retriever


def test_the_reranker_orders_more_than_are_wanted(reranker: Path) -> None:
    """Of four times as many candidates those with the model's highest scores are given, highest first."""
    with open_retriever() as plain:
        candidates = plain.search(QUESTION, 12)
    model = BertForSequenceClassification.from_pretrained(reranker).eval()
    tokenizer = BertTokenizerFast.from_pretrained(reranker)
    expected = {}
    for hit in candidates:
        with torch.no_grad():
            logits = model(**tokenizer(QUESTION, f"Pets\n{hit.chunk.text}", return_tensors="pt")).logits
        expected[hit.chunk.document_id] = float(logits.sigmoid())
    with open_retriever(reranker=str(reranker)) as retriever:
        assert isinstance(retriever.reranker, CrossEncoderReranker)
        assert retriever.reranker._model is None  # loaded at the first use
        found = retriever.search(QUESTION, 3)
    best = sorted(expected, key=lambda id_: -expected[id_])[:3]
    assert [hit.chunk.document_id for hit in found] == best
    assert [hit.score for hit in found] == pytest.approx([expected[id_] for id_ in best], abs=1e-5)
    assert best != [hit.chunk.document_id for hit in candidates[:3]]


def test_rerankers_that_cannot_be_used(tmp_path: Path) -> None:
    """A model of two labels, and one that is nowhere, are refused by name with what to do."""
    two = make_reranker(tmp_path / "two", labels=2)
    for name, why in ((two, "has 2 labels"), (tmp_path / "none", "hf download"), ("nothing", "cross-encoder/nothing")):
        with open_retriever(reranker=str(name)) as retriever, pytest.raises(RetrieverError, match=why):
            retriever.search(QUESTION, 3)


@pytest.mark.parametrize("retrieval", ["dense", "hybrid"])
def test_chunks_below_the_score_are_left_out(retrieval: str) -> None:
    """The score is the cosine similarity, also of what its words have found; what is below is left out, if need be all."""
    with open_retriever(retrieval=retrieval) as retriever:
        every = retriever.search(QUESTION, 12)
    for hit in every:
        assert hit.score == pytest.approx(1 - hit.distance / 2)
    least = sorted(hit.score for hit in every)[6]
    for threshold, expected in ((least, [hit for hit in every if hit.score >= least]), (1, [])):
        with open_retriever(retrieval=retrieval, min_score=threshold) as retriever:
            found = retriever.search(QUESTION, 12)
        assert [hit.chunk.document_id for hit in found] == [hit.chunk.document_id for hit in expected]


def test_the_score_is_the_rerankers(reranker: Path) -> None:
    """With both, the reranker's score decides."""
    with open_retriever(reranker=str(reranker)) as retriever:
        scores = [hit.score for hit in retriever.search(QUESTION, 6)]
    with open_retriever(reranker=str(reranker), min_score=scores[2]) as retriever:
        assert [hit.score for hit in retriever.search(QUESTION, 6)] == pytest.approx(scores[:3])
