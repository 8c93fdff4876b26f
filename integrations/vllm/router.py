"""Routes of vLLM's own HTTP server for clients that cannot mark chunks by token positions, and to store documents.

A middleware reads what is sent to `/v1/chat/completions` and `/v1/completions`. Where a chat has `documents`, it lays out the
prompt's token ids as the project's own service does; where texts have passages that are ingested or came before, it looks for
them in the token ids that vLLM makes. It sends the ids on with the marks; all else goes on as it came. vLLM loads this where
`VLLM_PLUGINS=cacheblend` is set; see docs/vllm.md.
"""

import asyncio
import json
import logging
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from types import MappingProxyType
from typing import Any

import numpy as np
from anyio import from_thread
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.types import Message as Event

from cacheblend.base.errors import CacheBlendError, InputError, RetrieverError, StoreError
from cacheblend.base.files import make_folder
from cacheblend.blend.families import max_positions_of
from cacheblend.blend.loading import load_tokenizer
from cacheblend.retriever import Document, EmbeddedDocument, RetrieverConfig, Splitter
from cacheblend.retriever.catalog import Catalog
from cacheblend.retriever.document import with_one_text
from cacheblend.retriever.index import INDEX_FILE, IndexedDocuments
from cacheblend.retriever.passages import Passage
from cacheblend.service.engine.chunk_context import ChunkContexts, ChunkNaming
from cacheblend.service.engine.passages import REMEMBERED, FoundPassage, locate, passages_of
from cacheblend.service.engine.prompt import Message, PromptRenderer
from cacheblend.store import KVStore
from cacheblend.store.tiers import AdmissionFilter

from .config import ConnectorConfig
from .plugin import CONNECTOR
from .scheduler import PARAMS_KEY, Marks, StoredText

logger = logging.getLogger(__name__)
BUSY_S = 0.2  # until the workers are asked again, whose disk is behind
# The prompt of a request with one of these is not that of its texts.
LEFT_TO_VLLM = ("echo", "suffix", "prompt_embeds", "truncate_prompt_tokens")
CHAT, COMPLETIONS, DOCUMENTS = "/v1/chat/completions", "/v1/completions", "/v1/cacheblend/documents"
# A chat over documents with one of these needs what vLLM's own rendering does with it.
RENDERED_BY_VLLM = ("tools", "chat_template", "continue_final_message", "echo", "truncate_prompt_tokens")
SURROGATES = re.compile("[\ud800-\udfff]")
Render = Callable[[str, dict[str, Any]], Sequence[int]]


