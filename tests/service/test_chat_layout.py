"""A chat's turns around the chunks, with and without a chat template."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from fakes import tiny_tokenizer

from cacheblend.base.errors import InputError
from cacheblend.retriever import Chunk
from cacheblend.service.engine.prompt import ChatLayouts, Message, PromptBuilder

INSTRUCTION = "Answer from these.\n"
TEMPLATE = "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}</s>{% endfor %}<s>assistant: "
CHUNKS = [
    Chunk("d", "v", place, "", text, tuple(tiny_tokenizer()(text)["input_ids"])) for place, text in enumerate(("one", "two"))
]


def tokenizer(template: str | None) -> Any:
    made = copy.deepcopy(tiny_tokenizer())
    made.chat_template = template
    return made


@pytest.mark.parametrize("template", [None, TEMPLATE], ids=["plain", "template"])
def test_one_question(template: str | None) -> None:
    """A chat of one question over chunks has the prompt of the engine's own questions."""
    made = tokenizer(template)
    layout = ChatLayouts(made, INSTRUCTION).chat([Message("user", " What? ")], with_chunks=True)
    assert layout.pieces(CHUNKS) == PromptBuilder(made, INSTRUCTION).build(CHUNKS, "What?")


def test_turns() -> None:
    """The template's words stand around every turn, chunks before the last question, and special tokens of turns stay text."""
    made = tokenizer(TEMPLATE)
    turns = [
        Message("system", "Be brief."),
        Message("user", "Hi </s>"),
        Message("assistant", "Hello"),
        Message("user", "What?"),
    ]
    layout = ChatLayouts(made, INSTRUCTION).chat(turns, with_chunks=True)
    assert made.decode(layout.head) == "<s>system: Be brief.</s><s>user: Hi </s></s><s>assistant: Hello</s><s>user: "
    assert list(layout.head).count(made.eos_token_id) == 3
    assert made.decode(layout.tail) == "Question: What?</s><s>assistant: "


def test_without_chunks() -> None:
    """Without chunks there is neither instruction nor the word before a question."""
    layout = ChatLayouts(tokenizer(TEMPLATE), INSTRUCTION).chat([Message("user", "What?")], with_chunks=False)
    assert tokenizer(None).decode(layout.pieces([]).token_ids) == "<s>user: What?</s><s>assistant: "


@pytest.mark.parametrize(
    ("template", "turns", "named"),
    [
        (None, [], "last one"),
        (None, [Message("user", "a"), Message("assistant", "b")], "last one"),
        (None, [Message("system", ""), Message("user", "b")], r"messages\[0\]"),
        ("{{ messages[0].content }}", [Message("system", "a"), Message("user", "b")], "drops or repeats"),
        ("{{ raise_exception('no system') }}", [Message("user", "b")], "no system"),
    ],
)
def test_turns_that_cannot_be_taken(template: str | None, turns: list[Message], named: str) -> None:
    """Turns that the model's template drops, or a chat without a question, are refused."""
    with pytest.raises(InputError, match=named):
        ChatLayouts(tokenizer(template), INSTRUCTION).chat(turns, with_chunks=True)


def test_completion() -> None:
    """A text to continue stands behind BOS and the chunks, as it is."""
    made = tokenizer(TEMPLATE)
    pieces = ChatLayouts(made, INSTRUCTION).completion("Once </s> upon").pieces(CHUNKS)
    assert pieces.head == (made.bos_token_id,)
    assert made.decode(pieces.tail) == "Once </s> upon"
    assert made.eos_token_id not in pieces.tail
