"""Sums of what several steps showed, as one line of a log."""

from __future__ import annotations

from collections.abc import Mapping

from .exam import Marks, add_marks
from .question import QuestionClass


class Tally:
    """Mean losses and per-class marks over the steps added."""

    def __init__(self) -> None:
        self._steps = 0
        self._answer_loss = self._context_loss = 0.0
        self._marks: dict[QuestionClass, Marks] = {}

    def add(self, answer_loss: float, context_loss: float, marks: Mapping[QuestionClass, Marks]) -> None:
        """Adds one step."""
        self._steps += 1
        self._answer_loss += answer_loss
        self._context_loss += context_loss
        add_marks(self._marks, marks)

    def line(self) -> dict[str, object]:
        """Losses, questions asked, and per class its accuracy and what guessing would get."""
        return {
            "answer_loss": round(self._answer_loss / self._steps, 4),
            "context_loss": round(self._context_loss / self._steps, 4),
            "questions": sum(marks.asked for marks in self._marks.values()),
            **marks_line(self._marks),
        }


def marks_line(marks: Mapping[QuestionClass, Marks]) -> dict[str, object]:
    """Accuracy and guessing level by class, rounded for a log."""
    ordered = [(each, marks[each]) for each in QuestionClass if each in marks]
    return {
        "accuracy": {str(each): round(one.accuracy, 3) for each, one in ordered},
        "guess": {str(each): round(one.guess, 3) for each, one in ordered},
    }
