"""`/v1/documents`: what is answered from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import JSONResponse
from pydantic import Field

from cacheblend.base.errors import InputError
from cacheblend.service.engine.documents import DocumentStatus, shown_chunk
from cacheblend.service.engine.engine import Engine

from .body import JsonRoute
from .errors import ApiError
from .schemas import DocumentBody, StrictModel, Text
from .server import Server, run_call, run_document_call

router = APIRouter(prefix="/v1/documents", route_class=JsonRoute)
_Result = TypeVar("_Result")
LISTED, MAX_LISTED = 100, 1000  # documents of a page


class IngestBody(StrictModel):
    """`POST /v1/documents`."""

    documents: Annotated[list[DocumentBody], Field(min_length=1, fail_fast=True)]


class ReplaceBody(StrictModel):
    """`PUT /v1/documents/{id}`."""

    title: Text | None = None
    text: Text


class PinBody(StrictModel):
    """`POST /v1/documents/{id}/pin`."""

    pinned: bool = True


@router.post("", status_code=201)
async def ingest(body: IngestBody, request: Request) -> dict[str, Any]:
    """Split, index and precompute documents; returns when their KV is durable. A known id is replaced."""
    limit = request.app.state.server.http.max_documents
    if len(body.documents) > limit:
        message = f"documents: {len(body.documents)} are more than max_documents={limit}; send them in several calls"
        raise ApiError(400, message, param="documents", code="too_many_documents")
    return await _upload(request, [document.model_dump() for document in body.documents])


@router.get("")
async def ls(
    request: Request,
    limit: Annotated[int, Query(ge=1, le=MAX_LISTED, description="At most so many documents.")] = LISTED,
    after: Annotated[str | None, Query(description="List those after the document of this id: the `last_id` before.")] = None,
    by: Annotated[
        Literal["document", "file"], Query(description="`file` lists the pages, slides and sheets of a file as one.")
    ] = "document",
    order: Annotated[
        Literal["asc", "desc"], Query(description="By the time of their adding; `desc`: the newest first.")
    ] = "asc",
) -> Response:
    """A page of the documents; `has_more` says whether to ask for the one after `last_id`."""

    def list_page(engine: Engine) -> Response:  # written out here too: of many documents that takes long
        read = engine.documents.files if by == "file" else engine.documents.page
        documents, has_more = read(limit, after, newest_first=order == "desc")
        ids = [document.id for document in documents]
        return JSONResponse(
            {
                "object": "list",
                "data": [_body(document) for document in documents],
                "first_id": ids[0] if ids else None,
                "last_id": ids[-1] if ids else None,
                "has_more": has_more,
            }
        )

    try:
        return await run_document_call(request, list_page)
    except InputError as error:
        raise ApiError(400, str(error), param="after", code="document_not_found") from error


@router.get("/{id_:path}")
async def show(id_: str, request: Request) -> dict[str, Any]:
    """One document, or a file's together, and the text of the chunks."""

    def read(engine: Engine) -> dict[str, Any]:  # places too: of a long document that takes a moment
        status, chunks = engine.documents.show(id_)
        return {**_body(status), "content": list(map(shown_chunk, chunks, engine.documents.places(chunks)))}

    return await _known(request, read)


@router.put("/{id_:path}")
async def replace(id_: str, body: ReplaceBody, request: Request) -> dict[str, Any]:
    """Put a document, in place of the one with this id where there is one."""
    return await _upload(request, [{"id": id_, "title": body.title, "text": body.text}])


@router.delete("/{id_:path}")
async def delete(id_: str, request: Request) -> dict[str, Any]:
    """Remove a document, or a file's, and the KV that no other document needs."""
    await _known(request, lambda engine: engine.documents.delete(id_))
    return {"id": id_, "object": "document", "deleted": True}


@router.post("/{id_:path}/pin")
async def pin(id_: str, body: PinBody, request: Request) -> dict[str, Any]:
    """Spare a document's KV from evictions, or no longer."""

    def set_pinned(engine: Engine) -> DocumentStatus:
        return engine.documents.pin(id_) if body.pinned else engine.documents.unpin(id_)

    return _body(await _known(request, set_pinned))


async def _upload(request: Request, documents: Sequence[Mapping[str, object]]) -> dict[str, Any]:
    """Ingest documents when it is the tenant's turn; nothing of them stays where the client goes before the answer."""
    server: Server = request.app.state.server
    engine: Engine = request.state.engine
    name = str(documents[0].get("id") or documents[0].get("title") or "")
    with server.ingests.follow(request.state.tenant, name) as progress:
        report = await run_call(
            server.uploads, request, lambda check: engine.ingest(documents, progress, check), until_begun=True
        )
    return {"object": "ingest_report", **report.as_dict()}


async def _known(request: Request, call: Callable[[Engine], _Result]) -> _Result:
    """Run a call that refuses an unknown document; that is a 404."""
    try:
        return await run_document_call(request, call)
    except InputError as error:
        raise ApiError(404, str(error), param="id", code="document_not_found") from error


def _body(status: DocumentStatus) -> dict[str, Any]:
    return {"object": "document", **status.as_dict()}
