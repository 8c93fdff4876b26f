"""Thoughts of reasoning models: the marks around them in an answer, and the reader that parts them from what is said."""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

MAX_HEADER = 256  # characters before the first mark of Harmony's; more are an answer without any
THOUGHTS, SAID, START, HEADER, CALL = "thoughts", "said", "start", "header", "call"


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The marks of thoughts; with `has_channels` each message of an answer has a header as in Harmony's format of gpt-oss."""

    opens: str
    closes: str
    has_channels: bool = False


# The first one whose marks a chat template or a vocabulary has.
FORMATS = (
    ReasoningFormat("<|channel|>analysis<|message|>", "<|end|>", has_channels=True),  # gpt-oss
    ReasoningFormat("<|channel>thought\n", "<channel|>"),  # Gemma 4
    ReasoningFormat("[THINK]", "[/THINK]"),  # Mistral
    ReasoningFormat("<|START_THINKING|>", "<|END_THINKING|>"),  # Cohere
    ReasoningFormat("<seed:think>", "</seed:think>"),
    ReasoningFormat("<mm:think>", "</mm:think>"),  # MiniMax
    ReasoningFormat("◁think▷", "◁/think▷"),  # Kimi
    ReasoningFormat("<think>", "</think>"),  # Qwen, DeepSeek, GLM, Nemotron, SmolLM3, OLMo and others
)
CHANNEL_MARKS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")


@dataclass(frozen=True, slots=True)
class Thoughts:
    """How a model's answer to one prompt has its thoughts.

    Args:
        format: the marks.
        is_open: the prompt ends within thoughts, so the answer begins with them.
        is_closed: the prompt ends after thoughts, so the answer has none.
        tokens: the ids of added tokens that the marks are made of.
        hidden: the tokens without text in an answer; None for the tokenizer's special ones.
    """

    format: ReasoningFormat
    is_open: bool = False
    is_closed: bool = False
    tokens: Mapping[str, int] = field(default_factory=dict)
    hidden: frozenset[int] | None = None

    @classmethod
    def find(cls, tokenizer: Any, templates: str) -> Self | None:
        """The thoughts of a model by its tokenizer and its chat templates; None for a model that has no marks for them."""
        added = {token.content: id_ for id_, token in tokenizer.added_tokens_decoder.items()}
        special = {*tokenizer.all_special_ids, *(id_ for id_, token in tokenizer.added_tokens_decoder.items() if token.special)}
        for each in FORMATS:
            sign = "<|channel|>" if each.has_channels else each.closes
            if sign in templates or sign in added:
                marks = CHANNEL_MARKS if each.has_channels else (each.opens, each.closes)
                tokens = {text: id_ for text, id_ in added.items() if any(text in mark for mark in marks)}
                shown = special & {*tokens.values()}
                return cls(each, tokens=tokens, hidden=frozenset(special - shown) if shown else None)
        return None

    def split(self, text: str) -> tuple[str, str, str] | None:
        """The mark before the thoughts, "" where the prompt had it, the thoughts, and what follows the mark after them, in the
        text of an earlier turn as a client that got all as one sends it back; None for a text without thoughts.
        """
        thoughts, closes, said = text.partition(self.format.closes)
        opens = self.format.opens if thoughts.startswith(self.format.opens) else ""
        if self.format.has_channels or not closes or (not opens and self.format.opens in thoughts):
            return None
        return opens, thoughts.removeprefix(opens), said

    def grammar(self, is_special: Callable[[int], bool]) -> str:
        """The beginning of a grammar in Lark, whose `answer` comes after the thoughts; empty if there are none.

        Args:
            is_special: whether the grammar's compiler has a token apart from its text.
        """
        if self.is_closed:
            return ""
        tokens = {text: f"<[{id_}]>" for text, id_ in self.tokens.items() if is_special(id_)}

        def lark(text: str) -> str:
            parts = re.split(f"({'|'.join(map(re.escape, tokens))})", text) if tokens else [text]
            return " ".join(tokens.get(part, json.dumps(part)) for part in parts if part)

        opens, closes = lark(self.format.opens), self.format.closes
        if closes in tokens:
            thoughts = f"thoughts: text {tokens[closes]}\ntext: /(?s:.*)/"
        else:
            thoughts = "thoughts[lazy]: /(?s:.*)" + re.escape(closes).replace("/", r"\/") + "/"
        if self.format.has_channels:
            start = f"({opens} thoughts {lark('<|start|>assistant')})? {lark('<|channel|>final<|message|>')} answer"
        else:
            start = "thoughts space? answer" if self.is_open else f"({opens} thoughts space?)? answer"
        return f"start: {start}\n{thoughts}\nspace: /[ \\n]{{1,4}}/\n"


