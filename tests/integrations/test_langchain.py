"""LangChain's own chains over the retriever and the chat model."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from langchain_core.documents import Document
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnablePassthrough
from pydantic import BaseModel

from cacheblend.base.errors import ConfigError, InputError
from cacheblend.blend import Fusor
from cacheblend.integrations.chat import EngineChat
from cacheblend.integrations.langchain import CacheBlendRetriever, ChatCacheBlend
from cacheblend.retriever import RetrieverConfig
from cacheblend.service import Engine, EngineConfig
from cacheblend.service.engine.grammar import Grammar
from cacheblend.service.engine.prompt import Message
from cacheblend.service.engine.reasoning import Thoughts

QUESTION = "What does the else clause of a while loop do?"
TEMPLATE = "Use this context:\n{context}\n\nQuestion: {question}"


def joined(documents: list[Document]) -> str:
    return "\n\n".join(document.page_content for document in documents)


def chain(model: Any, retriever: Any, template: Any = TEMPLATE, join: Any = joined) -> Any:
    prompt = ChatPromptTemplate.from_template(template) if isinstance(template, str) else template
    return {"context": retriever | join, "question": RunnablePassthrough()} | prompt | model


def entries(engine: Engine) -> int:
    return sum(1 for file in (engine.store.config.directory / "entries").rglob("*") if file.is_file())


@pytest.fixture
def retriever(engine: Engine) -> CacheBlendRetriever:
    return CacheBlendRetriever(engine=engine, num_chunks=4)


@pytest.fixture
def model(engine: Engine) -> ChatCacheBlend:
    return ChatCacheBlend(engine=engine)


@pytest.mark.parametrize("join", [joined, lambda found: "\n---\n".join(document.page_content.strip() for document in found)])
def test_the_prompt_is_unchanged(engine: Engine, retriever: CacheBlendRetriever, model: ChatCacheBlend, join: Any) -> None:
    """A blended prompt is the model's own tokens of the template's text; at ratio 1.0 so is the answer."""
    text = TEMPLATE.format(context=join(retriever.invoke(QUESTION)), question=QUESTION)
    layout, passages = engine.prompts.chat([Message("user", text)], with_chunks=False), engine.find_passages([("user", text)])
    options = {"layout": layout, "passages": passages, "num_chunks": 0, "recompute_ratio": 1.0}
    blended, exact = (engine.answer(text, method=method, **options) for method in ("blend", "full_recompute"))
    assert blended.plan.hits == 4
    assert tuple(token for one in blended.plan.segments for token in one.token_ids) == layout.token_ids
    assert blended.token_ids == exact.token_ids
    assert chain(model.bind(recompute_ratio=1.0), retriever, TEMPLATE, join).invoke(QUESTION).content == exact.text


def test_numbered_chunks_and_a_system_message(engine: Engine, retriever: CacheBlendRetriever, model: ChatCacheBlend) -> None:
    """Text between the chunks is computed anew and never stored; chunks may stand in any message."""
    template = ChatPromptTemplate.from_messages([("system", "Answer from:\n{context}"), ("human", "{question}")])

    def numbered(documents: list[Document]) -> str:
        return "".join(f"[{n}] {document.page_content}\n\n" for n, document in enumerate(documents))

    stored = entries(engine)
    for _ in range(2):
        plan = chain(model, retriever, template, numbered).invoke(QUESTION).response_metadata["plan"]
        assert (plan["hits"], plan["misses"]) == (4, 0)
        assert [segment["kind"] for segment in plan["segments"]].count("reused") == 4
        engine.drain()
    assert entries(engine) == stored


def test_changed_chunks(retriever: CacheBlendRetriever, model: ChatCacheBlend) -> None:
    """A template that changes the chunks' texts is answered in full."""
    shouted = chain(model, retriever, TEMPLATE, lambda found: joined(found).upper())
    assert shouted.invoke(QUESTION).response_metadata["plan"]["hits"] == 0


def test_tokens_are_the_models(engine: Engine, model: ChatCacheBlend) -> None:
    """LangChain counts the model's tokens, and is told where tools are called."""
    assert model.get_num_tokens(text := "some words " * 9) == len(engine.prompts.text_ids(text))
    with pytest.raises(NotImplementedError, match="cacheblend serve"):
        model.bind_tools([])


def test_stream_and_its_async_twin(retriever: CacheBlendRetriever, model: ChatCacheBlend) -> None:
    """Pieces come one by one and join to the whole answer; the last one has usage and plan."""
    asked = chain(model.bind(max_tokens=12), retriever)
    whole = asked.invoke(QUESTION)
    pieces = list(asked.stream(QUESTION))
    assert len(pieces) > 5
    assert "".join(piece.content for piece in pieces) == whole.content
    assert pieces[-1].usage_metadata == whole.usage_metadata
    assert "".join((chain(model.bind(max_tokens=12), retriever) | StrOutputParser()).stream(QUESTION)) == whole.content

    async def astream() -> list[str]:
        return [piece.content async for piece in asked.astream(QUESTION)]

    assert "".join(asyncio.run(astream())) == whole.content


