"""Applications that write what they retrieved into messages, in words of their own: its stored KV is reused.

`CACHEBLEND_RECORD_RECIPES=1 python -m pytest tests/service/http/test_passages.py -n 0 -k recipes` records the applications'
requests anew, which tests/integrations/vllm sends to vLLM.
"""

import gc
import json
import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from api import MODEL, serving
from engines import OpenEngine, make_model

from cacheblend.blend import Fusor
from cacheblend.service import Engine
from cacheblend.service.engine.passages import locate
from cacheblend.service.engine.request import Request

TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}\n{% endif %}{% for message in messages %}<{{ message.role }}>\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<call>{{ call.function | tojson }}</call>{% endfor %}\n{% endfor %}<assistant>\n"
)
TEXTS = (
    "The river Thames flows through London and has been a route of trade for centuries. Its banks hold many landmarks of the "
    "city. Several bridges cross it, among them Tower Bridge, and boats carry visitors every day.",
    "Mount Kenya is the highest mountain of its country. It is an extinct volcano that was once much taller. Its slopes hold "
    "forests and moorland, and the glaciers near the top shrink every year because the air gets warmer.",
    "The bicycle was developed in Europe. Early models had no pedals at all: riders pushed themselves along with their feet. "
    "Then came the chain drive, which made wheels of equal size possible. It brought the safety bicycle to everyone.",
    "Bread is one of the oldest foods that people make. Flour, water and a little salt are enough for it. Yeast makes the "
    "dough rise, and the heat of the oven gives it the crust that everybody likes. It is eaten in most countries.",
)
ASKED = ("Which is the oldest?", "Who has built them, and where?", "What can be seen there today?", "Which one is the warmest?")
OPEN_WEBUI = (
    "### Task:\nRespond to the user query using the provided context, incorporating inline citations in the format [id] **only "
    'when the <source> tag includes an explicit id attribute** (e.g., <source id="1">).\n\n### Guidelines:\n- If you don\'t '
    "know the answer, clearly state that.\n- Respond in the same language as the user's query.\n\n<context>\n{}\n</context>\n"
)
SEARCH = {"id": "call_1", "type": "function", "function": {"name": "search", "arguments": "{}"}}
TOOLS: Any = [{"type": "function", "function": {"name": "search", "description": "Searches."}}]
RECORDED = Path(__file__).with_name("recipes.json")
Recipe = Callable[[str, list[str], list[str]], None]  # address, texts in order, questions asked so far


def send(address: str, messages: list[Any], **options: Any) -> Any:
    with openai.OpenAI(base_url=f"{address}/v1", api_key="none", timeout=60, max_retries=0) as client:
        return client.chat.completions.create(model=MODEL, messages=messages, max_tokens=2, **options)


def turns(last: str, questions: list[str]) -> list[Any]:
    """A conversation whose earlier turns have no context."""
    earlier = [({"role": "user", "content": one}, {"role": "assistant", "content": "It is so."}) for one in questions[:-1]]
    return [*(message for pair in earlier for message in pair), {"role": "user", "content": last}]


def open_webui(address: str, texts: list[str], questions: list[str]) -> None:
    sources = "\n".join(f'<source id="{n}" name="file{n}.md">{text}</source>' for n, text in enumerate(texts, start=1))
    send(address, turns(f"{OPEN_WEBUI.format(sources)}\n{questions[-1]}", questions))


def langchain_stuff(address: str, texts: list[str], questions: list[str]) -> None:
    langchain = pytest.importorskip("langchain_openai", reason="langchain-openai is not installed")
    documents = pytest.importorskip("langchain_classic.chains.combine_documents", reason="langchain-classic is not installed")
    from langchain_core.documents import Document
    from langchain_core.prompts import ChatPromptTemplate

    prompt = ChatPromptTemplate.from_messages([("system", "Answer from the context only.\n\n{context}"), ("human", "{input}")])
    model = langchain.ChatOpenAI(base_url=f"{address}/v1", api_key="none", model=MODEL, max_tokens=2)
    chain = documents.create_stuff_documents_chain(model, prompt)
    chain.invoke({"context": [Document(page_content=text) for text in texts], "input": questions[-1]})


