"""Prompts as token ids whose borders are token borders: a prefix, chunks, and a suffix that holds the question."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeVar

from cacheblend.base.errors import InputError, PromptTooLongError
from cacheblend.retriever import PlainTokenizer

from .chat_template import ChatTemplate
from .reasoning import Thoughts

if TYPE_CHECKING:
    from cacheblend.store import ChunkKey, DocumentVersion, KVHandle

T = TypeVar("T")
# The words around a question where nobody asks for others.
BEFORE_QUESTION = "Question: "
AFTER_QUESTION = "\nAnswer:"
MAX_NEW_TOKENS = 4096  # of an answer of a model that says nothing of its positions
FIRST_READ = 8  # characters a position: where these are too many tokens, the rest is not read
CONTEXT_LENGTH = "this model's maximum context length is {} tokens"  # OpenAI's words, which routers look for
CHARACTERS_PER_TOKEN = 64  # no text that is worth a prompt has tokens of so many in the mean
MAX_SOUGHT = 2**33  # characters in which all turns' texts and control tokens are looked for: seconds
THOUGHT_FIELDS = ("reasoning_content", "reasoning", "thinking")  # of a turn, one of which a template reads


@dataclass(frozen=True, slots=True)
class PromptChunk:
    """A chunk in a prompt, or text that stands between two chunks.

    Args:
        token_ids: its token ids.
        key: the store's key of its KV; None for text between two chunks, whose KV is of no use in another prompt.
        document: id and version of the ingested document that it is of; None for a text that the request brought.
        earlier: the chunks of its document that its KV is computed after.
        stored_ids: the token ids of its KV, of which `token_ids` are those from `start` on; as many, where there are none here.
    """

    token_ids: tuple[int, ...]
    key: ChunkKey | None = None
    document: DocumentVersion | None = None
    earlier: tuple[tuple[int, ...], ...] = ()
    stored_ids: tuple[int, ...] = ()
    start: int = 0

    def part(self, kv: KVHandle | None) -> KVHandle | None:
        """Of the KV under its key, or of none, that of its tokens."""
        from cacheblend.store.chunk import KVPart

        return kv if kv is None or self.stored_ids in ((), self.token_ids) else KVPart(kv, self.start, self.token_ids)


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """A prompt's token ids: `prefix`, every chunk's, and `suffix`. Their concatenation is the prompt.

    Args:
        prefix: before the chunks.
        suffix: after them; it holds the question.
        chunks: the chunks, and what stands between them; none in the layout of a prompt whose chunks are still to be found.
    """

    prefix: tuple[int, ...]
    suffix: tuple[int, ...]
    chunks: tuple[PromptChunk, ...] = ()

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The prompt."""
        return (*self.prefix, *(token for ids in self.chunk_ids for token in ids), *self.suffix)

    @property
    def chunk_ids(self) -> tuple[tuple[int, ...], ...]:
        """The token ids of each chunk."""
        return tuple(chunk.token_ids for chunk in self.chunks)

    @property
    def keys(self) -> list[ChunkKey]:
        """The keys of the chunks that may be stored, in order."""
        return [chunk.key for chunk in self.chunks if chunk.key is not None]

    def by_chunk(self, found: Iterable[T]) -> list[T | None]:
        """For each chunk that has a key the next of `found`, which stands in the order of `keys`; None for the others."""
        left = iter(found)
        return [None if chunk.key is None else next(left) for chunk in self.chunks]

    def __len__(self) -> int:
        return len(self.prefix) + sum(len(chunk.token_ids) for chunk in self.chunks) + len(self.suffix)

    def check_length(self, max_tokens: int | None, max_positions: int | None, cap: int | None = None) -> int:
        """The limit of the answer's tokens; refuses a prompt that leaves no room for one.

        Args:
            max_tokens: asked for; None for what fits after the prompt.
            max_positions: the model's; None for any number, and then what fits is `MAX_NEW_TOKENS`.
            cap: of an answer for which no number is asked; None for none.

        Raises:
            PromptTooLongError: prompt and answer are longer than the model's positions.
        """
        tokens = len(self)
        if max_positions is None:
            return max_tokens or cap or MAX_NEW_TOKENS
        if tokens + (wanted := max_tokens or 1) > max_positions:
            why = f"input length and `max_tokens` exceed context limit: {tokens} + {wanted} > {max_positions}"
            if tokens >= max_positions:  # both in Anthropic's words
                why = f"prompt is too long: {tokens} tokens > {max_positions} maximum"
            what = f"these are {tokens} of the prompt and {wanted} to generate ({why})"
            of_chunks = "take fewer chunks, lower max_tokens, ask a shorter question, or ingest smaller chunks"
            remedy = of_chunks if self.chunks else "shorten it, or lower max_tokens"
            raise PromptTooLongError(f"{CONTEXT_LENGTH.format(max_positions)}, and {what}; {remedy}", tokens)
        return max_tokens or min(max_positions - tokens, cap or max_positions)


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a chat.

    Args:
        role: "system", "user", "assistant" or "tool".
        content: its text; "" for an assistant that only calls tools.
        tool_calls: what an assistant calls, as chat templates have it: `{"id", "type", "function": {"name", "arguments"}}`,
            the arguments an object, or a text where a model wrote no JSON.
        tool_call_id: the call that a tool's result is of.
        name: of that tool.
        thoughts: an assistant's before its answer, which the template drops or repeats.
    """

    role: str
    content: str
    tool_calls: tuple[Mapping[str, Any], ...] = ()
    tool_call_id: str | None = None
    name: str | None = None
    thoughts: str = ""

    def turn(self, content: str, thoughts: str = "") -> dict[str, Any]:
        """The turn as a chat template has it, with `content` and `thoughts` in place of its texts."""
        turn: dict[str, Any] = {"role": self.role, "content": content}
        if thoughts:
            turn.update(dict.fromkeys(THOUGHT_FIELDS, thoughts))
        if self.tool_calls:
            turn["tool_calls"] = [dict(call) for call in self.tool_calls]
        if self.tool_call_id is not None:
            turn["tool_call_id"] = self.tool_call_id
        if self.role == "tool" and self.name is not None:
            turn["name"] = self.name
        return turn


Piece = tuple[str, bool]  # a text of a rendered chat, and whether it is the template's own


@dataclass(frozen=True, slots=True)
class _Frame:
    """The texts around the question of some turns; `prefix` is the ids of those before, up to the place of the chunks."""

    before: tuple[Piece, ...]
    after: tuple[Piece, ...]
    prefix: tuple[int, ...]


class PromptRenderer:
    """Renders questions, chats and texts for one model and one instruction.

    A chat template is rendered around marks in place of all texts, between their white space, and cut at the marks: the prompt
    is the template's own text, token by token, but for the text of control tokens that stand in an instruction, a document or a
    message: it stays text, and no text becomes part of a template.
    Without a template a prompt is BOS, instruction, earlier turns one a line, chunks, question, and what of an answer is there.

    Args:
        tokenizer: the model's fast tokenizer.
        instruction: text before the chunks of a question, and of a chat that has no system message.
        before_question: text before the question, where there are chunks.
        after_question: text after the question, where there is no chat template to end it.
        chat: use the tokenizer's chat template where it has one; False makes a plain text of every question and chat.
        max_positions: of the model; texts that cannot be within them are refused before they are tokenised. None: any number.

    Attributes:
        prefix: what the prompt of every question begins with.
        template: the model's chat template.
        after_question: text after the question; empty where a chat template ends it.

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
        max_positions: int | None = None,
    ) -> None:
        self._instruction, self._max_positions = instruction, max_positions
        self._plain = PlainTokenizer(tokenizer)
        self.template = ChatTemplate(tokenizer, self._plain, is_used=chat)
        self._bos = self.template.opening_ids()
        self._before_question, self.after_question = before_question, "" if self.template.is_used else after_question
        kwargs = self.template.undated  # the prefix names stored KV, whatever the day
        self.prefix = self._frame([Message("user", "")], instruction, template_kwargs=kwargs, with_chunks=True).prefix

    def question(self, question: str) -> PromptTokens:
        """The prompt of a question over chunks.

        Raises:
            InputError: an empty question.
            PromptTooLongError: it cannot be within the model's positions.
        """
        if not isinstance(question, str) or not question.strip():
            raise InputError(f"question={question!r} is empty; ask something")
        return self.chat([Message("user", question)], with_chunks=True)

    def chat(
        self,
        messages: Sequence[Message],
        *,
        with_chunks: bool,
        tools: Sequence[Mapping[str, Any]] = (),
        template_kwargs: Mapping[str, Any] | None = None,
        continues: bool = False,
    ) -> PromptTokens:
        """The prompt of a chat; `with_chunks` where chunks will stand before the user's last message, which may be empty.

        A later turn has its own chunks before its question, and an earlier one's nowhere. What follows a question stands after
        it. Without chunks nobody needs to ask.

        Args:
            messages: the turns.
            with_chunks: leave a place for chunks.
            tools: that the model may call, as chat templates have them: `{"type": "function", "function": {"name", ...}}`.
            template_kwargs: variables of the chat template, such as `enable_thinking`.
            continues: end within the last message, which the answer continues.

        Raises:
            ConfigError: see `ChatTemplate.check_kwargs`.
            InputError: there are no messages, chunks have no question, the template refuses the turns, or there are tools and
                it takes none.
            PromptTooLongError: they cannot be within the model's positions.
        """
        # 1. Refuse turns that nobody can answer, and tools that the template does not take.
        check_characters(sum(len(message.content) + len(message.thoughts) for message in messages), self._max_positions)
        asking = messages[question_place(messages) :]
        if not messages or (with_chunks and not asking):
            raise InputError("messages: one must be the user's question, before which the chunks stand; give it")
        calling = (f"messages[{place}]" for place, one in enumerate(messages) if one.role == "tool" or one.tool_calls)
        if (field := "tools" if tools else next(calling, None)) and not self.template.takes_tools:
            raise InputError(f"{field}: the model's chat template takes no tools; leave them out, or use another model")
        quoted = json.dumps([*tools, *(one.turn("") for one in messages)], ensure_ascii=False)
        check_characters(len(quoted), self._max_positions)
        # 2. Render what stands around the question.
        self.template.check_kwargs(template_kwargs or {})
        if continues:
            template_kwargs = {**(template_kwargs or {}), "continue_final_message": True, "add_generation_prompt": False}
        has_system = any(message.role == "system" and message.content.strip() for message in messages)
        instruction = self._instruction if with_chunks and not has_system else ""
        frame = self._frame(messages, instruction, tools, template_kwargs, with_chunks=with_chunks)
        return self._layout(frame, asking[0].content if asking else "", with_chunks=with_chunks)

    def completion(self, text: str | Sequence[int]) -> PromptTokens:
        """The prompt of a text to continue: BOS where the tokenizer puts it, chunks, and the text, its control tokens read.

        Token ids in place of a text stay what they are; chunks stand after their BOS, if they have one.

        Raises:
            InputError: an empty text.
            PromptTooLongError: it cannot be within the model's positions.
        """
        if not isinstance(text, str):
            opening = self._bos if tuple(text[: len(self._bos)]) == self._bos and len(text) > len(self._bos) else ()
            return PromptTokens(opening, tuple(text[len(opening) :]))
        check_characters(len(text), self._max_positions)
        if not text:
            raise InputError("prompt is empty; give some text to continue")
        self._check_tokens(text)
        return PromptTokens(self._bos, self.template.ids(text))

    def thoughts(self, prompt: PromptTokens) -> Thoughts | None:
        """How the answer to a chat's prompt has its thoughts; None for a model without any."""
        return self.template.thoughts_after(prompt.suffix)

    def text_ids(self, text: str) -> list[int]:
        """Token ids of a text of any length; special tokens in it stay plain text."""
        return self._plain.ids(text)

    def _layout(self, frame: _Frame, question: str, *, with_chunks: bool) -> PromptTokens:
        # In one go: alone, the space at the end of "Question: " would be a token that no text has in this place.
        asked = f"{self._before_question if with_chunks else ''}{question.strip()}{self.after_question}"
        after: list[Piece] = [(asked, False), *frame.after]
        if with_chunks or not self.template.is_used:
            return PromptTokens(frame.prefix, self._joined(after))
        prompt = self._joined([*frame.before, *after])
        pairs = enumerate(zip(prompt, frame.prefix, strict=False))
        place = next((place for place, (one, other) in pairs if one != other), len(frame.prefix))
        return PromptTokens(prompt[:place], prompt[place:])

    def _frame(
        self,
        messages: Sequence[Message],
        instruction: str,
        tools: Sequence[Mapping[str, Any]] = (),
        template_kwargs: Mapping[str, Any] | None = None,
        *,
        with_chunks: bool,
    ) -> _Frame:
        """Render the turns, the chunks and the question left out."""
        asks = question_place(messages)
        if not self.template.is_used:
            earlier = "".join(f"{message.content.strip()}\n" for message in messages[:asks])
            answered = "".join(f" {message.content.strip()}" for message in messages[asks + 1 :])
            return _Frame((), ((answered, False),), (*self._bos, *self._ids(instruction), *self._ids(earlier)))
        # 1. A mark for each text that there is; with chunks the question's is their place too.
        texts: dict[str, Piece] = {}  # by mark, and whether the template may drop it
        turns: list[dict[str, Any]] = []
        question = secrets.token_hex(16)
        for place, message in enumerate(messages):
            if place == asks:
                opening = _marked(instruction, texts)
                texts[question] = "", False
                turns.append(message.turn(opening + (question if with_chunks else _around_core(message.content, question))))
            else:
                turns.append(self._turn(message, texts))
        # 2. What the template puts around them; it may drop thoughts.
        rendered = self.template.render(turns, self._quoted(tools, texts), template_kwargs or {})
        check_characters(len(rendered), self._max_positions)
        if len(texts) * len(rendered) > MAX_SOUGHT:
            raise InputError("too many turns, or control tokens in tools, beside so long a text; send fewer")
        for mark, (text, may_go) in texts.items():  # gpt-oss and Llama 3 write a tool's result as JSON
            if mark != (quoted := json.dumps(mark)[1:-1]) and quoted in rendered:
                rendered, texts[mark] = rendered.replace(quoted, mark), (json.dumps(text, ensure_ascii=False)[1:-1], may_go)
        marks = [mark for mark, (_, may_go) in texts.items() if mark in rendered or not may_go]
        marks.sort(key=rendered.find)  # Mistral's has the system message in the last turn
        between = _around(rendered, marks)
        place = marks.index(question) if question in texts else len(marks)  # without one the answer begins at the end
        pieces: list[Piece] = []
        for own, mark in zip(between, marks, strict=False):
            pieces += [(own, True), (texts[mark][0], False)]
        before, after = pieces[: 2 * place + 1], [*pieces[2 * place + 2 :], (between[-1], True)]
        return _Frame(tuple(before), tuple(after), self._joined(before))

    def _quoted(self, value: Any, texts: dict[str, Piece]) -> Any:
        """A JSON value with marks in place of control tokens' texts, which stay texts."""
        if isinstance(value, str):
            return self._plain.control_texts.sub(lambda found: _marked(found[0], texts, may_go=True), value)
        if isinstance(value, Mapping):
            return {self._quoted(name, texts): self._quoted(part, texts) for name, part in value.items()}
        return [self._quoted(part, texts) for part in value] if isinstance(value, list | tuple) else value

    def _turn(self, message: Message, texts: dict[str, Piece]) -> dict[str, Any]:
        """A turn as the template has it, with marks in place of its texts."""
        calls, call_id, name = self._quoted((message.tool_calls, message.tool_call_id, message.name), texts)
        message = replace(message, tool_calls=tuple(calls), tool_call_id=call_id, name=name)
        thinking = self.template.thoughts if message.role == "assistant" else None
        # Beside a call the template of gpt-oss refuses thoughts and a text.
        has_all = thinking is not None and thinking.format.has_channels and message.content and message.tool_calls
        thoughts = "" if has_all else _marked(message.thoughts, texts, may_go=True)
        if thinking is None or thoughts or (parts := thinking.split(message.content)) is None:
            content, switch = self.template.split_switch(message.role, message.content)
            return message.turn(_marked(content, texts, end='"' * (message.role == "tool")) + switch, thoughts)
        opens, inner, said = parts
        return message.turn(opens + _marked(inner, texts, may_go=True) + thinking.format.closes + _marked(said, texts))

    def _joined(self, pieces: Sequence[Piece]) -> tuple[int, ...]:
        """The ids of texts in one go, as in the model's own prompt; one by one if that makes a control token of a text."""
        text = "".join(part for part, _ in pieces)
        self._check_tokens(text)
        own = [self.template.ids(part) if is_own else () for part, is_own in pieces]
        ids = self.template.ids(text)
        if self._plain.controls(ids) == self._plain.controls(chain.from_iterable(own)):
            return ids
        apart = (own_ids if is_own else self._ids(part) for own_ids, (part, is_own) in zip(own, pieces, strict=True))
        return tuple(chain.from_iterable(apart))

    def _ids(self, text: str) -> tuple[int, ...]:
        self._check_tokens(text)
        return tuple(self._plain.ids(text))

    def _check_tokens(self, text: str) -> None:
        """Refuse a text that is not Unicode, or of too many tokens by its beginning."""
        if re.search("[\ud800-\udfff]", text):
            raise InputError("a text has half of a surrogate pair, which is no character; remove it")
        most = self._max_positions
        if most is not None and len(text) > 2 * (first := most * FIRST_READ) and len(self._plain.ids(text[:first])) > most:
            raise PromptTooLongError(f"{CONTEXT_LENGTH.format(most)}, and a text has more; ask a shorter question")


