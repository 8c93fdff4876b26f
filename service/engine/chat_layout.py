"""A chat's messages around the chunks: the last user message asks, and the chunks stand before it."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jinja2.exceptions import TemplateError

from cacheblend.base.errors import InputError
from cacheblend.retriever import Chunk, PlainTokenizer

from .lengths import check_characters
from .prompt import AFTER_QUESTION, BEFORE_QUESTION, PromptPieces


@dataclass(frozen=True, slots=True)
class Message:
    """One turn: `role` is "system", "user" or "assistant"."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class FixedLayout:
    """Token ids before the chunks and behind them; see `PromptPieces`."""

    head: tuple[int, ...]
    tail: tuple[int, ...]
    may_be_continued: bool = True

    def pieces(self, chunks: list[Chunk]) -> PromptPieces:
        """The prompt over these chunks."""
        ids = tuple(chunk.document_id for chunk in chunks)
        return PromptPieces(self.head, tuple(chunk.token_ids for chunk in chunks), self.tail, ids, self.may_be_continued)


class ChatLayouts:
    """Lays out chats for one model. A later turn has its own chunks before its question, and an earlier one's nowhere.

    The chat template is rendered around marks and cut there, as in `PromptBuilder`: no message becomes part of a template, and
    special tokens in messages stay plain text. Where a chat has no system message, the instruction stands before the chunks,
    and a chat of one question has the very prompt of `Engine.answer`. Without a template earlier turns stand between
    instruction and chunks as they are, one a line.

    Args:
        tokenizer: the model's fast tokenizer.
        instruction: text in front of the chunks where there are chunks and no system message.
        positions: of the model; texts that cannot be within them are refused before they are tokenised. None for any number.
    """

    def __init__(self, tokenizer: Any, instruction: str, positions: int | None = None) -> None:
        self._tokenizer, self._instruction, self._positions = tokenizer, instruction, positions
        self._plain = PlainTokenizer(tokenizer)
        self._bos = () if tokenizer.bos_token_id is None else (int(tokenizer.bos_token_id),)

    def chat(self, messages: Sequence[Message], *, with_chunks: bool) -> FixedLayout:
        """The layout of a chat; `with_chunks` where chunks will stand in it.

        Raises:
            InputError: the last message is not the user's, one is empty, or the model's template refuses the turns.
            PromptTooLongError: they cannot be within the model's positions.
        """
        check_characters(sum(len(message.content) for message in messages), self._positions)
        if not messages or messages[-1].role != "user":
            raise InputError("messages: the last one must be the user's question")
        for place, message in enumerate(messages):
            if not message.content.strip():
                raise InputError(f"messages[{place}].content is empty; leave the message out")
        has_system = any(message.role == "system" for message in messages)
        instruction = self._instruction if with_chunks and not has_system else ""
        question = messages[-1].content.strip()
        before = BEFORE_QUESTION if with_chunks else ""
        if self._tokenizer.chat_template is None:
            turns = "".join(f"{message.content.strip()}\n" for message in messages[:-1])
            head = (*self._bos, *self._ids(instruction), *self._ids(turns))
            tail = (*self._ids(before), *self._ids(question), *self._ids(AFTER_QUESTION))
            return FixedLayout(head, tail, may_be_continued=False)
        return self._templated(messages, instruction, before, question)

    def completion(self, prompt: str) -> FixedLayout:
        """The layout of a text to continue: BOS, chunks, text.

        Raises:
            InputError: an empty prompt.
            PromptTooLongError: it cannot be within the model's positions.
        """
        check_characters(len(prompt), self._positions)
        if not prompt:
            raise InputError("prompt is empty; give some text to continue")
        return FixedLayout(self._bos, self._ids(prompt), may_be_continued=False)

    def _templated(self, messages: Sequence[Message], instruction: str, before: str, question: str) -> FixedLayout:
        marks = [secrets.token_hex(16) for _ in messages]
        mark_chunks = secrets.token_hex(16)
        turns = [{"role": message.role, "content": mark} for message, mark in zip(messages, marks, strict=True)]
        turns[-1]["content"] = f"{mark_chunks}{marks[-1]}"
        try:
            rendered: str = self._tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        except (TemplateError, TypeError, ValueError) as error:
            raise InputError(f"messages: the model's chat template refuses these turns: {error}") from error
        head: tuple[int, ...] = ()
        texts = [*(message.content for message in messages[:-1]), instruction]
        for mark, text in zip([*marks[:-1], mark_chunks], texts, strict=True):
            if rendered.count(mark) != 1:
                raise InputError("messages: the model's chat template does not take these turns; it drops or repeats one")
            opening, _, rendered = rendered.partition(mark)
            head = (*head, *self._template_ids(opening), *self._ids(text))
        between, _, ending = rendered.partition(marks[-1])
        tail = (*self._ids(between + before), *self._ids(question), *self._template_ids(ending))
        return FixedLayout(head, tail, may_be_continued=False)

    def _ids(self, text: str) -> tuple[int, ...]:
        return tuple(self._plain.ids(text))

    def _template_ids(self, text: str) -> tuple[int, ...]:
        return tuple(int(token) for token in self._tokenizer(text, add_special_tokens=False)["input_ids"])
