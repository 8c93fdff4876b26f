"""Haystack's own pipelines over the retriever and the generators."""

import os
from typing import Any

import pytest

os.environ.setdefault("HAYSTACK_TELEMETRY_ENABLED", "False")
pytest.importorskip("haystack", reason="haystack-ai is not installed: pip install '.[haystack]'")

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


def test_filters(engine: Engine) -> None:
    """Filters are of documents' metadata, which these have not; those of a run come before the retriever's own."""
    assert CacheBlendRetriever(engine, filters={"year": 2024}).run(QUESTION) == {"documents": []}
    assert CacheBlendRetriever(engine).run(QUESTION, filters={"year": 2024}) == {"documents": []}


def test_pipeline_with_a_chat_generator(engine: Engine) -> None:
    """A pipeline with `ChatPromptBuilder` blends the stored KV; a callback that is a coroutine is refused."""
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
    stop = whole[3:6]
    assert generator.run(messages, {"stop": [stop]})["replies"][0].text == whole.partition(stop)[0]

    async def receive(_: StreamingChunk) -> None:
        pytest.fail("called")

    with pytest.raises(ValueError, match="cannot be a coroutine"):
        generator.run(messages, streaming_callback=receive)
