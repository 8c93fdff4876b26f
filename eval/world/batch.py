"""Lessons side by side as tensors.

Shapes: B lessons, C context tokens, Q questions of L tokens each, S = C + Q x L.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from transformers import PreTrainedTokenizerFast

from .lesson import Lesson
from .lesson_attention import Layout

_PAD_CHUNK = -1
# Lengths are rounded up: the CPU's matrix library compiles a kernel for every new shape, more slowly than it runs one.
_CONTEXT_STEP, _QUESTION_STEP = 16, 4


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Lessons as tensors: each row a BOS, its chunks, padding up to C, then Q padded questions with their answers.

    Attributes:
        ids_BS: int64 token ids.
        positions_BS: int64 positions.
        chunk_BC: int64, 0 for the BOS, c for the tokens of chunk c = 1.., -1 for padding.
        is_answer_BS: bool, the answers' tokens, EOS included.
        question: L.
        lessons: where the rows come from.
    """

    ids_BS: torch.Tensor
    positions_BS: torch.Tensor
    chunk_BC: torch.Tensor
    is_answer_BS: torch.Tensor
    question: int
    lessons: tuple[Lesson, ...]

    def to(self, device: torch.device) -> Batch:
        """The same batch on a device."""
        return Batch(
            ids_BS=self.ids_BS.to(device, non_blocking=True),
            positions_BS=self.positions_BS.to(device, non_blocking=True),
            chunk_BC=self.chunk_BC.to(device, non_blocking=True),
            is_answer_BS=self.is_answer_BS.to(device, non_blocking=True),
            question=self.question,
            lessons=self.lessons,
        )

    @property
    def is_context_BS(self) -> torch.Tensor:
        """Which tokens are a chunk's."""
        return torch.nn.functional.pad(self.chunk_BC > 0, (0, self.ids_BS.shape[1] - self.chunk_BC.shape[1]))

    def layout(self, *, chunks_apart: bool = False) -> Layout:
        """What `lesson_attention` needs. With `chunks_apart` each chunk sees itself and the BOS alone, and questions see them
        all: full KV reuse, keys rotated to their place.
        """
        row_BC1, column_B1C = self.chunk_BC[:, :, None], self.chunk_BC[:, None, :]
        seen_BCC = column_B1C >= 0
        if chunks_apart:
            seen_BCC = (column_B1C == row_BC1) | (column_B1C == 0)
        size = self.chunk_BC.shape[1]
        seen_BCC = seen_BCC & torch.ones(size, size, dtype=torch.bool, device=self.ids_BS.device).tril()
        return Layout(size, self.question, _bias(seen_BCC)[:, None], _bias(column_B1C >= 0)[:, None])


def make_batch(lessons: Sequence[Lesson], tokenizer: PreTrainedTokenizerFast) -> Batch:
    """Lessons padded to the longest context, the longest question and the most questions; padding is in no loss."""
    bos, eos, pad = tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id
    assert isinstance(bos, int)
    assert isinstance(eos, int)
    assert isinstance(pad, int)
    context = _round_up(1 + max(sum(map(len, lesson.chunks)) for lesson in lessons), _CONTEXT_STEP)
    pairs = [list(zip(lesson.prompts, lesson.answers, strict=True)) for lesson in lessons]
    question = _round_up(1 + max(len(prompt) + len(answer) for prompt, answer in chain(*pairs)), _QUESTION_STEP)
    count = max(map(len, pairs))
    shape = (len(lessons), context + count * question)
    ids_BS = torch.full(shape, pad)
    positions_BS = torch.zeros(shape, dtype=torch.int64)
    is_answer_BS = torch.zeros(shape, dtype=torch.bool)
    chunk_BC = torch.full((len(lessons), context), _PAD_CHUNK)
    for row, lesson in enumerate(lessons):
        ids_BS[row, 0], chunk_BC[row, 0] = bos, 0
        at = position = 1
        for index, chunk in enumerate(lesson.chunks):
            position += lesson.gaps[index]
            ids_BS[row, at : at + len(chunk)] = torch.tensor(chunk)
            positions_BS[row, at : at + len(chunk)] = torch.arange(position, position + len(chunk))
            chunk_BC[row, at : at + len(chunk)] = index + 1
            at, position = at + len(chunk), position + len(chunk)
        position += lesson.gaps[-1]
        for index, (prompt, answer) in enumerate(pairs[row]):
            whole, at = [*prompt, *answer, eos], context + index * question
            ids_BS[row, at : at + len(whole)] = torch.tensor(whole)
            positions_BS[row, at : at + len(whole)] = torch.arange(position, position + len(whole))
            is_answer_BS[row, at + len(prompt) : at + len(whole)] = True
    return Batch(ids_BS, positions_BS, chunk_BC, is_answer_BS, question, tuple(lessons))


def _round_up(size: int, step: int) -> int:
    return -(-size // step) * step


def _bias(seen: torch.Tensor) -> torch.Tensor:
    return torch.zeros(seen.shape, device=seen.device).masked_fill(~seen, float("-inf"))
