"""The clients that people have, against one running service: LangChain's, LlamaIndex's, and requests as Open WebUI sends them.

Open WebUI 0.12.4 sends them from its server, and from a browser over a direct connection. They follow its source:
`routers/openai.py`, `routers/tasks.py`, `utils/headers.py`, `utils/middleware.py`; of its page `+layout.svelte`, `apis/openai`.
"""

import asyncio
import gc
import json
import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import httpx
import pytest
from api import MODEL, bearer, key_of, serving
from engines import QUESTION
from pydantic import BaseModel

from cacheblend.service import Engine
from cacheblend.service.http.schemas import OF_OPEN_WEBUI

EXTRA = {"num_chunks": 2}
TOKENS = 12
PAGE = "http://localhost:3000"
# The last one where its ENABLE_FORWARD_USER_INFO_HEADERS is set.
HEADERS = {"Content-Type": "application/json", **bearer("one"), "X-OpenWebUI-User-Name": "Ada"}
# As its page adds them to a chat. Its server takes them out, for a direct connection too; they are taken all the same.
OF_THE_PAGE: dict[str, Any] = {field: {"any": ["value"]} for field in f"{OF_OPEN_WEBUI} metadata".split()}
MESSAGES: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": QUESTION}]


@pytest.fixture(autouse=True)
def _drop_what_they_leave() -> Iterator[None]:
    """The clients leave connections and event loops open, which a later test would be blamed for."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        asyncio.set_event_loop(None)
        gc.collect()


@pytest.fixture
def answer(client: httpx.Client) -> str:
    """What every client must give: the greedy answer, as the plain API has it."""
    body = {"model": MODEL, "messages": MESSAGES, "max_tokens": TOKENS, **EXTRA}
    text = client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
    assert text
    return str(text)


def test_langchain(answer: str, address: str) -> None:
    """`ChatOpenAI` in an LCEL chain: invoked, in a batch, streamed and asynchronous, with the cached tokens in its usage."""
    langchain_openai = pytest.importorskip("langchain_openai", reason="langchain-openai is not installed")
    from langchain_core.output_parsers import StrOutputParser
    from langchain_core.prompts import ChatPromptTemplate

    model = langchain_openai.ChatOpenAI(
        model=MODEL,
        base_url=f"{address}/v1",
        api_key="none",
        max_tokens=TOKENS,
        max_retries=0,
        stream_usage=True,
        extra_body=EXTRA,
    )
    prompt = ChatPromptTemplate.from_messages([("system", "Be brief."), ("user", "{question}")])
    chain = prompt | model | StrOutputParser()
    asked = {"question": QUESTION}
    assert chain.invoke(asked) == answer
    assert chain.batch([asked, asked]) == [answer, answer]
    assert next(iter(chain.stream(asked))) != "".join(chain.stream(asked)) == answer

    async def both() -> tuple[str, str]:
        return await chain.ainvoke(asked), "".join([piece async for piece in chain.astream(asked)])

    assert asyncio.run(both()) == (answer, answer)
    message = (prompt | model).invoke(asked)
    assert message.usage_metadata["input_token_details"]["cache_read"] > 0
    assert message.response_metadata["finish_reason"] in ("stop", "length")
    last = [piece.usage_metadata for piece in (prompt | model).stream(asked) if piece.usage_metadata]
    assert last[-1]["output_tokens"] > 0
    embeddings = langchain_openai.OpenAIEmbeddings(
        model=MODEL, base_url=f"{address}/v1", api_key="none", check_embedding_ctx_length=False
    )
    assert [len(vector) for vector in embeddings.embed_documents(["one", "two"])] == [64, 64]


class Word(BaseModel):
    """A keyword and its lines."""

    word: str
    lines: int


@pytest.mark.skipif(find_spec("llguidance") is None, reason="needs llguidance (pip install '.[structured]')")
def test_langchain_structured(address: str) -> None:
    """`with_structured_output` asks by a JSON schema, and gets an object of the class."""
    langchain_openai = pytest.importorskip("langchain_openai", reason="langchain-openai is not installed")
    model = langchain_openai.ChatOpenAI(
        model=MODEL, base_url=f"{address}/v1", api_key="none", max_tokens=120, max_retries=0, extra_body={"num_chunks": 0}
    )
    schema = {
        "title": "Word",
        "description": "A keyword.",
        "type": "object",
        "properties": {"word": {"enum": ["for", "while"]}, "lines": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["word", "lines"],
        "additionalProperties": False,
    }
    found = model.with_structured_output(schema, method="json_schema").invoke(QUESTION)
    assert Word.model_validate(found).word in ("for", "while")


def test_llamaindex(answer: str, address: str) -> None:
    """`OpenAILike`: a chat, streamed, asynchronous, and a completion."""
    openai_like = pytest.importorskip("llama_index.llms.openai_like", reason="llama-index-llms-openai-like is not installed")
    from llama_index.core.llms import ChatMessage

    options: dict[str, Any] = {"api_base": f"{address}/v1", "api_key": "none", "max_tokens": TOKENS, "temperature": 0.0}
    llm = openai_like.OpenAILike(model=MODEL, is_chat_model=True, additional_kwargs={"extra_body": EXTRA}, **options)
    messages = [ChatMessage(**message) for message in MESSAGES]
    assert llm.chat(messages).message.content == answer
    assert [piece.message.content for piece in llm.stream_chat(messages)][-1] == answer

    async def both() -> tuple[str | None, str]:
        streamed = await llm.astream_chat(messages)
        return (await llm.achat(messages)).message.content, "".join([piece.delta or "" async for piece in streamed])

    assert asyncio.run(both()) == (answer, answer)
    text = openai_like.OpenAILike(model=MODEL, is_chat_model=False, **options).complete("for x in").text
    with httpx.Client(base_url=address) as client:
        plain = client.post("/v1/completions", json={"prompt": "for x in", "max_tokens": TOKENS}).json()
    assert text == plain["choices"][0]["text"]


@pytest.fixture
def webui(engine: Engine) -> Iterator[httpx.Client]:
    """Open WebUI's server, or its page."""
    with (
        serving(engine, api_key=key_of("one"), cors_origins=(PAGE,)) as (_, address),
        httpx.Client(base_url=f"{address}/v1", timeout=60, headers=HEADERS) as client,
    ):
        yield client


