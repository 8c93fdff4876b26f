"""A LangChain chain whose retriever and chat model are CacheBlend's; the documents go to the model as documents.

python examples/langchain_chain.py --model path/to/model
"""

from __future__ import annotations

import argparse
from typing import Any

from langchain_core.messages import AIMessage
from langchain_core.runnables import Runnable, RunnableLambda, RunnablePassthrough

from cacheblend.integrations.langchain import CacheBlendRetriever, ChatCacheBlend
from cacheblend.service import Engine, EngineConfig

DOCUMENTS = [
    {"id": "travel", "text": "Journeys abroad are signed off by the head of the department, at least two weeks before."},
    {"id": "leave", "text": "Everyone has thirty days of leave. Ten of them may be taken over into the next year."},
]


def make_chain(engine: Engine) -> Runnable[str, AIMessage]:
    """Question -> documents -> answer."""
    retriever = CacheBlendRetriever(engine=engine, num_chunks=2)
    model = ChatCacheBlend(engine=engine)

    def answer(found: dict[str, Any]) -> AIMessage:
        return model.invoke(found["question"], documents=found["documents"])

    return {"documents": retriever, "question": RunnablePassthrough()} | RunnableLambda(answer)


def run(engine: Engine, question: str = "Who signs off journeys?") -> AIMessage:
    """Ingest, and ask the chain."""
    engine.ingest(DOCUMENTS)
    return make_chain(engine).invoke(question)


def main() -> None:
    """Run it on a model of yours."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--store-dir", default="cacheblend-store")
    options = parser.parse_args()
    with Engine(EngineConfig(model=options.model, store_dir=options.store_dir)) as engine:
        message = run(engine)
        print(message.content)
        print(message.usage_metadata)


if __name__ == "__main__":
    main()
