"""`/v1/documents`: what is answered from, uploaded as JSON or as files."""

from __future__ import annotations

import asyncio
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from functools import partial
from itertools import islice, starmap
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field
from python_multipart.exceptions import FormParserError
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from cacheblend.base.errors import InputError, MissingExtraError, StoreFullError
from cacheblend.base.threads import Check, Progress
from cacheblend.retriever import Document
from cacheblend.retriever.document import NO_ID, file_of, with_one_text
from cacheblend.retriever.metadata import read_metadata
from cacheblend.service.engine.document_sources import JSONL_SUFFIXES, file_documents, parse_json
from cacheblend.service.engine.documents import DocumentStatus, shown_chunk
from cacheblend.service.engine.engine import Engine
from cacheblend.service.engine.file_converter import MAX_CHARACTERS, FileConverter
from cacheblend.service.engine.file_readers import MAX_UNPACKED_BYTES
from cacheblend.service.engine.ingest import IngestReport
from cacheblend.service.engine.pdf_text import WITHOUT_TEXT

from .guard import ApiError, JsonRoute, error_body, read_json, refused, shortened
from .ingests import MAX_NAME_CHARACTERS, Ingest, Work
from .schemas import IngestedBody, StrictModel
from .server import Server, run_document_call, wait_for_call

router = APIRouter(route_class=JsonRoute)
_Result = TypeVar("_Result")
LISTED, MAX_LISTED = 100, 1000  # documents of a page
MAX_FILES = 100  # of a form
MAX_FAULTS = 100  # of an upload that are listed
CHECK_EVERY_S = 0.1  # while a file is read: other uploads have their turns then, and a line is read in less
_ESCAPES = re.compile("%(22|0D|0A)")  # of browsers in a name, by the HTML standard; no other character is escaped
_SUFFIX = re.compile(r"((\.[a-z0-9]{1,8})?\.gz|\.[a-z0-9]{1,8})$")  # of a kind; names in a file system hold few bytes


class IngestBody(StrictModel):
    """`POST /v1/documents`, as JSON."""

    documents: Annotated[list[IngestedBody], Field(min_length=1, fail_fast=True)]


class UploadForm(BaseModel):
    """`POST /v1/documents`, as a form; `metadata` is the JSON of an object, for all documents of the files."""

    file: list[bytes]
    id: str = ""
    metadata: str = "{}"


_FORMS: dict[str, type[BaseModel]] = {"application/json": IngestBody, "multipart/form-data": UploadForm}
_UPLOAD_SCHEMA = {
    kind: {"schema": body.model_json_schema(ref_template="#/components/schemas/{model}")} for kind, body in _FORMS.items()
}


@router.post("/v1/documents", status_code=202, openapi_extra={"requestBody": {"required": True, "content": _UPLOAD_SCHEMA}})
async def ingest(request: Request, wait: bool = False) -> Response:
    """Split, index and precompute documents, in a job of `/v1/ingests` that outlives the connection. A known id is replaced.

    With `wait` the answer comes when their KV is durable; if its client leaves before, nothing stays of the file under way.

    A form has files in place of JSON, `file` each, which are read as `cacheblend ingest` reads them. A file's document has its
    name as id, or the form's `id` where there is one file; pages, slides and sheets are documents such as `report.pdf#page=3`.
    A JSON line has its own id.
    """
    if request.headers.get("content-type", "").lower().startswith("multipart/form-data"):
        return await _upload(request, await _read_files(request), wait=wait)
    body = await read_json(request, IngestBody)
    request.app.state.server.check_count(body.documents)
    engine: Engine = request.state.engine
    given = (Document.of(one.model_dump()) for one in body.documents)
    documents = await run_in_threadpool(lambda: list(with_one_text(given)))  # what cannot be used is a 400, and no job
    parts: dict[str, Work] = {documents[0].id: lambda progress: engine.ingest(documents, progress)}
    nbytes = sum(len(document.text) for document in documents)
    return await _upload(request, Ingest(request.state.tenant, parts, nbytes), wait=wait)


