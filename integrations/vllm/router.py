"""Routes of vLLM's own HTTP server for clients that cannot mark chunks by token positions, and to store documents.

A middleware reads what is sent to `/v1/chat/completions` and `/v1/completions`. Where a chat has `documents`, or a text has
passages that came before, it lays out the prompt's token ids, as the project's own service does, and sends them on with the
marks; all else goes on as it came. vLLM loads this where `VLLM_PLUGINS=cacheblend` is set; see
docs/vllm.md.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, chain, pairwise
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.types import Message as Event

from cacheblend.base.errors import CacheBlendError, InputError, PromptTooLongError
from cacheblend.blend.loading import load_tokenizer
from cacheblend.retriever import Document, PlainTokenizer, RetrieverConfig, Splitter
from cacheblend.retriever.passages import find_passages
from cacheblend.service.engine.chunk_context import ChunkNaming
from cacheblend.service.engine.passages import EDGE_TOKENS, REMEMBERED, locate
from cacheblend.service.engine.prompt import Message, PromptRenderer, PromptTokens
from cacheblend.store.tiers import AdmissionFilter

from .config import ConnectorConfig
from .plugin import CONNECTOR
from .scheduler import PARAMS_KEY, Marks

BUSY_S = 0.2  # until the workers are asked again, whose disk is behind
# A request with one of these is tokenised by vLLM, or marked by somebody else.
LEFT_TO_VLLM = ["kv_transfer_params", "add_generation_prompt", "add_special_tokens", "truncate_prompt_tokens", "prompt_embeds"]
CHAT, COMPLETIONS, DOCUMENTS = "/v1/chat/completions", "/v1/completions", "/v1/cacheblend/documents"
# A chat with one of these needs what vLLM's own rendering does with it.
RENDERED_BY_VLLM = ("tools", "chat_template", "continue_final_message", "echo")
EDGE = EDGE_TOKENS // 2  # tokens at either end of a passage that are computed
Chunk = tuple[int, ...]


class PromptMarker:
    """Lays out a request's prompt from its documents or passages, within the model's positions."""

    def __init__(self, tokenizer: Any, config: ConnectorConfig, max_positions: int | None) -> None:
        self._finds_passages = config.engine.find_passages
        self._seen = AdmissionFilter(REMEMBERED)
        self._plain = PlainTokenizer(tokenizer)
        self._splitter = Splitter(tokenizer, RetrieverConfig(chunk_tokens=config.engine.retriever.chunk_tokens))
        self._around_documents = PromptRenderer(tokenizer, config.engine.instruction, max_positions=max_positions)
        self._as_written = PromptRenderer(tokenizer, "", "", "", max_positions=max_positions)

    def mark(self, path: str, body: dict[str, Any]) -> dict[str, Any] | None:
        """The request with token ids and marks; None for one that is vLLM's as it is.

        Raises:
            ConfigError, InputError: documents, messages or variables of the template that cannot be used.
            PromptTooLongError: they cannot be within the model's positions.
        """
        if path == COMPLETIONS:
            text = body.get("prompt")
            if body.get("echo") or not isinstance(text, str) or not text:
                return None
            return self._with_passages(path, body, [Message("user", text)], lambda: self._as_written.completion(text))
        variables, messages = self._variables(body), _messages(body.get("messages"))
        if any(body.get(name) for name in RENDERED_BY_VLLM) or messages is None or variables is None:
            return None
        if found := body.get("documents"):
            if not isinstance(found, list):
                raise InputError(f'documents: give a list of objects {{"title", "text"}}, not {type(found).__name__}')
            layout = self._around_documents.chat(messages, with_chunks=True, template_kwargs=variables)
            others = {name: value for name, value in body.items() if name != "documents"}
            return self._marked(path, others, layout, [self.split(document) for document in found])
        chat = partial(self._as_written.chat, messages, with_chunks=False, template_kwargs=variables)
        return self._with_passages(path, body, messages, chat)

    def _variables(self, body: Mapping[str, Any]) -> dict[str, Any] | None:
        """The chat template's variables of a request, as vLLM has them: those that it knows. None for what is no object."""
        asked, effort = body.get("chat_template_kwargs") or {}, body.get("reasoning_effort")
        if not isinstance(asked, Mapping):
            return None
        of_effort = {} if effort is None else {"reasoning_effort": effort, "enable_thinking": effort != "none"}
        return {name: value for name, value in {**of_effort, **asked}.items() if name in self._as_written.template.variables}

    def split(self, document: Mapping[str, object]) -> list[Chunk]:
        """Token ids of a document's chunks."""
        return [chunk.token_ids for chunk in self._splitter.split(Document.of(document))]

    def _marked(
        self, path: str, body: dict[str, Any], layout: PromptTokens, documents: Sequence[Sequence[Chunk]]
    ) -> dict[str, Any]:
        chunks = list(chain.from_iterable(documents))
        marks = {
            "chunks": list(pairwise(accumulate(map(len, chunks), initial=len(layout.prefix)))),
            "documents": [number for number, document in enumerate(documents) for _ in document],
        }
        return self._with_marks(path, body, [*layout.prefix, *chain.from_iterable(chunks), *layout.suffix], marks)

    def _with_passages(
        self, path: str, body: dict[str, Any], messages: Sequence[Message], lay_out: Callable[[], PromptTokens]
    ) -> dict[str, Any] | None:
        """The request with those passages marked that came in an earlier one of its salt; None if there are none.

        Only of messages after the assistant's last one: the blocks of what stands before are vLLM's own, and exact.
        """
        if not self._finds_passages or any(body.get(name) is not None for name in LEFT_TO_VLLM):
            return None
        last = max((place for place, message in enumerate(messages) if message.role == "assistant"), default=-1)
        texts = [(message.content, message.role) for message in messages[last + 1 :]]
        found = [self._ids(text[one.start : one.end]) for text, role in texts for one in find_passages(text, role)]
        came = {ids for ids in set(found) if self._seen.admits(str(hash((str(body.get("cache_salt")), ids))))}
        try:
            token_ids = list(lay_out().token_ids) if came else []
        except CacheBlendError:  # vLLM says what is wrong with it, if it is
            return None
        # A chunk's tokens are its name: those at a passage's ends, which differ between prompts, are no part of it.
        spans = list[tuple[int, int]]()
        for ids, place in zip(found, locate(token_ids, ((ids, 0) for ids in found)), strict=True):
            if ids in came and place is not None and (start := place[0] + EDGE - place[2]) >= place[0]:
                stop = start + len(ids) - 2 * EDGE
                spans += [(start, stop)] if start < stop <= place[1] else []
        return self._with_marks(path, body, token_ids, {"chunks": spans, "found": True}) if spans else None

    def _with_marks(self, path: str, body: dict[str, Any], token_ids: list[int], marks: dict[str, Any]) -> dict[str, Any]:
        given = body.get("kv_transfer_params")
        params = dict(given) if isinstance(given, Mapping) else {}
        asked = params.get(PARAMS_KEY)
        params[PARAMS_KEY] = {**marks, "ratio": asked.get("ratio") if isinstance(asked, Mapping) else None}
        Marks.read(params[PARAMS_KEY], len(token_ids))  # refuses a ratio that is none
        if path == COMPLETIONS:
            return {**body, "prompt": token_ids, "kv_transfer_params": params}
        return {**body, "kv_transfer_params": {**params, "prompt_token_ids": token_ids}}

    def _ids(self, text: str) -> Chunk:
        return tuple(self._plain.ids(text))


