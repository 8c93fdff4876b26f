"""Tools of a chat: taken where the model's template has a place for them, and their calls found in answers."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from anthropic_events import events_of, joined
from api import MODEL, serving
from engines import OpenEngine
from hypothesis import given
from hypothesis import strategies as st
from thinking import grammar_of

from cacheblend.blend import Fusor
from cacheblend.service import Engine
from cacheblend.service.engine.grammar import call_schema
from cacheblend.service.engine.prompt import Message
from cacheblend.service.http import chat
from cacheblend.service.http.answers import CallReader
from cacheblend.service.http.schemas import ChatBody
from cacheblend.service.serving.scheduler import ServingConfig

# In little what Qwen's is.
TEMPLATE = (
    "{% if tools %}{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}{% endif %}"
    "{% for message in messages %}{{ message.role }}: {{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}\n{% endfor %}"
    "assistant:"
)
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather.",
        "strict": True,
        "parameters": {
            "$defs": {"City": {"type": "string", "maxLength": 6}},
            "type": "object",
            "properties": {"city": {"$ref": "#/$defs/City"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
TIME: dict[str, Any] = {"type": "function", "function": {"name": "time"}}
USER = {"role": "user", "content": "Is it raining?"}
CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "It rains."}
WRITTEN = 'I look.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


@pytest.fixture
def tools_engine(fusor: Fusor, open_engine: OpenEngine, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """An engine whose model takes tools."""
    monkeypatch.setattr(fusor.tokenizer, "chat_template", TEMPLATE)
    return open_engine()


@pytest.fixture
def client(tools_engine: Engine) -> Iterator[openai.OpenAI]:
    with (
        serving(tools_engine, ServingConfig(max_num_seqs=4)) as (_, address),
        openai.OpenAI(base_url=f"{address}/v1", api_key="none", timeout=60, max_retries=0) as client,
    ):
        yield client


def test_many_tools(client: openai.OpenAI) -> None:
    """Tools are not counted: agents send a hundred and more, as many as the context has room for."""
    tools = [{"type": "function", "function": {"name": f"tool_{number}", "description": "d" * 700}} for number in range(8, 130)]
    with pytest.raises(openai.BadRequestError, match="context length"):  # the tiny model's is 512 tokens
        ask(client, tools=tools)


def ask(client: openai.OpenAI, messages: list[Any] | None = None, **options: Any) -> Any:
    return client.chat.completions.create(model=MODEL, messages=messages or [USER], **{"max_tokens": 120, **options})


@pytest.fixture
def writes_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model writes `WRITTEN`, whatever it is asked."""
    pytest.importorskip("llguidance")
    monkeypatch.setattr(chat, "sampling_of", lambda _, compiler, *__: {"grammar": grammar_of(compiler, WRITTEN)})