@router.get("/v1/documents")
async def ls(
    request: Request,
    limit: Annotated[int, Query(ge=1, le=MAX_LISTED)] = LISTED,
    after: str | None = None,
    by: Literal["document", "file"] = "document",
    order: Literal["asc", "desc"] = "asc",
) -> Response:
    """A page of the documents after the one of the id `after`; `has_more` says whether to ask for the one after `last_id`.

    By `file` the pages, slides and sheets of a file are one document. `desc` is by the time of their adding, the newest first.
    """

    def list_page(engine: Engine) -> Response:  # written out here too: many documents need long
        documents, has_more = engine.documents.page(limit, after, by_file=by == "file", newest_first=order == "desc")
        ids: list[str | None] = [document.id for document in documents] or [None]
        page = {"object": "list", "first_id": ids[0], "last_id": ids[-1], "has_more": has_more}
        return JSONResponse({**page, "data": [_body(document) for document in documents]})

    try:
        return await run_document_call(request, list_page)
    except InputError as error:
        raise refused("after", str(error), code="document_not_found") from error


@router.get("/v1/documents/{id_:path}")
async def show(id_: str, request: Request) -> dict[str, Any]:
    """One document, or a file's together, and the text of the chunks."""

    def read(engine: Engine) -> dict[str, Any]:  # places too: those of a long document need a moment
        status, chunks = engine.documents.show(id_)
        return {**_body(status), "content": list(starmap(shown_chunk, chunks))}

    return await _known(request, read)


@router.delete("/v1/documents/{id_:path}")
async def delete(id_: str, request: Request) -> dict[str, Any]:
    """Remove a document, or a file's, and the KV that no other document needs."""
    await _known(request, lambda engine: engine.documents.delete(id_))
    return {"id": id_, "object": "document", "deleted": True}


async def _known(request: Request, call: Callable[[Engine], _Result]) -> _Result:
    """Run a call that refuses an unknown document; that is a 404."""
    try:
        return await run_document_call(request, call)
    except InputError as error:
        raise ApiError(404, str(error), param="id", code="document_not_found") from error


def _body(status: DocumentStatus) -> dict[str, Any]:
    return {"object": "document", **status.as_dict()}


async def _read_files(request: Request) -> Ingest:
    server: Server = request.app.state.server
    async with server.reading[request.state.tenant]:
        try:  # in a thread: 30 MiB of almost boundaries take seconds
            files = await run_in_threadpool(lambda: asyncio.run(_read_form(request)))
        except (MultiPartException, FormParserError) as error:  # starlette's, and the parser's own
            raise ApiError(400, f"the body is no form: {getattr(error, 'message', error)}", code="invalid_value") from None
    faults = dict[str, str]()
    parts: dict[str, Work] = {one.name: partial(_ingest_file, server, request.state.engine, one, faults) for one in files}
    return Ingest(request.state.tenant, parts, sum(len(one.raw) for one in files), faults=faults)


def _ingest_file(server: Server, engine: Engine, file: FormFile, faults: dict[str, str], progress: Progress) -> IngestReport:
    progress.note("read", 0, 1)
    documents, own_faults = _read_file(server, file, progress.check)
    room = max(0, MAX_FAULTS - len(faults))
    faults.update(islice(own_faults.items(), room))
    if len(own_faults) > room:
        faults[file.name] = f"{len(own_faults) - room:,} more lines or parts cannot be used"
    report = engine.ingest(documents, progress)
    if {*own_faults.values()} <= {*WITHOUT_TEXT} and not file.name.lower().endswith(JSONL_SUFFIXES):
        gone = engine.documents.prune([document.id for document in documents], [file.id])  # pages of a longer file of this id
        report = replace(report, deleted=len(gone))
    return report


async def _upload(request: Request, ingest: Ingest, *, wait: bool) -> Response:
    """Ingest when it is the tenant's turn, as a job, or before the answer."""
    server: Server = request.app.state.server
    server.ingests.add(ingest)
    with ExitStack() as ends:
        ends.callback(server.ingests.forget, ingest)
        if not wait:
            server.uploads.submit(ingest.call)
            ends.pop_all()
            return JSONResponse(ingest.body(), 202, {"Location": f"/v1/ingests/{ingest.id}"})
        report = await wait_for_call(server.uploads, request, ingest.call)
    failed = {name: error_body(error)["error"]["message"] for name, error in ingest.errors.items()}
    faults = [f"{place}: {why}" for place, why in {**ingest.faults, **failed}.items()]
    return JSONResponse({"object": "ingest_report", **report.as_dict(), **({"faults": faults} if faults else {})}, 201)


