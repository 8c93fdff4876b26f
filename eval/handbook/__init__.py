"""The handbook of a fictional firm, as a folder of documents, and forty questions about it."""

import json
from dataclasses import dataclass
from importlib.resources import files
from typing import Literal

QuestionClass = Literal["one_place", "across", "table"]


@dataclass(frozen=True, slots=True)
class HandbookQuestion:
    """A question, its accepted answers (the first stands in a gold document word for word), and the documents it rests on."""

    id: str
    question: str
    answers: tuple[str, ...]
    question_class: QuestionClass
    gold: tuple[str, ...]


def handbook_documents() -> list[dict[str, str]]:
    """Lists every chapter as `{"id", "title", "text"}`, in the order of the file names, which are the ids."""
    chapters = sorted((file for file in files(__name__).iterdir() if file.name.endswith(".md")), key=lambda file: file.name)
    texts = {file.name: file.read_text(encoding="utf-8") for file in chapters}
    return [{"id": name, "title": text.partition("\n")[0].removeprefix("# "), "text": text} for name, text in texts.items()]


def handbook_questions() -> list[HandbookQuestion]:
    """Lists the questions in the order of the file."""
    lines = (files(__name__) / "questions.jsonl").read_text(encoding="utf-8").splitlines()
    return [
        HandbookQuestion(row["id"], row["question"], tuple(row["answers"]), row["class"], tuple(row["gold"]))
        for row in map(json.loads, lines)
    ]
