"""Thoughts of reasoning models: the template's variables, earlier turns' thoughts, and thoughts read out of answers."""

import copy
import json
from typing import Any

import pytest
from fakes import tiny_tokenizer
from hypothesis import given
from hypothesis import strategies as st
from thinking import GPT_OSS, OPENED, QWEN3, thinking_tokenizer
from tiny_models import tiny_model

from cacheblend.base.errors import ConfigError
from cacheblend.service.engine.decoding import TextStream
from cacheblend.service.engine.grammar import GrammarCompiler
from cacheblend.service.engine.prompt import Message, PromptRenderer
from cacheblend.service.engine.reasoning import FORMATS, ThoughtReader, Thoughts

THINK, HARMONY = FORMATS[-1], FORMATS[0]
ASKED = [Message("user", "What?")]
TURNS = [
    Message("user", "Hi"),
    Message("assistant", "<think>\nold\n</think>\n\nHello"),
    Message("user", "Rain?"),
    Message("assistant", "", ({"type": "function", "function": {"name": "f", "arguments": {}}},), thoughts="\nnew </think>\n"),
    Message("tool", "It rains.", (), "call_1"),
]


@pytest.mark.parametrize(
    ("template", "names"), [(QWEN3, {"enable_thinking"}), (OPENED, set()), (GPT_OSS, {"reasoning_effort"}), (None, set())]
)
def test_variables_of_a_template(template: str | None, names: set[str]) -> None:
    """A request may set the template's own variables, and nothing else that the tokenizer's method has as an option."""
    renderer = PromptRenderer(tiny_tokenizer() if template is None else thinking_tokenizer(template), "Read.\n")
    assert renderer.template.variables == names
    for asked in ({"enable_thinkin": True}, {"chat_template": "x"}, {"tokenize": True}, {"messages": []}, {"tools": []}):
        with pytest.raises(
            ConfigError, match=f"chat_template_kwargs='{next(iter(asked))}' is not allowed: the model's chat template"
        ):
            renderer.chat(ASKED, with_chunks=True, template_kwargs=asked)
    for name in names:
        with pytest.raises(ConfigError, match="control token"):
            renderer.chat(ASKED, with_chunks=True, template_kwargs={name: ["</s>"]})


def test_asking_not_to_think() -> None:
    """Only a model that never thinks may be asked not to by a variable that its template does not know."""
    tokenizer = copy.copy(tiny_tokenizer())
    tokenizer.chat_template = "{{ day }}{{ messages[-1].content }}"
    PromptRenderer(tokenizer, "").template.check_kwargs({"enable_thinking": False})
    with pytest.raises(ConfigError, match="'enable_thinking' is not allowed"):
        PromptRenderer(thinking_tokenizer(OPENED), "").template.check_kwargs({"enable_thinking": False})


@pytest.mark.parametrize(
    ("template", "variables", "end", "is_open", "is_closed"),
    [
        (QWEN3, {}, "<|im_start|>assistant\n", False, False),
        (QWEN3, {"enable_thinking": True}, "<|im_start|>assistant\n", False, False),
        (QWEN3, {"enable_thinking": False}, "<|im_start|>assistant\n<think>\n\n</think>\n\n", False, True),
        (OPENED, {}, "<|im_start|>assistant\n<think>\n", True, False),
        (GPT_OSS, {}, "<|end|><|start|>assistant", False, False),
    ],
)
def test_the_prompt_of_a_question(template: str, variables: dict[str, Any], end: str, is_open: bool, is_closed: bool) -> None:
    """Chunks and question stand where the template has the user's words, and the prompt says how the answer begins."""
    tokenizer = thinking_tokenizer(template)
    renderer = PromptRenderer(tokenizer, "Read.\n")
    layout = renderer.chat(ASKED, with_chunks=True, template_kwargs=variables)
    content = "Read.\nQuestion: What?"
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True, **variables
    )
    assert tokenizer.decode(layout.token_ids) == rendered
    assert rendered.endswith(end)
    assert layout.prefix == renderer.prefix
    thoughts = renderer.thoughts(layout)
    assert thoughts is not None
    assert (thoughts.is_open, thoughts.is_closed) == (is_open, is_closed)


SWITCHED = (
    "{% set system = messages[0].content %}{{ system.replace('/no_think', '').replace('/think', '').rstrip() }}"
    "{% for message in messages[1:] %}<{{ message.role }}>{{ message.content }}{% endfor %}"
    "<assistant>{% if '/no_think' in system %}<think></think>{% endif %}"
)


