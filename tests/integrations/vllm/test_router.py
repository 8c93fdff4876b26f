"""Requests that mark their chunks by documents or passages, as vLLM's server gets them, and `cacheblend ingest --vllm`; vLLM
itself is not needed.
"""

import asyncio
import json
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest
import torch
from api import listening
from fakes import FakeEmbedder
from make_random_model import CHAT_TEMPLATE, ModelShape, python_help, train_tokenizer
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.testclient import TestClient

from cacheblend.base.errors import InputError, StoreFullError
from cacheblend.blend import ChunkContext
from cacheblend.cli import main as cli
from cacheblend.integrations.vllm.config import ConnectorConfig
from cacheblend.integrations.vllm.router import CHAT, COMPLETIONS, DOCUMENTS, BlendRoutes, PromptMarker, RunningEngine
from cacheblend.integrations.vllm.scheduler import Marks
from cacheblend.retriever import PlainTokenizer, Retriever
from cacheblend.retriever.catalog import Catalog
from cacheblend.retriever.index import INDEX_FILE, IndexedDocuments
from cacheblend.service.engine.chunk_context import ChunkNaming
from cacheblend.service.engine.request import namespace_of
from cacheblend.store import ChunkKV, KVStore, StoreConfig

KEY = "a key of vLLM"
RULES = " ".join(f"Rule {number}: trains to town {number} are booked by the office. </s>" for number in range(12))
DOCS = [{"title": "Travel", "text": RULES}, {"text": "Lunch is at noon, and free on Fridays."}]
QUESTION, CALLED = {"role": "user", "content": "Who books trains?"}, {"role": "tool", "content": "Rules"}
SAID = {"role": "assistant", "content": "well,"}
NO_TEXTS = "cut \ud83d", [{"type": "text", "text": None}], [{"type": "image_url"}]
LEFT = (
    *({"tools": [{}]}, {"truncate_prompt_tokens": 9}, {"add_generation_prompt": False}),
    *({"messages": one} for one in ("hi", [QUESTION, SAID], [QUESTION, CALLED], [QUESTION, CALLED, QUESTION])),
    *({"messages": [{**QUESTION, "content": one}]} for one in NO_TEXTS),
)
NAMING = ChunkNaming((), ChunkContext(), "model", "raw")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    tokenizer = train_tokenizer(python_help()[:20], ModelShape(vocab=400, max_positions=2048))
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


@pytest.fixture
def make_marker(tokenizer: Any, tmp_path: Path) -> Iterator[Callable[..., PromptMarker]]:
    """Makes a marker over the test's folder, of a vLLM that writes messages one after the other."""
    with ExitStack() as opened:

        def make(
            own_tokenizer: Any = tokenizer,
            naming: ChunkNaming = NAMING,
            chunk_tokens: int = 64,
            error: type[Exception] | None = None,
        ) -> PromptMarker:
            config = ConnectorConfig.from_options({"store_dir": str(tmp_path), "chunk_tokens": chunk_tokens})

            def render(path: str, body: dict[str, Any]) -> Sequence[int]:
                if error is not None:
                    raise error("planted")
                told = body["prompt"] if path == COMPLETIONS else "".join(f"{one['content']}\n" for one in body["messages"])
                return PlainTokenizer(own_tokenizer).ids(told if isinstance(told, str) else told[0])

            return opened.enter_context(closing(PromptMarker(own_tokenizer, config, 2048, naming, render)))

        yield make


@pytest.fixture
def marker(make_marker: Callable[..., PromptMarker]) -> PromptMarker:
    return make_marker()


def chunk_texts(tokenizer: Any, marked: dict[str, Any], ids: list[int]) -> list[str]:
    return [tokenizer.decode(ids[start:stop]) for start, stop in marked["kv_transfer_params"]["cacheblend"]["chunks"]]


