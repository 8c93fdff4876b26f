"""Requests as Open WebUI 0.12.4 sends them: from its server, and from a browser over a direct connection.

They follow its source: `routers/openai.py`, `routers/tasks.py`, `utils/headers.py`, `utils/middleware.py`, and its page's
`+layout.svelte` and `apis/openai`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from api import MODEL, listening
from engines import QUESTION

from cacheblend.service import Engine
from cacheblend.service.http.config import HttpConfig
from cacheblend.service.http.server import Server

KEY = "cb-open-webui"
PAGE = "http://localhost:3000"
# The last five where its ENABLE_FORWARD_USER_INFO_HEADERS is set.
HEADERS = {
    "Content-Type": "application/json",
    "Authorization": f"Bearer {KEY}",
    "X-OpenWebUI-User-Name": "Ada",
    "X-OpenWebUI-User-Id": "u",
    "X-OpenWebUI-User-Email": "ada@example.org",
    "X-OpenWebUI-User-Role": "user",
    "X-OpenWebUI-Chat-Id": "5f0c8a8e",
}
# As its page makes them for a chat. Its server takes them out, for a direct connection too; they are taken all the same.
OF_THE_PAGE: dict[str, Any] = {
    "chat_id": "5f0c8a8e-2f8a-4b0e-9c0c-1d1c0a1b2c3d",
    "session_id": "Vq3nXy",
    "id": "b1d1c0a1",
    "message_id": "b1d1c0a1",
    "parent_id": "a0",
    "parent_message": {"id": "a0", "role": "user", "content": QUESTION, "childrenIds": ["b1d1c0a1"]},
    "user_message": None,
    "features": {"voice": False, "image_generation": False, "code_interpreter": False, "web_search": False},
    "variables": {"{{USER_NAME}}": "Ada", "{{CURRENT_DATE}}": "2026-11-23"},
    "background_tasks": {"title_generation": True, "tags_generation": True, "follow_up_generation": True},
    "model_item": {"id": MODEL, "object": "model", "owned_by": "openai", "openai": {"id": MODEL}, "urlIdx": 0},
    "filter_ids": [],
    "tool_ids": ["web"],
    "tool_servers": [],
    "skill_ids": None,
    "metadata": {"user_id": "u", "chat_id": "5f0c8a8e", "features": {}, "files": None},
}
# A message with what Open WebUI has retrieved itself.


@pytest.fixture
def webui(engine: Engine) -> Iterator[httpx.Client]:
    """Open WebUI's server, or its page."""
    http = HttpConfig(served_model_name=MODEL, api_key=KEY, cors_origins=(PAGE,))
    with (
        Server(engine.config, http=http, engine=engine) as server,
        listening(server) as address,
        httpx.Client(base_url=f"{address}/v1", timeout=60, headers=HEADERS) as client,
    ):
        yield client


def pieces(client: httpx.Client, body: dict[str, Any], **options: Any) -> list[dict[str, Any]]:
    """The events of a stream, read line by line."""
    with client.stream("POST", "/chat/completions", json={**body, "stream": True}, **options) as response:
        lines = [line for line in response.iter_lines() if line]
        assert response.status_code == 200, lines
        assert response.headers["content-type"].startswith("text/event-stream")
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def text_of(events: list[dict[str, Any]]) -> str:
    return "".join(choice["delta"].get("content") or "" for event in events for choice in event["choices"])


def test_connection(webui: httpx.Client) -> None:
    """Adding a connection lists the models with the key; a wrong key is an error that its dialogue can show."""
    listed = webui.get("/models").json()
    assert listed["object"] == "list"
    assert [(model["id"], model["object"]) for model in listed["data"]] == [(MODEL, "model")]
    wrong = webui.get("/models", headers={"Authorization": "Bearer no"})
    assert (wrong.status_code, "API key" in wrong.json()["error"]["message"]) == (401, True)


def test_direct_connection(webui: httpx.Client) -> None:
    """A browser of a named origin may ask first, and then chat with all that the page sends; one of another origin may not."""

    def preflight_of(path: str, method: str, origin: dict[str, str]) -> httpx.Response:
        ask = {"Access-Control-Request-Method": method, "Access-Control-Request-Headers": "authorization,content-type"}
        return httpx.options(f"{webui.base_url}{path}", headers={**ask, **origin})

    for path, method in (("models", "GET"), ("chat/completions", "POST")):  # a preflight request sends no key
        preflight = preflight_of(path, method, {"Origin": PAGE})
        assert (preflight.status_code, preflight.headers["access-control-allow-origin"]) == (200, PAGE)
        assert "authorization" in preflight.headers["access-control-allow-headers"].lower()
    body = {"model": MODEL, "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 6}
    plain = text_of(pieces(webui, body))
    assert text_of(pieces(webui, {**body, **OF_THE_PAGE}, headers={"Origin": PAGE})) == plain
    response = webui.post("/chat/completions", json=body, headers={"Origin": PAGE})
    assert response.headers["access-control-allow-origin"] == PAGE
    foreign = {"Origin": "http://evil.example"}
    assert webui.post("/chat/completions", json=body, headers=foreign).status_code == 403
    assert preflight_of("models", "GET", foreign).status_code == 400
