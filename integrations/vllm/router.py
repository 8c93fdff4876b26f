"""Routes of vLLM's own HTTP server for clients that cannot mark chunks by token positions, and to store documents.

A middleware reads what is sent to `/v1/chat/completions` and `/v1/completions`. Where a chat has `documents`, or a text has the
connector's separator, it lays out the prompt's token ids, as the project's own service does, and sends them on with the marks;
all else goes on as it came. vLLM loads this where `VLLM_PLUGINS=cacheblend` is set; see docs/vllm.md.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.types import Message as Event

from cacheblend.base.errors import CacheBlendError, InputError, PromptTooLongError
from cacheblend.blend.loading import load_tokenizer
from cacheblend.blend.precompute import ChunkContext
from cacheblend.retriever import Document, PlainTokenizer, RetrieverConfig, Splitter
from cacheblend.retriever.config import SEPARATOR
from cacheblend.service.engine.prompt import Message, PromptLayout, PromptRenderer

from .config import ConnectorConfig
from .marks import PARAMS_KEY, Chunk, Marks, naming_of_engine
from .plugin import CONNECTOR

BUSY_S = 0.2  # until the workers are asked again, whose disk is behind
CHAT, COMPLETIONS, DOCUMENTS = "/v1/chat/completions", "/v1/completions", "/v1/cacheblend/documents"
# A chat with one of these needs what vLLM's own rendering does with it.
RENDERED_BY_VLLM = ("tools", "chat_template", "chat_template_kwargs", "continue_final_message", "echo")


class PromptMarker:
    """Lays out a request's prompt from its documents or separators.

    Args:
        tokenizer: the model's.
        config: the connector's: instruction, separator, size of chunks.
        max_positions: of the model.
    """

    def __init__(self, tokenizer: Any, config: ConnectorConfig, max_positions: int | None) -> None:
        self._separator = config.separator
        self._plain = PlainTokenizer(tokenizer)
        retriever = RetrieverConfig(chunk_tokens=config.chunk_tokens)
        self._splitter = Splitter(tokenizer, retriever)
        self._around_documents = PromptRenderer(tokenizer, config.instruction, max_positions=max_positions)
        self._as_written = PromptRenderer(tokenizer, "", "", "", max_positions=max_positions)

    def mark(self, path: str, body: dict[str, Any]) -> dict[str, Any] | None:
        """The request with token ids and marks; None for one that is vLLM's as it is.

        Raises:
            InputError: documents or messages that cannot be used.
            PromptTooLongError: they cannot be within the model's positions.
        """
        if path == COMPLETIONS:
            return self._mark_text(body)
        if any(body.get(name) for name in RENDERED_BY_VLLM) or (messages := _messages(body.get("messages"))) is None:
            return None
        if found := body.get("documents"):
            if not isinstance(found, list):
                raise InputError(f'documents: give a list of objects {{"title", "text"}}, not {type(found).__name__}')
            documents = [self.split(document) for document in found]
            layout = self._around_documents.chat(messages, with_chunks=True)
            rest = {name: value for name, value in body.items() if name != "documents"}
            return self._marked(rest, "messages", layout, (), documents)
        if self._separator and self._separator in messages[-1].content:
            before, *texts, question = messages[-1].content.split(self._separator)
            if not any(map(str.strip, texts)):
                return None
            layout = self._as_written.chat([*messages[:-1], Message("user", question)], with_chunks=False)
            return self._marked(body, "messages", layout, self._ids(before), self._documents(texts))
        return None

    def split(self, document: Mapping[str, object]) -> list[Chunk]:
        """Token ids of a document's chunks."""
        if not isinstance(document, Mapping):
            raise InputError(f'documents: each must be an object {{"title", "text"}}, not {type(document).__name__}')
        text = next((document[name] for name in ("text", "contents", "content", "doc") if document.get(name)), None)
        return [chunk.token_ids for chunk in self._splitter.split(Document.of({**document, "text": text}))]

    def _mark_text(self, body: dict[str, Any]) -> dict[str, Any] | None:
        text = body.get("prompt")
        if not self._separator or not isinstance(text, str) or self._separator not in text or body.get("echo"):
            return None
        before, *texts, question = text.split(self._separator)
        if not any(map(str.strip, texts)) or not question:
            return None
        layout = self._as_written.completion(question)
        return self._marked(body, "prompt", layout, self._ids(before), self._documents(texts))

    def _documents(self, texts: Sequence[str]) -> list[list[Chunk]]:
        """Texts between two separators: a chunk each, as a document of one chunk has it."""
        return [[self._ids(text.strip() + SEPARATOR)] for text in texts if text.strip()]

    def _marked(
        self, body: dict[str, Any], field: str, layout: PromptLayout, before: Chunk, documents: Sequence[Sequence[Chunk]]
    ) -> dict[str, Any]:
        prefix = (*layout.prefix, *before)
        chunks = list(chain.from_iterable(documents))
        borders = [len(prefix)]
        for chunk in chunks:
            borders.append(borders[-1] + len(chunk))
        token_ids = [*prefix, *chain.from_iterable(chunks), *layout.suffix]
        given = body.get("kv_transfer_params")
        given = dict(given) if isinstance(given, Mapping) else {}
        asked = given.get(PARAMS_KEY)
        ratio = asked.get("ratio") if isinstance(asked, Mapping) else None
        numbers = [number for number, document in enumerate(documents) for _ in document]
        marks = Marks.read({"chunks": list(pairwise(borders)), "ratio": ratio, "documents": numbers}, len(token_ids))
        params = {**given, PARAMS_KEY: marks.as_params()}
        if field == "prompt":
            return {**body, "prompt": token_ids, "kv_transfer_params": params}
        return {**body, "kv_transfer_params": {**params, "prompt_token_ids": token_ids}}

    def _ids(self, text: str) -> Chunk:
        return tuple(self._plain.ids(text))


