"""Thinking models through the API: switched by the template's variables, thoughts apart from what is said."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from api import MODEL, serving
from engines import DOCUMENTS, QUESTION, OpenEngine
from fakes import tiny_tokenizer
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from thinking import GPT_OSS, QWEN3, grammar_of, thinking_tokenizer
from tiny_models import tiny_model

from cacheblend.base.errors import ConfigError
from cacheblend.blend import Fusor
from cacheblend.service import Engine
from cacheblend.service.engine.grammar import GrammarCompiler
from cacheblend.service.engine.reasoning import Thoughts
from cacheblend.service.http import chat
from cacheblend.service.http.config import HttpConfig
from cacheblend.service.http.schemas import ChatBody
from cacheblend.service.serving.scheduler import ServingConfig

THOUGHTS, SAID = "hm {\n\nso", "It rains."
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
CITY = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 6}}, "required": ["city"]}
WEATHER: Any = {"type": "function", "function": {"name": "weather", "parameters": CITY}}
NO_CHUNKS = {"num_chunks": 0}  # for which tools leave no room
MESSAGES: list[Any] = [{"role": "user", "content": QUESTION}]
SWITCHES: list[tuple[dict[str, Any], bool]] = [
    ({}, True),
    ({"chat_template_kwargs": {"enable_thinking": True}}, True),
    ({"chat_template_kwargs": {"enable_thinking": False}}, False),
    ({"enable_thinking": False}, False),
    ({"reasoning_effort": "none"}, False),
    ({"reasoning_effort": "low"}, True),
    ({"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}}, True),
]


def thinking_engine(open_engine: OpenEngine, template: str) -> Engine:
    """An engine over documents with a tiny Qwen3, and the tokenizer and template of a reasoning model."""
    tokenizer = thinking_tokenizer(template)
    engine = open_engine(fusor=Fusor(tiny_model("qwen3", vocab=len(tokenizer)), tokenizer))
    engine.ingest(DOCUMENTS[:2])
    return engine


@pytest.fixture
def client(open_engine: OpenEngine) -> Iterator[openai.OpenAI]:
    with (
        serving(thinking_engine(open_engine, QWEN3), ServingConfig(max_num_seqs=4)) as (_, address),
        openai.OpenAI(base_url=f"{address}/v1", api_key="none", timeout=60, max_retries=0) as client,
    ):
        yield client


@pytest.fixture
def says(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the model says, in a list to be changed; it thinks before, unless its prompt has ended the thoughts."""
    said = [SAID]

    def sampling_of(_: Any, compiler: GrammarCompiler, thoughts: Thoughts) -> dict[str, Any]:
        if thoughts.format.has_channels:
            text = f"<|channel|>analysis<|message|>{THOUGHTS}<|end|><|start|>assistant{said[0]}"
        else:
            text = said[0] if thoughts.is_closed else f"<think>\n{THOUGHTS}\n</think>\n\n{said[0]}"
        return {"grammar": grammar_of(compiler, text)}

    monkeypatch.setattr(chat, "sampling_of", sampling_of)
    return said


def test_an_engines_answer(open_engine: OpenEngine) -> None:
    """`Engine.answer` and its stream have thoughts apart from the text; a text that is continued keeps them in it."""
    engine, raw = thinking_engine(open_engine, QWEN3), f"<think>\n{THOUGHTS}\n</think>\n\n{SAID}"
    grammar = grammar_of(GrammarCompiler(engine.fusor.model, engine.fusor.tokenizer), raw)
    answer = engine.answer(QUESTION, grammar=grammar, max_tokens=120)
    assert (answer.text, answer.thoughts, answer.as_dict()["thoughts"]) == (SAID, THOUGHTS, THOUGHTS)
    *pieces, done = engine.stream(engine.prepare(QUESTION, grammar=grammar, max_tokens=120))
    assert "".join(piece.text for piece in pieces) + done.last_text == SAID
    continued = engine.answer("", layout=engine.prompts.completion("So: "), num_chunks=0, grammar=grammar, max_tokens=120)
    assert (continued.text, continued.thoughts) == (raw, "")


def ask(client: openai.OpenAI, **options: Any) -> ChatCompletion:
    return client.chat.completions.create(model=MODEL, **{"messages": MESSAGES, "max_tokens": 120, **options})


def streamed(client: openai.OpenAI, **options: Any) -> tuple[str, str, list[ChatCompletionChunk]]:
    """Thoughts, content and pieces of a stream."""
    pieces = list(
        client.chat.completions.create(
            model=MODEL,
            stream=True,
            **{"messages": MESSAGES, "max_tokens": 120, "stream_options": {"include_usage": True}, **options},
        )
    )
    deltas = [choice.delta for piece in pieces for choice in piece.choices]
    thoughts = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
    return thoughts, "".join(delta.content or "" for delta in deltas), pieces