def test_a_chats_documents_stand_before_its_question(marker: PromptMarker, tokenizer: Any) -> None:
    """Documents become chunks, a long one several, before the question; each is marked, with the document that it is of."""
    marked = marker.mark(CHAT, {"messages": [QUESTION], "documents": DOCS, "max_tokens": 4})
    assert marked is not None
    params = marked["kv_transfer_params"]
    ids = params["prompt_token_ids"]
    texts = chunk_texts(tokenizer, marked, ids)
    assert len(texts) > 2
    assert "".join(text.removesuffix("\n\n") for text in texts[:-1]) == f"Travel\n{DOCS[0]['text']}"
    assert texts[-1] == f"{DOCS[1]['text']}\n\n"
    assert params["cacheblend"]["documents"] == [0] * (len(texts) - 1) + [1]
    assert tokenizer.eos_token_id not in ids  # of a document's text, nothing is a control token
    last = params["cacheblend"]["chunks"][-1][1]
    assert "Question: Who books trains?" in tokenizer.decode(ids[last:])
    assert "documents" not in marked
    assert marked["messages"] == [QUESTION]
    assert marked["max_tokens"] == 4
    asked = {"cacheblend": {"ratio": 0.3}, "other": 1}
    told = {"role": "developer", "content": "Be short."}
    again = marker.mark(CHAT, {"messages": [told, QUESTION], "documents": DOCS, "kv_transfer_params": asked})
    assert again is not None
    assert (again["kv_transfer_params"]["cacheblend"]["ratio"], again["kv_transfer_params"]["other"]) == (0.3, 1)


def stored_texts(tokenizer: Any, marked: dict[str, Any] | None) -> list[str]:
    """The texts whose KV a request's marks name, whose marked tokens are in the prompt."""
    if marked is None:
        return []
    params = marked["kv_transfer_params"]
    ids, marks = params.get("prompt_token_ids") or marked["prompt"], params["cacheblend"]
    prompt = Marks.read(marks, len(ids)).prompt(NAMING, ids, marked.get("cache_salt"))
    assert prompt.token_ids == tuple(ids)
    return [tokenizer.decode(chunk.stored_ids) for chunk in prompt.chunks if chunk.key is not None]


TRAINS = [" ".join(f"Rule {n}{letter}: the trains to the town are booked early." for n in "123") for letter in "ab"]


def with_sources(order: str, question: str) -> dict[str, str]:
    sources = "\n".join(f"<source>{TRAINS[int(index)]}</source>" for index in order)
    return {"role": "user", "content": f"Answer.\n<context>\n{sources}\n</context>\n{question}"}


def test_passages_that_came_before_are_marked(marker: PromptMarker, tokenizer: Any) -> None:
    """A passage is marked from its second request on, under one name wherever it stands, each salt by itself."""

    def mark(order: str, question: str, *before: dict[str, str], **fields: Any) -> list[str]:
        return stored_texts(tokenizer, marker.mark(CHAT, {"messages": [*before, with_sources(order, question)], **fields}))

    assert mark("01", "Who?") == []
    assert mark("01", "Who?", cache_salt="other") == []
    assert mark("10", "And where?") == TRAINS[::-1]
    assert mark("01", "When?") == TRAINS
    earlier = {"role": "user", "content": f"<source>{TRAINS[0]}</source>"}, {"role": "assistant", "content": "Yes."}
    assert [mark("1", "So?", *earlier) for _ in range(2)] == [TRAINS, TRAINS]
    assert mark("1", "So?", with_sources("01", "Who?"), earlier[1], cache_salt="other") == [*TRAINS, TRAINS[1]]
    assert mark("1", "So?", kv_transfer_params={"cacheblend": {"ratio": 0.3}}) == TRAINS[1:]
    for params in ({"other": 1}, {"cacheblend": {"chunks": [[0, 4]]}}):
        assert mark("1", "So?", kv_transfer_params=params) == []
    for prompt in (given := f"[1] {TRAINS[1]}\nQuestion: who?", [given]):
        assert stored_texts(tokenizer, marker.mark(COMPLETIONS, {"prompt": prompt})) == TRAINS[1:]


