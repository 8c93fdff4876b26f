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
from api import MODEL, bearer, key_of, serving
from engines import QUESTION

from cacheblend.service import Engine
from cacheblend.service.http.schemas import OF_OPEN_WEBUI

PAGE = "http://localhost:3000"
# The last one where its ENABLE_FORWARD_USER_INFO_HEADERS is set.
HEADERS = {"Content-Type": "application/json", **bearer("one"), "X-OpenWebUI-User-Name": "Ada"}
# As its page adds them to a chat. Its server takes them out, for a direct connection too; they are taken all the same.
OF_THE_PAGE: dict[str, Any] = {field: {"any": ["value"]} for field in f"{OF_OPEN_WEBUI} metadata".split()}


@pytest.fixture
def webui(engine: Engine) -> Iterator[httpx.Client]:
    """Open WebUI's server, or its page."""
    with (
        serving(engine, api_key=key_of("one"), cors_origins=(PAGE,)) as (_, address),
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


def test_direct_connection(webui: httpx.Client) -> None:
    """A browser of a named origin may ask first, and then chat with all that the page sends; one of another origin may not."""

    def preflight_of(path: str, method: str, origin: dict[str, str]) -> httpx.Response:
        headers = "authorization,content-type,x-stainless-lang"  # the last of OpenAI's own client
        ask = {"Access-Control-Request-Method": method, "Access-Control-Request-Headers": headers}
        return httpx.options(f"{webui.base_url}{path}", headers={**ask, **origin})

    for path, method in (("models", "GET"), ("chat/completions", "POST")):  # a preflight request sends no key
        preflight = preflight_of(path, method, {"Origin": PAGE})
        assert (preflight.status_code, preflight.headers["access-control-allow-origin"]) == (200, PAGE)
        assert {"authorization", "x-stainless-lang"} <= set(preflight.headers["access-control-allow-headers"].split(","))
        assert "access-control-allow-credentials" not in preflight.headers
    body = {"model": MODEL, "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 6}
    plain = text_of(pieces(webui, body))
    assert text_of(pieces(webui, {**body, **OF_THE_PAGE}, headers={"Origin": PAGE})) == plain
    response = webui.post("/chat/completions", json=body, headers={"Origin": PAGE})
    assert response.headers["access-control-allow-origin"] == PAGE
    foreign = {"Origin": "http://evil.example"}
    assert webui.post("/chat/completions", json=body, headers=foreign).status_code == 403
    assert preflight_of("models", "GET", foreign).status_code == 400
