"""One request as the client saw it."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import Any

import httpx

from cacheblend.eval.metrics import quality

from .request_set import LoadRequest
from .target import Target

TOO_MANY_REQUESTS = 429
SHOWN_CHARACTERS = 200  # of an error


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What became of a request; seconds run from the start of its rate's first arrival process.

    Args:
        id: of the example.
        due_s: when it was to be sent.
        sent_s: when it was.
        end_s: when its last byte came.
        outcome: "answered", "rejected" (429) or "failed".
        detail: what was wrong; empty where it was answered.
        ttft_s: from `due_s` to the first piece of text (of an answer without any, to its end); None unless answered.
        prompt_tokens: as the server counts them; None where it does not tell.
        cached_tokens: those of them that it had cached; None where it does not tell.
        completion_tokens: as the server counts them; None where it does not tell.
        text: the answer.
        quality: of the answer, 0..1, by the first metric of its example's task; None unless answered.
    """

    id: str
    due_s: float
    sent_s: float
    end_s: float
    outcome: str
    detail: str = ""
    ttft_s: float | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    text: str = ""
    quality: float | None = None


async def ask(
    client: httpx.AsyncClient, target: Target, request: LoadRequest, max_tokens: int, *, started: float, due_s: float
) -> Sample:
    """Send a request and read its stream; nothing is raised for what a server does.

    Args:
        client: sends it.
        target: to whom.
        request: what.
        max_tokens: of the answer.
        started: second 0, on `time.perf_counter`'s clock.
        due_s: when it was to be sent.
    """
    sent_s = time.perf_counter() - started
    seen = _Stream()

    def sample(outcome: str, detail: str = "", ttft_s: float | None = None, marked: float | None = None) -> Sample:
        return Sample(
            id=request.example.id,
            due_s=due_s,
            sent_s=sent_s,
            end_s=time.perf_counter() - started,
            outcome=outcome,
            detail=detail[:SHOWN_CHARACTERS],
            ttft_s=ttft_s,
            **seen.usage(),
            text=seen.text,
            quality=marked,
        )

    try:
        body = target.body(request, max_tokens)
        async with client.stream("POST", target.url, json=body, headers=target.headers) as response:
            if response.status_code != httpx.codes.OK:
                said = (await response.aread()).decode(errors="replace")
                rejected = response.status_code == TOO_MANY_REQUESTS
                return sample("rejected" if rejected else "failed", f"{response.status_code} {said}")
            async for line in response.aiter_lines():
                if line.startswith("data:"):
                    seen.add(line.removeprefix("data:").strip(), time.perf_counter() - started)
    except (httpx.HTTPError, ValueError, LookupError, TypeError, AttributeError) as error:
        return sample("failed", f"{type(error).__name__}: {error}")
    if seen.error is not None or not seen.finished:
        return sample("failed", seen.error or "the stream ended before the answer did")
    ended = time.perf_counter() - started
    first_s = ended if seen.first_text_s is None else seen.first_text_s
    found = quality(request.example, target.wording.answer_in(seen.text))
    return sample("answered", ttft_s=first_s - due_s, marked=next(iter(found.values())))


class _Stream:
    """Reads the events of a streamed completion, chat or text."""

    def __init__(self) -> None:
        self.text = ""
        self.first_text_s: float | None = None
        self.finished = False
        self.error: str | None = None
        self._usage: dict[str, Any] = {}

    def add(self, data: str, at_s: float) -> None:
        """An event's data, and when it came."""
        if data == "[DONE]":
            return
        event = json.loads(data)
        if "error" in event:
            self.error = json.dumps(event["error"])
        self._usage = event.get("usage") or self._usage
        for choice in event.get("choices") or []:
            piece = choice["text"] if "text" in choice else (choice.get("delta") or {}).get("content")
            if piece and self.first_text_s is None:
                self.first_text_s = at_s
            self.text += piece or ""
            self.finished = self.finished or choice.get("finish_reason") is not None

    def usage(self) -> dict[str, int | None]:
        """Tokens as the server counts them."""
        details = self._usage.get("prompt_tokens_details") or {}
        return {
            "prompt_tokens": self._usage.get("prompt_tokens"),
            "cached_tokens": details.get("cached_tokens"),
            "completion_tokens": self._usage.get("completion_tokens"),
        }
