"""`/v1/embeddings`, `/tokenize` and `/detokenize`: what becomes of texts outside an answer."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BeforeValidator, Field, Tag, model_validator

from cacheblend.base.errors import InputError
from cacheblend.retriever import checked_between_batches
from cacheblend.service.engine.document_encoder import Check
from cacheblend.service.engine.engine import Engine

from .body import JsonRoute
from .errors import ApiError
from .schemas import LIST_TAG, MAX_MESSAGES, TEXT_TAG, IgnoredFields, MessageBody, StrictModel, Text, TextOrList
from .server import Server, run_call

router = APIRouter(route_class=JsonRoute)
MAX_INPUTS = 2048  # texts of one call for embeddings, as OpenAI has it


def _without_token_ids(inputs: list[Any]) -> list[Any]:
    if inputs and isinstance(inputs[0], int | list):
        raise ValueError("give texts; token ids are other models' (in LangChain: check_embedding_ctx_length=False)")
    return inputs


Inputs = Annotated[list[Text], Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True), BeforeValidator(_without_token_ids)]


class EmbeddingsBody(IgnoredFields):
    """`POST /v1/embeddings`."""

    model: str | None = None
    input: Annotated[Annotated[Text, Tag(TEXT_TAG)] | Annotated[Inputs, Tag(LIST_TAG)], TextOrList]
    encoding_format: Literal["float", "base64"] | None = "float"
    dimensions: int | None = None

    def texts(self) -> list[str]:
        """`input` as a list."""
        return [self.input] if isinstance(self.input, str) else self.input


class TokenizeBody(StrictModel):
    """`POST /tokenize`: a text, or a chat as the model's template renders it."""

    model: str | None = None
    prompt: Text | None = None
    messages: Annotated[list[MessageBody], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)] | None = None
    add_special_tokens: bool = True
    return_token_strs: bool | None = False

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give prompt or messages, and one of them alone")
        return self


class DetokenizeBody(StrictModel):
    """`POST /detokenize`."""

    model: str | None = None
    tokens: Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(fail_fast=True)]


@router.post("/v1/embeddings")
async def embeddings(body: EmbeddingsBody, request: Request) -> Response:
    """Vectors of texts, by the embedder that the documents are searched with."""
    server: Server = request.app.state.server
    engine: Engine = request.state.engine
    embedder, texts = engine.retriever.embedder, body.texts()
    name = Path(embedder.name).name  # an embedder may be named by its folder
    server.check_model(body.model, name)
    if empty := [place for place, text in enumerate(texts) if not text.strip()]:
        raise ApiError(400, f"input.{empty[0]}: is empty; leave it out", param="input", code="invalid_value")

    def embed(check: Check) -> Response:  # written out here too: of many texts that takes long
        if body.dimensions not in (None, dimensions := embedder.dimensions):
            raise ApiError(400, f"dimensions: {name} has {dimensions}; leave it out", param="dimensions", code="invalid_value")
        with checked_between_batches(check):
            vectors_ND = embedder.encode(texts)
        check()
        tokens = sum(len(engine.prompts.text_ids(text, with_bos=False)) for text in texts)
        as_base64 = body.encoding_format == "base64"
        data = [
            {
                "object": "embedding",
                "index": index,
                "embedding": base64.b64encode(vector_D.astype("<f4").tobytes()).decode() if as_base64 else vector_D.tolist(),
            }
            for index, vector_D in enumerate(np.asarray(vectors_ND, dtype=np.float32))
        ]
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return JSONResponse({"object": "list", "data": data, "model": name, "usage": usage})

    return await run_call(server.texts, request, embed)


@router.post("/tokenize")
async def tokenize(body: TokenizeBody, request: Request) -> dict[str, Any]:
    """The model's token ids of a text, or of a chat as its template renders it, without chunks."""
    server: Server = request.app.state.server
    engine: Engine = request.state.engine
    server.check_model(body.model)

    def read(_: Check) -> dict[str, Any]:
        prompts, tokenizer = engine.prompts, engine.fusor.tokenizer
        if body.messages is not None:
            ids = list(prompts.chat([message.message() for message in body.messages], with_chunks=False).tokens(()).token_ids)
        else:
            ids = list(prompts.text_ids(body.prompt or "", with_bos=body.add_special_tokens))
        strings = tokenizer.convert_ids_to_tokens(ids) if body.return_token_strs else None
        return {"count": len(ids), "max_model_len": engine.fusor.max_positions, "tokens": ids, "token_strs": strings}

    return await run_call(server.texts, request, read)


@router.post("/detokenize")
async def detokenize(body: DetokenizeBody, request: Request) -> dict[str, str]:
    """The text of the model's token ids."""
    server: Server = request.app.state.server
    engine: Engine = request.state.engine
    server.check_model(body.model)

    def write(_: Check) -> dict[str, str]:
        tokenizer = engine.fusor.tokenizer
        if (largest := max(body.tokens, default=0)) >= len(tokenizer):
            raise InputError(f"tokens: {largest} is no token of this model, which has {len(tokenizer)}")
        return {"prompt": tokenizer.decode(body.tokens)}

    return await run_call(server.texts, request, write)
