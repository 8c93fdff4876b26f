"""A lesson: one context with many questions after it.

Every question sees the context and itself, never another question or its answer, and its positions go on from the context's
last. So a lesson teaches what as many separate prompts would, at a fraction of their cost.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from typing import Any

import torch
from transformers import AttentionInterface, PreTrainedTokenizerFast

from cacheblend.eval.world.question import Question
from cacheblend.eval.world.scene import Scene
from cacheblend.retriever import PlainTokenizer
from cacheblend.retriever.config import SEPARATOR


@dataclass(frozen=True, slots=True)
class Lesson:
    """Ids of a context and of the questions about it.

    Attributes:
        chunks: token ids of each chunk of the context, in order.
        gaps: positions left out before each chunk, and last before the questions.
        prompts: token ids of each question.
        answers: token ids of what is written to each, the working before the answer included, without EOS.
        questions: what is asked.
        guess: per question, the chance of a guess among the answers that its relation allows.
    """

    chunks: list[list[int]]
    gaps: list[int]
    prompts: list[list[int]]
    answers: list[list[int]]
    questions: tuple[Question, ...]
    guess: tuple[float, ...]


def make_lesson(
    tokenizer: PreTrainedTokenizerFast,
    scene: Scene,
    asked: Sequence[Question],
    *,
    preamble: str = "",
    gaps: random.Random | None = None,
    cut_at: int | None = None,
    longest: int = 2048,
) -> Lesson:
    """The lesson of a scene and the questions to ask about it.

    Args:
        tokenizer: the reader's.
        scene: the context.
        asked: the questions, at least one.
        preamble: text before the first chunk.
        gaps: a source of random gaps between the positions of neighbouring chunks, so that positions generalise to contexts
            longer than the lesson; None for none.
        cut_at: cut the articles, under a title line, into chunks of so many tokens, wherever that falls, as the engine cuts
            documents; None keeps the chunks as they were written.
        longest: no position reaches this.
    """
    written = [passage.text for passage in scene.passages] if cut_at is None else _cut(tokenizer, scene, cut_at)
    context = [text for text in (preamble, *written) if text]
    texts = list(context)
    texts += [question.prompt for question in asked] + [question.written for question in asked]
    encoded = [encoding.ids for encoding in tokenizer.backend_tokenizer.encode_batch(texts, add_special_tokens=False)]
    chunks, rest = encoded[: len(context)], encoded[len(context) :]
    prompts, answers = rest[: len(asked)], rest[len(asked) :]
    used = 2 + sum(map(len, chunks)) + max(len(p) + len(a) for p, a in zip(prompts, answers, strict=True))
    guess = tuple(1 / len(set(scene.candidates(question))) for question in asked)
    return Lesson(chunks, _gaps(gaps, len(chunks) + 1, longest - used), prompts, answers, tuple(asked), guess)


def _cut(tokenizer: PreTrainedTokenizerFast, scene: Scene, tokens: int) -> list[str]:
    """The scene's articles as the engine's retriever would cut them."""
    plain = PlainTokenizer(tokenizer)
    texts: list[str] = []
    for name, passages in groupby(scene.passages, key=lambda passage: passage.article.subject.name):
        content = f"{name}\n{''.join(passage.text for passage in passages)}"
        texts += [text + SEPARATOR for text in plain.cut(content, tokens, 0)]
    return texts


def _gaps(rng: random.Random | None, count: int, spare: int) -> list[int]:
    """`count` gaps that add up to at most `spare`; half the lessons have none."""
    if rng is None or spare <= 0 or rng.random() < 0.5:
        return [0] * count
    total = int(spare * rng.random() ** 2)
    cuts = sorted(rng.randint(0, total) for _ in range(count))
    return [high - low if rng.random() < 0.5 else 0 for low, high in zip([0, *cuts[:-1]], cuts, strict=True)]


NAME = "lesson"


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """Layout of a row of S tokens, and what its context tokens see.

    Attributes:
        context: C, the context's tokens with its padding; Q questions of `question` tokens follow.
        question: L.
        context_bias_B1CC: 0 where a context row sees a context column, else -inf.
        reading_bias_B11C: 0 where a question sees a context column, else -inf.
    """

    context: int
    question: int
    context_bias_B1CC: torch.Tensor
    reading_bias_B11C: torch.Tensor


def lesson_attention(
    module: torch.nn.Module,
    q_BHSD: torch.Tensor,
    k_BHSD: torch.Tensor,
    v_BHSD: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    layout: Layout,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention as transformers calls it; `layout` comes through the model's keyword arguments.

    Returns:
        the output, (B, S, H, D), and None for the weights.
    """
    del module, attention_mask
    b, h, s, d = q_BHSD.shape
    c, length = layout.context, layout.question
    count = (s - c) // length
    q_BHSD = q_BHSD * scaling
    kc_BHDC, vc_BHCD = k_BHSD[:, :, :c].transpose(-1, -2), v_BHSD[:, :, :c]
    context_BHCC = q_BHSD[:, :, :c] @ kc_BHDC + layout.context_bias_B1CC.to(q_BHSD.dtype)
    context_BHCD = context_BHCC.softmax(-1) @ vc_BHCD
    if not count:
        return context_BHCD.transpose(1, 2).contiguous(), None
    q_BHQLD = q_BHSD[:, :, c:].reshape(b, h, count, length, d)
    k_BHQLD = k_BHSD[:, :, c:].reshape(b, h, count, length, d)
    v_BHQLD = v_BHSD[:, :, c:].reshape(b, h, count, length, d)
    reading_BHRC = q_BHSD[:, :, c:] @ kc_BHDC + layout.reading_bias_B11C.to(q_BHSD.dtype)
    future_LL = torch.ones(length, length, dtype=torch.bool, device=q_BHSD.device).triu(1)
    own_BHQLL = (q_BHQLD @ k_BHQLD.transpose(-1, -2)).masked_fill(future_LL, float("-inf"))
    own_BHRL = own_BHQLL.reshape(b, h, count * length, length)
    weights_BHRK = torch.cat((reading_BHRC, own_BHRL), dim=-1).softmax(-1)
    own_BHQLD = weights_BHRK[..., c:].reshape(b, h, count, length, length) @ v_BHQLD
    question_BHRD = weights_BHRK[..., :c] @ vc_BHCD + own_BHQLD.reshape(b, h, count * length, d)
    return torch.cat((context_BHCD, question_BHRD), dim=2).transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, lesson_attention)


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