@pytest.mark.usefixtures("writes_a_call")
def test_a_call(client: openai.OpenAI) -> None:
    """A call that the model writes is told as one, whole and streamed, and what stands before it as text."""
    choice = ask(client, tools=[WEATHER, TIME]).choices[0]
    (call,) = choice.message.tool_calls
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "I look.\n")
    assert (call.type, call.function.name, json.loads(call.function.arguments)) == ("function", "weather", {"city": "Oslo"})
    pieces = [piece.choices[0] for piece in ask(client, tools=[WEATHER], stream=True, n=1)]
    assert "".join(piece.delta.content for piece in pieces) == "I look.\n"
    (streamed,) = pieces[-2].delta.tool_calls  # before the end, as clients expect it
    assert (streamed.index, streamed.function.name, streamed.function.arguments) == (0, "weather", '{"city": "Oslo"}')
    assert [piece.finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + ["tool_calls"]
    with client.chat.completions.stream(model=MODEL, messages=[USER], tools=[WEATHER], max_tokens=120) as events:
        done = [event.arguments for event in events if event.type == "tool_calls.function.arguments.done"]
        message = events.get_final_completion().choices[0].message
    assert (message.tool_calls[0].function.name, done) == ("weather", ['{"city": "Oslo"}'])
    plain = ask(client, tools=[WEATHER], tool_choice="none").choices[0]
    assert (plain.message.content, plain.message.tool_calls, plain.finish_reason) == (WRITTEN, None, "stop")


TOOL = {"name": "weather", "input_schema": WEATHER["function"]["parameters"], "cache_control": {"type": "ephemeral"}}


@pytest.mark.usefixtures("writes_a_call")
def test_a_call_in_messages(client: openai.OpenAI) -> None:
    """Anthropic's API has calls as blocks after the text, whole and streamed."""
    with httpx.Client(base_url=str(client.base_url).removesuffix("/v1/"), timeout=60) as plain:
        body = {"messages": [USER], "max_tokens": 120, "tools": [TOOL], "tool_choice": {"type": "auto"}}
        for message in (plain.post("/v1/messages", json=body).json(), joined(events_of(plain, body))):
            text, call = message["content"]
            assert (message["stop_reason"], text) == ("tool_use", {"type": "text", "text": "I look.\n"})
            assert (call.pop("id") != "", call) == (True, {"type": "tool_use", "name": "weather", "input": {"city": "Oslo"}})


def test_forced_calls_in_messages(client: openai.OpenAI) -> None:
    """A call must come where `tool_choice` says so; of one that is cut there is what came of it."""
    pytest.importorskip("llguidance")
    long = {"type": "string", "minLength": 40, "maxLength": 60}
    schema = {"type": "object", "properties": {"a": long}, "required": ["a"], "additionalProperties": False}
    limit = 120
    for choice, reason in (({"type": "any"}, "tool_use"), ({"type": "tool", "name": "f"}, "max_tokens")):
        tools = [{"name": "f", "input_schema": schema}]
        body = {"messages": [USER], "max_tokens": limit, "tools": tools, "tool_choice": choice}
        answer = httpx.post(f"{client.base_url}messages", json=body, timeout=60).json()
        assert (answer["stop_reason"], [block["type"] for block in answer["content"]]) == (reason, ["tool_use"])
        limit = answer["usage"]["output_tokens"] - 4


def test_a_conversation_in_messages(client: openai.OpenAI) -> None:
    """Calls and results in Anthropic's blocks are the turns that a chat has, text beside a result the user's own."""
    said = {"type": "text", "text": "Well?"}
    called = {"type": "tool_use", "id": "call_1", "name": "weather", "input": {"city": "Oslo"}}
    text = {"type": "text", "text": "It rains."}
    result = {"type": "tool_result", "tool_use_id": "call_1", "content": [text]}
    chat = [USER, {"role": "assistant", "content": "Hm.", "tool_calls": [CALL]}, RESULT]
    page = {"type": "document", "source": {"type": "text", "data": "It rains."}}
    found = {**result, "content": [{"type": "search_result", "title": "Sky", "content": [text]}, page]}
    documents = "<document>\nSky\nIt rains.\n</document>\n<document>\nIt rains.\n</document>\n"
    others = [*chat, {"role": "user", "content": "Well?"}], [*chat[:2], {**RESULT, "content": documents}]
    for content, turns in (([result], chat), ([result, said], others[0]), ([found], others[1])):
        own = [USER, {"role": "assistant", "content": [{"type": "text", "text": "Hm."}, called]}]
        body = {"messages": [*own, {"role": "user", "content": content}], "tools": [TOOL], "num_chunks": 0}
        counted = httpx.post(f"{client.base_url}messages/count_tokens", json=body, timeout=60).json()
        tool = {"type": "function", "function": {"name": "weather", "parameters": TOOL["input_schema"]}}
        answer = ask(client, turns, tools=[tool], max_tokens=1, extra_body={"num_chunks": 0})
        assert counted["input_tokens"] == answer.usage.prompt_tokens


def test_a_call_that_must_come(client: openai.OpenAI) -> None:
    """With "required" and with a named function the answer is a call whose arguments have their schema."""
    pytest.importorskip("llguidance")
    for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
        for stream in (False, True):
            answer = ask(client, tools=[WEATHER, TIME], tool_choice=choice, temperature=1.0, seed=3, stream=stream)
            choices = [piece.choices[0] for piece in answer] if stream else 2 * answer.choices
            (call,) = (choices[-2].delta if stream else choices[-2].message).tool_calls
            assert choices[-1].finish_reason == "tool_calls"
            arguments = json.loads(call.function.arguments)
            if call.function.name == "weather":
                assert len(arguments.pop("city")) <= 6
            else:
                assert choice == "required"
            assert arguments == {}
    short = ask(client, tools=[WEATHER], tool_choice="required", max_tokens=3).choices[0]
    assert (short.finish_reason, short.message.tool_calls) == ("length", None)


def test_tools_that_are_allowed(client: openai.OpenAI) -> None:
    """Of OpenAI's allowed tools one must or may be called, and the prompt has no others; one that is not there is named."""
    pytest.importorskip("llguidance")
    only = ask(client, tools=[TIME], max_tokens=1).usage.prompt_tokens
    for names, mode in ((["time"], "required"), (["time"], "auto"), (["time", "other"], "auto")):
        allowed = [{"type": "function", "function": {"name": name}} for name in names]
        choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": allowed}}
        if "other" in names:
            with pytest.raises(openai.BadRequestError, match="tool_choice: 'other' is none of the tools"):
                ask(client, tools=[WEATHER, TIME], tool_choice=choice)
            continue
        answer = ask(client, tools=[WEATHER, TIME], tool_choice=choice)
        assert answer.usage.prompt_tokens == only
        assert (answer.choices[0].finish_reason == "tool_calls") is (mode == "required")


def test_what_cannot_be_enforced(client: openai.OpenAI) -> None:
    """Keywords without a grammar are left out of schemas of tools and of answers, and refused by name in strict ones."""
    pytest.importorskip("llguidance")
    texts = {"type": "array", "uniqueItems": True, "items": {"$ref": "#/$defs/text"}, "maxItems": 1}
    text = {"type": "string", "pattern": "^(?!x)y", "not": {"const": "z"}, "maxLength": 3}
    schema = {"type": "object", "properties": {"a": texts}, "required": ["a"], "additionalProperties": False}
    schema["$defs"] = {"text": text}
    tool, strict = (
        {"type": "function", "function": {"name": "f", "parameters": schema, "strict": is_strict}}
        for is_strict in (False, True)
    )
    (call,) = ask(client, tools=[tool], tool_choice="required").choices[0].message.tool_calls
    (a,) = json.loads(call.function.arguments)["a"] or [""]
    assert len(a) <= 3
    ask(client, tools=[tool], response_format={"type": "json_object"}, max_tokens=1)
    form, strict_form = (
        {"type": "json_schema", "json_schema": {"name": "m", "schema": schema, "strict": is_strict}}
        for is_strict in (None, True)
    )
    (a,) = json.loads(ask(client, response_format=form).choices[0].message.content)["a"] or [""]
    assert len(a) <= 3
    looking = {"type": "json_schema", "json_schema": {"schema": {"type": "string", "pattern": "^(?!x)y"}, "strict": True}}
    deep = {"type": "json_schema", "json_schema": {"schema": json.loads('{"not": ' * 600 + "{}" + "}" * 600)}}
    for options, why in (
        ({"tools": [strict], "tool_choice": "required"}, "tool_choice: .*cannot be enforced"),
        ({"tools": [tool], "response_format": strict_form}, "response_format: .*cannot be enforced .*uniqueItems"),
        ({"response_format": looking}, r"response_format: .*cannot be enforced \([^|]*\^\(\?!x\)y[^|]*\); leave"),
        ({"response_format": deep}, "levels deep"),
    ):
        with pytest.raises(openai.BadRequestError, match=why):
            ask(client, **options)


def test_a_call_or_json(client: openai.OpenAI) -> None:
    """With a response format beside tools the answer is a call or has the schema, whose references hold."""
    pytest.importorskip("llguidance")
    moods = {"mood": {"enum": ["wet", "dry"]}}
    schema = {"type": "object", "properties": {"mood": {"$ref": "#/$defs/mood"}}, "required": ["mood"], "$defs": moods}
    form = {"type": "json_schema", "json_schema": {"name": "m", "schema": {**schema, "additionalProperties": False}}}
    for seed in range(4):
        message = ask(client, tools=[WEATHER], response_format=form, temperature=1.0, seed=seed).choices[0].message
        if message.tool_calls:
            assert message.tool_calls[0].function.name == "weather"
        else:
            assert json.loads(message.content)["mood"] in ("wet", "dry")


def test_a_conversation_with_calls(client: openai.OpenAI, tools_engine: Engine) -> None:
    """Calls and results stand in the prompt as the template has them, chunks before the question that they are of."""
    turns = [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}, RESULT]
    answer = ask(client, turns, tools=[WEATHER], max_tokens=4, extra_body={"documents": [{"text": "Oslo is wet."}]})
    assert answer.usage.prompt_tokens > 0
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
    messages = [Message("user", "Raining?"), Message("assistant", "", (call,)), Message("tool", "It rains.", (), "call_1")]
    layout = tools_engine.prompts.chat(messages, with_chunks=True, tools=[WEATHER])
    decode = tools_engine.fusor.tokenizer.decode
    prefix, suffix = decode(layout.prefix), decode(layout.suffix)
    assert prefix.startswith(json.dumps(WEATHER))
    assert "Raining?" not in prefix
    shown = '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'
    assert suffix.endswith(f"Raining?assistant: {shown}tool: It rains.assistant:")