def question_place(messages: Sequence[Message]) -> int:
    """Find the index of the last user message, which has the question; `len(messages)` if there is none."""
    return max((place for place, message in enumerate(messages) if message.role == "user"), default=len(messages))


def _around_core(text: str, mark: str) -> str:
    """A mark between a text's white space, which a template may trim."""
    start = len(text) - len(text.lstrip())
    return text[:start] + mark + text[max(start, len(text.rstrip())) :]


def _marked(text: str, texts: dict[str, Piece], *, may_go: bool = False, end: str = "") -> str:
    """A mark in place of what is not white space of a text, noted in `texts`; white space as it is. JSON escapes a quote."""
    if not (core := text.strip()):
        return text
    texts[mark := secrets.token_hex(16) + end] = core, may_go
    return _around_core(text, mark)


def _around(rendered: str, marks: Sequence[str]) -> list[str]:
    """A template's text before each mark, and after the last."""
    between: list[str] = []
    for mark in marks:
        if rendered.count(mark) != 1:
            raise InputError("messages: the model's chat template does not take these turns; it drops or repeats one")
        part, _, rendered = rendered.partition(mark)
        between.append(part)
    return [*between, rendered]


def check_characters(characters: int, max_positions: int | None) -> None:
    """Refuse a text that cannot be within the model's positions, before it is tokenised.

    Raises:
        PromptTooLongError: it has more characters than so many tokens could.
    """
    if max_positions is not None and characters > max_positions * CHARACTERS_PER_TOKEN:
        raise PromptTooLongError(f"{CONTEXT_LENGTH.format(max_positions)}, and {characters} characters are more; shorten it")
