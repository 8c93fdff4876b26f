"""The packaged reader, its corpus and its questions."""

from __future__ import annotations

from collections import Counter

import pytest
from fakes import FakeEmbedder
from transformers import AutoModelForCausalLM, AutoTokenizer

from cacheblend.cli.model import CHUNK_TOKENS, READER, bundled_corpus, default_model
from cacheblend.eval.demo import CLASSES, ask_all, bundled_questions, marked_tokens
from cacheblend.eval.world.tokens import make_tokenizer
from cacheblend.retriever import RetrieverConfig
from cacheblend.service import Engine, EngineConfig


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    folder = tmp_path_factory.mktemp("store")
    config = EngineConfig(
        model=default_model(), store_dir=folder, max_tokens=8, retriever=RetrieverConfig(chunk_tokens=CHUNK_TOKENS)
    )
    with Engine(config, embedder=FakeEmbedder()) as engine:
        engine.ingest(bundled_corpus()[:12])
        yield engine


def test_the_reader_is_a_small_llama_that_transformers_loads():
    model = AutoModelForCausalLM.from_pretrained(default_model())
    tokenizer = AutoTokenizer.from_pretrained(default_model())
    assert model.config.model_type == "llama"
    assert model.config.num_hidden_layers >= 8
    assert tokenizer.get_vocab() == make_tokenizer().get_vocab()
    assert sum(path.stat().st_size for path in READER.iterdir()) <= 16 * 2**20


def test_the_questions_are_about_the_corpus():
    corpus, questions = bundled_corpus(), bundled_questions()
    titles = {document["id"] for document in corpus}
    assert len(corpus) == len(titles) >= 200
    assert len(questions) >= 50
    assert min(Counter(item.question_class for item in questions)[each] for each in CLASSES) >= 10
    assert all(titles.issuperset(item.gold) and item.answers and item.gold for item in questions)


def test_every_method_is_scored_on_every_class(engine):
    questions = bundled_questions()[:4]
    result = ask_all(engine, questions, top_k=4)
    assert set(result.methods) == {"full_recompute", "prefix_cache", "full_reuse", "blend"}
    for row in result.methods.values():
        assert {each: score.cases for each, score in row.items()} == {**dict.fromkeys(CLASSES, 1), "all": 4}
        assert all(0 <= score.f1 <= 1 and score.ttft_s_median > 0 for score in row.values())
    assert set(result.as_dict()["methods"]["blend"]["across"]) == {"f1", "cases", "ttft_s_median"}
    assert all(0 <= share <= 1 for share in result.recall.values())


def test_marked_tokens_are_the_chunks_own_text(engine):
    answer = engine.answer(bundled_questions()[0].question, top_k=3, recompute_ratio=0.3)
    marks = marked_tokens(engine, answer)
    assert [title for title, _ in marks] == [scored.chunk.title for scored in answer.chunks]
    for scored, (_, tokens) in zip(answer.chunks, marks, strict=True):
        assert "".join("".join(text for text, _ in tokens).split()) == "".join(scored.chunk.text.split())
    share = [is_recomputed for _, tokens in marks for _, is_recomputed in tokens]
    assert 0.1 < sum(share) / len(share) < 0.7
