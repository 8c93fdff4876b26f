"""`/v1/responses` through OpenAI's own client, whole and streamed."""

from __future__ import annotations

import json
from importlib.util import find_spec
from typing import Any

import httpx
import openai
import pytest
from api import MODEL
from engines import DOCUMENTS, QUESTION, TOP_K
from pydantic import BaseModel

from cacheblend.service import Engine


def test_whole(engine: Engine, openai_client: openai.OpenAI) -> None:
    """An input's answer is a chat's, with its usage; what was too long says so."""
    alone = engine.answer(QUESTION, top_k=TOP_K, max_tokens=20)
    answer = openai_client.responses.create(model=MODEL, input=QUESTION, max_output_tokens=20, extra_body={"num_chunks": TOP_K})
    assert answer.output_text == alone.text
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (alone.plan.prompt_tokens, 20)
    assert answer.usage.input_tokens_details.cached_tokens > 0
    assert answer.model_extra["cacheblend"]["method"] == "blend"


def test_turns(engine: Engine, openai_client: openai.OpenAI) -> None:
    """Instructions are a system message, an earlier answer comes back as it was given, and documents may be brought."""
    messages: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": QUESTION}]
    chat = openai_client.chat.completions.create(model=MODEL, messages=messages, max_tokens=6)
    first = openai_client.responses.create(model=MODEL, instructions="Be brief.", input=QUESTION, max_output_tokens=6)
    assert first.output_text == chat.choices[0].message.content
    asked: Any = [{"role": "user", "content": [{"type": "input_text", "text": QUESTION}]}, *first.output]
    again: Any = [item if isinstance(item, dict) else item.model_dump(exclude_none=True) for item in asked]
    second = openai_client.responses.create(
        model=MODEL, input=[*again, {"role": "user", "content": "And then?"}], max_output_tokens=6, store=False
    )
    assert second.usage.input_tokens > first.usage.input_tokens
    documents = [{key: document[key] for key in ("title", "text")} for document in DOCUMENTS[:1]]
    brought = openai_client.responses.create(
        model=MODEL, input=QUESTION, max_output_tokens=6, extra_body={"documents": documents, "method": "full_recompute"}
    )
    assert brought.output_text == engine.answer(QUESTION, documents=documents, max_tokens=6, method="full_recompute").text


def test_stream(openai_client: openai.OpenAI) -> None:
    """The client puts the very answer together from the events, which are numbered and in OpenAI's order."""
    whole = openai_client.responses.create(model=MODEL, input=QUESTION, max_output_tokens=20)
    events = list(openai_client.responses.create(model=MODEL, input=QUESTION, max_output_tokens=20, stream=True))
    kinds = [event.type.removeprefix("response.") for event in events]
    deltas = kinds.count("output_text.delta")
    assert kinds == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *["output_text.delta"] * deltas,
        *("output_text.done", "content_part.done", "output_item.done", "incomplete"),
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert deltas > 3
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    assert events[-1].response.output_text == whole.output_text
    assert events[-1].response.usage == whole.usage


class Answer(BaseModel):
    word: str
    lines: int


@pytest.mark.skipif(find_spec("llguidance") is None, reason="needs llguidance (pip install cacheblend[structured])")
def test_parsed(openai_client: openai.OpenAI) -> None:
    """The client's `parse` and `stream` with a pydantic model give one of it."""
    options: Any = {"model": MODEL, "input": QUESTION, "text_format": Answer, "temperature": 1.0, "extra_body": {"seed": 3}}
    parsed = openai_client.responses.parse(**options, max_output_tokens=300)
    if parsed.status == "completed":
        assert isinstance(parsed.output_parsed, Answer)
    else:  # the tiny model may write a string for ever
        assert parsed.output_text.startswith("{")
    form: Any = {"format": {"type": "json_schema", "name": "x", "schema": {"enum": [{"a": 1}]}}}
    with openai_client.responses.stream(model=MODEL, input=QUESTION, text=form, max_output_tokens=60) as stream:
        stream.until_done()
        assert json.loads(stream.get_final_response().output_text) == {"a": 1}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": 5}, "input: must be a text, got 5"),
        ({"input": [{"role": "user", "content": 5}]}, "input.0.content: must be a text, got 5"),
        ({"documents": 5}, "documents: must be a list, got 5"),
        ({"input": [{"type": "function_call_output", "call_id": "x", "output": "y"}]}, "input.0"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "image: this service reads text",
        ),
        ({"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "x"}]}]}, "file: this service reads text"),
        ({"previous_response_id": "resp_1"}, "send the earlier turns as input"),
        ({"conversation": "c"}, "send the earlier turns as input"),
        ({"background": True}, "comes with its response alone"),
        ({"tools": [{"type": "web_search"}]}, "leave them out"),
        ({"text": {"format": {"type": "json_schema"}}}, "give schema"),
        ({"max_output_tokens": 0}, "max_output_tokens: must be at least 1"),
        ({"n": 2}, "n: "),
        ({"model": "gpt-5"}, "there is no model"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_cannot_be(client: httpx.Client, change: dict[str, Any], named: str) -> None:
    """What a response cannot have here is refused by the field's name."""
    for stream in (False, True):
        response = client.post("/v1/responses", json={"input": QUESTION, "stream": stream, **change})
        assert response.status_code in (400, 404), response.text
        assert named in response.json()["error"]["message"]