@pytest.mark.parametrize(
    ("template", "system", "text"),
    [
        (SWITCHED, "/no_think", "<user>What?<assistant><think></think>"),
        (SWITCHED, "Be\n/no_think brief.", "Be\n brief.<user>What?<assistant><think></think>"),
        (SWITCHED, "Of /think", "Of<user>What?<assistant>"),
        (SWITCHED, "See a/no_think", "See a/no_think<user>What?<assistant>"),
        (SWITCHED.replace("/no_think", "/nothink"), "Be /no_think", "Be /no_think<user>What?<assistant>"),
    ],
)
def test_a_word_that_the_template_reads(template: str, system: str, text: str) -> None:
    """A template that switches thoughts by a word of the system message sees it; elsewhere the word is text."""
    tokenizer = copy.copy(tiny_tokenizer())
    tokenizer.chat_template = template
    asked = [Message("system", system), Message("user", "Of /no_think?"), *ASKED]
    layout = PromptRenderer(tokenizer, "").chat(asked, with_chunks=False)
    assert tokenizer.decode(layout.token_ids) == text.replace("<user>", "<user>Of /no_think?<user>")


def test_effort() -> None:
    """A variable that stands before the chunks changes the prompt there, and not what chunks are computed after."""
    renderer = PromptRenderer(tokenizer := thinking_tokenizer(GPT_OSS), "Read.\n")
    layout = renderer.chat(ASKED, with_chunks=True, template_kwargs={"reasoning_effort": "high"})
    assert tokenizer.decode(layout.prefix) == tokenizer.decode(renderer.prefix).replace("medium", "high")


def test_earlier_thoughts() -> None:
    """Thoughts of earlier turns are the template's to drop or to repeat, whether they come apart or within the text."""
    texts = {}
    apart = [TURNS[0], Message("assistant", "Hello", thoughts="old"), *TURNS[2:]]
    for template, turns in ((QWEN3, apart), (QWEN3, TURNS), (OPENED, TURNS[:3]), (GPT_OSS, apart)):
        tokenizer = thinking_tokenizer(template)
        layout = PromptRenderer(tokenizer, "").chat(turns, with_chunks=False)
        texts[template] = tokenizer.decode(layout.token_ids)
        assert "old" not in texts[template]
        assert "Hello<|im_end|>" in texts[template] or "<|message|>Hello<|end|>" in texts[template]
        if template == QWEN3:  # what a client writes is no mark
            assert layout.token_ids.count(tokenizer.convert_tokens_to_ids("</think>")) == 1
    assert "<think>\nnew </think>\n</think>\n\n<tool_call>" in texts[QWEN3]
    assert "analysis<|message|>\nnew </think>\n<|end|><|start|>assistant to=functions.f" in texts[GPT_OSS]


CALL = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>'


@pytest.mark.parametrize(
    ("marks", "text", "thoughts", "said"),
    [
        (Thoughts(THINK), "<think>\nhm\n\nso\n</think>\n\nYes.", "hm\n\nso", "Yes."),
        (Thoughts(THINK), " <think></think>Yes <think>no</think>", "", "Yes <think>no</think>"),
        (Thoughts(THINK), "<think>a < b </thin", "a < b </thin", ""),
        (Thoughts(THINK), "<thin", "", "<thin"),
        (Thoughts(THINK), "\n Yes </think>", "", "\n Yes </think>"),
        (Thoughts(THINK, is_open=True), "\nhm </think> \nYes.", "hm", "Yes."),
        (Thoughts(THINK, is_open=True), "never ends", "never ends", ""),
        (Thoughts(THINK, is_closed=True), "Yes.", "", "Yes."),
        (Thoughts(THINK, is_closed=True), "<think>still</think>Yes.", "still", "Yes."),
        (Thoughts(FORMATS[1]), "<|channel>thought\nhm<channel|>Yes.", "hm", "Yes."),
        (
            Thoughts(HARMONY),
            "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Yes.<|return|>",
            "hm",
            "Yes.",
        ),
        (Thoughts(HARMONY), "<|channel|>analysis<|message|>hm", "hm", ""),
        (Thoughts(HARMONY), "<|channel|>anal", "", ""),
        (Thoughts(HARMONY), "plain", "", "plain"),
        (Thoughts(HARMONY), "plain " * 60, "", "plain " * 60),
        (
            Thoughts(HARMONY),
            f"<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary<|message|>Wait.<|end|><|start|>assistant{CALL}",
            "hm",
            'Wait.<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>',
        ),
        (
            Thoughts(HARMONY),
            " to=functions.f<|channel|>commentary<|message|>{}",
            "",
            '<tool_call>{"name": "f", "arguments": {}}</tool_call>',
        ),
    ],
)
def test_thoughts_in_a_text(marks: Thoughts, text: str, thoughts: str, said: str) -> None:
    """Thoughts and what is said are parted, however the text is cut, and no mark shows in either."""
    for size in (1, 5, len(text)):
        reader = ThoughtReader(marks)
        pieces = [reader.add(text[start : start + size]) for start in range(0, len(text), size)]
        pieces.append(reader.finish())
        assert ("".join(one for one, _ in pieces), "".join(other for _, other in pieces)) == (thoughts, said)


