"""The handbook: clean documents, and questions whose answers stand in them."""

from __future__ import annotations

import re
from collections import Counter

from cacheblend.eval.handbook import handbook_documents, handbook_questions

TEXTS = {document["id"]: document["text"] for document in handbook_documents()}
QUESTIONS = handbook_questions()


def _stands_in(answer: str, text: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(answer)}(?!\w)", text, re.IGNORECASE) is not None


def test_documents() -> None:
    """Ids are sorted file names, titles are different first headings, and no character is odd."""
    documents = handbook_documents()
    assert [document["id"] for document in documents] == sorted(TEXTS)
    assert len({document["title"] for document in documents}) == len(documents)
    for document in documents:
        assert document["text"].startswith(f"# {document['title']}\n\n")
        assert {sign for sign in document["text"] if not (sign == "\n" or " " <= sign <= "~")} <= set("£€¥")


def test_questions() -> None:
    """Forty different questions in three classes; the first answer, of five words at most, stands in a gold document."""
    assert Counter(question.question_class for question in QUESTIONS) == {"one_place": 20, "across": 10, "table": 10}
    assert len({question.id for question in QUESTIONS}) == len({question.question for question in QUESTIONS}) == 40
    for question in QUESTIONS:
        assert len(question.gold) == (2 if question.question_class == "across" else 1), question.id
        assert 1 <= len(question.answers[0].split()) <= 5, question.id
        assert any(_stands_in(question.answers[0], TEXTS[name]) for name in question.gold), question.id


def test_a_table_answer_is_a_cell() -> None:
    """The answer to a question about a table is a cell of one in the gold document."""
    for question in QUESTIONS:
        if question.question_class == "table":
            rows = (row.split("|")[2:-1] for row in TEXTS[question.gold[0]].splitlines() if row.startswith("| "))
            assert any(question.answers[0] in map(str.strip, cells) for cells in rows), question.id