@pytest.mark.usefixtures("says")
@pytest.mark.parametrize("documents", [None, [{"text": "Oslo is wet."}]], ids=["stored", "brought"])
def test_openai(client: openai.OpenAI, documents: Any) -> None:
    """Thinking is switched on and off; whole and streamed the thoughts are apart, counted, and never content."""
    brought = {} if documents is None else {"documents": documents}
    for switch, thinks in SWITCHES if documents is None else SWITCHES[:3]:
        thoughts = THOUGHTS if thinks else ""
        answer = ask(client, extra_body={**switch, **brought})
        message = answer.choices[0].message
        assert (message.content, getattr(message, "reasoning_content", "")) == (SAID, thoughts), switch
        found_thoughts, content, pieces = streamed(client, extra_body={**switch, **brought})
        assert (content, found_thoughts) == (SAID, thoughts), switch
        for usage in (answer.usage, pieces[-1].usage):
            assert usage is not None
            assert usage.completion_tokens_details is not None
            reasoning_tokens = usage.completion_tokens_details.reasoning_tokens
            assert reasoning_tokens is not None
            assert (reasoning_tokens > 0) == thinks
            assert reasoning_tokens < usage.completion_tokens
        report = answer.model_extra["cacheblend"] if answer.model_extra else {}
        assert report["hits"] > 0 or documents is not None
    cut = ask(client, max_tokens=4).choices[0]
    assert (cut.finish_reason, cut.message.content) == ("length", "")
    assert THOUGHTS.startswith(cut.message.model_extra["reasoning_content"] if cut.message.model_extra else "?")


@pytest.mark.usefixtures("says")
def test_anthropic(client: openai.OpenAI) -> None:
    """Thoughts are a block before the text's in Anthropic's words, and are switched off in them."""
    body = {"max_tokens": 120, "messages": MESSAGES, "num_chunks": 0}
    url = f"{client.base_url}messages"
    thoughts = {"type": "thinking", "thinking": THOUGHTS, "signature": ""}
    for thinking, blocks in (("enabled", [thoughts]), ("disabled", [])):
        asked = {**body, "thinking": {"type": thinking}}
        assert httpx.post(url, json=asked, timeout=60).json()["content"] == [*blocks, {"type": "text", "text": SAID}]
        lines = httpx.post(url, json={**asked, "stream": True}, timeout=60).text.splitlines()
        opened = [json.loads(line[6:])["content_block"]["type"] for line in lines if '"content_block_start"' in line]
        assert opened == ["thinking", "text"][1 - len(blocks) :]


def test_calls_after_thoughts(client: openai.OpenAI, says: list[str]) -> None:
    """A call after thoughts is one, whole and streamed, and it comes back in the conversation with its thoughts."""
    says[0] = CALL
    choice = ask(client, tools=[WEATHER], extra_body=NO_CHUNKS).choices[0]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    assert choice.message.tool_calls is not None
    (call,) = choice.message.tool_calls
    thoughts, content, pieces = streamed(client, tools=[WEATHER], stream_options=None, extra_body=NO_CHUNKS)
    assert (thoughts, content) == (THOUGHTS, "")
    assert pieces[-2].choices[0].delta.tool_calls is not None
    says[0] = SAID
    back = choice.message.model_dump(exclude_none=True)
    assert back["reasoning_content"] == THOUGHTS
    turns = [{"role": "user", "content": "Rain?"}, back, {"role": "tool", "tool_call_id": call.id, "content": "It rains."}]
    longer = ask(client, messages=turns, max_tokens=40, tools=[WEATHER], extra_body=NO_CHUNKS)
    assert longer.choices[0].message.content == SAID
    back["reasoning"] = back.pop("reasoning_content") * 2  # as vLLM names them
    assert longer.usage is not None
    usage = ask(client, messages=turns, max_tokens=40, tools=[WEATHER], extra_body=NO_CHUNKS).usage
    assert usage is not None
    assert usage.prompt_tokens > longer.usage.prompt_tokens


def test_json_after_thoughts(client: openai.OpenAI) -> None:
    """A schema holds what is said, also where a call must come; the thoughts before it are free."""
    pytest.importorskip("llguidance")
    tokenizer = thinking_tokenizer(QWEN3)
    bias = {str(tokenizer.convert_tokens_to_ids(mark)): 100 for mark in ("<think>", "</think>")}
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"], "additionalProperties": False}
    form: Any = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    for thinks in (True, False):
        extra = {"chat_template_kwargs": {"enable_thinking": thinks}, **NO_CHUNKS}
        answer = ask(client, response_format=form, logit_bias=bias, logprobs=True, extra_body=extra)
        first = answer.choices[0].logprobs
        assert first is not None
        assert first.content is not None
        assert (first.content[0].token == "<think>") == thinks
        assert json.loads(answer.choices[0].message.content or "") == {"a": 1}
        _, content, _ = streamed(client, response_format=form, logit_bias=bias, extra_body=extra)
        assert json.loads(content) == {"a": 1}
        called = ask(client, tools=[WEATHER], tool_choice="required", logit_bias=bias, extra_body=extra).choices[0]
        assert called.finish_reason == "tool_calls"


