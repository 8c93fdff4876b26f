"""The exam between training steps: names never trained on, contexts as the test's, read in full and with KV reused."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from cacheblend.eval.world.article import Style
from cacheblend.eval.world.names import Split
from cacheblend.eval.world.question import QuestionClass

from .curriculum import Stage, draw_batch
from .trainer import Marks, add_marks, losses, mark


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


EXAM = Stage(name="exam", styles=(Style(),), articles=(3,), linked=0.5, questions=24)
EASY = Stage(name="easy", styles=(Style(chunk_tokens=0, facts=2),), articles=(2,), linked=0.5, questions=16)


@torch.no_grad()
def examine(
    network: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, device: torch.device, lessons: int = 32
) -> dict[str, object]:
    """Accuracy by class on validation names, for the test's contexts and for short ones of two articles.

    Returns:
        `full` and `reuse` (each chunk's KV computed alone) of the test's contexts, `easy` and `easy_reuse` of the short ones.
    """
    network.eval()
    result: dict[str, object] = {}
    for stage, names in ((EXAM, ("full", "reuse")), (EASY, ("easy", "easy_reuse"))):
        for name, chunks_apart in zip(names, (False, True), strict=True):
            total: dict[QuestionClass, Marks] = {}
            for part in range(-(-lessons // 8)):
                batch = draw_batch(tokenizer, stage, seed=f"exam/{part}", contexts=8, split=Split.VALIDATION).to(device)
                with torch.autocast(device.type, torch.bfloat16):
                    _, _, right_N = losses(network, batch, chunks_apart=chunks_apart)
                add_marks(total, mark(batch, right_N))
            result[name] = marks_line(total)
    network.train()
    return result
