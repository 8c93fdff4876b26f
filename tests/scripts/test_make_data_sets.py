"""Data sets out of their originals."""

import json
from pathlib import Path

import pytest
from make_data_sets import digest, example, main

from cacheblend.eval.data import read_examples

WANTED = {
    "id": "1",
    "question": "Who?",
    "answers": ["Ada", "A. L."],
    "passages": [{"title": "T", "text": "One. Two."}],
    "task": "qa",
}
PARAGRAPHS = [{"idx": 0, "title": "T", "paragraph_text": "One. Two. ", "is_supporting": True}]
MUSIQUE = {"id": "1", "question": "Who? ", "answer": "Ada", "answer_aliases": ["A. L.", "Ada"], "paragraphs": PARAGRAPHS}
HOTPOT = {"_id": "1", "question": "Who?", "answer": "Ada", "context": [["T", ["One.", " Two."]]]}


def test_forms() -> None:
    """A case of either form of originals is one that `eval` reads; its digest does not depend on white space."""
    assert example(MUSIQUE) == WANTED
    assert example(HOTPOT) == {**WANTED, "answers": ["Ada"]}
    assert digest({**WANTED, "question": " Who?\n"}) == digest(WANTED) != digest(example(HOTPOT))


def test_cases_that_are_missing_or_differ(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What an original lacks, or has with another text, is counted, and the exit code is 1."""
    original = tmp_path / "dev.jsonl"
    original.write_text("".join(json.dumps({**MUSIQUE, "id": name}) + "\n" for name in ("2hop__559076_55984", "other")))
    assert main(["musique_dev", str(original), "--out", str(tmp_path)]) == 1
    assert capsys.readouterr().out == "1 of 146 cases, 0 of which are the published ones\n"
    assert [each.question for each in read_examples(tmp_path / "musique_dev.jsonl")] == ["Who?"]