@dataclass(frozen=True, slots=True)
class WindowPrecomputes:
    """Part of a document that the workers are asked to compute.

    Args:
        head: see `ChunkNaming.prefix_ids`.
        context: likewise.
        max_positions: of the model; None where nothing bounds it.
    """

    head: Chunk
    context: ChunkContext
    max_positions: int | None

    def windows(self, chunks: Sequence[Chunk]) -> list[tuple[list[list[int]], list[int]]]:
        """The chunks that are read together, window by window, and indexes of those to compute.

        Raises:
            PromptTooLongError: one is longer, with what it stands after, than the model's positions.
        """
        found: list[tuple[list[list[int]], list[int]]] = []
        for window in self.context.windows(chunks):
            together = [list(chunk) for chunk in chunks[window.first : window.last]]
            tokens = len(self.head) + len(self.context.filler_ids) + sum(map(len, together))
            if self.max_positions is not None and tokens > self.max_positions:
                raise PromptTooLongError(
                    f"a chunk of {sum(map(len, together))} tokens, after instruction and filler, makes {tokens}, and the model "
                    f"has {self.max_positions} positions; lower chunk_tokens of the connector"
                )
            found.append((together, list(range(window.new - window.first, len(together)))))
        return found


class BlendRoutes:
    """vLLM's endpoint plugin; see `vllm.plugins.endpoint_plugins.interface`."""

    name = "cacheblend"
    required_tasks = ("generate",)

    def __init__(self) -> None:
        self._marker: PromptMarker | None = None
        self._precomputes = WindowPrecomputes((), ChunkContext(), None)
        self._engine: Any = None

    def attach_router(self, app: Any) -> None:
        """Add the middleware and the documents' route."""
        app.add_middleware(ChunkMarking, routes=self)
        app.router.routes.append(Route(DOCUMENTS, self._store_documents, methods=["POST"]))

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """Make the marker for the engine's model; nothing where vLLM runs without the connector."""
        transfer = None if engine_client is None else engine_client.vllm_config.kv_transfer_config
        if transfer is None or transfer.kv_connector != CONNECTOR:
            return
        config, model = ConnectorConfig.from_options(transfer.kv_connector_extra_config), engine_client.vllm_config.model_config
        tokenizer = await run_in_threadpool(load_tokenizer, model.tokenizer or model.model)
        naming = await run_in_threadpool(naming_of_engine, config, engine_client.vllm_config)
        self._marker = PromptMarker(tokenizer, config, int(model.max_model_len))
        positions = getattr(model.hf_text_config, "max_position_embeddings", None)
        self._precomputes = WindowPrecomputes(naming.prefix_ids, naming.context, positions)
        self._engine = engine_client

    async def mark(self, path: str, body: bytes) -> bytes:
        """A request's body with token ids and marks, or as it was.

        Raises:
            InputError: see `PromptMarker.mark`.
        """
        if self._marker is None:
            return body
        try:
            request = json.loads(body)
        except ValueError:
            return body  # vLLM says what is wrong with it
        if not isinstance(request, dict):
            return body
        marked = await run_in_threadpool(self._marker.mark, path, request)
        return body if marked is None else json.dumps(marked).encode()

    async def _store_documents(self, request: Request) -> JSONResponse:
        """POST {"documents": [{"title", "text"}, ...]}: compute and store their chunks' KV, between other requests' steps."""
        marker = self._marker
        if marker is None:
            return _error(503, "vLLM runs without CacheBlendConnector")
        try:
            body = await request.json()
            documents = body.get("documents") if isinstance(body, dict) else None
            if not isinstance(documents, list) or not documents:
                raise InputError('give {"documents": [{"title": ..., "text": ...}, ...]}')
            split = await run_in_threadpool(lambda: [marker.split(document) for document in documents])
            windows = [window for chunks in split for window in self._precomputes.windows(chunks)]
        except (CacheBlendError, ValueError) as error:
            return _error(400, str(error))
        salt, stored = body.get("cache_salt"), 0
        for chunks, new in windows:  # a call each, so that requests run between two
            left = len(new)
            while left:
                now, left = (await self._engine.collective_rpc("cacheblend_precompute", args=([chunks], new, salt)))[0]
                stored += now
                if left:
                    await asyncio.sleep(BUSY_S)
        tokens = sum(len(chunk) for chunks in split for chunk in chunks)
        return JSONResponse(
            {"documents": len(split), "chunks": sum(map(len, split)), "stored_chunks": stored, "tokens": tokens}
        )