def llama_index(address: str, texts: list[str]) -> tuple[Any, Any]:
    """LlamaIndex's class for services, and a retriever that finds these texts."""
    pytest.importorskip("llama_index.llms.openai_like", reason="llama-index-llms-openai-like is not installed")
    from llama_index.core import QueryBundle
    from llama_index.core.retrievers import BaseRetriever
    from llama_index.core.schema import NodeWithScore, TextNode
    from llama_index.llms.openai_like import OpenAILike

    class Fixed(BaseRetriever):
        def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
            return [NodeWithScore(node=TextNode(text=text, metadata={"file_name": "a.md"})) for text in texts]

    options: Any = {"api_base": f"{address}/v1", "api_key": "none", "max_tokens": 2, "context_window": 8000}
    return OpenAILike(model=MODEL, temperature=0.0, is_chat_model=True, **options), Fixed()


def llama_index_engine(address: str, texts: list[str], questions: list[str]) -> None:
    llm, retriever = llama_index(address, texts)
    from llama_index.core import PromptHelper, get_response_synthesizer
    from llama_index.core.query_engine import RetrieverQueryEngine

    helper = PromptHelper(context_window=8000, num_output=2, tokenizer=str.split)
    synthesizer = get_response_synthesizer(llm=llm, prompt_helper=helper)
    RetrieverQueryEngine.from_args(retriever, llm=llm, response_synthesizer=synthesizer).query(questions[-1])


def llama_index_chat(address: str, texts: list[str], questions: list[str]) -> None:
    """The context is in the system message, before the conversation so far."""
    llm, retriever = llama_index(address, texts)
    from llama_index.core.chat_engine import ContextChatEngine
    from llama_index.core.llms import ChatMessage
    from llama_index.core.memory import ChatMemoryBuffer

    said = [ChatMessage(role=turn["role"], content=turn["content"]) for turn in turns("", questions)[:-1]]
    memory = ChatMemoryBuffer.from_defaults(said, token_limit=4000, tokenizer_fn=str.split)
    ContextChatEngine.from_defaults(retriever=retriever, llm=llm, memory=memory).chat(questions[-1])


def haystack_pipeline(address: str, texts: list[str], questions: list[str]) -> None:
    pytest.importorskip("haystack", reason="haystack-ai is not installed")
    from haystack import Document
    from haystack.components.builders import ChatPromptBuilder
    from haystack.components.generators.chat import OpenAIChatGenerator
    from haystack.dataclasses import ChatMessage
    from haystack.utils import Secret

    template = (
        "Given the following information, answer the question.\n\nContext:\n"
        "{% for document in documents %}\n    {{ document.content }}\n{% endfor %}\n\nQuestion: {{question}}\nAnswer:"
    )
    builder = ChatPromptBuilder(template=[ChatMessage.from_user(template)], required_variables="*")
    made = builder.run(documents=[Document(content=text) for text in texts], question=questions[-1])
    generator = OpenAIChatGenerator(
        api_key=Secret.from_token("none"), model=MODEL, api_base_url=f"{address}/v1", generation_kwargs={"max_tokens": 2}
    )
    generator.run(messages=made["prompt"])


def f_string(address: str, texts: list[str], questions: list[str]) -> None:
    with openai.OpenAI(base_url=f"{address}/v1", api_key="none", timeout=60, max_retries=0) as client:
        numbered = "\n".join(f"[{n}] {text}" for n, text in enumerate(texts, start=1))
        prompt = f"Answer from what follows.\n\n{numbered}\n\nQuestion: {questions[-1]}\nAnswer:"
        client.completions.create(model=MODEL, prompt=prompt, max_tokens=2)


def agent(address: str, texts: list[str], questions: list[str]) -> None:
    found = json.dumps([{"id": n, "text": text} for n, text in enumerate(texts)])
    asked = {"role": "user", "content": questions[-1]}
    called = {"role": "assistant", "content": None, "tool_calls": [SEARCH]}
    send(address, [asked, called, {"role": "tool", "tool_call_id": "call_1", "content": found}], tools=TOOLS)


LLAMA_INDEX: tuple[Recipe, ...] = (llama_index_engine, llama_index_chat)
RECIPES: tuple[Recipe, ...] = (open_webui, langchain_stuff, *LLAMA_INDEX, haystack_pipeline, f_string, agent)


@pytest.fixture(scope="module")
def passages_fusor(tmp_path_factory: pytest.TempPathFactory) -> Fusor:
    """A model with room for passages, whose template takes tools."""
    directory = tmp_path_factory.mktemp("passages")
    make_model(directory, 2048)
    fusor = Fusor.from_pretrained(str(directory))
    fusor.tokenizer.chat_template = TEMPLATE  # type: ignore[union-attr]
    return fusor


