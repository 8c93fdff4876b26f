"""MapReduce: the model notes what each chunk says, then answers from the notes (paper §7.1, after LangChain)."""

from __future__ import annotations

import time

from cacheblend.blend import Fusor
from cacheblend.eval.data import Example, Task, Wording, make_request
from cacheblend.eval.data.source import prompt_builder
from cacheblend.retriever import PlainTokenizer

from .lone_chunk import read_chunk
from .method import MethodAnswer, generate, rows_run
from .resident import ResidentRequest


class MapReduce:
    """One note a chunk, one after the other, then full recompute of a prompt whose chunks are the notes.

    Args:
        fusor: the model.
        wording: the words around passages and question.
    """

    def __init__(self, fusor: Fusor, wording: Wording) -> None:
        self._fusor = fusor
        self._builder = prompt_builder(fusor.tokenizer, wording)
        self._plain = PlainTokenizer(fusor.tokenizer)

    def prepare(self, resident: ResidentRequest) -> None:
        """KV of the head with each chunk."""
        _ = resident.lone_kv

    def answer(self, resident: ResidentRequest, max_new_tokens: int) -> MethodAnswer:
        """The first token is the last step's, so all notes are in the TTFT."""
        started = time.perf_counter()
        tail = self._builder.build([], _map_question(resident.request.example)).tail
        chunks = range(len(resident.pieces.chunks))
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
            resident.pieces.head,
            [self._plain.ids(text + "\n") for text in texts],
            resident.pieces.tail,
            None if positions is None else positions - max_new_tokens,
        )
        return request.pieces.token_ids


def _map_question(example: Example) -> str:
    if example.task is Task.SUMMARIZATION:
        return "Summarize this text in a few sentences."
    return f"Note in one sentence what this text says about the question: {example.question}"
