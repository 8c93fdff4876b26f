"""Prompts as token ids whose borders are token borders: prefix, chunks, suffix; and the context-length checks."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from jinja2.exceptions import TemplateError

from cacheblend.base.errors import InputError, PromptTooLongError
from cacheblend.retriever import Chunk, Document, PlainTokenizer, Splitter
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


MOST_NEW_TOKENS = 4096  # of an answer of a model that says nothing of its positions
CHARACTERS_PER_TOKEN = 64  # no text that is worth a prompt has tokens of so many in the mean


def check_chunks(documents: Iterable[Document], splitter: Splitter, positions: int | None, prefix_tokens: int) -> None:
    """Refuse documents that the model cannot read chunk by chunk.

    Args:
        documents: what is to be ingested.
        splitter: cuts them.
        positions: the model's; None for any number.
        prefix_tokens: tokens that chunks are computed behind.

    Raises:
        PromptTooLongError: a chunk and its prefix are longer than the model's positions.
    """
    chunk_tokens = splitter.config.chunk_tokens
    if positions is None or prefix_tokens + 2 * chunk_tokens <= positions:  # a chunk is a little over chunk_tokens
        return
    for document in documents:
        longest = max(len(chunk.token_ids) for chunk in splitter.split(document))
        if prefix_tokens + longest > positions:
            raise PromptTooLongError(
                f"document {document.id!r} has a chunk of {longest} tokens, and the model {positions} positions, of which "
                f"{prefix_tokens} are for what stands before it; lower chunk_tokens={chunk_tokens}"
            )


def check_characters(characters: int, positions: int | None) -> None:
    """Refuse a text that cannot be within the model's positions, before it is tokenised.

    Raises:
        PromptTooLongError: it has more characters than so many tokens could.
    """
    if positions is not None and characters > positions * CHARACTERS_PER_TOKEN:
        raise PromptTooLongError(
            f"{characters} characters are more than the model's {positions} positions hold; ask a shorter question"
        )


def check_length(pieces: PromptPieces, max_tokens: int | None, positions: int | None) -> int:
    """Refuse a prompt that leaves no room for its answer; gives the most tokens of the answer.

    Args:
        pieces: the prompt.
        max_tokens: asked for; None for what fits behind the prompt.
        positions: the model's; None for any number, and then what fits is `MOST_NEW_TOKENS`.

    Raises:
        PromptTooLongError: prompt and answer are longer than the model's positions.
    """
    tokens = len(pieces.token_ids)
    if positions is None:
        return MOST_NEW_TOKENS if max_tokens is None else max_tokens
    if tokens + (max_tokens or 1) > positions:
        raise PromptTooLongError(
            f"{tokens} prompt tokens and {max_tokens or 1} to generate are more than the model's {positions} positions; "
            "take fewer chunks, lower max_tokens, ask a shorter question, or ingest smaller chunks"
        )
    return positions - tokens if max_tokens is None else max_tokens
