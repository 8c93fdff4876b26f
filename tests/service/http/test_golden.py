"""The API's answers to a fixed list of requests, as they were recorded.

`CACHEBLEND_RECORD_GOLDEN=1 python -m pytest tests/service/http/test_golden.py` records them anew.
"""

import hashlib
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import httpx
import pytest
from api import MODEL
from engines import QUESTION

from cacheblend.blend import Fusor

pytestmark = pytest.mark.contract
GOLDEN = Path(__file__).with_name("golden.json")
RECORDS = os.environ.get("CACHEBLEND_RECORD_GOLDEN") == "1"
# The model's tokenizer and documents are made of Python's own texts, which change from version to version.
TEXTS = hashlib.sha256(json.dumps(sorted(topics.items())).encode()).hexdigest()[:16]

CHAT, COMPLETIONS, DOCUMENTS = "/v1/chat/completions", "/v1/completions", "/v1/documents"
USER = [{"role": "user", "content": QUESTION}]
BROUGHT = [{"id": "one", "title": "A title", "text": "The else clause of a while loop runs."}, {"text": "Nothing else."}]
SCHEMA = {"type": "object", "properties": {"found": {"type": "boolean"}}, "required": ["found"], "additionalProperties": False}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
TOOLS = "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"
TEMPLATE = TOOLS + "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant:"

Step = tuple[str, str, Any]


def _chat(**fields: Any) -> Step:
    return "POST", CHAT, {"model": MODEL, "messages": USER, "max_tokens": 6, **fields}


def _completion(**fields: Any) -> Step:
    return "POST", COMPLETIONS, {"model": MODEL, "prompt": "The while statement", "max_tokens": 6, **fields}


CASES: dict[str, Sequence[Step]] = {
    "chat": [_chat(num_chunks=0)],
    "chat_retrieval": [_chat(num_chunks=3, return_chunks=True)],
    "chat_documents": [_chat(documents=BROUGHT)],
    "chat_stream": [_chat(num_chunks=2, stream=True, stream_options={"include_usage": True})],
    "chat_choices": [_chat(num_chunks=2, n=2, temperature=1.0, seed=7, logprobs=True, top_logprobs=2)],
    "chat_json_schema": [
        _chat(max_tokens=30, response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}})
    ],
    "chat_tools": [_chat(num_chunks=0, max_tokens=60, tools=[TOOL], tool_choice="required")],
    "chat_full_recompute": [_chat(num_chunks=2, method="full_recompute", stop=["e"])],
    "completion": [_completion(logprobs=1)],
    "completion_stream": [_completion(stream=True, documents=BROUGHT, logprobs=0)],
    "embeddings": [("POST", "/v1/embeddings", {"input": ["while", "for"], "encoding_format": "base64"})],
    "models": [("GET", "/v1/models", None), ("GET", f"/v1/models/{MODEL}", None)],
    "documents": [
        (
            "POST",
            f"{DOCUMENTS}?wait=true",
            {"documents": [{"id": "new", "title": "New", "text": "A new document, of some length."}]},
        ),
        ("GET", f"{DOCUMENTS}?limit=2&order=desc", None),
        ("GET", f"{DOCUMENTS}/new", None),
        ("POST", f"{DOCUMENTS}?wait=true", {"documents": [{"id": "new", "text": "Another text."}]}),
        ("GET", f"{DOCUMENTS}?by=file&limit=1&after=with", None),
        ("DELETE", f"{DOCUMENTS}/new", None),
        ("GET", f"{DOCUMENTS}/new", None),
    ],
    "service": [
        ("GET", "/v1/ingests", None),
        ("GET", "/v1/store", None),
        ("GET", "/healthz", None),
        ("GET", "/readyz", None),
        ("GET", "/health", None),
    ],
    "errors": [
        _chat(unknown=1),
        _chat(model="another"),
        _chat(temperature=3),
        _chat(num_chunks=2, documents=BROUGHT),
        _completion(prompt="word " * 3000),
        ("POST", DOCUMENTS, {"documents": []}),
        ("GET", "/v1/nothing", None),
        ("PATCH", DOCUMENTS, {}),
    ],
}


@pytest.mark.parametrize("name", CASES)
def test_answers_are_the_recorded_ones(name: str, client: httpx.Client, fusor: Fusor, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request has the status and the body that were recorded, but for ids, times and the words of errors."""
    golden = json.loads(GOLDEN.read_text(encoding="utf-8")) if GOLDEN.exists() else {}
    if not RECORDS and golden["texts"] != TEXTS:
        pytest.skip("recorded with the texts of another version of Python")
    if name == "chat_tools":
        monkeypatch.setattr(fusor.tokenizer, "chat_template", TEMPLATE)
    found = []
    for method, path, body in CASES[name]:
        response = client.request(method, path, json=body)
        found.append({"request": f"{method} {path}", "status": response.status_code, "body": _body(response)})
    if RECORDS:
        golden = {**golden, "texts": TEXTS, name: found}
        GOLDEN.write_text(json.dumps(golden, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    assert found == _nearly(golden[name])


def _body(response: httpx.Response) -> Any:
    if response.headers["content-type"].startswith("text/event-stream"):
        events = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
        return [event if event == "[DONE]" else _normal(json.loads(event)) for event in events]
    body = _normal(response.json())
    if body.get("object") == "store":  # what the machine's speed and threads decide
        return {key: type(value).__name__ for key, value in body.items()}
    return body


def _normal(value: Any, key: str = "") -> Any:
    """A value without what is new in each answer."""
    if isinstance(value, dict):
        return {name: _normal(each, name) for name, each in value.items()}
    if isinstance(value, list):
        return [_normal(each, key) for each in value]
    if key == "message" and isinstance(value, str):
        return "MESSAGE"
    if (key in ("created", "seconds") or key.endswith(("_s", "_at"))) and isinstance(value, int | float):
        return "TIME"
    if key == "id" and isinstance(value, str):
        return re.sub(r"^((chat)?cmpl-)?[0-9a-f]{9,}$", r"\1ID", value)
    return value


def _nearly(value: Any) -> Any:
    """A recorded value that equals one whose floating-point numbers are a little off."""
    if isinstance(value, dict):
        return {name: _nearly(each) for name, each in value.items()}
    if isinstance(value, list):
        return list(map(_nearly, value))
    return pytest.approx(value, rel=1e-2, abs=1e-3) if isinstance(value, float) else value
