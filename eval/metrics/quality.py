"""How good an answer is, by what its example asks for."""

from __future__ import annotations

from collections.abc import Mapping

from cacheblend.eval.data import Example, Task

from .answer_text import exact_match, f1
from .rouge_l import rouge_l


def quality(example: Example, prediction: str) -> Mapping[str, float | None]:
    """The metrics of the example's task, each 0..1; the first is the one that methods are compared by.

    None where nobody gave a right answer.
    """
    if example.task is Task.SUMMARIZATION:
        return {"rouge_l": rouge_l(prediction, example.answers) if example.answers else None}
    if not example.answers:
        return {"f1": None, "em": None}
    return {"f1": f1(prediction, example.answers), "em": exact_match(prediction, example.answers)}