def test_channels(open_engine: OpenEngine, says: list[str]) -> None:
    """Harmony's channels of gpt-oss are read from its special tokens; its calls are OpenAI's."""
    with (
        serving(thinking_engine(open_engine, GPT_OSS)) as (_, address),
        openai.OpenAI(base_url=f"{address}/v1", api_key="none", timeout=60, max_retries=0) as client,
    ):
        says[0] = f"<|channel|>final<|message|>{SAID}"
        message = ask(client, reasoning_effort="high").choices[0].message
        assert (message.content, message.model_extra) == (SAID, {"reasoning_content": THOUGHTS})
        assert streamed(client)[:2] == (THOUGHTS, SAID)
        says[0] = '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Oslo"}'
        choice = ask(client, tools=[WEATHER], extra_body=NO_CHUNKS).choices[0]
        assert choice.message.tool_calls is not None
        assert choice.message.tool_calls[0].to_dict()["function"] == {"name": "weather", "arguments": '{"city": "Oslo"}'}


@pytest.mark.usefixtures("says")
def test_defaults_of_the_service(open_engine: OpenEngine) -> None:
    """What the service is started with holds for chats that say nothing else; what its template does not know is refused."""
    engine = thinking_engine(open_engine, QWEN3)
    with (
        serving(engine, default_chat_template_kwargs='{"enable_thinking": false}') as (_, address),
        openai.OpenAI(base_url=f"{address}/v1", api_key="none", timeout=60, max_retries=0) as client,
    ):
        assert "reasoning_content" not in (ask(client).choices[0].message.model_extra or {})
        for switch in ({"chat_template_kwargs": {"enable_thinking": True}}, {"thinking": {"type": "enabled"}}):
            assert streamed(client, extra_body=switch)[:2] == (THOUGHTS, SAID)
    for text in ("{", "[]", "1", "", '{"enable_thinking": false'):
        with pytest.raises(ConfigError, match=r"default_chat_template_kwargs=.* a JSON object such as"):
            HttpConfig(default_chat_template_kwargs=text)
    with (
        pytest.raises(ConfigError, match=r"default_chat_template_kwargs='thinking' .* knows enable_thinking"),
        serving(engine, default_chat_template_kwargs='{"thinking": false}'),
    ):
        pass


def test_what_is_refused(client: openai.OpenAI) -> None:
    """What the template does not know, what is no object and what is too large are refused, and the field is named."""
    deep: Any = 1
    for _ in range(40):
        deep = [deep]
    for given, message in (
        ({"enable_thinkin": False}, "'enable_thinkin' is not allowed: the model's chat template knows enable_thinking"),
        ({"chat_template": "{{ 1 }}"}, "'chat_template' is not allowed"),
        ("enable_thinking=false", "chat_template_kwargs"),
        ({"enable_thinking": deep}, "levels deep"),
        ({"enable_thinking": "x" * 70_000}, "characters"),
        ({"enable_thinking": "</s>"}, "control token"),
    ):
        body = {"messages": MESSAGES, "max_tokens": 1, "chat_template_kwargs": given}
        response = httpx.post(f"{client.base_url}chat/completions", json=body, timeout=60)
        error = response.json()["error"]
        assert (response.status_code, str(error["param"]).partition(".")[0]) == (400, "chat_template_kwargs"), response.text
        assert message in error["message"]


@pytest.mark.parametrize("name", ["enable_thinking", "thinking"])
def test_the_templates_own_switch(name: str) -> None:
    """Thinking is switched by the variable that the template knows."""
    for switch in ({"enable_thinking": True}, {"reasoning_effort": "high"}, {"thinking": {"type": "enabled"}}):
        body = ChatBody.model_validate({"messages": MESSAGES, **switch})
        assert chat.template_kwargs(body, {name: False}, {name}) == {name: True}


def test_a_model_that_does_not_think(openai_client: openai.OpenAI) -> None:
    """Without a chat template there is nothing to switch; an effort, which clients send by themselves, changes nothing."""
    assert tiny_tokenizer().chat_template is None
    plain, other = (ask(openai_client, max_tokens=4, extra_body=extra) for extra in ({}, {"reasoning_effort": "low"}))
    assert plain.choices[0].message.content == other.choices[0].message.content
    assert plain.usage is not None
    assert plain.usage.completion_tokens_details is None
    for extra in ({"enable_thinking": False}, {"chat_template_kwargs": {"enable_thinking": False}}):
        assert ask(openai_client, max_tokens=4, extra_body=extra).choices[0].message.content == plain.choices[0].message.content
    with pytest.raises(openai.BadRequestError, match="has no variables to set; leave it out"):
        ask(openai_client, max_tokens=4, extra_body={"enable_thinking": True})