PARTS = [
    "\n",
    " a",
    *["<think>", "</", "think>", "<|channel|>", "<|message|>", "<|end|>", "analysis", "to=functions.f", "<|call|>", "<|"],
]


@given(st.lists(st.sampled_from(PARTS), max_size=12).map("".join), st.integers(1, 6), st.booleans())
def test_a_cut_changes_nothing(text: str, size: int, is_open: bool) -> None:
    """What is read piece by piece is what is read of the text in one."""
    for marks in (Thoughts(THINK, is_open=is_open), Thoughts(HARMONY)):
        reader = ThoughtReader(marks)
        pieces = [*(reader.add(text[start : start + size]) for start in range(0, len(text), size)), reader.finish()]
        assert ThoughtReader(marks).finish(text) == ("".join(one for one, _ in pieces), "".join(two for _, two in pieces))


def test_special_marks_are_read() -> None:
    """Marks that are special tokens have their text in a chat's answer, other special tokens have none."""
    tokenizer = thinking_tokenizer(GPT_OSS)
    thoughts = Thoughts.find(tokenizer, GPT_OSS)
    assert thoughts is not None
    text = f"<s><|channel|>analysis<|message|>é<|end|>{CALL}"
    for hidden, expected in ((None, 'analysisécommentary to=functions.f json{"a": 1}'), (thoughts.hidden, text[3:])):
        stream = TextStream(tokenizer, hidden=hidden)
        read = "".join(stream.add(token) for token in tokenizer(text)["input_ids"]) + stream.finish()
        assert read == expected.replace("<|constrain|>", "")


@pytest.mark.parametrize(
    ("template", "variables", "good", "bad"),
    [
        (QWEN3, {}, ['{"a": 1}', '<think>\nno {"a"\n</think>\n\n{"a": 1}'], ["Yes", "<think></think>Yes"]),
        (QWEN3, {"enable_thinking": False}, ['{"a": 1}'], ["<think>"]),
        (OPENED, {}, ['\nno {"a"</think>{"a": 1}'], ['</think>\n{"b"']),
        (
            GPT_OSS,
            {},
            [
                '<|channel|>final<|message|>{"a": 1}',
                '<|channel|>analysis<|message|>no {"a"<|end|><|start|>assistant<|channel|>final<|message|>{"a": 1}',
            ],
            ['{"a": 1}', "<|channel|>commentary<|message|>", "<|channel|>final<|message|>Yes"],
        ),
    ],
)
def test_json_after_thoughts(template: str, variables: dict[str, Any], good: list[str], bad: list[str]) -> None:
    """A schema holds what is said, not the thoughts before it."""
    pytest.importorskip("llguidance")
    tokenizer = thinking_tokenizer(template)
    renderer = PromptRenderer(tokenizer, "")
    thoughts = renderer.thoughts(renderer.chat(ASKED, with_chunks=False, template_kwargs=variables))
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"], "additionalProperties": False}
    grammar = GrammarCompiler(tiny_model("qwen3", vocab=len(tokenizer)), tokenizer).json(schema, thoughts=thoughts)
    for text in (*good, *bad):
        matcher, ids = grammar.matcher(), tokenizer(text, add_special_tokens=False)["input_ids"]
        taken = matcher.try_consume_tokens(ids)
        assert (taken == len(ids) and matcher.is_accepting()) == (text in good), (text, json.dumps(ids[taken:]))