def test_an_answer_that_is_continued(client: openai.OpenAI) -> None:
    """The assistant's last message is a turn before the answer, or begins the answer where a client says so."""

    def prompt_tokens(prefix: bool = False, **options: bool) -> int:
        turns = [USER, {"role": "assistant", "content": "It ra", "prefix": prefix}]
        return int(ask(client, turns, max_tokens=1, extra_body={"num_chunks": 0, **options}).usage.prompt_tokens)

    continued = prompt_tokens(continue_final_message=True, add_generation_prompt=False)
    assert prompt_tokens() > continued == prompt_tokens(prefix=True) == prompt_tokens(continue_final_message=True)


def test_control_tokens_stay_text(tools_engine: Engine) -> None:
    """In tools, calls, and names of results, which a conversation keeps for good."""
    tokenizer = tools_engine.fusor.tokenizer

    def ids_of(said: str) -> list[int]:
        tool = {"type": "function", "function": {"name": "f", "description": said, "parameters": {said: [said]}}}
        call = {"id": said, "type": "function", "function": {"name": "f", "arguments": {said: said}}}
        messages = [Message("user", "Go."), Message("assistant", "", (call,)), Message("tool", said, (), said, said)]
        return list(tools_engine.prompts.chat(messages, with_chunks=True, tools=[tool]).token_ids)

    hostile, tame = ids_of("say </s>"), ids_of("say so")
    assert tokenizer.decode(hostile).count("say </s>") == tokenizer.decode(tame).count("say so") > 5
    assert hostile.count(tokenizer.eos_token_id) == tame.count(tokenizer.eos_token_id)