def test_passages_among_a_tools_results_are_marked(marker: PromptMarker, tokenizer: Any) -> None:
    """A chat with tools is rendered by vLLM, and the long texts of its last results are passages."""
    tools = [{"type": "function", "function": {"name": "search"}}]
    for _ in range(2):
        called = {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": {}}]}
        results = {"role": "tool", "tool_call_id": "1", "content": json.dumps([{"text": text} for text in TRAINS])}
        marked = marker.mark(CHAT, {"messages": [QUESTION, called, results], "tools": tools})
    assert stored_texts(tokenizer, marked) == TRAINS


def test_a_renderer_that_fails(make_marker: Callable[..., PromptMarker]) -> None:
    """The request is left to vLLM, which says what is wrong with it."""
    marker = make_marker(error=TypeError)
    assert [marker.mark(CHAT, {"messages": [with_sources("01", "Who?")]}) for _ in range(2)] == [None, None]


@pytest.mark.parametrize("way", ["route", "folder"])
def test_ingested_texts_are_marked_at_once(
    make_marker: Callable[..., PromptMarker], tokenizer: Any, tmp_path: Path, way: str
) -> None:
    """A text of an ingested document is found in any prompt, and its KV is the one of its document, title and earlier text."""
    naming = replace(NAMING, context=ChunkContext(document_tokens=400))
    if way == "folder":
        config = ConnectorConfig.from_options({"store_dir": str(tmp_path), "chunk_tokens": 160}).engine.retriever_config()
        with Retriever(config, tokenizer, FakeEmbedder()) as retriever:
            retriever.add(DOCS)
    marker = make_marker(naming=naming, chunk_tokens=160)
    document = marker.split(DOCS[0])
    if way == "route":
        marker.ingest([document])
    chunks = document.token_ids
    texts = [tokenizer.decode(chunk).removeprefix("Travel\n").strip() for chunk in chunks]
    prompt = f"Answer ({texts[1]}) or|{texts[0]}| please"
    for salt in (None, "other"):
        marked = marker.mark(COMPLETIONS, {"prompt": prompt, "cache_salt": salt})
        assert marked is not None
        marks = marked["kv_transfer_params"]["cacheblend"]
        cut = Marks.read(marks, len(marked["prompt"])).prompt(naming, marked["prompt"], salt)
        earlier = naming.context.earlier(chunks)
        assert cut.keys == [naming.key(chunks[n], earlier[n], namespace_of(salt or "")) for n in (1, 0)]
        assert sum(len(chunk.token_ids) for chunk in cut.chunks if chunk.key) >= 0.8 * sum(map(len, chunks[:2]))
    assert marker.mark(COMPLETIONS, {"prompt": f"Answer ({texts[1][:-20]})"}) is None
    other = make_marker(train_tokenizer(python_help()[30:50], ModelShape(vocab=900, max_positions=2048)))
    marked = [other.mark(COMPLETIONS, {"prompt": f"<source>{RULES}</source> {place}"}) for place in "ab"]
    assert [one is None for one in marked] == [True, False]  # for another model they are as texts that nobody ingested


def test_thinking_is_the_templates(make_marker: Callable[..., PromptMarker]) -> None:
    """The template's variables of a request with documents hold, what the template does not know is left out as in vLLM."""
    tokenizer = train_tokenizer(python_help()[:20], ModelShape(vocab=400, max_positions=2048))
    tokenizer.chat_template = f"{CHAT_TEMPLATE}{{% if enable_thinking is false %}}no thoughts{{% endif %}}"
    marker = make_marker(tokenizer)
    for switch, is_off in (
        ({}, False),
        ({"chat_template_kwargs": {"enable_thinking": False, "other": 1}}, True),
        ({"reasoning_effort": "none"}, True),
        ({"reasoning_effort": "low", "chat_template_kwargs": None}, False),
    ):
        marked = marker.mark(CHAT, {"messages": [QUESTION], "documents": DOCS, **switch})
        assert marked is not None
        assert tokenizer.decode(marked["kv_transfer_params"]["prompt_token_ids"]).endswith("no thoughts") == is_off


def test_what_is_vllms_as_it_is(marker: PromptMarker) -> None:
    """Requests without chunks, and those whose rendering is vLLM's own business, go on as they came."""
    for messages in ([QUESTION], ["hi"]):
        assert marker.mark(CHAT, {"messages": messages}) is None
    for body in ({"prompt": [1, 2, 3]}, {"prompt": "no passage"}, {"prompt": RULES, "echo": True}):
        assert marker.mark(COMPLETIONS, body) is None


def test_documents_that_only_a_template_could_write(make_marker: Callable[..., PromptMarker], tokenizer: Any) -> None:
    """A chat that vLLM must render keeps its documents where the model's template writes them, and is refused elsewhere."""
    writing = deepcopy(tokenizer)
    writing.chat_template += "{% for one in documents or () %}{{ one.text }}{% endfor %}"
    marker, other = make_marker(writing), make_marker()
    for more in LEFT:
        body = {"messages": [QUESTION], "documents": DOCS, **more}
        assert marker.mark(CHAT, body) is None
        with pytest.raises(InputError, match="leaves them out"):
            other.mark(CHAT, body)


@pytest.mark.parametrize("documents", [["text"], [{"title": "no text"}], [{"text": "  "}], 5, "text", {"text": "a text"}])
def test_bad_documents_are_refused(marker: PromptMarker, documents: Any) -> None:
    """Documents that are none are refused with a message."""
    with pytest.raises(InputError):
        marker.mark(CHAT, {"messages": [QUESTION], "documents": documents})


class Workers:
    """The workers of a vLLM; they compute nothing. `asked` has chunks, indexes and salt of each call."""

    def __init__(self) -> None:
        self.asked, self.stored, self.broken = list[Any](), set[tuple[int, ...]](), False

    async def call(self, method: str, args: Any) -> list[list[int]]:
        assert method == "cacheblend_precompute"
        if self.broken:
            raise RuntimeError("planted")
        self.asked.append(args)
        new = {tuple(args[0][index]) for index in args[1]} - self.stored
        self.stored |= new
        return [[len(new), 0, 0]]


@pytest.fixture
def workers() -> Workers:
    return Workers()


@pytest.fixture
def routes(marker: PromptMarker, workers: Workers) -> BlendRoutes:
    routes = BlendRoutes()
    routes.engine = RunningEngine(marker, NAMING, None, workers.call)
    return routes


@pytest.fixture
def client(routes: BlendRoutes) -> TestClient:
    """A server that answers with what it got, after the middleware."""

    async def echo(request: Request) -> JSONResponse:
        body = await request.body()
        assert int(request.headers["content-length"]) == len(body)
        return JSONResponse({"got": body.decode()})

    app = Starlette(routes=[Route(path, echo, methods=["POST"]) for path in (CHAT, COMPLETIONS, "/v1/other")])
    routes.attach_router(app)
    return TestClient(app)


def replace_engine(routes: BlendRoutes, **changed: Any) -> None:
    assert routes.engine is not None
    routes.engine = replace(routes.engine, **changed)


def test_bodies_pass_the_middleware(client: TestClient) -> None:
    """A marked body is longer; one that is not a request, or is for another route, is the same to the byte; errors are 400."""
    body: Any = {"messages": [QUESTION], "documents": DOCS}
    marked = json.loads(client.post(CHAT, json=body).json()["got"])
    assert marked["kv_transfer_params"]["prompt_token_ids"]
    behind_proxy = TestClient(client.app, root_path="/llm").post(f"/llm{CHAT}", json=body)
    assert json.loads(behind_proxy.json()["got"]) == marked
    others = (CHAT, b"{not json"), (CHAT, b"[1]"), (CHAT, b"[" * 100_000)
    for path, body in (*others, ("/v1/other", json.dumps({"documents": DOCS}).encode())):
        assert client.post(path, content=body).json()["got"].encode() == body
    refused = client.post(CHAT, json={"messages": [QUESTION], "documents": [3]})
    assert (refused.status_code, refused.json()["error"]["type"]) == (400, "BadRequestError")


def test_documents_are_stored_window_by_window(client: TestClient, routes: BlendRoutes, workers: Workers) -> None:
    """Each call to the workers has the chunks of one window of one document, and computes those that are new in it."""
    context = ChunkContext(document_tokens=140)
    replace_engine(routes, naming=replace(NAMING, context=context))
    answer = client.post(DOCUMENTS, json={"documents": DOCS, "cache_salt": "tenant"})
    assert answer.json()["documents"] == 2
    assert answer.json()["stored_chunks"] == answer.json()["chunks"] > 2
    assert {salt for *_, salt, _ in workers.asked} == {"tenant"}
    assert len(workers.asked) > 3
    assert max(sum(map(len, window)) for window, *_ in workers.asked) <= 140
    assert routes.engine is not None
    split = [routes.engine.marker.split(document) for document in DOCS]
    asked = [tuple(window[index]) for window, new, *_ in workers.asked for index in new]
    assert asked == [chunk for one in split for chunk in one.token_ids]
    before = [tuple(map(tuple, context.earlier(window)[index])) for window, new, *_ in workers.asked for index in new]
    assert before == [earlier for one in split for earlier in context.earlier(one.token_ids)]
    for wrong in ([], [{"id": "one", "text": text} for text in "ab"]):
        assert client.post(DOCUMENTS, json={"documents": wrong}).status_code == 400
    client.post(DOCUMENTS, json={"documents": DOCS[1:]})
    assert workers.asked[-1][2:] == (None, (split[1].document.id, split[1].document.version))
    replace_engine(routes, is_hybrid=True)
    assert "hybrid model" in client.post(DOCUMENTS, json={"documents": DOCS}).json()["error"]["message"]


@pytest.mark.parametrize("has_index", [False, True])
def test_no_file_has_a_deleted_text(
    client: TestClient, marker: PromptMarker, tmp_path: Path, capsys: pytest.CaptureFixture[str], has_index: bool
) -> None:
    """A document is deleted by its id while vLLM runs; its text, its earlier version's and their KV are in no file."""
    if has_index:  # of the project's own engine, over the same store
        (tmp_path / "index").mkdir()
        Catalog(tmp_path / "index" / INDEX_FILE, {}).close()
    given = {"rules.md": [f"{RULES} The end.", RULES.replace("town", "city")], "lunch.md": [DOCS[1]["text"]]}
    traces: dict[str, list[bytes]] = {}
    with KVStore(StoreConfig(directory=tmp_path / "kv")) as store:
        for id_, texts in given.items():
            for document in ({"id": id_, "text": text} for text in texts):
                client.post(DOCUMENTS, json={"documents": [document]}).raise_for_status()
                split = marker.split(document)
                for key, ids in zip(NAMING.keys_of_document(split.token_ids), split.token_ids, strict=True):
                    store.put(key, ChunkKV([(torch.zeros(1, len(ids), 4),) * 2], ids))
                    traces.setdefault(id_, []).append(json.dumps(json.dumps(ids[:9]))[2:-2].replace(" ", "").encode())
                traces[id_] += [chunk.text[:20].encode() for chunk in split.chunks]
        assert len(store.ls()) == sum(len(marker.split({"text": texts[-1]}).chunks) for texts in given.values())

        def files_with(id_: str) -> set[str]:
            raws = {str(path.relative_to(tmp_path)): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
            return {name.partition("/")[0] for name, raw in raws.items() if any(trace in raw for trace in traces[id_])}

        assert files_with("rules.md") == files_with("lunch.md") == {"kv", "vllm"}
        for command in ("ls --json", "delete rules.md --yes"):
            with pytest.raises(SystemExit) as ended:
                cli.main(["documents", *command.split(), "--store-dir", str(tmp_path)])
            assert not ended.value.code
        listed = json.loads(capsys.readouterr().out.splitlines()[0])["documents"]
        assert {one["id"]: one["stored_chunks"] == one["chunks"] > 0 for one in listed} == dict.fromkeys(given, True)
        assert (files_with("rules.md"), files_with("lunch.md")) == (set(), {"kv", "vllm"})


def test_what_the_disk_is_behind_with_is_asked_for_again(client: TestClient, routes: BlendRoutes) -> None:
    """Chunks that the workers leave, since too much waits to be written, are computed by a later call, and counted once."""
    call = AsyncMock(side_effect=[[[0, 2, 0]], [[1, 1, 0]], [[1, 0, 0]]])
    replace_engine(routes, call=call)
    answer = client.post(DOCUMENTS, json={"documents": DOCS[1:]})
    assert (answer.json()["stored_chunks"], call.await_count) == (2, 3)
    replace_engine(routes, call=AsyncMock(return_value=[[0, 0, 2]]))
    full = client.post(DOCUMENTS, json={"documents": DOCS[1:]})
    assert (full.status_code, "KV of 2 chunks cannot be stored" in full.json()["error"]["message"]) == (503, True)
    replace_engine(routes, marker=Mock(split=Mock(side_effect=StoreFullError("planted"))))
    assert client.post(DOCUMENTS, json={"documents": DOCS[1:]}).status_code == 503


def test_a_document_that_is_too_long_is_refused_at_once(
    client: TestClient, routes: BlendRoutes, workers: Workers, tmp_path: Path
) -> None:
    """A chunk that is beyond the model's positions, after what it is computed after, is the request's error; nothing stays."""
    naming = replace(NAMING, prefix_ids=(1, 2), context=ChunkContext(filler_ids=(3,), document_tokens=10))
    replace_engine(routes, naming=naming, max_positions=30)
    refused = client.post(DOCUMENTS, json={"documents": [DOCS[1], DOCS[0]]})
    assert (refused.status_code, "30 positions" in refused.json()["error"]["message"]) == (400, True)
    assert not workers.asked
    assert not IndexedDocuments.open(tmp_path / "vllm").count()


def test_the_docs_command(client: TestClient) -> None:
    """The `curl` command of docs/vllm.md stores its document, as curl sends it: without saying that it is JSON."""
    page = (Path(__file__).parents[3] / "docs" / "vllm.md").read_text(encoding="utf-8")
    (line,) = [line for line in page.splitlines() if line.startswith("curl ")]
    _, address, _, body = shlex.split(line, comments=True)
    assert address == f"localhost:8000{DOCUMENTS}"
    answer = client.post(DOCUMENTS, content=body, headers={"Content-Type": "application/x-www-form-urlencoded"})
    assert (answer.status_code, answer.json()["documents"]) == (200, 1)


def test_without_the_connector_nothing_is_changed(client: TestClient, routes: BlendRoutes) -> None:
    """A server that runs without the connector gets requests as they came, and stores no documents."""
    routes.engine = None
    body = json.dumps({"messages": [QUESTION], "documents": DOCS}).encode()
    assert client.post(CHAT, content=body).json()["got"].encode() == body
    assert client.post(DOCUMENTS, json={"documents": DOCS}).status_code == 503
    asyncio.run(routes.init_state(SimpleNamespace(vllm_config=SimpleNamespace(kv_transfer_config=None)), None, None))
    assert routes.engine is None


@pytest.fixture
def url(routes: BlendRoutes) -> Iterator[str]:
    """Address of a server with the routes, until the test ends."""

    async def check_key(request: Request, call_next: Any) -> Response:
        """As vLLM's `--api-key` does."""
        is_right = request.headers.get("authorization") == f"Bearer {KEY}"
        return await call_next(request) if is_right else JSONResponse({"error": "Unauthorized"}, 401)

    app = Starlette(middleware=[Middleware(BaseHTTPMiddleware, dispatch=check_key)])
    routes.attach_router(app)
    with listening(app) as address:
        yield address


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two documents, one of several chunks."""
    pytest.importorskip("pathspec", reason="pathspec is not installed; the extra [rag] brings it")
    files = tmp_path / "handbook"
    files.mkdir()
    (files / "travel.md").write_text(RULES, encoding="utf-8")
    (files / "lunch.txt").write_text("Lunch is at noon, and free on Fridays.", encoding="utf-8")
    return files


Ingest = Callable[..., tuple[int, str, str]]


@pytest.fixture
def ingest(folder: Path, capsys: pytest.CaptureFixture[str]) -> Ingest:
    """`cacheblend ingest` of the folder with more arguments; returns exit code, output and errors."""

    def run(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            cli.main(["ingest", str(folder), *arguments])
        return int(ended.value.code or 0), *capsys.readouterr()

    return run


def test_files_are_stored_by_the_running_engine(
    url: str, workers: Workers, folder: Path, ingest: Ingest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder's documents are posted one by one; a file that cannot be used is named; a second run computes nothing."""
    monkeypatch.setenv("CACHEBLEND_VLLM_API_KEY", KEY)
    (folder / "broken.jsonl").write_text("{not json", encoding="utf-8")
    code, out, err = ingest("--vllm", f"{url}/v1", "--json")
    report = json.loads(out)
    assert (code, "broken.jsonl" in err) == (1, True)
    assert [Path(name).name for name in report["faults"]] == ["broken.jsonl, line 1"]
    assert (report["documents"], report["computed"], report["already_stored"]) == (2, len(workers.stored), 0)
    assert report["chunks"] > 2
    (folder / "broken.jsonl").unlink()
    code, out, _ = ingest("--vllm", url)
    assert (code, f"KV of 0 computed, {report['chunks']} stored before" in out) == (0, True)


def test_a_document_that_is_refused_is_named(url: str, routes: BlendRoutes, ingest: Ingest) -> None:
    """What vLLM refuses of one document, such as a chunk beyond the model's positions, has its id; the others are stored."""
    replace_engine(routes, max_positions=40)
    code, out, err = ingest("--vllm", url, "--vllm-api-key", KEY, "--json")
    report = json.loads(out)
    assert (code, report["documents"], report["computed"]) == (1, 1, 1)
    ((name, why),) = report["faults"].items()
    assert ("travel.md" in name, "40 positions" in why, "travel.md: " in err) == (True, True, True)


@pytest.mark.parametrize(
    ("address", "options", "code", "said"),
    [
        ("URL", [], 2, "give --vllm-api-key"),
        ("URL/other", ["--vllm-api-key", KEY], 1, "VLLM_PLUGINS=cacheblend"),
        ("URL", ["--vllm-api-key", KEY], 1, "answers 500"),
        ("http://127.0.0.1:1", [], 1, "does not answer"),
        ("localhost:8000", [], 2, "http://localhost:8000"),
        ("URL", ["--watch"], 2, "--watch"),
    ],
)
def test_what_is_wrong_with_the_server_is_said(
    url: str, workers: Workers, ingest: Ingest, address: str, options: list[str], code: int, said: str
) -> None:
    """A wrong key, no such route, a failing engine and nobody there are one line each, with what to do."""
    workers.broken = True
    ended, _, err = ingest("--vllm", address.replace("URL", url), *options)
    assert (ended, said in err) == (code, True)
