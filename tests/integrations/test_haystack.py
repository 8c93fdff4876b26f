"""Haystack's own pipelines over the retriever and the generators."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import pytest

os.environ.setdefault("HAYSTACK_TELEMETRY_ENABLED", "False")
pytest.importorskip("haystack", reason="haystack-ai is not installed: pip install 'cacheblend[haystack]'")

from haystack import Pipeline
from haystack.components.builders import ChatPromptBuilder
from haystack.dataclasses import ChatMessage, StreamingChunk

from cacheblend.integrations.haystack import CacheBlendChatGenerator, CacheBlendRetriever
from cacheblend.service import Engine

QUESTION = "What does the else clause of a while loop do?"
TEMPLATE = "Use this:\n{% for document in documents %}{{ document.content }}\n\n{% endfor %}Question: {{ question }}"


def pipeline(engine: Engine, builder: Any, generator: Any) -> Pipeline:
    made = Pipeline()
    made.add_component("retriever", CacheBlendRetriever(engine, top_k=4))
    made.add_component("builder", builder)
    made.add_component("generator", generator)
    made.connect("retriever.documents", "builder.documents")
    made.connect("builder.prompt", "generator")
    return made


def test_pipeline_with_a_chat_generator(engine: Engine) -> None:
    """A pipeline with `ChatPromptBuilder` blends the stored KV; `run_async` gives the same reply."""
    pieces: list[StreamingChunk] = []
    builder = ChatPromptBuilder([ChatMessage.from_user(TEMPLATE)], required_variables="*")
    asked = pipeline(engine, builder, CacheBlendChatGenerator(engine, {"max_tokens": 9}, pieces.append))
    (reply,) = asked.run({"retriever": {"query": QUESTION}, "builder": {"question": QUESTION}})["generator"]["replies"]
    assert (reply.meta["plan"]["hits"], reply.meta["plan"]["misses"]) == (4, 0)
    assert reply.meta["usage"]["cached_tokens"] > 0
    assert "".join(piece.content for piece in pieces) == reply.text
    assert len(pieces) > 3
    generator = CacheBlendChatGenerator(engine)
    messages = [ChatMessage.from_system("Be short."), ChatMessage.from_user("When?")]
    whole = generator.run(messages)["replies"][0].text
    assert asyncio.run(generator.run_async(messages))["replies"][0].text == whole
    stop = whole[3:6]
    assert generator.run(messages, {"stop": [stop]})["replies"][0].text == whole.partition(stop)[0]


def test_async_streaming(engine: Engine) -> None:
    """A coroutine is awaited on the event loop with each piece before the next; `run` refuses it."""
    pieces: list[StreamingChunk] = []

    async def receive(chunk: StreamingChunk) -> None:
        await asyncio.sleep(0)
        assert asyncio.get_running_loop() is loop[0]
        pieces.append(chunk)

    async def answer() -> ChatMessage:
        loop[:] = [asyncio.get_running_loop()]
        return (await generator.run_async(messages, {"max_tokens": 9}))["replies"][0]

    loop: list[asyncio.AbstractEventLoop] = []
    generator, messages = CacheBlendChatGenerator(engine, streaming_callback=receive), [ChatMessage.from_user("When?")]
    reply = asyncio.run(answer())
    assert reply.text == "".join(piece.content for piece in pieces)
    assert len(pieces) > 3
    assert [piece.finish_reason for piece in pieces].count(None) == len(pieces) - 1
    with pytest.raises(ValueError, match="cannot be a coroutine"):
        generator.run(messages)
