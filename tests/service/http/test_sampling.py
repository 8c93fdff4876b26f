"""Several choices, log-probabilities, penalties, biases and JSON: each request by its own, through OpenAI's client."""

import json
import math
import re
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from typing import Any

import httpx
import openai
import pytest
import torch
from api import MODEL, serving
from engines import QUESTION
from waiting import wait_until

from cacheblend.blend import Fusor, NextToken, SequenceKV
from cacheblend.service import Engine
from cacheblend.service.engine.decoding import UNFINISHED
from cacheblend.service.http.server import Server
from cacheblend.service.serving.scheduler import ServingConfig

HAS_GRAMMARS = find_spec("llguidance") is not None
needs_grammars = pytest.mark.skipif(not HAS_GRAMMARS, reason="needs llguidance (pip install '.[structured]')")
PROMPT = "The for statement is used to"
SCHEMA = {
    "type": "object",
    "properties": {"word": {"enum": ["for", "while"]}, "lines": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["word", "lines"],
    "additionalProperties": False,
}


def complete(client: openai.OpenAI, **options: Any) -> Any:
    return client.completions.create(model=MODEL, prompt=PROMPT, **{"max_tokens": 12, **options})


def ask(client: openai.OpenAI, **options: Any) -> Any:
    messages: Any = [{"role": "user", "content": QUESTION}]
    return client.chat.completions.create(model=MODEL, messages=messages, **options)


def prompt_ids(fusor: Fusor) -> list[int]:
    return [fusor.tokenizer.bos_token_id, *fusor.tokenizer(PROMPT, add_special_tokens=False)["input_ids"]]


def test_choices(engine: Engine, openai_client: openai.OpenAI, server: Server) -> None:
    """`n` choices go on from one prefill, each by a seed of its own: the first is what `n` of 1 gives with the seed."""
    prefills = 0
    steps = engine.prefill_steps

    def count(request: Any) -> Any:
        nonlocal prefills
        prefills += 1
        return steps(request)

    engine.prefill_steps = count  # type: ignore[method-assign]
    complete(openai_client, n=3, max_tokens=1)  # the first one has ended when the others begin
    drawn = complete(openai_client, n=3, temperature=1.0, seed=5)
    assert prefills == 2
    assert [choice.index for choice in drawn.choices] == [0, 1, 2]
    singles = [complete(openai_client, temperature=1.0, seed=5 + number) for number in range(3)]
    alone = [single.choices[0].text for single in singles]
    assert [choice.text for choice in drawn.choices] == alone
    assert len(set(alone)) == 3
    assert drawn.usage.completion_tokens == sum(single.usage.completion_tokens for single in singles)
    pieces = complete(openai_client, n=3, temperature=1.0, seed=5, stream=True, stream_options={"include_usage": True})
    texts, usage = ["", "", ""], None
    for piece in pieces:
        usage = piece.usage
        for choice in piece.choices:
            texts[choice.index] += choice.text
    assert texts == alone
    assert usage.completion_tokens == drawn.usage.completion_tokens
    state = server.scheduler.state
    assert (state.waiting, state.prefilling, state.decoding) == (0, 0, 0)
    counted = server.metrics.text().decode()
    assert 'cacheblend_requests_total{method="blend",outcome="length"} 6.0' in counted  # choices are no requests of their own


def test_more_choices_than_places(openai_client: openai.OpenAI) -> None:
    """More choices than there are places (4) come all the same, and chats over chunks blend once."""
    chat = ask(openai_client, n=9, max_tokens=3, temperature=2.0, seed=1)
    assert len(chat.choices) == 9
    assert len({choice.message.content for choice in chat.choices}) > 3


def test_choices_are_checked_once(engine: Engine) -> None:
    """The quality guard holds a request of several choices against full prefill once, by its prompt's KV as it was."""
    with serving(engine, ServingConfig(guard_share=1.0)) as (server, address):
        body = {"messages": [{"role": "user", "content": QUESTION}], "num_chunks": 2, "n": 3, "max_tokens": 3}
        answer = httpx.post(f"{address}/v1/chat/completions", json=body, timeout=60).json()
        assert len({choice["message"]["content"] for choice in answer["choices"]}) == 1  # greedy
        wait_until(lambda: server.scheduler.quality("")["evaluated"] > 0)
        assert server.scheduler.quality("")["evaluated"] == 1


def test_logprobs(engine: Engine, openai_client: openai.OpenAI) -> None:
    """Log-probabilities are the model's own, of every token, whole and in pieces, in a text's shape and in a chat's."""
    fusor = engine.fusor
    logits_V = fusor.prefill(prompt_ids(fusor)).logits
    expected = torch.log_softmax(logits_V, -1)
    whole = complete(openai_client, logprobs=3, temperature=0.7, seed=1).choices[0]
    told = whole.logprobs
    read = re.sub(r"bytes:\\x..", UNFINISHED, "".join(told.tokens))  # the model writes bytes that are no characters
    assert read == whole.text
    assert len(told.token_logprobs) == len(told.tokens) == len(told.top_logprobs) == 12
    likeliest = [fusor.tokenizer.decode([int(token)]) for token in expected.topk(3).indices]
    assert {*likeliest} - {UNFINISHED} <= {*told.top_logprobs[0]}
    assert max(told.top_logprobs[0].values()) == pytest.approx(float(expected.max()), abs=1e-4)
    assert sorted(told.text_offset) == told.text_offset
    assert (told.text_offset[0], told.text_offset[-1] < len(whole.text)) == (0, True)
    streamed = [
        piece.choices[0].logprobs for piece in complete(openai_client, logprobs=3, temperature=0.7, seed=1, stream=True)
    ]
    assert [token for one in streamed for token in one.tokens] == told.tokens
    assert [value for one in streamed for value in one.token_logprobs] == pytest.approx(told.token_logprobs, abs=1e-4)
    plain = ask(openai_client, max_tokens=5)
    chat = ask(openai_client, max_tokens=5, logprobs=True, top_logprobs=2).choices[0]
    assert chat.message.content == plain.choices[0].message.content
    assert plain.choices[0].logprobs is None
    joined = b"".join(bytes(one.bytes) for one in chat.logprobs.content)
    assert joined.decode(errors="replace") == chat.message.content
    for one in chat.logprobs.content:
        assert one.logprob == max(likely.logprob for likely in one.top_logprobs) <= 0  # greedy
        assert bytes(one.bytes).decode(errors="replace") in (one.token, UNFINISHED)
        assert sum(math.exp(likely.logprob) for likely in one.top_logprobs) <= 1.0001


def test_penalties_and_biases(engine: Engine, openai_client: openai.OpenAI) -> None:
    """Each changes what its definition says, held against logits that are adjusted by hand."""
    fusor = engine.fusor
    ids = prompt_ids(fusor)

    def by_hand(presence: float = 0.0, frequency: float = 0.0, bias: dict[int, float] | None = None, **options: Any) -> str:
        fused = fusor.prefill(ids)
        drawer, kv = NextToken(fusor.model, ids, 12, **options), SequenceKV(fused, fusor.decoder.windows)
        logits_V = fused.logits
        while drawer.finish_reason is None:
            scores_V = logits_V.clone()
            for token in set(drawer.token_ids):
                scores_V[token] -= presence + frequency * drawer.token_ids.count(token)
            for token, value in (bias or {}).items():
                scores_V[token] += value
            drawer.draw(scores_V)
            logits_V = fusor.decoder.decode([drawer.token_ids[-1]], [kv])[0]
        text: str = fusor.tokenizer.decode(drawer.token_ids, skip_special_tokens=True)
        return text.removesuffix("\ufffd")  # a character that is not complete is not sent

    plain = complete(openai_client)
    assert (by_hand(), len(ids)) == (plain.choices[0].text, plain.usage.prompt_tokens)
    first = int(fusor.prefill(ids).logits.argmax())
    for options, expected in (
        ({"presence_penalty": 2.0}, by_hand(presence=2.0)),
        ({"frequency_penalty": -2.0}, by_hand(frequency=-2.0)),
        ({"logit_bias": {str(first): -100}}, by_hand(bias={first: -100.0})),
        ({"extra_body": {"repetition_penalty": 3.0}}, by_hand(repetition_penalty=3.0)),
    ):
        assert complete(openai_client, **options).choices[0].text == expected, options
    assert complete(openai_client, logit_bias={str(first): -100}).choices[0].text != plain.choices[0].text
    sampled = {"temperature": 2.0, "seed": 3}
    assert complete(openai_client, **sampled, extra_body={"min_p": 1.0}).choices[0].text == plain.choices[0].text
    assert complete(openai_client, **sampled).choices[0].text != plain.choices[0].text
    nearly_none = complete(openai_client, temperature=1e-300, seed=3)  # too small to divide by
    assert nearly_none.choices[0].text == plain.choices[0].text


def test_answers_do_not_end_before_min_tokens(openai_client: openai.OpenAI, fusor: Fusor) -> None:
    """The end of sequence is drawn once it is allowed, and never with `ignore_eos`; JSON that is complete ends all the same."""
    ended = {"logit_bias": {str(fusor.tokenizer.eos_token_id): 100}}
    for least, tokens, reason in (({}, 1, "stop"), ({"min_tokens": 4}, 5, "stop"), ({"ignore_eos": True}, 12, "length")):
        answer = complete(openai_client, **ended, extra_body=least)
        assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (tokens, reason)
    if HAS_GRAMMARS:
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": 1}}}
        answer = complete(openai_client, extra_body={"response_format": form, "ignore_eos": True})
        assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("1", "stop")


def test_others_are_not_changed(openai_client: openai.OpenAI) -> None:
    """A greedy answer is the same beside requests with penalties, a grammar and log-probabilities in its batch."""
    alone = complete(openai_client, max_tokens=60).choices[0].text
    others: list[dict[str, Any]] = [{"presence_penalty": 2.0, "n": 2}, {"logprobs": 5, "temperature": 1.5}]
    if HAS_GRAMMARS:
        others.append({"extra_body": {"response_format": {"type": "json_object"}}})
    with ThreadPoolExecutor(len(others)) as pool:
        asked = [pool.submit(complete, openai_client, max_tokens=60, **other) for other in others]
        assert [complete(openai_client, max_tokens=60).choices[0].text for _ in range(2)] == [alone, alone]
    assert all(other.result().choices for other in asked)


@needs_grammars
def test_json(openai_client: openai.OpenAI) -> None:
    """JSON is what the schema says, greedy and sampled, streamed, in several choices, and behind chunks; then it ends."""
    form: Any = {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": SCHEMA}}
    for options in ({}, {"temperature": 2.0, "seed": 2, "n": 3}):
        chat = ask(openai_client, response_format=form, max_tokens=100, **options)
        for choice in chat.choices:
            value = json.loads(choice.message.content)
            assert choice.finish_reason == "stop"
            assert (set(value), value["word"] in ("for", "while"), 0 <= value["lines"] <= 99) == ({"word", "lines"}, True, True)
    stream = ask(openai_client, response_format=form, max_tokens=100, stream=True)
    assert set(json.loads("".join(piece.choices[0].delta.content or "" for piece in stream))) == {"word", "lines"}
    chat = ask(openai_client, response_format={"type": "json_object"}, max_tokens=300, temperature=1.0, seed=4)
    assert chat.choices[0].message.content.startswith("{")


@needs_grammars
@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "pattern": "(a|aa){1,5000}(b|c){1,5000}$"},
        {"type": "string", "pattern": "^(.*a.{300}){3}$"},
        {"type": "array", "items": {"$ref": "#"}},
        {"anyOf": [{"type": "object", "properties": {f"a{i}": {"enum": list(range(40))}}} for i in range(60)]},
        {"type": "string", "minLength": 10**6, "maxLength": 10**7},
    ],
    ids=["repetitions", "states", "endless", "branches", "long"],
)
def test_schemas_that_mean_harm(client: httpx.Client, schema: dict[str, Any]) -> None:
    """A schema that is made to be hard is refused or followed, and never longer than its own request takes."""
    form = {"type": "json_schema", "json_schema": {"schema": schema}}
    body = {"prompt": PROMPT, "max_tokens": 20, "response_format": form, "temperature": 1.0, "seed": 1}
    response = client.post("/v1/completions", json=body, timeout=60)
    assert response.status_code in (200, 400), response.text
    assert client.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 2}).status_code == 200


@needs_grammars
@pytest.mark.parametrize("value", [math.inf, math.nan, "\ud800", 10**400], ids=lambda value: ascii(value)[:9])
def test_schemas_with_what_json_cannot_have(client: httpx.Client, value: object) -> None:
    """A number that is not finite and half a character are refused by the field's name, in a schema and in a tool's."""
    schema = {"type": "object", "properties": {"a": {"type": "number", "maximum": value}}}
    function = {"type": "function", "function": {"name": "f", "parameters": schema}}
    for asked in (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}},
        {"tools": [function], "tool_choice": "required"},
    ):
        body = json.dumps({"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, **asked})
        response = client.post("/v1/chat/completions", content=body, headers={"Content-Type": "application/json"})
        assert response.status_code == 400, response.text
        assert next(iter(asked)) in response.json()["error"]["message"]
