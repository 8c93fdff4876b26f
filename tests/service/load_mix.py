"""What many clients do to the service at once: ask in every way, go away, send rubbish, change the documents."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pydoc_data.topics import topics
from typing import Any

import httpx

MODEL = "tiny"
TEXT = " ".join(text for _, text in sorted(topics.items()))
BASE_DOCUMENTS, CHANGING_DOCUMENTS = 30, 30  # those that stay, and those that come and go
OVERTAKEN = (409, 429)  # by another client, which replaced or deleted the document meanwhile; too many uploads at once
DOCUMENT_CHARACTERS = 250
OWN_TEXTS = 40  # that clients bring; more than fit beside the documents
ERROR_KEYS = {"message", "type", "param", "code"}
CHAT, TEXT_COMPLETION = "/v1/chat/completions", "/v1/completions"

MALFORMED: list[tuple[str, str, bytes | dict[str, Any], int]] = [
    ("POST", CHAT, b"{", 400),
    ("POST", CHAT, b'{"model": "\xff\xfe"}', 400),
    ("POST", CHAT, b"[" * 5000, 400),
    ("POST", CHAT, {"model": MODEL, "messages": "no list"}, 400),
    ("POST", CHAT, {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "max_tokens": 10**30}, 400),
    ("POST", CHAT, {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "stream": True, "num_chunks": 10**6}, 400),
    ("POST", CHAT, {"model": "other", "messages": [{"role": "user", "content": "x"}]}, 404),
    ("POST", TEXT_COMPLETION, {"model": MODEL, "prompt": "word " * 20_000}, 400),
    ("POST", TEXT_COMPLETION, b"x" * 2**21, 413),
    ("POST", "/v1/documents", {"documents": [{"id": 7}]}, 400),
    ("PUT", "/v1/documents/a", {"text": ""}, 400),
    ("GET", "/v1/documents/none", b"", 404),
    ("PATCH", CHAT, {}, 405),
]


@dataclass(slots=True)
class Seen:
    """What came back.

    Args:
        requests: how many of each kind.
        statuses: how many responses of each status.
        texts: every greedy answer that came whole, and how often.
        faults: what must not happen, in words.
    """

    requests: Counter[str] = field(default_factory=Counter)
    statuses: Counter[int] = field(default_factory=Counter)
    texts: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)


class LoadMix:
    """Clients of one server; what each does next is drawn from the mix.

    Args:
        address: of the server.
        streams: clients at once.
        seed: of what they draw.
    """

    def __init__(self, address: str, streams: int, seed: int) -> None:
        self._streams, self._random, self.seen = streams, random.Random(seed), Seen()
        self._client = httpx.AsyncClient(
            base_url=address, timeout=120, limits=httpx.Limits(max_connections=None, max_keepalive_connections=0)
        )
        self._own_texts = [self._text() for _ in range(OWN_TEXTS)]
        self._mix: list[tuple[str, int, Callable[[], Awaitable[None]]]] = [
            ("own documents", 16, self._ask_over_own_documents),
            ("retrieval", 24, self._ask_by_retrieval),
            ("conversation", 10, self._converse),
            ("text completion", 6, self._complete_text),
            ("cancellation", 16, self._cancel),
            ("malformed", 12, self._send_rubbish),
            ("half a body", 2, self._send_half),
            ("upload", 4, self._upload),
            ("replacement", 3, self._replace),
            ("deletion", 3, self._delete),
            ("look", 4, self._look),
        ]

    async def fill(self) -> None:
        """Ingest the documents that stay."""
        documents = [{"id": f"base-{number}", "text": self._text()} for number in range(BASE_DOCUMENTS)]
        (await self._client.post("/v1/documents", json={"documents": documents})).raise_for_status()

    async def run(self, seconds: float) -> None:
        """Have every client send one request after the other for so long, and finish the last one."""
        until = time.monotonic() + seconds

        async def one() -> None:
            while time.monotonic() < until:
                ((kind, _, call),) = self._random.choices(self._mix, [weight for _, weight, _ in self._mix])
                self.seen.requests[kind] += 1
                try:
                    await call()
                except Exception as error:  # whatever it is, it is a finding
                    self.seen.faults.append(f"{kind}: {type(error).__name__}: {error}")

        await asyncio.gather(*(one() for _ in range(self._streams)))

    async def close(self) -> None:
        """Let go of the connections."""
        await self._client.aclose()

    def _text(self) -> str:
        start = self._random.randrange(len(TEXT) - DOCUMENT_CHARACTERS)
        return TEXT[start : start + DOCUMENT_CHARACTERS]

    def _question(self) -> str:
        return f"What is said of {' '.join(self._text().split()[1:6])}?"

    def _options(self) -> dict[str, Any]:
        """How to answer: mostly as the service likes, now and then otherwise."""
        options: dict[str, Any] = {"model": MODEL, "max_tokens": self._random.randint(1, 24)}
        options["stream"] = self._random.random() < 0.7
        options["method"] = self._random.choice(("blend",) * 7 + ("full_recompute", "prefix_cache", "full_reuse"))
        if self._random.random() < 0.2:
            options["recompute_ratio"] = self._random.choice((0.0, 0.3, 1.0))
        if self._random.random() < 0.1:
            options["temperature"] = 0.8
        if self._random.random() < 0.2:
            options["cache_salt"] = self._random.choice("ab")
        if self._random.random() < 0.1:
            options["stop"] = ["the"]
        if self._random.random() < 0.1:
            options["return_chunks"] = True
        return options

    async def _ask_over_own_documents(self) -> None:
        texts = self._random.sample(self._own_texts, self._random.randint(1, 3))
        documents = [{"title": "Own", "text": text} for text in texts]
        await self._answer(CHAT, {**self._options(), "messages": [_user(self._question())], "documents": documents})

    async def _ask_by_retrieval(self) -> None:
        num_chunks = self._random.randint(1, 8)
        await self._answer(CHAT, {**self._options(), "messages": [_user(self._question())], "num_chunks": num_chunks})

    async def _converse(self) -> None:
        messages: list[dict[str, str]] = [{"role": "system", "content": "Answer in few words, from what is given."}]
        options = {**self._options(), "num_chunks": self._random.choice((0, 2))}
        for _ in range(3):
            messages.append(_user(self._question()))
            text = await self._answer(CHAT, {**options, "messages": messages})
            if text is None or not text.strip():
                return
            messages.append({"role": "assistant", "content": text})

    async def _complete_text(self) -> None:
        await self._answer(
            TEXT_COMPLETION, {**self._options(), "prompt": self._question(), "num_chunks": self._random.randint(0, 3)}
        )

    async def _cancel(self) -> None:
        """Go away before the answer, or in the middle of it."""
        body = {**self._options(), "messages": [_user(self._question())], "num_chunks": 4, "max_tokens": 100, "stream": True}
        if self._random.random() < 0.5:
            with contextlib.suppress(httpx.TimeoutException):
                await self._client.post(CHAT, json={**body, "stream": self._random.random() < 0.5}, timeout=0.1)
            return
        lines = self._random.randint(1, 20)
        async with self._client.stream("POST", CHAT, json=body) as response:
            self._note(response.status_code, (200, 429))
            async for _ in response.aiter_lines():
                lines -= 1
                if not lines:
                    return

    async def _send_rubbish(self) -> None:
        method, path, content, status = self._random.choice(MALFORMED)
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        response = await self._client.request(method, path, content=body, headers={"Content-Type": "application/json"})
        self._note(response.status_code, (status, 429), f"{method} {path} {body[:60]!r}")
        if set(response.json()["error"]) != ERROR_KEYS:
            self.seen.faults.append(f"{method} {path} {body[:60]!r}: {response.text}")

    async def _send_half(self) -> None:
        """Promise a body, send a part of it, and go away."""
        _, writer = await asyncio.open_connection(self._client.base_url.host, self._client.base_url.port)
        writer.write(b"POST /v1/documents HTTP/1.1\r\nHost: x\r\nContent-Length: 9999\r\n\r\n" + b'{"documents": [')
        await writer.drain()
        writer.close()
        await writer.wait_closed()

    async def _upload(self) -> None:
        documents = [{"id": self._changing(), "text": self._text()} for _ in range(2)]
        if documents[0]["id"] == documents[1]["id"]:
            documents.pop()
        await self._plain("POST", "/v1/documents", (201, *OVERTAKEN), json={"documents": documents})

    async def _replace(self) -> None:
        await self._plain("PUT", f"/v1/documents/{self._changing()}", (200, *OVERTAKEN), json={"text": self._text()})

    async def _delete(self) -> None:
        await self._plain("DELETE", f"/v1/documents/{self._changing()}", (200, 404))

    async def _look(self) -> None:
        paths = ("/v1/store", "/metrics", "/v1/documents", "/v1/documents/base-1", "/", "/readyz")
        await self._plain("GET", self._random.choice(paths), (200,))

    def _changing(self) -> str:
        return f"changing-{self._random.randrange(CHANGING_DOCUMENTS)}"

    async def _plain(self, method: str, path: str, allowed: tuple[int, ...], **options: Any) -> None:
        response = await self._client.request(method, path, **options)
        self._note(response.status_code, allowed, f"{method} {path}: {response.text[:200]}")

    def _note(self, status: int, allowed: tuple[int, ...], what: str = "") -> None:
        self.seen.statuses[status] += 1
        if status not in allowed:
            self.seen.faults.append(f"status {status}, not {allowed}: {what}")

    async def _answer(self, path: str, body: dict[str, Any]) -> str | None:
        """The text of an answer, however it comes; None where the queue was full."""
        if not body["stream"]:
            response = await self._client.post(path, json=body)
            self._note(response.status_code, (200, 429), response.text[:200])
            if response.status_code != 200:
                await asyncio.sleep(0.2)
                return None
            text = _text_of(response.json()["choices"][0], "message")
        else:
            async with self._client.stream("POST", path, json=body) as response:
                if response.status_code != 200:
                    await response.aread()
                    self._note(response.status_code, (429,), response.text[:200])
                    await asyncio.sleep(0.2)
                    return None
                self._note(200, (200,))
                data = [line.removeprefix("data: ") async for line in response.aiter_lines() if line]
            pieces = [json.loads(piece) for piece in data[:-1]]
            if data[-1] != "[DONE]" or pieces[-1]["choices"][0]["finish_reason"] is None:
                raise RuntimeError(f"a stream broke off: {data[-1]}")
            text = "".join(_text_of(piece["choices"][0], "delta") for piece in pieces)
        if not body.get("temperature"):
            self.seen.texts[text] += 1
        return text


def _user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def _text_of(choice: dict[str, Any], part: str) -> str:
    text: str = choice[part]["content"] if part in choice else choice["text"]
    return text