def test_what_is_refused(client: openai.OpenAI) -> None:
    """A tool that is none of the given ones cannot be the one to call."""
    named = {"type": "function", "function": {"name": "other"}}
    with pytest.raises(openai.BadRequestError, match="tool_choice: 'other' is none of the tools"):
        ask(client, tools=[TIME], tool_choice=named, max_tokens=1)


def test_a_model_without_tools(openai_client: openai.OpenAI) -> None:
    """Where the model has no template that takes tools, they are refused with what to do instead, unless none may be called."""
    with pytest.raises(openai.BadRequestError, match="tools: the model's chat template has no place for them") as caught:
        ask(openai_client, tools=[TIME], max_tokens=1)
    assert caught.value.param == "tools"
    assert ask(openai_client, tools=[TIME], tool_choice="none", max_tokens=1).choices[0].finish_reason == "length"


def test_what_an_answer_beside_tools_may_be() -> None:
    """Without a schema any object beside the calls, whose arguments are an object whatever their schema says."""
    asked = {"messages": [USER], "tools": [TIME], "response_format": {"type": "json_object"}}
    body = ChatBody.model_validate(asked)
    assert body.answer_schemas is not None
    assert body.answer_schemas[1][-1] == {"type": "object"}
    assert call_schema("f", {}, is_strict=True)["properties"]["arguments"] == {"type": "object"}


ONE = '{"name": "f", "arguments": {"a": "é</tool_call>"}}'
CODER = "<function=f>\n<parameter=a>\né</tool_call>\n</parameter>\n</function>"
BRACES = r'{"name": "f", "arguments": {"a": "}] {\"a\": 1}, <tool_call>"}}'