class ChunkMarking:
    """The middleware; pure ASGI, so that streamed answers pass as they come."""

    def __init__(self, app: ASGIApp, routes: BlendRoutes) -> None:
        self._app, self._routes = app, routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Mark a request's chunks, and pass it on."""
        path = scope.get("path")
        if scope["type"] != "http" or scope.get("method") != "POST" or path not in (CHAT, COMPLETIONS):
            return await self._app(scope, receive, send)
        body, more = b"", True
        while more:
            event = await receive()
            if event["type"] == "http.disconnect":
                return None
            body, more = body + event.get("body", b""), event.get("more_body", False)
        try:
            marked = await self._routes.mark(path, body)
        except CacheBlendError as error:
            return await _error(400, str(error))(scope, receive, send)
        rest = [(name, value) for name, value in scope["headers"] if name.lower() != b"content-length"]
        headers = [*rest, (b"content-length", str(len(marked)).encode())]
        events: list[Event] = [{"type": "http.request", "body": marked, "more_body": False}]

        async def replay() -> Event:
            return events.pop() if events else await receive()

        return await self._app({**scope, "headers": headers}, replay, send)


def _messages(messages: Any) -> list[Message] | None:
    """A chat's messages of text; None where one is of another kind, or the last is not the user's."""
    found: list[Message] = []
    for message in messages if isinstance(messages, list) else ():
        content = message.get("content") if isinstance(message, Mapping) else None
        if isinstance(content, list) and all(isinstance(part, Mapping) and part.get("type") == "text" for part in content):
            content = "".join(str(part.get("text", "")) for part in content)
        if not isinstance(content, str) or message.get("role") not in ("system", "user", "assistant"):
            return None
        found.append(Message(message["role"], content))
    return found if found and found[-1].role == "user" else None


def _error(status: int, message: str) -> JSONResponse:
    """An error as OpenAI's clients read it."""
    kind = "BadRequestError" if status == 400 else "ServiceUnavailableError"
    return JSONResponse({"error": {"message": message, "type": kind, "param": None, "code": status}}, status)