class PromptMarker:
    """Lays out a request's prompt from its documents, within the model's positions, or finds passages in vLLM's own.

    Passages are ingested if they came by `DOCUMENTS`, or if the project's own engine had ingested them when vLLM started.

    Args:
        tokenizer: the model's fast tokenizer.
        config: of the connector.
        max_positions: of the model; None for any number.
        naming: of chunks' KV.
        render: makes the token ids of a route's request, as vLLM does; where it raises, the request is left to vLLM.
        variables: of the chat template, where a request does not set them.
    """

    def __init__(
        self,
        tokenizer: Any,
        config: ConnectorConfig,
        max_positions: int | None,
        naming: ChunkNaming,
        render: Render,
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self._finds_passages, self._render, self._naming = config.engine.find_passages, render, naming
        self._default_variables, self._template = variables, str(tokenizer.chat_template)
        self._seen = AdmissionFilter(REMEMBERED)
        self._splitter = Splitter(tokenizer, RetrieverConfig(chunk_tokens=config.engine.retriever.chunk_tokens))
        self._around_documents = PromptRenderer(tokenizer, config.engine.instruction, max_positions=max_positions)
        offline, own = config.engine.retriever_config().directory, config.engine.vllm_dir
        make_folder(own)
        self._store_config = config.store_config()
        self._ingested = IndexedDocuments(Catalog(own / INDEX_FILE, {}, config.engine.retriever.index_budget_bytes))
        indexes = [self._ingested]
        if offline is not None and (offline / INDEX_FILE).is_file():
            indexes.append(IndexedDocuments.open(offline))
        self._indexes = [(index, ChunkContexts(naming.context, index)) for index in indexes]

    def close(self) -> None:
        """Close the indexes."""
        for index, _ in self._indexes:
            index.close()

    def mark(self, path: str, body: dict[str, Any]) -> dict[str, Any] | None:
        """The request with token ids and marks; None for one that is vLLM's as it is.

        Raises:
            ConfigError, InputError: documents, messages or variables of the template that cannot be used.
            PromptTooLongError: they cannot be within the model's positions.
        """
        if path == COMPLETIONS:
            text = body.get("prompt")
            text = text[0] if isinstance(text, list) and len(text) == 1 else text
            return self._with_passages(path, body, [Message("user", text)]) if isinstance(text, str) else None
        messages, found = _messages(body.get("messages")), body.get("documents")
        if not found:
            return None if messages is None else self._with_passages(path, body, messages)
        is_rendered = any(body.get(name) for name in RENDERED_BY_VLLM) or body.get("add_generation_prompt") is False
        if messages is None or is_rendered or "tool" in [one.role for one in messages]:
            if re.search(r"\bdocuments\b", str(body.get("chat_template") or self._template)):
                return None
            without = f"tools' results, {', '.join(RENDERED_BY_VLLM)} and add_generation_prompt: false"
            remedy = f"send them with messages of text that end with the user's, and without {without}"
            raise InputError(f"documents: the model's chat template leaves them out; {remedy}")
        if not isinstance(found, list):
            raise InputError(f'documents: give a list of objects {{"title", "text"}}, not {type(found).__name__}')
        layout = self._around_documents.chat(messages, with_chunks=True, template_kwargs=self._variables(body))
        documents = [self.split(document).token_ids for document in found]
        chunks = list(chain.from_iterable(documents))
        marks = {
            "chunks": list(pairwise(accumulate(map(len, chunks), initial=len(layout.prefix)))),
            "documents": [number for number, document in enumerate(documents) for _ in document],
        }
        others = {name: value for name, value in body.items() if name != "documents"}
        return self._with_marks(path, others, [*layout.prefix, *chain.from_iterable(chunks), *layout.suffix], marks)

    def _variables(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """The chat template's variables of a request, as vLLM has them: those that it knows; InputError for no object."""
        asked, effort = body.get("chat_template_kwargs") or {}, body.get("reasoning_effort")
        if not isinstance(asked, Mapping):
            raise InputError("chat_template_kwargs: give an object")
        of_effort = {} if effort is None else {"reasoning_effort": effort, "enable_thinking": effort != "none"}
        known = self._around_documents.template.variables
        return {name: value for name, value in {**self._default_variables, **of_effort, **asked}.items() if name in known}

    def split(self, document: Document | Mapping[str, object]) -> EmbeddedDocument:
        """A document and its chunks, with vectors of zeros; InputError for one that cannot be used."""
        checked = Document.of(document)
        chunks = self._splitter.split(checked)
        return EmbeddedDocument(checked, chunks, np.zeros((len(chunks), 1), dtype=np.float32))

    def ingest(self, documents: Sequence[EmbeddedDocument]) -> None:
        """Have documents found in prompts from now on, in place of those with their ids, whose own KV goes.

        Raises:
            RetrieverError, StoreError: index or store cannot be written.
        """
        with KVStore(self._store_config) as store, store.exclusive():
            store.documents.put(
                (one.document.id, one.document.version, self._naming.keys_of_document(one.token_ids)) for one in documents
            )
            self._ingested.put(documents)

    def _with_passages(self, path: str, body: dict[str, Any], messages: Sequence[Message]) -> dict[str, Any] | None:
        """The request with passages marked that are ingested, or came in an earlier one of its salt; None if there are none."""
        params = body.get("kv_transfer_params")
        asked = params.get(PARAMS_KEY) if isinstance(params, Mapping) and len(params) == 1 else None
        is_marked = bool(params) and (not isinstance(asked, Mapping) or "chunks" in asked)
        if not self._finds_passages or is_marked or any(body.get(name) for name in LEFT_TO_VLLM):
            return None
        salt = str(body.get("cache_salt"))
        try:
            found = passages_of(((one.role, one.content) for one in messages), self._passages_in)
            texts = list(map(self._stored_text, found))
            reusable = {one for one in set(texts) if one.is_ingested or self._seen.admits(str(hash((salt, one.token_ids))))}
            token_ids = list(self._render(path, body)) if reusable else []
        except Exception as error:  # vLLM says what is wrong with the request, if it is
            logger.debug("no passages are looked for in a request: %r", error)
            return None
        places = zip(texts, locate(token_ids, ((one.token_ids, one.start) for one in texts)), strict=True)
        marks = sorted((place[:2], text._replace(start=place[2])) for text, place in places if place and text in reusable)
        stored = {"chunks": [span for span, _ in marks], "stored": [text for _, text in marks]}
        return self._with_marks(path, body, token_ids, stored) if marks else None

    def _passages_in(self, text: str, role: str) -> list[Passage]:
        """The passages in a message, by the index that knows the largest number of them."""
        found = (index.passages(text, role) for index, _ in self._indexes)
        return max(found, key=lambda passages: sum(one.chunk is not None for one in passages))

    def _stored_text(self, passage: FoundPassage) -> StoredText:
        """The text whose KV a passage's is a part of, from its first token on that is not of a title."""
        if (chunk := passage.chunk) is None or self._splitter.token_ids(chunk.text) != chunk.token_ids:  # another model's
            return StoredText(tuple(self._around_documents.text_ids(passage.text)), 0, (), is_ingested=False)
        start = len(self._around_documents.text_ids(chunk.text.partition(passage.text)[0].lstrip()))
        earlier = next((before for _, contexts in self._indexes if (before := contexts.of_prompt([chunk])[0])), ())
        return StoredText(chunk.token_ids, start, earlier, is_ingested=True)

    def _with_marks(self, path: str, body: dict[str, Any], token_ids: list[int], marks: dict[str, Any]) -> dict[str, Any]:
        given = body.get("kv_transfer_params")
        params = dict(given) if isinstance(given, Mapping) else {}
        asked = params.get(PARAMS_KEY)
        params[PARAMS_KEY] = {**marks, "ratio": asked.get("ratio") if isinstance(asked, Mapping) else None}
        Marks.read(params[PARAMS_KEY], len(token_ids))  # refuses a ratio that is none
        if path == COMPLETIONS:
            return {**body, "prompt": token_ids, "kv_transfer_params": params}
        return {**body, "kv_transfer_params": {**params, "prompt_token_ids": token_ids}}


@dataclass(frozen=True, slots=True)
class RunningEngine:
    """The running vLLM: a marker and the naming of its model, the model's positions (None: any), and `collective_rpc`.

    Of a hybrid model no KV is stored.
    """

    marker: PromptMarker
    naming: ChunkNaming
    max_positions: int | None
    call: Callable[..., Awaitable[Any]]
    is_hybrid: bool = False


class BlendRoutes:
    """vLLM's endpoint plugin; see `vllm.plugins.endpoint_plugins.interface`."""

    name = "cacheblend"
    required_tasks = ("generate",)

    def __init__(self) -> None:
        self.engine: RunningEngine | None = None  # None where vLLM runs without the connector

    def attach_router(self, app: Any) -> None:
        """Add the middleware and the documents' route."""
        app.add_middleware(ChunkMarking, routes=self)
        app.router.routes.append(Route(DOCUMENTS, self._store_documents, methods=["POST"]))

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """Take the engine; nothing where vLLM runs without the connector."""
        transfer = None if engine_client is None else engine_client.vllm_config.kv_transfer_config
        if transfer is None or transfer.kv_connector != CONNECTOR:
            return
        config, model = ConnectorConfig.from_options(transfer.kv_connector_extra_config), engine_client.vllm_config.model_config
        tokenizer = await run_in_threadpool(load_tokenizer, model.tokenizer or model.model, revision=model.tokenizer_revision)
        naming = await run_in_threadpool(config.naming, model)
        own = state.online_renderer
        tokenizer.chat_template = own.chat_template or tokenizer.chat_template
        variables, length = own.default_chat_template_kwargs, int(model.max_model_len)
        marker = await run_in_threadpool(PromptMarker, tokenizer, config, length, naming, vllm_renderer(own), variables)
        positions = max_positions_of(model.hf_text_config)
        self.engine = RunningEngine(marker, naming, positions, engine_client.collective_rpc, model.is_hybrid)

    async def mark(self, path: str, body: bytes) -> bytes:
        """A request's body with token ids and marks, or as it was; raises what `PromptMarker.mark` does."""
        if self.engine is None:
            return body
        try:
            request = json.loads(body)
        except (ValueError, RecursionError):
            return body  # vLLM says what is wrong with it
        if not isinstance(request, dict):
            return body
        marked = await run_in_threadpool(self.engine.marker.mark, path, request)
        return body if marked is None else json.dumps(marked).encode()

    async def _store_documents(self, request: Request) -> JSONResponse:
        """POST {"documents": [{"title", "text"}, ...]}: compute and store their chunks' KV, between other requests' steps."""
        if (engine := self.engine) is None:
            return _error(503, "vLLM runs without CacheBlendConnector")
        if engine.is_hybrid:
            return _error(400, "of a hybrid model no KV is stored: send the documents with each request")
        try:
            body = await request.json()
            documents = body.get("documents") if isinstance(body, dict) else None
            if not isinstance(documents, list) or not documents:
                raise InputError('give {"documents": [{"title": ..., "text": ...}, ...]}')
            if not isinstance(salt := body.get("cache_salt"), str | None):
                raise InputError("cache_salt: give a text")
            checked = with_one_text(map(Document.of, documents))
            split = await run_in_threadpool(list, map(engine.marker.split, checked))
            for one in split:
                engine.naming.check_lengths(one.document.id, one.token_ids, engine.max_positions)
            if not salt:
                await run_in_threadpool(engine.marker.ingest, split)
        except (RetrieverError, StoreError) as error:
            return _error(503, str(error))
        except (CacheBlendError, ValueError) as error:
            return _error(400, str(error))
        stored, chunks = 0, [chunk for one in split for chunk in one.token_ids]
        for one in split:
            version = () if salt else (one.document.id, one.document.version)
            for window in engine.naming.context.windows(one.token_ids):  # a call each, so that requests run between two
                together = [list(chunk) for chunk in one.token_ids[window.first : window.last]]
                new = list(range(window.new - window.first, len(together)))
                left = len(new)
                while left:
                    now, left, failed = (await engine.call("cacheblend_precompute", args=(together, new, salt, version)))[0]
                    stored += now
                    if failed:
                        return _error(503, f"the KV of {failed} chunks cannot be stored; vLLM's log says why")
                    if left:
                        await asyncio.sleep(BUSY_S)
        tokens = sum(map(len, chunks))
        return JSONResponse({"documents": len(split), "chunks": len(chunks), "stored_chunks": stored, "tokens": tokens})


class ChunkMarking:
    """The middleware; pure ASGI, so that streamed answers pass as they come."""

    def __init__(self, app: ASGIApp, routes: BlendRoutes) -> None:
        self._app, self._routes = app, routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Mark a request's chunks, and pass it on."""
        path = scope.get("path", "").removeprefix(scope.get("root_path", ""))
        if scope["type"] != "http" or scope["method"] != "POST" or path not in (CHAT, COMPLETIONS):
            return await self._app(scope, receive, send)
        try:
            marked = await self._routes.mark(path, await Request(scope, receive).body())
        except ClientDisconnect:
            return None
        except CacheBlendError as error:
            return await _error(400, str(error))(scope, receive, send)
        rest = [(name, value) for name, value in scope["headers"] if name.lower() != b"content-length"]
        headers = [*rest, (b"content-length", str(len(marked)).encode())]
        events: list[Event] = [{"type": "http.request", "body": marked, "more_body": False}]

        async def replay() -> Event:
            return events.pop() if events else await receive()

        return await self._app({**scope, "headers": headers}, replay, send)


def _messages(messages: Any) -> list[Message] | None:
    """A chat's messages of text; None where one is of another kind, or the last is not the user's or a tool's."""
    found: list[Message] = []
    for message in messages if isinstance(messages, list) else ():
        if not isinstance(message, Mapping):
            return None
        content = message.get("content")
        if isinstance(content, list) and all(isinstance(part, Mapping) and part.get("type") == "text" for part in content):
            texts = [part.get("text") for part in content]
            content = "".join(texts) if all(isinstance(text, str) for text in texts) else None
        content = "" if content is None and message.get("tool_calls") else content
        role: Any = "system" if message.get("role") == "developer" else message.get("role")
        if not isinstance(content, str) or SURROGATES.search(content) or role not in ("system", "user", "assistant", "tool"):
            return None
        thoughts = message.get("reasoning_content") or message.get("reasoning") if role == "assistant" else None
        found.append(Message(role, content, thoughts=thoughts if isinstance(thoughts, str) else ""))
    return found if found and found[-1].role in ("user", "tool") else None


def vllm_renderer(renderer: Any) -> Render:
    """The token ids that vLLM's own renderer makes of a request, for threads that its event loop has begun."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest

    async def rendered(path: str, body: dict[str, Any]) -> Any:
        if path == CHAT:
            _, inputs = await renderer.render_chat(ChatCompletionRequest.model_validate({**body}))
        else:
            inputs = await renderer.render_completion(CompletionRequest.model_validate({**body}))
        return inputs[0]["prompt_token_ids"]

    return lambda path, body: from_thread.run(rendered, path, body)


def _error(status: int, message: str) -> JSONResponse:
    """An error as OpenAI's clients read it."""
    kind = "BadRequestError" if status == 400 else "ServiceUnavailableError"
    return JSONResponse({"error": {"message": message, "type": kind, "param": None, "code": status}}, status)
