"""Anthropic's API over the same chats; the events are read as its documentation and client have them."""

from typing import Any

import httpx
import pytest
from anthropic_events import events_of, joined
from api import MODEL
from engines import QUESTION

USER = {"role": "user", "content": QUESTION}
ASKED: dict[str, Any] = {"model": MODEL, "max_tokens": 12, "messages": [USER], "num_chunks": 2}
EPHEMERAL = {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}


def test_a_chat(client: httpx.Client) -> None:
    """A message is the chat's answer, in one piece and streamed; system is its first turn; cached tokens are counted apart."""
    turns = [{"role": "system", "content": "Be brief."}, USER]
    for system in ("Be brief.", [EPHEMERAL]):
        chat = client.post("/v1/chat/completions", json={**ASKED, "messages": turns}).json()
        body = {**ASKED, "system": system, "metadata": {"user_id": "1"}, "thinking": {"type": "disabled"}}
        message = client.post("/v1/messages", json=body).json()
        assert message["content"] == [{"type": "text", "text": chat["choices"][0]["message"]["content"]}]
        assert message["id"].startswith("msg_")
        heads = [message[name] for name in ("type", "role", "model", "stop_reason")]
        assert heads == ["message", "assistant", MODEL, "max_tokens"]
        usage = message["usage"]
        assert usage["input_tokens"] + usage["cache_read_input_tokens"] == chat["usage"]["prompt_tokens"]
        assert usage["cache_read_input_tokens"] > 0
        streamed = joined(events_of(client, body))
        assert (streamed["content"], streamed["stop_reason"]) == (message["content"], "max_tokens")
        assert streamed["usage"]["output_tokens"] == chat["usage"]["completion_tokens"]
        assert streamed["cacheblend"].keys() == message["cacheblend"].keys()


def test_count_tokens(client: httpx.Client) -> None:
    """The count is that of the message's prompt, chunks and system included; nothing is answered."""
    for change in ({}, {"system": "Be brief.", "num_chunks": 0}):
        body = {**ASKED, **change}
        usage = client.post("/v1/messages", json=body).json()["usage"]
        counted = {name: value for name, value in body.items() if name != "max_tokens"}
        tokens = usage["input_tokens"] + usage["cache_read_input_tokens"]
        assert client.post("/v1/messages/count_tokens", json=counted).json() == {"input_tokens": tokens}
    many = client.post(
        "/v1/messages/count_tokens", json={**ASKED, "messages": [{"role": "user", "content": "word " * 400}]}
    ).json()
    assert many["input_tokens"] > 512  # more than the model could be asked


def test_stop_sequences(client: httpx.Client) -> None:
    """The sequence that ended the answer is said."""
    text = client.post("/v1/messages", json=ASKED).json()["content"][0]["text"]
    body = {**ASKED, "stop_sequences": ["never", text[3:5]]}
    for message in (client.post("/v1/messages", json=body).json(), joined(events_of(client, body))):
        assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", text[3:5])
        assert message["content"] == [{"type": "text", "text": text.partition(text[3:5])[0]}]


DOCUMENT = {"type": "document", "title": "A", "source": {"type": "text", "media_type": "text/plain", "data": "A loop."}}
CONTENT = [{"type": "text", "text": "A loop."}]
PARTS = {"type": "document", "title": "A", "source": {"type": "content", "content": CONTENT}}
LINK = {"role": "user", "content": [{**DOCUMENT, "source": {"type": "url"}}]}
CALL = {"role": "assistant", "content": [{"type": "tool_use"}]}
FOUND = {"type": "search_result", "title": "A", "source": "https://a.example", "content": CONTENT}


def test_output_config(client: httpx.Client) -> None:
    """Its format is that of the answer, its effort the template's; a format without a grammar is refused by name."""
    pytest.importorskip("llguidance")
    form: dict[str, Any] = {"type": "json_schema", "schema": {"enum": [17]}}
    answer = client.post("/v1/messages", json={**ASKED, "output_config": {"effort": "high", "format": form}}).json()
    assert answer["content"] == [{"type": "text", "text": "17"}]
    refused = client.post("/v1/messages", json={**ASKED, "output_config": {"format": {"type": "json_schema"}}})
    assert refused.status_code == 400
    assert "schema" in refused.json()["error"]["message"]


@pytest.mark.parametrize("block", [DOCUMENT, PARTS, FOUND], ids=["text", "parts", "found"])
def test_documents(client: httpx.Client, block: dict[str, Any]) -> None:
    """Documents in messages are the chat's, before the last question; others of the request come first."""

    def tokens(**body: Any) -> int:
        return int(client.post("/v1/messages/count_tokens", json=body).json()["input_tokens"])

    turns = [{"role": "user", "content": [block]}, {"role": "assistant", "content": "Yes."}]
    said = [{"role": "user", "content": []}, turns[1]]
    asked, other = [{"role": "user", "content": [block, {"type": "text", "text": QUESTION}]}], {"text": "A class."}
    given = {"title": "A", "text": "A loop."}
    for messages, same, documents in ((asked, [USER], None), (asked, [USER], [other]), ([*turns, USER], [*said, USER], [])):
        expected = tokens(messages=same, documents=[*(documents or []), given])
        assert tokens(messages=messages, documents=documents) == expected > tokens(messages=same, documents=[])
    for named in ("A class.", {"page_content": "A class.", "metadata": {}}, {"content": "A class."}):
        assert tokens(messages=asked, documents=[named]) == tokens(messages=asked, documents=[other])


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"max_tokens": None}, "max_tokens: is missing"),
        ({"tools": [{"name": "f", "input_schema": {}}]}, "tools: the model's chat template has no place for them"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0.type: must be 'function'"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.function.name: is missing"),
        ({"messages": [USER, CALL]}, "messages.1.tool_calls.0.id: is missing"),
        ({"messages": [LINK]}, "messages.0.content.0.type: this"),
        ({"stop_sequences": [[]]}, "stop_sequences.0: must be a valid string"),
        ({"mcp_servers": [{}]}, "mcp_servers: is no field of this request"),
        ({"n": 2}, "n: must be 1"),
    ],
)
def test_what_is_refused(client: httpx.Client, change: dict[str, Any], named: str) -> None:
    """What is not served is refused in Anthropic's form of errors."""
    response = client.post("/v1/messages", json={**ASKED, **change})
    error = response.json()
    assert (response.status_code, error["type"], error["error"]["type"]) == (400, "error", "invalid_request_error")
    assert error["error"]["message"].startswith(named)
