"""The handbook: whole, clean documents, and questions whose answers stand in them."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from cacheblend.eval.handbook import HandbookQuestion, handbook_documents, handbook_questions

TEXTS = {document["id"]: document["text"] for document in handbook_documents()}
QUESTIONS = handbook_questions()


def _stands_in(answer: str, text: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(answer)}(?!\w)", text, re.IGNORECASE) is not None


def test_documents_are_of_the_promised_number_and_length() -> None:
    """Between 24 and 36 documents of 450 to 800 words hold 15,000 to 22,000 words in all."""
    words = {name: len(text.split()) for name, text in TEXTS.items()}
    assert 24 <= len(words) <= 36
    assert {name: count for name, count in words.items() if not 450 <= count <= 800} == {}
    assert 15_000 <= sum(words.values()) <= 22_000


def test_documents_come_sorted_with_their_headings_as_titles() -> None:
    """Ids are sorted file names, and titles are different first headings without the mark."""
    documents = handbook_documents()
    assert [document["id"] for document in documents] == sorted(TEXTS)
    assert len({document["title"] for document in documents}) == len(documents)
    for document in documents:
        assert document["text"].startswith(f"# {document['title']}\n\n")


@pytest.mark.parametrize("name", TEXTS)
def test_a_document_has_three_to_six_sections_of_clean_text(name: str) -> None:
    """A document has one title and three to six sections, and no character but ASCII and the signs of three currencies."""
    headings = Counter(line.split()[0] for line in TEXTS[name].splitlines() if line.startswith("#"))
    assert headings["#"] == 1
    assert 3 <= headings["##"] <= 6
    assert set(headings) == {"#", "##"}
    assert {sign for sign in TEXTS[name] if not (sign == "\n" or " " <= sign <= "~")} <= set("£€¥")


@pytest.mark.parametrize("name", TEXTS)
def test_a_cross_reference_names_a_chapter_and_a_section_that_exist(name: str) -> None:
    """Every "Title, section Heading" leads to a heading of the document with that title."""
    titles = {document["title"]: document["text"] for document in handbook_documents()}
    for before, rest in re.findall(r"([A-Za-z ]+), section ([^.;\"]+)", TEXTS[name]):
        chapter = next((title for title in sorted(titles, key=len, reverse=True) if before.endswith(title)), None)
        assert chapter is not None, before
        assert any(rest.startswith(heading) for heading in re.findall(r"^## (.+)$", titles[chapter], re.MULTILINE)), rest


def test_there_are_forty_questions_in_three_classes() -> None:
    """Forty questions with ids and wordings of their own are divided into twenty, ten and ten."""
    assert Counter(question.question_class for question in QUESTIONS) == {"one_place": 20, "across": 10, "table": 10}
    assert [question.id for question in QUESTIONS] == [f"q{number:02}" for number in range(1, 41)]
    assert len({question.question for question in QUESTIONS}) == 40


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda question: question.id)
def test_the_first_answer_stands_in_a_gold_document(question: HandbookQuestion) -> None:
    """The first answer, of five words at most, stands in a gold document; only `across` may rest on two."""
    answer = question.answers[0]
    assert 1 <= len(answer.split()) <= 5
    assert len(question.gold) == (2 if question.question_class == "across" else 1)
    assert any(_stands_in(answer, TEXTS[name]) for name in question.gold)
    assert len(set(question.answers)) == len(question.answers)


@pytest.mark.parametrize(
    "question", [question for question in QUESTIONS if question.question_class == "table"], ids=lambda question: question.id
)
def test_a_table_answer_stands_in_one_row_of_a_table(question: HandbookQuestion) -> None:
    """Exactly one row of the whole handbook shares a key word with a table question and has the answer as a cell."""
    asked = set(re.findall(r"[A-Za-z]{5,}|[\d£,]+", question.question.lower()))
    rows = [
        (name, row)
        for name, text in TEXTS.items()
        for row in text.splitlines()
        if row.startswith("| ") and asked & set(re.findall(r"[a-z]{5,}|[\d£,]+", row.split("|")[1].lower()))
    ]
    having = [name for name, row in rows if question.answers[0] in (cell.strip() for cell in row.split("|")[2:-1])]
    assert having == list(question.gold)