class _FormInMemory(MultiPartParser):
    spool_max_size = 2**62  # the body is in memory already, and a full disk is no reason to fail here


class FormFile(NamedTuple):
    """A file of a form: its name without folders, the id that is given or else the name, its bytes, and metadata for all."""

    name: str
    id: str
    raw: bytes
    metadata: Mapping[str, Any]


async def _read_form(request: Request) -> list[FormFile]:
    """The files of a form, whose names differ."""
    form = await _FormInMemory(request.headers, request.stream(), max_files=MAX_FILES, max_fields=8).parse()
    try:
        files, found = [one for one in form.getlist("file") if isinstance(one, UploadFile)], dict[str, FormFile]()
        if unknown := [field for field in form if field not in UploadForm.model_fields]:
            raise refused(shortened(unknown[0]), "is no field of this request; leave it out")
        if "id" in form and len(files) > 1:
            raise refused("id", "is of one file, and these are several; leave it out, or send one")
        try:
            metadata = read_metadata(parse_json(str(form.get("metadata") or "{}"), "metadata"))
        except InputError as error:
            raise refused("metadata", str(error).removeprefix("metadata: ")) from None
        for file in files:
            given = _ESCAPES.sub(lambda found: chr(int(found[1], 16)), file.filename or "")
            name = PurePosixPath(PureWindowsPath(given).name).name
            names = {"file": name, "id": str(form.get("id") or name)}
            for field, one in names.items():
                if not 0 < len(one) <= MAX_NAME_CHARACTERS or NO_ID.search(one) or file_of(one) != one or one in found:
                    why = f"needs a name of its own of 1 to {MAX_NAME_CHARACTERS} characters, without control characters"
                    raise refused(field, why)
            found[name] = FormFile(name, names["id"], await file.read(), metadata)
        if not found:
            raise refused("file", "is missing; send it as a file of multipart/form-data")
        return [*found.values()]
    finally:
        await form.close()


def _read_file(server: Server, file: FormFile, check: Check) -> tuple[list[Document], dict[str, str]]:
    """The documents of a file, read as `cacheblend ingest` reads it, and by place why pages and lines are none.

    `check` ends the reading if nobody waits for it. A file without any document is refused.
    """
    name, checked_at = file.name, time.monotonic()

    def check_in_time() -> None:
        nonlocal checked_at
        if time.monotonic() - checked_at >= CHECK_EVERY_S:
            check()
            checked_at = time.monotonic()

    max_documents, documents, characters, faults = server.http.max_documents, list[Document](), 0, dict[str, str]()
    with _written(server.uploads_folder, name, file.raw) as path, closing(FileConverter()) as converter:
        try:
            title = PurePosixPath(name).stem
            for document in file_documents(
                path,
                file.id,
                converter,
                title=title,
                where=name,
                metadata=file.metadata,
                check=check_in_time,
                max_bytes=MAX_UNPACKED_BYTES,
                fault=faults.__setitem__,
            ):
                documents.append(document)
                characters += len(document.text)
                if len(documents) > max_documents or characters > MAX_CHARACTERS:
                    why = f"more than {max_documents} documents or {MAX_CHARACTERS} characters; split it"
                    raise refused("file", why, status=413, code="too_many_documents")
        except MissingExtraError as error:
            raise refused("file", f"needs the extra `{error.extra}` where the service runs; send it as text") from error
        except InputError as error:
            raise refused("file", str(error)) from None
    if faults and not documents:
        raise refused("file", "{}: {}".format(*next(iter(faults.items()))))
    return documents, faults


@contextmanager
def _written(parent: Path, name: str, raw: bytes) -> Iterator[Path]:
    """A temporary file of these bytes, with the end of the name that says its kind; StoreFullError if it cannot be written."""
    suffix = _SUFFIX.search(name.lower())
    with ExitStack() as opened:
        try:
            folder = opened.enter_context(tempfile.TemporaryDirectory(dir=parent, ignore_cleanup_errors=True))
            path = Path(folder, f"file{suffix[0] if suffix else ''}")
            path.write_bytes(raw)
        except OSError as error:
            raise StoreFullError(f"an upload cannot be written to {parent}: {error}") from error
        yield path