def windows(
    chunks: Sequence[Chunk], naming: ChunkNaming, max_positions: int | None
) -> Iterator[tuple[list[list[int]], list[int]]]:
    """A document's chunks that are read together, window by window, and the indexes of those to compute.

    Raises:
        PromptTooLongError: a window is longer, with what it stands after, than the model's positions.
    """
    before = len(naming.prefix_ids) + len(naming.context.filler_ids)
    for window in naming.context.windows(chunks):
        together = [list(chunk) for chunk in chunks[window.first : window.last]]
        tokens = sum(map(len, together))
        if max_positions is not None and before + tokens > max_positions:
            raise PromptTooLongError(
                f"a chunk of {tokens} tokens, after instruction and filler, makes {before + tokens}, and the model "
                f"has {max_positions} positions; lower chunk_tokens of the connector"
            )
        yield together, list(range(window.new - window.first, len(together)))


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
        tokenizer = await run_in_threadpool(load_tokenizer, model.tokenizer or model.model)
        naming = await run_in_threadpool(config.naming, model)
        marker = PromptMarker(tokenizer, config, int(model.max_model_len))
        positions = getattr(model.hf_text_config, "max_position_embeddings", None)
        self.engine = RunningEngine(marker, naming, positions, engine_client.collective_rpc, model.is_hybrid)

    async def mark(self, path: str, body: bytes) -> bytes:
        """A request's body with token ids and marks, or as it was; raises what `PromptMarker.mark` does."""
        if self.engine is None:
            return body
        try:
            request = json.loads(body)
        except ValueError:
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
            split = await run_in_threadpool(lambda: [engine.marker.split(document) for document in documents])
            every = [window for chunks in split for window in windows(chunks, engine.naming, engine.max_positions)]
        except (CacheBlendError, ValueError) as error:
            return _error(400, str(error))
        salt, stored = body.get("cache_salt"), 0
        for chunks, new in every:  # a call each, so that requests run between two
            left = len(new)
            while left:
                now, left = (await engine.call("cacheblend_precompute", args=(chunks, new, salt)))[0]
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
        if scope["type"] != "http" or scope.get("method") != "POST" or scope.get("path") not in (CHAT, COMPLETIONS):
            return await self._app(scope, receive, send)
        try:
            marked = await self._routes.mark(scope["path"], await Request(scope, receive).body())
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
    """A chat's messages of text; None where one is of another kind, or the last is not the user's."""
    found: list[Message] = []
    for message in messages if isinstance(messages, list) else ():
        content = message.get("content") if isinstance(message, Mapping) else None
        if isinstance(content, list) and all(isinstance(part, Mapping) and part.get("type") == "text" for part in content):
            content = "".join(str(part.get("text", "")) for part in content)
        if not isinstance(content, str) or message.get("role") not in ("system", "user", "assistant"):
            return None
        thoughts = message.get("reasoning_content") or message.get("reasoning") if message["role"] == "assistant" else None
        found.append(Message(message["role"], content, thoughts=thoughts if isinstance(thoughts, str) else ""))
    return found if found and found[-1].role == "user" else None


def _error(status: int, message: str) -> JSONResponse:
    """An error as OpenAI's clients read it."""
    kind = "BadRequestError" if status == 400 else "ServiceUnavailableError"
    return JSONResponse({"error": {"message": message, "type": kind, "param": None, "code": status}}, status)