@pytest.mark.parametrize(
    ("text", "kept", "calls"),
    [
        (f"<tool_call>{ONE}</tool_call>", "", 1),
        (f"a<tool_call>{ONE}</tool_call>\n<tool_call>{ONE}</tool_call>\n", "a", 2),
        (f"<tool_call>\n{ONE}\n", "", 1),
        (f" {ONE} ", "", 1),
        (f"{ONE}; {ONE}", "", 2),
        (f"{ONE}\n{ONE}", "", 2),
        (f"[{ONE}, {ONE}]", "", 2),
        (f" [\n{ONE}\n]\n", "", 1),
        (f"```json\n{ONE}\n```", "", 1),
        (f"```python\n{ONE}\n```", None, 0),
        (f"[{ONE}, 7]", None, 0),
        ("[1] says so, and [2] too.", None, 0),
        ("[]", None, 0),
        ('{"name": "f", "parameters": {}}', "", 1),
        ('{"name": "f", "arguments": "{}"}', "", 1),
        ('{"name": "f", "arguments": null}', "", 1),
        ('[{"tool_call_id": "0", "tool_name": "f", "parameters": {}}]', "", 1),
        (f"a<tools>\n{ONE}\n</tools>\n", "a", 1),
        (f"a<tool_call>\n{CODER}\n</tool_call>\n<tool_call>\n{CODER}\n</tool_call> b", "a b", 2),
        (CODER.replace("=f", "=g"), None, 0),
        (CODER[:-1], None, 0),
        ("<function=f>" + "<parameter=a>x</parameter>" * 5000, None, 0),
        ('<tool_call>{"name": "g", "arguments": {}}</tool_call>', None, 0),
        ('<tool_call>{"name": ["f"], "arguments": {}}</tool_call>', None, 0),
        ('<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>', None, 0),
        ('<tool_call>{"name": "f", "arguments": {"a": "\\ud800"}}</tool_call>', None, 0),
        ("<tool_call>" + '{"name": "f", "arguments": ' + "[" * 5000, None, 0),
        (f"<tool_call>{ONE}</tool_call> b <tool_call>x", " b <tool_call>x", 1),
        (f"{ONE} and more", None, 0),
        (f"I look.\n<tool_call>{BRACES}</tool_call><tool_call>{ONE}</tool_call>", "I look.\n", 2),
        (BRACES, "", 1),
        ("a < b <tool", None, 0),
        ("   ", None, 0),
    ],
)
def test_calls_in_a_text(text: str, kept: str | None, calls: int) -> None:
    """Whole calls of known tools are taken, and all else stays text; so it is however the text is cut."""
    for size in (1, 7, len(text)):
        reader = CallReader({"f": {}})
        given = "".join(reader.add(text[start : start + size]) for start in range(0, len(text), size))
        rest, found = reader.finish()
        assert (given + rest, len(found)) == (text if kept is None else kept, calls)
        written = ({}, {"a": "é</tool_call>"}, json.loads(BRACES)["arguments"])
        assert all(json.loads(call["function"]["arguments"]) in written for call in found)
    assert len({call["id"] for call in CallReader({"f": {}}).finish(text)[1]}) == calls
    assert len(CallReader({"f": {}}, 1).finish(text)[1]) == min(calls, 1)


def test_values_that_are_no_json() -> None:
    """Qwen3-Coder writes values as they are: they are texts where the tool's schema says so, and else JSON if they can be."""
    kinds = json.loads('{"a": {"type": "string"}, "b": {"anyOf": [{"type": ["null", "string"]}]}, "c": {"type": "object"}}')
    values = {"a": "7\n</parameter> 8", "b": "7", "c": '{"d": 7}', "e": "seven"}
    text = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    _, (call,) = CallReader({"f": {"properties": kinds}}).finish(f"<function=f>\n{text}</function>")
    assert json.loads(call["function"]["arguments"]) == {**values, "c": {"d": 7}}


def test_a_second_call_that_is_cut() -> None:
    """Of an answer that ends at its limit within a call the earlier ones are there, and nothing of that one."""
    reader = CallReader({"f": {}})
    kept, calls = reader.finish(f"a<tool_call>{ONE}</tool_call>\n<tool_call>{ONE[:9]}", "length")
    assert (kept, len(calls), reader.is_cut) == ("a", 1, True)


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ('{"na', None),
        ('{"name": "f", "arguments": {"a": 1', '{"a": 1'),
        ('{"name"\n : "f" , "arguments"\n : {"a": 1', '{"a": 1'),
    ],
)
def test_a_forced_call_that_is_cut(text: str, arguments: str | None) -> None:
    """What came of a call that must come is its arguments, and no text."""
    reader = CallReader({"f": {}}, is_forced=True)
    kept, calls = reader.finish(text)
    assert (kept, [call["function"]["arguments"] for call in calls], reader.is_cut) == ("", [arguments] * bool(arguments), True)


@given(st.lists(st.sampled_from(["<", "<tool", "_call>", "{", "}", '"name"', ":", '"f"', ", ", '"arguments"', "{}", " "])))
def test_no_text_is_lost(pieces: list[str]) -> None:
    """What is given as it comes begins what is found in the whole."""
    reader, whole = CallReader({"f": {}}), CallReader({"f": {}})
    given = "".join(reader.add(piece) for piece in pieces)
    rest, calls = reader.finish()
    text, same = whole.finish("".join(pieces))
    assert given + rest == text
    assert [call["function"] for call in calls] == [call["function"] for call in same]