def pieces(client: httpx.Client, body: dict[str, Any], **options: Any) -> list[dict[str, Any]]:
    """The events of a stream, read line by line."""
    with client.stream("POST", "/chat/completions", json={**body, "stream": True}, **options) as response:
        lines = [line for line in response.iter_lines() if line]
        assert response.status_code == 200, lines
        assert response.headers["content-type"].startswith("text/event-stream")
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def text_of(events: list[dict[str, Any]]) -> str:
    return "".join(choice["delta"].get("content") or "" for event in events for choice in event["choices"])


def test_direct_connection(webui: httpx.Client) -> None:
    """A browser of a named origin may ask first, and then chat with all that the page sends; one of another origin may not."""

    def preflight_of(path: str, method: str, origin: dict[str, str]) -> httpx.Response:
        headers = "authorization,content-type,x-stainless-lang"  # the last of OpenAI's own client
        ask = {"Access-Control-Request-Method": method, "Access-Control-Request-Headers": headers}
        return httpx.options(f"{webui.base_url}{path}", headers={**ask, **origin})

    for path, method in (("models", "GET"), ("chat/completions", "POST")):  # a preflight request sends no key
        preflight = preflight_of(path, method, {"Origin": PAGE})
        assert (preflight.status_code, preflight.headers["access-control-allow-origin"]) == (200, PAGE)
        assert {"authorization", "x-stainless-lang"} <= set(preflight.headers["access-control-allow-headers"].split(","))
        assert "access-control-allow-credentials" not in preflight.headers
    body = {"model": MODEL, "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 6}
    plain = text_of(pieces(webui, body))
    assert text_of(pieces(webui, {**body, **OF_THE_PAGE}, headers={"Origin": PAGE})) == plain
    response = webui.post("/chat/completions", json=body, headers={"Origin": PAGE})
    assert response.headers["access-control-allow-origin"] == PAGE
    foreign = {"Origin": "http://evil.example"}
    assert webui.post("/chat/completions", json=body, headers=foreign).status_code == 403
    assert preflight_of("models", "GET", foreign).status_code == 400
