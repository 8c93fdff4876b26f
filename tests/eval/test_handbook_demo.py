"""`cacheblend demo` and its handbook: clean documents with answers in them, what is shown, what is refused, and the figures."""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from fakes import FakeEmbedder

from cacheblend.base.errors import ModelFetchError
from cacheblend.blend import Fusor, models
from cacheblend.eval import handbook_demo
from cacheblend.eval.cli_demo import DEMO_MODEL
from cacheblend.eval.handbook import handbook_documents, handbook_questions
from cacheblend.eval.handbook_demo import (
    METHODS,
    AskedQuestion,
    ask_handbook,
    chosen_questions,
    closing_note,
    has_answer,
    summarize,
)
from cacheblend.retriever import DEFAULT_EMBEDDER, RetrieverConfig
from cacheblend.service import Engine, EngineConfig

EVERY, TEXTS = handbook_questions(), {document["id"]: document["text"] for document in handbook_documents()}
QUESTIONS = [EVERY[0], EVERY[30]]
DOCUMENTS = [document for document in handbook_documents() if document["id"] in {item.gold[0] for item in QUESTIONS}]
for _document in DOCUMENTS:
    _document["text"] = _document["text"][:600]


def test_questions() -> None:
    """Forty different questions in three classes; the first answer, of five words at most, stands in a gold document, to a
    question about a table as a cell.
    """
    assert len({document["title"] for document in handbook_documents()}) == len(TEXTS)
    assert Counter(question.question_class for question in EVERY) == {"one_place": 20, "across": 10, "table": 10}
    assert len({question.id for question in EVERY}) == len({question.question for question in EVERY}) == 40
    for question in EVERY:
        assert len(question.gold) == (2 if question.question_class == "across" else 1), question.id
        assert 1 <= len(question.answers[0].split()) <= 5, question.id
        assert any(has_answer(TEXTS[name], question.answers[:1]) for name in question.gold), question.id
        if question.question_class == "table":
            rows = (row.split("|")[2:-1] for row in TEXTS[question.gold[0]].splitlines() if row.startswith("| "))
            assert any(question.answers[0] in map(str.strip, cells) for cells in rows), question.id


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def demo(cacheblend: Run, model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs the demo on the tiny model, two short documents and two questions of two classes, without an embedding model."""
    monkeypatch.setattr("cacheblend.eval.handbook.handbook_documents", lambda: DOCUMENTS)
    monkeypatch.setattr("cacheblend.eval.handbook.handbook_questions", lambda: QUESTIONS)
    fake = FakeEmbedder(name=DEFAULT_EMBEDDER)
    monkeypatch.setattr("cacheblend.retriever.retriever.SentenceTransformerEmbedder", lambda _: fake)
    return partial(cacheblend, "demo", model_dir, "--chunk-tokens", 64, "--num-chunks", 2, "--max-tokens", 4)


def test_the_default_model_is_fetched_with_yes_alone(cacheblend: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a terminal and --yes the error names the command that fetches the model; with --yes it is fetched."""
    asked_for: list[str] = []

    def nothing(model: models.KnownModel, **_: object) -> bool:
        asked_for.append(model.name)
        raise ModelFetchError("no network; try again with one")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(models, "fetch_model", nothing)
    code, _, err = cacheblend("demo", "--small")
    assert (code, asked_for, f"cacheblend model get {models.DEFAULT_MODEL}" in err) == (2, [], True)
    code, _, err = cacheblend("demo", "--yes")
    assert (code, asked_for) == (1, [DEMO_MODEL])
    assert f"No model was given: using {DEMO_MODEL}" in err
    assert "no network; try again" in err


def test_json(demo: Run) -> None:
    """The one object on stdout has the model, the ingest, every question with its answers, and the methods' summaries."""
    code, out, err = demo("--json")
    assert code == 0, err
    shown: dict[str, Any] = json.loads(out)
    assert set(shown) == {"model", "dtype", "ingest", "questions", "methods", "seconds", "note"}
    assert shown["ingest"]["documents"] == 2
    assert shown["ingest"]["kv_bytes"] > 0
    assert [row["class"] for row in shown["questions"]] == ["one_place", "table"]
    for row in shown["questions"]:
        assert set(row["methods"]) == set(METHODS)
        assert row["methods"]["full_recompute"]["first_token_kl_nats"] == 0
        assert row["methods"]["full_recompute"]["equal_greedy_tokens"] == 1
    full, reuse, blend = (shown["methods"][method] for method in METHODS)
    assert set(full["answer_share_by_class"]) == {"one_place", "table"}
    assert (full["speedup"], full["recomputed_share"], full["gold_nll_over_full_nats"]) == (1, 1, 0)
    assert reuse["recomputed_share"] < blend["recomputed_share"] < 1
    assert blend["first_token_kl_nats"] > 0


def test_each_question_is_shown_as_it_is_answered(
    demo: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the next question is asked the one before stands on stdout with its answers and times, and `begin` before all."""
    shown = list[str]()

    def watched(*arguments: Any, **options: Any) -> Iterator[AskedQuestion]:
        for asked in ask_handbook(*arguments, **options):
            shown.append(capsys.readouterr().out)
            yield asked

    monkeypatch.setattr(handbook_demo, "ask_handbook", watched)
    assert demo()[0] == 0
    first, second = shown
    assert "2 questions" in first
    assert QUESTIONS[0].question not in first
    assert f"1 of 2  {QUESTIONS[0].question}" in second
    assert len(re.findall(r"full recompute|blend", second)) == 4
    assert re.search(r"blend +[\d,]+ ms  \d+\.\d x", second)
    assert "\x1b" not in "".join(shown)


def test_some_questions_or_all(demo: Run) -> None:
    """`--questions` says how many are asked, at even distances; no number is the user's error."""
    for given, asked in (("1", QUESTIONS[:1]), ("all", QUESTIONS), ("9", QUESTIONS)):
        found = json.loads(demo("--questions", given, "--json")[1])
        assert [row["id"] for row in found["questions"]] == [item.id for item in asked]
    for given in ("none", "0"):
        code, _, err = demo("--questions", given)
        assert (code, f"questions='{given}'" in err) == (2, True)
    assert chosen_questions(EVERY, len(EVERY)) == EVERY
    assert chosen_questions(EVERY, 8) == EVERY[::5]


def test_words_and_a_store_that_stays(demo: Run, tmp_path: Path) -> None:
    """Questions, table and note are printed; of a store that stays nothing is computed again."""
    _, first, _ = demo("--store-dir", tmp_path / "store")
    assert all(item.question in first for item in QUESTIONS)
    assert "tokens/s" in first
    assert "set-up" in first
    assert f"cacheblend serve --store-dir {tmp_path / 'store'}" in first
    assert "no KV to compute" in demo("--store-dir", tmp_path / "store")[1]


def test_random_weights_are_told(model_dir: Path, fusor: Fusor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The note follows from the figures, and of random weights says that they mean nothing."""
    config = EngineConfig(model=str(model_dir), store_dir=tmp_path, max_tokens=2, retriever=RetrieverConfig(chunk_tokens=64))
    with Engine(config, fusor=fusor, embedder=FakeEmbedder()) as engine:
        engine.ingest(DOCUMENTS)
        asked = list(ask_handbook(engine, QUESTIONS, num_chunks=2))
        methods = summarize(asked)
        right = round(2 * methods["blend"].answer_share)
        assert f"blend {right}." in closing_note(engine, asked, methods)
        monkeypatch.setattr(fusor.model.config, "random_weights", True, raising=False)
        assert "random" in closing_note(engine, asked, methods)


def test_has_answer() -> None:
    """An answer counts as whole words of the reply, in whatever case and punctuation."""
    assert has_answer("It is kept for 30 Days.", ["30 days"])
    assert not has_answer("It is kept for 130 days.", ["30 days"])


@pytest.mark.real_model
@pytest.mark.timeout(600)
def test_smollm2_over_a_chapter(real_model: Any, tmp_path: Path) -> None:
    """On a pretrained model blending stays near to full recompute and runs a small part of the prompt."""
    config = EngineConfig(
        model=str(real_model(models.DEFAULT_MODEL)),
        store_dir=tmp_path,
        max_tokens=8,
        retriever=RetrieverConfig(chunk_tokens=128),
    )
    [chapter] = [document for document in handbook_documents() if document["id"] == QUESTIONS[0].gold[0]]
    with Engine(config, embedder=FakeEmbedder()) as engine:
        engine.ingest([{**chapter, "text": chapter["text"][:3000]}])
        blend = summarize(list(ask_handbook(engine, QUESTIONS[:1], num_chunks=4)))["blend"]
    assert blend.first_token_kl_nats < 0.2
    assert blend.recomputed_share < 0.5
