"""`/v1/documents`: what is answered from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Query, Request
from fastapi.concurrency import run_in_threadpool

from cacheblend.retriever import Chunk
from cacheblend.store.errors import InputError

from ..documents import DocumentStatus
from ..engine import Engine
from ..own_thread import in_own_thread
from .errors import ApiError
from .schemas import IngestBody, PinBody, ReplaceBody

router = APIRouter(prefix="/v1/documents")
_Result = TypeVar("_Result")
LISTED, MOST_LISTED = 100, 1000  # documents of a page


@router.post("", status_code=201)
async def ingest(body: IngestBody, request: Request) -> dict[str, Any]:
    """Split, index and precompute documents; returns when their KV is durable. A known id is replaced."""
    limit = request.app.state.server.http.max_documents
    if len(body.documents) > limit:
        message = f"documents: {len(body.documents)} are more than max_documents={limit}; send them in several calls"
        raise ApiError(400, message, param="documents", code="too_many_documents")
    engine: Engine = request.state.engine
    report = await run_in_threadpool(in_own_thread, engine.ingest, [document.model_dump() for document in body.documents])
    return {"object": "ingest_report", **report.as_dict()}


@router.get("")
async def ls(
    request: Request,
    limit: Annotated[int, Query(ge=1, le=MOST_LISTED, description="At most so many documents.")] = LISTED,
    after: Annotated[str | None, Query(description="List those behind the document of this id: the `last_id` before.")] = None,
) -> dict[str, Any]:
    """A page of the documents, in the order of adding; `has_more` tells whether to ask for the one after `last_id`."""
    engine: Engine = request.state.engine
    try:
        documents, has_more = await run_in_threadpool(engine.documents.page, limit, after)
    except InputError as error:
        raise ApiError(400, str(error), param="after", code="document_not_found") from error
    ids = [document.id for document in documents]
    return {
        "object": "list",
        "data": [_body(document) for document in documents],
        "first_id": ids[0] if ids else None,
        "last_id": ids[-1] if ids else None,
        "has_more": has_more,
    }


@router.get("/{id_:path}")
async def show(id_: str, request: Request) -> dict[str, Any]:
    """One document and the text of its chunks."""
    engine: Engine = request.state.engine
    status, chunks = await _known(lambda: engine.documents.show(id_))
    return {**_body(status), "content": [_chunk(chunk) for chunk in chunks]}


@router.put("/{id_:path}")
async def replace(id_: str, body: ReplaceBody, request: Request) -> dict[str, Any]:
    """Put a document, in place of the one with this id where there is one."""
    engine: Engine = request.state.engine
    report = await run_in_threadpool(in_own_thread, engine.ingest, [{"id": id_, "title": body.title, "text": body.text}])
    return {"object": "ingest_report", **report.as_dict()}


@router.delete("/{id_:path}")
async def delete(id_: str, request: Request) -> dict[str, Any]:
    """Remove a document, and the KV that no other document needs."""
    engine: Engine = request.state.engine
    await _known(lambda: engine.documents.delete(id_))
    return {"id": id_, "object": "document", "deleted": True}


@router.post("/{id_:path}/pin")
async def pin(id_: str, body: PinBody, request: Request) -> dict[str, Any]:
    """Spare a document's KV from evictions, or no longer."""
    engine: Engine = request.state.engine
    await _known(lambda: engine.documents.pin(id_) if body.pinned else engine.documents.unpin(id_))
    return _body(await _known(lambda: engine.documents.status(id_)))


async def _known(call: Callable[[], _Result]) -> _Result:
    """Run a call that refuses an unknown document; that is a 404."""
    try:
        return await run_in_threadpool(call)
    except InputError as error:
        raise ApiError(404, str(error), param="id", code="document_not_found") from error


def _body(status: DocumentStatus) -> dict[str, Any]:
    return {"object": "document", **status.as_dict()}


def _chunk(chunk: Chunk) -> dict[str, Any]:
    return {"position": chunk.position, "tokens": len(chunk.token_ids), "text": chunk.text}
