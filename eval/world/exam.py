"""Marking: which answers of a batch the reader gets right, class by class, beside what guessing would get."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from transformers import LlamaForCausalLM

from .batch import Batch
from .question import QuestionClass

_ROW_STEP = 512


@dataclass(frozen=True, slots=True)
class Marks:
    """Marks of one class: questions asked, answered right, and expected right by guessing."""

    asked: int
    right: int
    guessed: float

    @property
    def accuracy(self) -> float:
        """Share of right answers, every token of them."""
        return self.right / self.asked

    @property
    def guess(self) -> float:
        """The same share for a guesser who knows the relation and the context's answers to it."""
        return self.guessed / self.asked

    def __add__(self, other: Marks) -> Marks:
        return Marks(self.asked + other.asked, self.right + other.right, self.guessed + other.guessed)


def losses(
    network: LlamaForCausalLM, batch: Batch, *, chunks_apart: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Mean loss of the answers' tokens, of the context's tokens, and per answer token whether it was the likeliest.

    Returns:
        answer loss, context loss (both scalars), right_N (bool, the N answer tokens in order).
    """
    hidden_BSD = network.model(
        input_ids=batch.ids_BS,
        attention_mask={"full_attention": None},
        position_ids=batch.positions_BS,
        use_cache=False,
        layout=batch.layout(chunks_apart=chunks_apart),
    ).last_hidden_state
    wanted_BS = (batch.is_answer_BS | batch.is_context_BS)[:, 1:]
    hidden_ND = hidden_BSD[:, :-1][wanted_BS]
    count = len(hidden_ND)
    # Rounded up to whole steps of rows, for the reason that `batch` rounds lengths.
    hidden_ND = torch.nn.functional.pad(hidden_ND, (0, 0, 0, -count % _ROW_STEP))
    logits_NV = network.lm_head(hidden_ND)[:count].float()
    targets_N = batch.ids_BS[:, 1:][wanted_BS]
    loss_N = torch.nn.functional.cross_entropy(logits_NV, targets_N, reduction="none")
    answers_N = batch.is_answer_BS[:, 1:][wanted_BS]
    right_N = logits_NV.argmax(-1)[answers_N] == targets_N[answers_N]
    return loss_N[answers_N].mean(), loss_N[~answers_N].mean(), right_N


def mark(batch: Batch, right_N: torch.Tensor) -> dict[QuestionClass, Marks]:
    """Marks by class: an answer is right when each of its tokens, the EOS included, is the likeliest after those before."""
    is_right: dict[tuple[int, int], bool] = {}
    for (row, column), right in zip(batch.is_answer_BS.nonzero().tolist(), right_N.tolist(), strict=True):
        place = row, (column - batch.chunk_BC.shape[1]) // batch.question
        is_right[place] = is_right.get(place, True) and right
    marks: dict[QuestionClass, Marks] = {}
    for (row, index), right in is_right.items():
        lesson = batch.lessons[row]
        question = lesson.questions[index]
        one = Marks(1, int(right), lesson.guess[index])
        before = marks.get(question.question_class)
        marks[question.question_class] = one if before is None else before + one
    return marks


def add_marks(total: dict[QuestionClass, Marks], more: Mapping[QuestionClass, Marks]) -> None:
    """Adds marks to `total` in place."""
    for each, marks in more.items():
        total[each] = total[each] + marks if each in total else marks
