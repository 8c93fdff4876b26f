"""MapReduce: the model notes what each chunk says, then answers from the notes (paper §7.1, after LangChain)."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from transformers import LogitsProcessor, LogitsProcessorList

from cacheblend.blend import Fusor, Segment
from cacheblend.eval.data import Example, Task, Wording, make_request
from cacheblend.eval.data.source import prompt_renderer
from cacheblend.retriever import PlainTokenizer

from .method import MethodAnswer, ResidentRequest, generate, rows_run


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkAnswer:
    """The model's words after the head, one chunk and a tail.

    Args:
        token_ids: greedy.
        confidence: mean log-probability of them.
        recomputed_tokens: see `MethodAnswer`.
        loaded_bytes: see `MethodAnswer`.
    """

    token_ids: list[int]
    confidence: float
    recomputed_tokens: float
    loaded_bytes: int


def read_chunk(fusor: Fusor, resident: ResidentRequest, index: int, tail: tuple[int, ...], max_new_tokens: int) -> ChunkAnswer:
    """Continue head, chunk and tail. Head and chunk are a prefix that prefix caching holds, where the chunk is cached."""
    prefix, kv = (*resident.prompt.prefix, *resident.prompt.chunks[index]), resident.lone_kv[index]
    if fusor.max_positions is not None and len(prefix) + len(tail) + max_new_tokens > fusor.max_positions:
        prefix, kv = prefix[: fusor.max_positions - len(tail) - max_new_tokens], None
    fused = fusor.prefill((*prefix, *tail)) if kv is None else fusor.fuse([Segment(prefix, kv, exact=True), Segment(tail)])
    confidence = _Confidence()
    processors: Any = LogitsProcessorList([confidence])
    token_ids, _ = generate(fusor, fused, max_new_tokens, logits_processor=processors)
    return ChunkAnswer(
        token_ids=token_ids,
        confidence=sum(confidence.logprobs) / len(confidence.logprobs),
        recomputed_tokens=rows_run(fused),
        loaded_bytes=0 if kv is None else kv.nbytes,
    )


class _Confidence(LogitsProcessor):
    """Notes the log-probability of the likeliest token of each step, which greedy decoding takes."""

    def __init__(self) -> None:
        self.logprobs: list[float] = []

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        self.logprobs.append(float(torch.log_softmax(scores[0].float(), dim=-1).max()))
        return scores


class MapReduce:
    """One note a chunk, one after the other, then full recompute of a prompt whose chunks are the notes.

    Args:
        fusor: the model.
        wording: the words around passages and question.
    """

    def __init__(self, fusor: Fusor, wording: Wording) -> None:
        self._fusor = fusor
        self._prompts = prompt_renderer(fusor.tokenizer, wording)
        self._plain = PlainTokenizer(fusor.tokenizer)

    def prepare(self, resident: ResidentRequest) -> None:
        """KV of the head with each chunk."""
        _ = resident.lone_kv

    def answer(self, resident: ResidentRequest, max_new_tokens: int) -> MethodAnswer:
        """The first token is the last step's, so all notes are in the TTFT."""
        started = time.perf_counter()
        tail = self._prompts.question(_map_question(resident.request.example)).suffix
        chunks = range(len(resident.prompt.chunks))
        notes = [read_chunk(self._fusor, resident, index, tail, max_new_tokens) for index in chunks]
        fused = self._fusor.prefill(self._reduce_prompt(resident, [note.token_ids for note in notes], max_new_tokens))
        token_ids, first_token = generate(self._fusor, fused, max_new_tokens)
        return MethodAnswer(
            token_ids=token_ids,
            ttft_s=first_token - started,
            recomputed_tokens=rows_run(fused) + sum(note.recomputed_tokens for note in notes),
            loaded_bytes=sum(note.loaded_bytes for note in notes),
            fused=None,
        )

    def _reduce_prompt(self, resident: ResidentRequest, notes: list[list[int]], max_new_tokens: int) -> tuple[int, ...]:
        texts = [self._fusor.tokenizer.decode(note, skip_special_tokens=True).strip() for note in notes]
        positions = self._fusor.max_positions
        request = make_request(
            resident.request.example,
            resident.prompt.prefix,
            [self._plain.ids(text + "\n") for text in texts],
            resident.prompt.suffix,
            None if positions is None else positions - max_new_tokens,
        )
        return request.prompt.token_ids


def _map_question(example: Example) -> str:
    if example.task is Task.SUMMARIZATION:
        return "Summarize this text in a few sentences."
    return f"Note in one sentence what this text says about the question: {example.question}"


class MapRerank:
    """Confidence is the mean log-probability of an answer's tokens. LangChain asks the model to write a score, which takes a
    model that follows instructions; the log-probability exists for every model.

    Args:
        fusor: the model.
    """

    def __init__(self, fusor: Fusor) -> None:
        self._fusor = fusor

    def prepare(self, resident: ResidentRequest) -> None:
        """KV of the head with each chunk."""
        _ = resident.lone_kv

    def answer(self, resident: ResidentRequest, max_new_tokens: int) -> MethodAnswer:
        """The TTFT ends when the answer is chosen: no token of it can be shown before."""
        started = time.perf_counter()
        chunks, tail = range(len(resident.prompt.chunks)), resident.prompt.suffix
        answers = [read_chunk(self._fusor, resident, index, tail, max_new_tokens) for index in chunks]
        best = max(answers, key=lambda answer: answer.confidence)
        return MethodAnswer(
            token_ids=best.token_ids,
            ttft_s=time.perf_counter() - started,
            recomputed_tokens=sum(answer.recomputed_tokens for answer in answers),
            loaded_bytes=sum(answer.loaded_bytes for answer in answers),
            fused=None,
        )