@pytest.fixture
def served(
    passages_fusor: Fusor, open_engine: OpenEngine, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Engine, str, list[Request]]]:
    """An engine, its server's address, and the requests that were prepared."""
    engine, requests = open_engine(fusor=passages_fusor, chunk_tokens=192), list[Request]()
    prepare = engine.prepare

    def noted(*args: Any, **options: Any) -> Request:
        requests.append(prepare(*args, **options))
        return requests[-1]

    monkeypatch.setattr(engine, "prepare", noted)
    with serving(engine) as (_, address):
        yield engine, address, requests


@pytest.fixture(autouse=True)
def _drop_clients() -> Iterator[None]:
    """Frameworks leave clients and event loops open."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The path and body of each request that a client's library has sent."""
    found, send_one = list[dict[str, Any]](), httpx.Client.send

    def noted(client: httpx.Client, request: httpx.Request, **options: Any) -> httpx.Response:
        found.append({"path": request.url.path, "body": json.loads(request.content)})
        return send_one(client, request, **options)

    monkeypatch.setattr(httpx.Client, "send", noted)
    return found


def check_recorded(name: str, sent: list[dict[str, Any]]) -> None:
    """Check that what a recipe's application writes is what was recorded; other fields are its library's version's."""
    recorded = json.loads(RECORDED.read_text(encoding="utf-8")) if RECORDED.is_file() else {}
    if os.environ.get("CACHEBLEND_RECORD_RECIPES") == "1":
        recorded = {"texts": TEXTS, "requests": {**recorded.get("requests", {}), name: sent}}
        RECORDED.write_text(json.dumps(recorded, indent=1, ensure_ascii=False, sort_keys=True) + "\n", encoding="utf-8")
    written = [
        [(one["path"], *map(one["body"].get, ("messages", "prompt", "tools"))) for one in many]
        for many in (sent, recorded["requests"][name])
    ]
    assert written[0] == written[1]


def reused(request: Request) -> int:
    return sum(len(chunk.token_ids) for chunk in request.prompt.chunks if chunk.key is not None)


@pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::DeprecationWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.__name__)
def test_recipes(served: tuple[Engine, str, list[Request]], sent: list[dict[str, Any]], recipe: Recipe) -> None:
    """Texts that came twice are hits in another order under another question; at ratio 1.0 the answer is the exact one."""
    engine, address, requests = served
    tokens = sum(len(engine.prompts.text_ids(text)) for text in TEXTS)
    for number, order in enumerate(([0, 1, 2, 3], [2, 0, 3, 1], [3, 1, 0, 2])):
        recipe(address, [TEXTS[index] for index in order], list(ASKED[: number + 1]))
        engine.drain()
    check_recorded(recipe.__name__, sent)
    assert [reused(request) for request in requests[:2]] == [0, 0]
    assert len(requests) == 3
    assert reused(requests[2]) >= 0.9 * tokens
    blended = engine.complete(replace(requests[2], fusion=replace(requests[2].fusion, recompute_ratio=1.0)))
    exact = engine.complete(replace(requests[2], method="full_recompute"))
    assert blended.plan.hits == len(TEXTS)
    assert blended.plan.cached_tokens >= 0.9 * tokens
    torch.testing.assert_close(blended.first_logits, exact.first_logits)
    assert blended.token_ids == exact.token_ids


def ask(address: str, texts: list[str], question: str = ASKED[0], **fields: Any) -> Any:
    sources = "\n".join(f"<source>{text}</source>" for text in texts)
    return send(address, [{"role": "user", "content": f"{OPEN_WEBUI.format(sources)}\n{question}"}], extra_body=fields)


def test_ingested_texts_are_hits_at_once(served: tuple[Engine, str, list[Request]]) -> None:
    """An ingested text is found under whatever stands around it, and nothing is retrieved beside it; usage tells of it."""
    engine, address, requests = served
    engine.ingest([{"id": str(n), "title": f"A title of text {n}", "text": text} for n, text in enumerate(TEXTS)])
    answer = ask(address, list(TEXTS))
    tokens = sum(len(engine.prompts.text_ids(text)) for text in TEXTS)
    assert answer.usage.prompt_tokens_details.cached_tokens == reused(requests[-1]) >= 0.9 * tokens
    assert (answer.cacheblend["passages"], answer.cacheblend["hits"]) == (4, 4)
    assert not requests[-1].chunks
    assert ask(address, list(TEXTS), num_chunks=2).cacheblend.get("passages") is None


