"""Answers on their way: no request outlives its client."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import nullcontext
from functools import partial

import pytest
from api import MODEL, connected
from fakes import tiny_tokenizer
from starlette.requests import ClientDisconnect
from starlette.types import Message
from waiting import wait_until

from cacheblend.service.engine.decoding import TokenLogprob, token_bytes
from cacheblend.service.http.answers import ChatChoice, TextChoice, token_texts
from cacheblend.service.http.chat import EventStream
from cacheblend.service.http.schemas import ChatBody, CompletionBody
from cacheblend.service.http.server import Server


class OneEvent:
    cancelled = False

    def cancel(self) -> None:
        self.cancelled = True

    async def pieces(self, *_: object) -> AsyncIterator[str]:
        yield "data: {}\n\n"


@pytest.mark.parametrize("client_is_there", [True, False])
def test_cancelled_at_its_end(client_is_there: bool) -> None:
    """The response's end cancels the request: after the last event, and where the client is gone before the first one."""
    served = OneEvent()

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    async def send(_: Message) -> None:
        if not client_is_there:
            raise OSError("the client is gone")

    stream = EventStream(served, (0, None))  # type: ignore[arg-type]  # a stand-in
    with nullcontext() if client_is_there else pytest.raises(ClientDisconnect):
        asyncio.run(stream({"type": "http", "asgi": {"spec_version": "2.4"}}, receive, send))
    assert served.cancelled


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves(address: str, server: Server, stream: bool) -> None:
    """A request ends soon after its client has left, also where its answer is to come whole."""
    fields = {"model": MODEL, "prompt": "while", "max_tokens": 500, "n": 4, "logit_bias": {"1": -100}, "stream": stream}
    body = json.dumps(fields).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
    with connected(address) as connection:
        connection.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + body)
        wait_until(lambda: server.scheduler.state.decoding > 0)
    wait_until(lambda: server.scheduler.state.decoding == 0)
    assert b'outcome="cancelled"} 1.0' in server.metrics.text()


def test_tokens_read_as_their_text() -> None:
    """The texts of a chunk's tokens are its text, also where a token alone loses its space, or is half a character."""
    text = "Ada Thornley plays the zither.\n\nHis café opened in 1988 🙂, as most people know"
    tokenizer = tiny_tokenizer()
    token_ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    texts = token_texts(token_ids, tokenizer)
    assert len(texts) == len(token_ids) > 10
    assert "".join(texts) == tokenizer.decode(token_ids)
    assert "Ada Thornley plays" in "".join(texts)


def test_logprobs_of_split_characters() -> None:
    """Bytes joined are the text's, tokens within a character are written as bytes, and offsets stay within the text."""
    text, tokenizer = "é🙂a", tiny_tokenizer()
    tokens = [TokenLogprob(token, -1.0, ()) for token in tokenizer(text, add_special_tokens=False)["input_ids"]]
    read = partial(token_bytes, tokenizer)
    chat = ChatChoice(0, ChatBody(messages=[{"role": "user", "content": "x"}], logprobs=True), read, str).logprobs(tokens)
    assert bytes(byte for one in chat["content"] for byte in one["bytes"]).decode() == text
    choice = TextChoice(0, CompletionBody(prompt="x", logprobs=0), read, str)
    told, later = choice.logprobs(tokens), choice.logprobs(tokens[-1:])
    assert told["tokens"] == ["bytes:\\xc3", "bytes:\\xa9", *(f"bytes:\\x{byte:x}" for byte in "🙂".encode()), "a"]
    assert [*told["text_offset"], *later["text_offset"]] == [0, 0, 1, 1, 1, 1, 2, 3]
