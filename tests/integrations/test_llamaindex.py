"""LlamaIndex's own query engine over the retriever and the LLM."""

import asyncio
import threading
from typing import Any

import pytest

pytest.importorskip("llama_index.core", reason="llama-index-core is not installed: pip install '.[llamaindex]'")

from llama_index.core import PromptHelper, PromptTemplate, get_response_synthesizer
from llama_index.core.llms import ChatMessage
from llama_index.core.query_engine import RetrieverQueryEngine

from cacheblend.base.errors import InputError
from cacheblend.integrations.llamaindex import CacheBlendLLM, CacheBlendRetriever
from cacheblend.service import Engine

QUESTION = "What does the else clause of a while loop do?"
TEMPLATE = PromptTemplate("Use this:\n{context_str}\n\nQuestion: {query_str}")


@pytest.fixture
def llm(engine: Engine) -> CacheBlendLLM:
    return CacheBlendLLM(engine=engine)


def query_engine(engine: Engine, llm: CacheBlendLLM, *, streaming: bool = False) -> RetrieverQueryEngine:
    retriever = CacheBlendRetriever(engine, similarity_top_k=4)
    helper = PromptHelper(context_window=4096, num_output=6)  # the tiny model has no room for LlamaIndex's refine template
    synthesizer = get_response_synthesizer(llm=llm, prompt_helper=helper, text_qa_template=TEMPLATE, streaming=streaming)
    return RetrieverQueryEngine.from_args(retriever, llm=llm, response_synthesizer=synthesizer)


def test_query_engine_finds_the_chunks(engine: Engine, llm: CacheBlendLLM) -> None:
    """A query engine's answer comes from the KV of the chunks in its prompt, whole and streamed."""
    first = query_engine(engine, llm).query(QUESTION)
    streamed = "".join(query_engine(engine, llm, streaming=True).query(QUESTION).response_gen)
    prompt = TEMPLATE.format(context_str="\n\n".join(n.text.strip() for n in first.source_nodes), query_str=QUESTION)
    plan = llm.complete(prompt).additional_kwargs["plan"]
    assert len(first.source_nodes) == 4
    assert streamed == first.response
    assert (plan["hits"], plan["misses"]) == (4, 0)
    assert CacheBlendRetriever(engine, filter={"year": 2024}).retrieve(QUESTION) == []


def test_chat_stream_and_options(llm: CacheBlendLLM) -> None:
    """Chat, its stream and its async twins give one text; options and stop strings hold."""
    messages = [ChatMessage(role="system", content="Be short."), ChatMessage(role="user", content="When?")]
    whole = llm.chat(messages, max_tokens=9)
    pieces = list(llm.stream_chat(messages, max_tokens=9))
    assert len(pieces) > 3
    assert pieces[-1].message.content == "".join(piece.delta for piece in pieces) == whole.message.content
    assert pieces[-1].additional_kwargs["completion_tokens"] <= 9
    stop = whole.message.content[3:6]
    cut = whole.message.content.partition(stop)[0]
    assert llm.chat(messages, max_tokens=9, stop=[stop]).message.content == cut

    async def twins() -> tuple[str, str, str]:
        chat = await llm.achat(messages, max_tokens=9)
        streamed = [piece async for piece in await llm.astream_chat(messages, max_tokens=9)]
        text = await llm.acomplete("When?", max_tokens=9)
        return chat.message.content, streamed[-1].message.content, text.text

    assert asyncio.run(twins()) == (whole.message.content,) * 2 + (llm.complete("When?", max_tokens=9).text,)
    with pytest.raises(InputError, match="tools: not an option"):
        llm.chat(messages, tools=[])


def test_async_does_not_block_the_loop(engine: Engine, llm: CacheBlendLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a slow model answers, the event loop goes on."""
    decode, begun, gate = engine.fusor.decoder.decode, threading.Event(), threading.Event()

    def slow(*given: Any) -> Any:
        begun.set()
        assert gate.wait(30), "the loop that opens the gate does not go on"
        return decode(*given)

    monkeypatch.setattr(engine.fusor.decoder, "decode", slow)

    async def answers() -> None:
        both = asyncio.gather(llm.acomplete("hello"), llm.achat([ChatMessage("hello")]))
        assert await asyncio.to_thread(begun.wait, 30)
        assert not both.done()
        gate.set()
        await both

    asyncio.run(answers())