def test_explained(served: tuple[Engine, str, list[Request]]) -> None:
    """The service shows a request's passages, why, and whose KV its salt has; looking stores nothing, and is no sight."""
    engine, address, requests = served
    engine.ingest([{"id": "0", "title": "", "text": TEXTS[0]}])
    entries = len(engine.store.ls())
    sources = "\n".join(f"<source>{text}</source>" for text in TEXTS[:2])
    chat = {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": f"{sources}\n{ASKED[0]}"}]}

    def explain(body: Any) -> Any:
        answer = httpx.post(f"{address}/v1/chat/completions/explain", json=body, timeout=60)
        assert answer.status_code == (404 if "model" in body else 200), answer.text
        engine.drain()
        return answer.json()

    for _ in range(3):
        shown = explain(chat)
    assert [(one["message"], one["reason"], one["stored"]) for one in shown["passages"]] == [
        (1, "stored", True),
        (1, "tag", False),
    ]
    stored, fresh = shown["passages"]
    assert chat["messages"][1]["content"][stored["start"] : stored["end"]] == stored["text"] == TEXTS[0]
    assert (stored["document_id"], fresh["document_id"], shown["num_chunks"]) == ("0", None, 0)
    assert stored["tokens"] == shown["reused_tokens"] <= shown["prompt_tokens"]
    assert (len(engine.store.ls()), requests) == (entries, [])
    assert not explain({**chat, "cache_salt": "another"})["passages"][0]["stored"]
    plain = explain({"messages": [{"role": "user", "content": ASKED[0]}]})
    assert (plain["passages"], plain["reused_tokens"], plain["num_chunks"]) == ([], 0, engine.retriever.chunk_count)
    assert "model" in explain({**chat, "model": "another"})["error"]["message"]


def test_too_little_is_left_as_it_is(served: tuple[Engine, str, list[Request]]) -> None:
    """A prompt of which a small part is stored, or which the prefix cache has, has no chunk in it."""
    engine, address, requests = served
    engine.ingest([{"id": "0", "title": "", "text": TEXTS[0]}])
    assert ask(address, list(TEXTS)).cacheblend["passages"] == 4
    assert not requests[-1].prompt.chunks
    assert ask(address, list(TEXTS)).usage.prompt_tokens_details.cached_tokens > 400
    assert not requests[-1].prompt.chunks


def test_salts_share_nothing(served: tuple[Engine, str, list[Request]]) -> None:
    """What one salt has twice another finds neither stored nor half-way to it; and a text within one request counts once."""
    engine, address, requests = served
    for first, salt in zip((0, 2, 0, 2, 3), "aabbb", strict=True):
        ask(address, [TEXTS[first], TEXTS[1], TEXTS[1]], cache_salt=salt)
        engine.drain()
    namespaces = {entry.key.namespace for entry in engine.store.ls()}
    assert [bool(reused(request)) for request in requests] == [False, False, False, False, True]
    assert all(name.startswith("passages:") and len(name) > 64 for name in namespaces)
    assert len(namespaces) == 2


def test_earlier_turns_are_hits(served: tuple[Engine, str, list[Request]]) -> None:
    """A conversation that drops its oldest turn finds the passages of the others, which the prefix cache does not."""
    engine, address, requests = served
    history: list[Any] = []
    for number, text in enumerate(TEXTS):
        history.append({"role": "user", "content": f"Read.\n<source>{text}</source>\n{ASKED[number]}"})
        send(address, history)
        history.append({"role": "assistant", "content": "Yes."})
        engine.drain()
    send(address, [*history[2:], {"role": "user", "content": "Go on."}])
    assert reused(requests[-1]) >= 0.9 * sum(len(engine.prompts.text_ids(text)) for text in TEXTS[1:3])


def test_switched_off(passages_fusor: Fusor, open_engine: OpenEngine) -> None:
    """Without the option nothing is looked for."""
    engine = open_engine(fusor=passages_fusor, find_passages=False)
    assert not engine.find_passages([("user", f"<source>{TEXTS[0]}</source>")])


def test_passages_stand_where_the_template_puts_them() -> None:
    """In any order, at the prompt's ends, one of two that are equal, and after many that the template has left out."""
    first, second, absent = (tuple(range(start, start + 40)) for start in (100, 200, 900))
    prompt = (1, *first, 2, *second)
    places = [(1, 41, 0), (42, 81, 0)]  # the last token is always computed
    assert locate(prompt, [(first, 0), (second, 0)]) == places
    assert locate(prompt, [(second, 0), (first, 0)]) == places[::-1]
    assert locate(prompt, [(first, 0), (first, 0)]) == [places[0], None]
    assert locate(prompt, [*[(absent, 0)] * 7, *[((1,), 0)] * 5, (first, 0)])[-1] == places[0]
