"""`cacheblend demo`: which of its forms runs, what it refuses, and the handbook's figures."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes import FakeEmbedder

from cacheblend.base.errors import ModelFetchError
from cacheblend.blend import Fusor, models
from cacheblend.cli import main as cli
from cacheblend.eval import handbook_demo
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
from cacheblend.service.engine.config import read_examples

QUESTIONS = [handbook_questions()[0], handbook_questions()[30]]
DOCUMENTS = [document for document in handbook_documents() if document["id"] in {item.gold[0] for item in QUESTIONS}]
for _document in DOCUMENTS:
    _document["text"] = _document["text"][:600]


@pytest.fixture
def short_handbook(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two short documents and two questions, of two classes, and an embedder that needs no model."""
    monkeypatch.setattr("cacheblend.eval.handbook.handbook_documents", lambda: DOCUMENTS)
    monkeypatch.setattr("cacheblend.eval.handbook.handbook_questions", lambda: QUESTIONS)
    fake = FakeEmbedder(name=DEFAULT_EMBEDDER)
    monkeypatch.setattr("cacheblend.retriever.retriever.SentenceTransformerEmbedder", lambda _: fake)


def _demo(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["demo", *arguments])
    return int(stopped.value.code or 0)


def _on_tiny(model_dir: Path, *arguments: str) -> int:
    return _demo(str(model_dir), "--chunk-tokens", "64", "--num-chunks", "2", "--max-tokens", "4", *arguments)


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """The models that would be fetched, into an empty cache; none can be had."""
    asked_for: list[str] = []

    def nothing(model: models.KnownModel, **_: object) -> bool:
        asked_for.append(model.name)
        raise ModelFetchError("no network; try again with one")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(models, "fetch_model", nothing)
    return asked_for


def test_the_default_model_is_fetched_with_yes_alone(fetched: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Without a terminal and --yes the error names the command that fetches the model; with --yes it is fetched."""
    assert _demo() == 2
    assert fetched == []
    assert f"cacheblend model get {models.DEFAULT_MODEL}" in capsys.readouterr().err
    assert _demo("--yes") == 1
    assert fetched == [models.DEFAULT_MODEL]
    said = capsys.readouterr().err
    assert f"No --model was given: using {models.DEFAULT_MODEL}" in said
    assert "no network; try again" in said


@pytest.mark.usefixtures("short_handbook")
def test_json(model_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The one object on stdout has the model, the ingest, every question with its answers, and the methods' summaries."""
    assert _on_tiny(model_dir, "--json") == 0
    shown: dict[str, Any] = json.loads(capsys.readouterr().out)
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


@pytest.mark.usefixtures("short_handbook")
def test_each_question_is_shown_as_it_is_answered(
    model_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the next question is asked the one before stands on stdout with its answers and times, and `begin` before all."""
    shown = list[str]()

    def watched(*arguments: Any, **options: Any) -> Iterator[AskedQuestion]:
        for asked in ask_handbook(*arguments, **options):
            shown.append(capsys.readouterr().out)
            yield asked

    monkeypatch.setattr(handbook_demo, "ask_handbook", watched)
    assert _on_tiny(model_dir) == 0
    first, second = shown
    assert "2 questions" in first
    assert QUESTIONS[0].question not in first
    assert f"1 of 2  {QUESTIONS[0].question}" in second
    assert len(re.findall(r"full recompute|blend", second)) == 4
    assert re.search(r"blend +[\d,]+ ms  \d+\.\d x", second)
    assert "\x1b" not in "".join(shown)


@pytest.mark.usefixtures("short_handbook")
def test_some_questions_or_all(model_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--questions` says how many are asked, at even distances; no number is the user's error."""
    for given, asked in (("1", QUESTIONS[:1]), ("all", QUESTIONS), ("9", QUESTIONS)):
        assert _on_tiny(model_dir, "--questions", given, "--json") == 0
        shown = json.loads(capsys.readouterr().out)
        assert [row["id"] for row in shown["questions"]] == [item.id for item in asked]
    for given in ("none", "0"):
        assert _demo("--questions", given) == 2
        assert f"questions='{given}'" in capsys.readouterr().err
    every = handbook_questions()
    assert chosen_questions(every, len(every)) == every
    assert chosen_questions(every, 8) == every[::5]


@pytest.mark.usefixtures("short_handbook")
def test_words_and_a_kept_store(model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Questions, table and note are printed; a store that was kept offers the questions, and nothing is computed again."""
    store = ("--store-dir", str(tmp_path / "store"))
    assert _on_tiny(model_dir, *store) == 0
    first = capsys.readouterr().out
    assert all(item.question in first for item in QUESTIONS)
    assert "tokens/s" in first
    assert "set-up" in first
    offered = read_examples(tmp_path / "store")
    assert offered
    assert set(offered) <= {item.question for item in QUESTIONS}
    assert _on_tiny(model_dir, *store) == 0
    assert "no KV to compute" in capsys.readouterr().out


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
