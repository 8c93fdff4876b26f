"""A user's own documents: questions are read or refused, measured with and without right answers, and embedded once."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from fakes import FakeEmbedder, tiny_tokenizer
from numpy.typing import NDArray

from cacheblend.base.errors import ConfigError, InputError
from cacheblend.blend import Fusor
from cacheblend.eval.data import DocumentsSource, Preset
from cacheblend.eval.data.caching_embedder import CachingEmbedder
from cacheblend.eval.data.documents_source import read_questions
from cacheblend.eval.run.folder import EvalConfig, RunFolder
from cacheblend.eval.run.report import report
from cacheblend.eval.run.runner import evaluate


def test_files_of_questions(tmp_path: Path) -> None:
    """Lines of text are questions, JSON lines may have answers and an id; other files are refused."""
    (tmp_path / "a.txt").write_text("Who?\n\n  Where?  \n")
    found = list(read_questions(tmp_path / "a.txt"))
    assert [(example.id, example.question) for example in found] == [("1", "Who?"), ("3", "Where?")]
    (tmp_path / "a.jsonl").write_text('{"question": "Who?", "answers": ["she", "her"], "id": "q"}\n{"question": "Where?"}\n')
    found = list(read_questions(tmp_path / "a.jsonl"))
    assert [(example.id, example.answers) for example in found] == [("q", ("she", "her")), ("2", ())]
    (tmp_path / "latin.txt").write_bytes(b"\xff\xfe?")
    for name, says in (("a.csv", "no file of questions"), ("none.txt", "cannot be read"), ("latin.txt", "UTF-8")):
        with pytest.raises(InputError, match=says):
            list(read_questions(tmp_path / name))


def test_settings_are_checked() -> None:
    """Presets that belong to a data set's cases are refused, and so is a run of no question."""
    for preset in (Preset(chunking="passage"), Preset(shared_corpus=True)):
        with pytest.raises(ConfigError, match="preset"):
            DocumentsSource(documents="d", questions="q.txt", preset=preset)
    with pytest.raises(ConfigError, match="cases"):
        DocumentsSource(documents="d", questions="q.txt", cases=0)


def test_chunks_are_searched_in_all_documents(documents: Path, embedder: FakeEmbedder) -> None:
    """Each question gets the nearest chunks of the folder, in the same prompt as the service's, after worked examples."""
    questions = documents.parent / "q.txt"
    questions.write_text("Where are rooms booked?\nWho signs off travel?\nWhy?\n")
    preset = Preset(chunk_tokens=64, num_chunks=3)
    source = DocumentsSource(documents=str(documents), questions=str(questions), cases=2, preset=preset)
    tokenizer = tiny_tokenizer()
    rooms, travel = source.requests(tokenizer, None, embedder)
    assert {len(request.prompt.chunks) for request in (rooms, travel)} == {3}
    assert {chunk.document for chunk in rooms.prompt.chunks} == {("rooms.txt", "")}
    assert {chunk.document for chunk in travel.prompt.chunks} == {("travel.md", "")}
    texts = (documents / "rooms.txt").read_text()
    places = [texts.find(tokenizer.decode(chunk.token_ids)[-20:]) for chunk in rooms.prompt.chunks]
    assert places == sorted(places)
    assert "Question: In which season" in tokenizer.decode(rooms.prompt.prefix)
    assert tokenizer.decode(rooms.prompt.suffix) == "Question: Where are rooms booked?\nAnswer:"
    empty = documents.parent / "empty"
    empty.mkdir()
    with pytest.raises(InputError, match="no file of"):
        list(DocumentsSource(documents=str(empty), questions=str(questions)).requests(tokenizer, None, embedder))


@pytest.mark.parametrize("answered", [0, 1, 2])
def test_right_answers_are_not_needed(
    documents: Path, fusor: Fusor, model_dir: Path, embedder: FakeEmbedder, tmp_path: Path, answered: int
) -> None:
    """KL and equal tokens come without right answers; F1 and likelihoods over the questions that have one."""
    asked = [{"question": "Where are rooms booked?"}, {"question": "Who signs off travel?"}]
    for line in asked[:answered]:
        line["answers"] = ["the front desk"]  # type: ignore[assignment]  # beside a text
    questions = tmp_path / "q.jsonl"
    questions.write_text("".join(json.dumps(line) + "\n" for line in asked))
    source = DocumentsSource(documents=str(documents), questions=str(questions), preset=Preset(chunk_tokens=48, num_chunks=2))
    config = EvalConfig(source=source, model=str(model_dir), methods=("full_recompute", "full_reuse"), max_new_tokens=3)
    summary = evaluate(config, tmp_path / "run", fusor=fusor, embedder=embedder)
    reuse = summary["methods"]["full_reuse"]
    assert reuse["first_token_kl_nats"] > 0
    assert 0 <= reuse["equal_greedy_tokens"] <= 1
    for name in ("f1", "em", "gold_nll_nats", "gold_nll_over_full_nats"):
        assert (reuse[name] is None) == (answered == 0)
    known = [row["methods"]["full_reuse"]["gold_nll_nats"] is not None for row in RunFolder(tmp_path / "run").rows()]
    assert sum(known) == answered
    assert ("quality" in summary) == (answered == 0)
    text = report([tmp_path / "run"])
    assert ("right answer" in text) == (answered == 0)
    assert "KL nats (95 %)" in text


class CountingEmbedder(FakeEmbedder):
    """Notes what it embeds."""

    def __init__(self, name: str = "fake", dimensions: int = 64) -> None:
        super().__init__(name, dimensions)
        self.texts = list[str]()

    def encode(self, texts: Sequence[str]) -> NDArray[np.float32]:
        self.texts += texts
        return super().encode(texts)


def test_each_text_is_embedded_once(tmp_path: Path) -> None:
    """The vectors are the embedder's own, in the texts' order; the file serves equal embedders only, by name and length."""
    first, second = CountingEmbedder(), CountingEmbedder()
    file = tmp_path / "new" / "vectors.sqlite"
    np.testing.assert_array_equal(CachingEmbedder(first, file).encode(["a b", "c", "a b"]), first.encode(["a b", "c", "a b"]))
    assert first.texts[:2] == ["a b", "c"]
    cached = CachingEmbedder(second, file)
    np.testing.assert_array_equal(cached.encode(["d", "c", "\ud800"]), FakeEmbedder().encode(["d", "c", "\ud800"]))
    assert second.texts == ["d", "\ud800"]
    assert cached.encode([]).shape == (0, 64)
    for other in (CountingEmbedder("other"), CountingEmbedder(dimensions=32)):
        assert CachingEmbedder(other, file).encode(["c"]).shape == (1, other.dimensions)
        assert other.texts == ["c"]


def test_a_file_that_cannot_be_used(tmp_path: Path) -> None:
    """Every text is embedded, and nothing fails."""
    (tmp_path / "broken").write_bytes(b"no database " * 100)
    (tmp_path / "file").write_text("")
    for file in (tmp_path / "broken", tmp_path / "file" / "below.sqlite"):
        embedder = CountingEmbedder()
        for _ in range(2):
            np.testing.assert_array_equal(CachingEmbedder(embedder, file).encode(["a"]), FakeEmbedder().encode(["a"]))
        assert embedder.texts == ["a", "a"]