def test_an_abandoned_stream_frees_all(engine: Engine, retriever: CacheBlendRetriever, model: ChatCacheBlend) -> None:
    """A stream that nobody reads to its end holds no pin, and the background work goes on."""
    stream = chain(model, retriever).stream(QUESTION)
    next(stream)
    assert engine.foreground._running
    stream.close()
    assert not engine.foreground._running
    assert not engine.store._pins._pinned.total()


def test_options_of_a_call(model: ChatCacheBlend) -> None:
    """`bind` and `stop` hold; one seed gives one answer; an unknown option is named."""
    whole = model.bind(max_tokens=20).invoke("When?")
    assert whole.usage_metadata["output_tokens"] <= 20
    stop = whole.content[3:6]
    assert model.bind(max_tokens=20, stop=[stop]).invoke("When?").content == whole.content[: whole.content.index(stop)]
    drawn = [model.bind(temperature=1.5, seed=seed, top_k=50).invoke("When?").content for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    with pytest.raises(InputError, match=r"tools: not an option.*max_tokens"):
        model.invoke("When?", tools=[])


class Signature(BaseModel):
    name: str
    days: int


def test_structured_output(model: ChatCacheBlend) -> None:
    """A pydantic class, a JSON schema and the raw message beside either."""
    pytest.importorskip("llguidance")
    limited = ChatCacheBlend(engine=model.engine, max_tokens=200)
    schema = {
        "title": "Vote",
        "type": "object",
        "properties": {"vote": {"enum": ["yes", "no"], "not": {"const": "no"}}},  # of that a grammar holds only the first
        "required": ["vote"],
        "additionalProperties": False,
    }
    assert limited.with_structured_output(schema).invoke("Agreed?")["vote"] in ("yes", "no")
    with pytest.raises(InputError, match="cannot be enforced"):
        limited.with_structured_output(schema, strict=True).invoke("Agreed?")
    raw = limited.with_structured_output(schema, include_raw=True).invoke("Agreed?")
    assert raw["parsed"]["vote"] in ("yes", "no")
    assert raw["parsing_error"] is None
    cut = ChatCacheBlend(engine=model.engine, max_tokens=3).with_structured_output(Signature, include_raw=True).invoke("Who?")
    assert cut["parsed"] is None
    assert cut["parsing_error"] is not None


def test_documents_of_any_retriever(engine: Engine, retriever: CacheBlendRetriever, model: ChatCacheBlend) -> None:
    """`documents=` takes what any vector database found; of the engine's own chunks the stored KV is used."""
    own = retriever.invoke(QUESTION)
    others = [
        Document("Boats leave at nine.", metadata={"title": "Boats"}),
        {"text": "Or ten."},
        {"text": " \n"},
    ]  # the last is left out
    plan = model.invoke(QUESTION, documents=[*own, *others]).response_metadata["plan"]
    assert (plan["hits"], plan["misses"]) == (4, 2)
    engine.drain()
    assert model.invoke(QUESTION, documents=[*own, *others]).response_metadata["plan"]["misses"] == 0


def test_thoughts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Thinking is switched by the template's variables; the thoughts stand beside the content, with and without chunks."""
    pytest.importorskip("llguidance")
    from engines import DOCUMENTS
    from fakes import FakeEmbedder
    from thinking import QWEN3, grammar_of, thinking_tokenizer
    from tiny_models import tiny_model

    tokenizer = thinking_tokenizer(QWEN3)

    def says(chat: EngineChat, _: Any, thoughts: Thoughts) -> Grammar:
        return grammar_of(chat._grammars, "Yes." if thoughts.is_closed else "<think>\nhm\n</think>\n\nYes.")

    monkeypatch.setattr(EngineChat, "_grammar", says)
    config = EngineConfig(model="qwen3", store_dir=tmp_path, retriever=RetrieverConfig(chunk_tokens=24))
    fusor = Fusor(tiny_model("qwen3", vocab=len(tokenizer)), tokenizer)
    with Engine(config, fusor=fusor, embedder=FakeEmbedder()) as engine:
        engine.ingest(DOCUMENTS[:2])
        model = ChatCacheBlend(engine=engine, max_tokens=40)
        for thinks in (True, False):
            switched = model.bind(chat_template_kwargs={"enable_thinking": thinks})
            for answer in (
                switched.invoke(QUESTION),
                chain(switched, CacheBlendRetriever(engine=engine, num_chunks=2)).invoke(QUESTION),
            ):
                assert (answer.content, answer.additional_kwargs) == ("Yes.", {"reasoning_content": "hm"} if thinks else {})
            assert "".join(piece.content for piece in switched.stream(QUESTION)) == "Yes."
        for given in ({"thinking": True}, "no"):
            with pytest.raises(ConfigError, match="chat_template_kwargs"):
                model.invoke(QUESTION, chat_template_kwargs=given)
