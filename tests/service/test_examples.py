"""The examples run."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import openai
from api import MODEL, listening
from engines import OpenEngine
from langchain_core.documents import Document

from cacheblend.integrations.langchain import CacheBlendRetriever, ChatCacheBlend
from cacheblend.service.http.config import HttpConfig
from cacheblend.service.http.server import Server

EXAMPLES = Path(__file__).parents[2] / "examples"


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_plain_function(open_engine: OpenEngine) -> None:
    """The second answer reuses what the first one missed."""
    first, second = example("plain_function").run(open_engine())
    assert (first.plan.hits, first.plan.misses) == (0, second.plan.hits)
    assert second.plan.misses == 0


def test_langchain_chain(open_engine: OpenEngine) -> None:
    """The chain gives `Engine.answer`'s text, from stored KV."""
    engine = open_engine()
    question = "Who signs off journeys?"
    message = example("langchain_chain").run(engine, question)
    alone = engine.answer(question, num_chunks=2)
    assert message.content == alone.text
    assert message.usage_metadata["input_token_details"]["cache_read"] > 0
    assert message.response_metadata["plan"]["hits"] == 2


def test_langchain_documents_of_another_retriever(open_engine: OpenEngine) -> None:
    """Documents that are not the engine's, or are deleted, are taken by their text; a stop string ends the answer."""
    engine = open_engine()
    example("langchain_chain").run(engine)
    found = CacheBlendRetriever(engine=engine, num_chunks=2).invoke("journeys")
    assert [document.metadata["document_id"] for document in found] == ["travel", "leave"]
    engine.documents.delete("travel")
    model = ChatCacheBlend(engine=engine, max_tokens=20)
    documents = [*found, Document(page_content="At noon.")]
    assert model.invoke("When?", documents=documents).response_metadata["plan"]["misses"] >= 1
    engine.drain()
    warm = model.invoke("When?", documents=documents)
    assert warm.response_metadata["plan"]["misses"] == 0
    stop = warm.content[3:6]
    assert model.invoke("When?", documents=documents, stop=[stop]).content == warm.content[: warm.content.index(stop)]


def test_openai_client(open_engine: OpenEngine) -> None:
    """The client uploads documents and reads the stream."""
    engine = open_engine()
    with (
        Server(engine.config, http=HttpConfig(served_model_name=MODEL), engine=engine) as server,
        listening(server) as address,
        openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client,
    ):
        assert example("openai_client").run(client)
    assert {document.id for document in engine.documents.ls()} == {"travel", "leave"}
