"""Prompts in pieces whose borders are token borders: head, chunks, tail."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Any, Protocol

from jinja2.exceptions import TemplateError

from cacheblend.base.errors import InputError
from cacheblend.retriever import Chunk, PlainTokenizer
from cacheblend.store import DocumentVersion

# The words around a question where nobody asks for others.
BEFORE_QUESTION = "Question: "
AFTER_QUESTION = "\nAnswer:"


@dataclass(frozen=True, slots=True)
class PromptPieces:
    """A prompt's token ids: `head`, every chunk's, and `tail`, which holds the question. Their concatenation is the prompt.

    `document_ids` says which document each chunk is of, and `earlier` the chunks of that document which its KV is computed
    after; both are empty where nobody knows. `documents` has the id and version of the ingested document that each chunk is
    of, or None. `may_be_continued` says whether a later
    prompt may begin with all of this one, chunks and answer included: then its blended KV is kept for that.
    """

    head: tuple[int, ...]
    chunks: tuple[tuple[int, ...], ...]
    tail: tuple[int, ...]
    document_ids: tuple[str, ...] = ()
    may_be_continued: bool = True
    earlier: tuple[tuple[tuple[int, ...], ...], ...] = ()
    documents: tuple[DocumentVersion | None, ...] = ()

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The whole prompt."""
        return (*self.head, *(token for chunk in self.chunks for token in chunk), *self.tail)

    def start(self, index: int) -> int:
        """Position of a chunk's first token."""
        return len(self.head) + sum(map(len, self.chunks[:index]))

    def earlier_of(self, index: int) -> tuple[tuple[int, ...], ...]:
        """The chunks of its document that a chunk's KV is computed after."""
        return self.earlier[index] if self.earlier else ()

    def document_of(self, index: int) -> DocumentVersion | None:
        """The ingested document that a chunk is of; None for a text that the request brought."""
        return self.documents[index] if self.documents else None


class Layout(Protocol):
    """What stands around the chunks of one request's prompt."""

    def pieces(self, chunks: list[Chunk]) -> PromptPieces:
        """The prompt over these chunks."""


class PromptBuilder:
    """Lays out prompts for one model and one instruction.

    With a chat template the template is rendered once, around marks where chunks and question go, and cut at the marks: the
    template's own special tokens are read, those that stand in an instruction, a document or a question are not, and no text
    of theirs is ever part of a template. Without one the prompt is BOS, instruction, chunks, question.

    Args:
        tokenizer: the model's fast tokenizer.
        instruction: text in front of the chunks.
        before_question: text in front of the question.
        after_question: text behind the question, where there is no chat template to end it.
        chat: use the tokenizer's chat template where it has one; False makes a plain text of every prompt.

    Raises:
        InputError: the chat template cannot be rendered, or drops the user's text.
    """

    def __init__(
        self,
        tokenizer: Any,
        instruction: str,
        before_question: str = BEFORE_QUESTION,
        after_question: str = AFTER_QUESTION,
        *,
        chat: bool = True,
    ) -> None:
        self._plain = PlainTokenizer(tokenizer)
        bos = () if tokenizer.bos_token_id is None else (int(tokenizer.bos_token_id),)
        if tokenizer.chat_template is None or not chat:
            self.head = (*bos, *self._plain.ids(instruction))
            self._before_question, self._after_question = before_question, after_question
            self._tail_end: tuple[int, ...] = ()
            return
        mark_instruction, mark_chunks, mark_question = (secrets.token_hex(16) for _ in range(3))
        content = f"{mark_instruction}{mark_chunks}{before_question}{mark_question}"
        try:
            rendered = tokenizer.apply_chat_template(
                [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise InputError(f"the tokenizer's chat template cannot be rendered: {error}") from error
        parts = []
        for mark in (mark_instruction, mark_chunks, mark_question):
            if rendered.count(mark) != 1:
                raise InputError(
                    "the tokenizer's chat template does not repeat the user's message once and as it is; use another one"
                )
            part, _, rendered = rendered.partition(mark)
            parts.append(part)
        opening, between, question = parts
        self.head = (*self._template_ids(tokenizer, opening), *self._plain.ids(instruction), *self._plain.ids(between))
        self._before_question, self._after_question = question, ""
        self._tail_end = self._template_ids(tokenizer, rendered)

    def build(self, chunks: list[Chunk], question: str) -> PromptPieces:
        """The prompt of a question over chunks, each with the very ids it was precomputed with.

        Raises:
            InputError: an empty question.
        """
        if not isinstance(question, str) or not question.strip():
            raise InputError(f"question={question!r} is empty; ask something")
        # In one go: alone, the space at the end of "Question: " would be a token that no text has in this place.
        text = self._before_question + question.strip() + self._after_question
        tail = (*self._plain.ids(text), *self._tail_end)
        ids = tuple(chunk.document_id for chunk in chunks)
        return PromptPieces(self.head, tuple(chunk.token_ids for chunk in chunks), tail, ids, may_be_continued=False)

    def answer_ids(self, answer: str) -> tuple[int, ...]:
        """Token ids of an answer as it follows the prompt: after a space in a plain text, as it is after a chat template."""
        before = self._after_question
        if self._tail_end or not before or before[-1].isspace():
            return tuple(self._plain.ids(answer))
        # In one go, where the border holds: some tokenizers put a space of their own in front of a text.
        before_ids, whole = self._plain.ids(before), self._plain.ids(f"{before} {answer}")
        holds = whole[: len(before_ids)] == before_ids
        return tuple(whole[len(before_ids) :] if holds else self._plain.ids(f" {answer}"))

    @staticmethod
    def _template_ids(tokenizer: Any, text: str) -> tuple[int, ...]:
        return tuple(int(token) for token in tokenizer(text, add_special_tokens=False)["input_ids"])