def begun_size(text: str, marks: Iterable[str]) -> int:
    """Length of the longest end of a text that one of a few marks begins with, and does not end."""
    sizes = ((size, mark) for mark in marks for size in range(min(len(mark) - 1, len(text)), 0, -1))
    return max((size for size, mark in sizes if text.endswith(mark[:size])), default=0)


class ThoughtReader:
    """Parts one answer's text, as it comes, into thoughts and what is said. White space around thoughts is dropped.

    Text is held back from where a mark may begin. A call of Harmony's becomes one as Hermes writes it.
    """

    def __init__(self, thoughts: Thoughts) -> None:
        self._format = thoughts.format
        self._state = HEADER if self._format.has_channels else THOUGHTS if thoughts.is_open else START
        self._held = self._header = ""
        self._is_fresh, self._has_marks = thoughts.is_open, False
        self._parts: dict[str, list[str]] = {THOUGHTS: [], SAID: []}

    def add(self, text: str) -> tuple[str, str]:
        """The thoughts and the said text that are certain with this piece of the answer."""
        self._held += text
        while (found := self._next_mark()) is not None:
            place, mark = found
            before, self._held = self._held[:place], self._held[place + len(mark) :]
            self._emit({START: "", THOUGHTS: before.rstrip()}.get(self._state, before))
            self._switch(mark)
        certain = self._held[: len(self._held) - self._uncertain()]
        self._held = self._held[len(certain) :]
        self._emit(certain)
        return self._given()

    def finish(self, text: str = "") -> tuple[str, str]:
        """Read the last piece, and what was held back, in the same way."""
        thoughts, said = self.add(text)
        if self._state == START:
            self._state = SAID
        self._emit(self._held)
        self._held = ""
        if self._state == HEADER and not self._has_marks:  # an answer without any mark is said
            self._parts[SAID].append(self._header)
        self._end_call()
        last_thoughts, last_said = self._given()
        return thoughts + last_thoughts, said + last_said

    def _marks(self) -> tuple[str, ...]:
        """The marks that count now."""
        if self._format.has_channels:
            return CHANNEL_MARKS
        return {START: (self._format.opens,), THOUGHTS: (self._format.closes,)}.get(self._state, ())

    def _next_mark(self) -> tuple[int, str] | None:
        found = [(place, mark) for mark in self._marks() if (place := self._held.find(mark)) >= 0]
        if not found or (self._state == START and self._held[: min(found)[0]].strip()):
            return None
        return min(found)

    def _uncertain(self) -> int:
        """How many of the last characters may belong to a mark, or to white space at the thoughts' end."""
        held = self._held
        if self._state == START:
            if self._format.opens.startswith(held.lstrip()):
                return len(held)
            self._state = SAID
            return 0
        size = begun_size(held, self._marks())
        return len(held) - len(held[: len(held) - size].rstrip()) if self._state == THOUGHTS else size

    def _switch(self, mark: str) -> None:
        """Go on after a mark."""
        self._has_marks = self._is_fresh = True
        if not self._format.has_channels:
            self._state = THOUGHTS if mark == self._format.opens else SAID
        elif mark != "<|message|>":
            self._end_call()
            self._state = HEADER
            self._header += " "
        else:
            called = re.search(r"to=functions\.([\w-]+)", self._header)
            self._state = CALL if called else THOUGHTS if "analysis" in self._header else SAID
            self._header = ""
            if called:
                self._parts[SAID].append(f'<tool_call>{{"name": "{called[1]}", "arguments": ')

    def _end_call(self) -> None:
        if self._state == CALL:
            self._parts[SAID].append("}</tool_call>")
            self._state = HEADER

    def _emit(self, text: str) -> None:
        if self._is_fresh:
            text = text.lstrip()
            self._is_fresh = not text
        if self._state != HEADER:
            self._parts[THOUGHTS if self._state == THOUGHTS else SAID].append(text)
            return
        self._header += text
        if not self._has_marks and len(self._header) > MAX_HEADER:
            self._state, text, self._header = SAID, self._header, ""
            self._parts[SAID].append(text)

    def _given(self) -> tuple[str, str]:
        thoughts, said = ("".join(self._parts[name]) for name in (THOUGHTS, SAID))
        self._parts = {THOUGHTS: [], SAID: []}
        return thoughts, said
