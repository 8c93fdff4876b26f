"""One example of a data set: a question over passages, and the right answers."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Task(StrEnum):
    """What an example asks for; it decides the metric: F1 and EM, or Rouge-L."""

    QA = "qa"
    SUMMARIZATION = "summarization"


@dataclass(frozen=True, slots=True)
class Passage:
    """A text that the answer may rest on; the title may be empty."""

    title: str
    text: str


@dataclass(frozen=True, slots=True)
class Example:
    """A plain example, the same for every data set.

    Args:
        id: unique in its data set.
        question: may be empty where the task alone says what to do.
        answers: the right answers; the best match counts. None where nobody knows: then there is no quality to report.
        passages: the context; none where the source searches documents of its own.
        task: what is asked for.
        category: the class that results are also given for; empty where the data set has none.
    """

    id: str
    question: str
    answers: tuple[str, ...]
    passages: tuple[Passage, ...]
    task: Task
    category: str = ""
