"""`/v1/files` in OpenAI's shape: a file is a view of the documents that were read from it, and no table of its own.

The id of a file says when it came, how many bytes it had, and a digest of them, its purpose and its name. Its documents' ids
begin with the file's id, its purpose and its name: `file-.../user_data/report.pdf#page=3`.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from itertools import islice
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import PlainTextResponse
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import FormData, UploadFile

from cacheblend.base.errors import InputError, MissingExtraError, StoreFullError
from cacheblend.retriever.document import NO_ID
from cacheblend.service.engine.document_encoder import Check
from cacheblend.service.engine.document_sources import JSONL_SUFFIXES, PARQUET_SUFFIX, file_documents
from cacheblend.service.engine.documents import part_order
from cacheblend.service.engine.engine import Engine
from cacheblend.service.engine.file_converter import MAX_CHARACTERS, MAX_UNPACKED_BYTES, FileConverter
from cacheblend.service.engine.json_lines import LineLimits

from .errors import ApiError, shortened
from .server import Server, run_call, run_document_call

router = APIRouter(prefix="/v1/files")
PURPOSES = ("assistants", "user_data", "batch", "fine-tune", "vision", "evals")
FORM_FIELDS = ("file", "purpose")
MAX_NAME_CHARACTERS = 200
LISTED = 1000
LINE_LIMITS = LineLimits(lines=200_000, decompressed_bytes=MAX_UNPACKED_BYTES)
CHECK_EVERY_S = 0.1  # other uploads have their turns then, and a line is read in less
_FILE = re.compile(rf"(file-([0-9a-f]{{8}})([0-9a-f]{{8}})[0-9a-f]{{16}})/({'|'.join(PURPOSES)})/([^#]+)(#.*)?", re.DOTALL)
_SUFFIX = re.compile(r"\.[a-z0-9]{1,8}")  # what says of which kind a file is; a file name of the system holds few bytes
_FORM = {
    "type": "object",
    "required": list(FORM_FIELDS),
    "properties": {"file": {"type": "string", "format": "binary"}, "purpose": {"type": "string", "enum": list(PURPOSES)}},
}


@router.post("", openapi_extra={"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": _FORM}}}})
async def create(request: Request) -> dict[str, Any]:
    """Read a file, and ingest its text as documents; returns when their KV is durable.

    The same bytes once more, under the same name and for the same purpose, are the file that is there, and make it whole.
    """
    server: Server = request.app.state.server
    engine: Engine = request.state.engine
    async with request.app.state.server.reading[request.state.tenant], _form(request) as form:
        name, raw = await _uploaded(form.get("file"))
        if unknown := [field for field in form if field not in FORM_FIELDS]:
            field = shortened(unknown[0])
            raise ApiError(400, f"{field}: is no field of this request; leave it out", param="file", code="invalid_value")
        purpose = form.get("purpose")
    if purpose not in PURPOSES:
        message = f"purpose: must be one of {', '.join(PURPOSES)}"
        raise ApiError(400, message, param="purpose", code="invalid_value")
    digest = hashlib.sha256(f"{purpose}/{name}\0".encode() + raw).hexdigest()[:16]
    end = f"{len(raw):08x}{digest}/{purpose}/{name}"

    with server.ingests.follow(request.state.tenant, name) as progress:

        def ingest(check: Check) -> str:
            progress("read", 0, 1)
            known = (id_.partition("#")[0] for id_ in engine.retriever.ids("file-"))
            first = next(
                (id_ for id_ in known if id_[13:] == end), f"file-{int(time.time()):08x}{end}"
            )  # 13: before is its time
            engine.ingest(_documents(first, name, raw, server.http.max_documents, check), progress, check)
            return first

        return _body(await run_call(server.uploads, request, ingest, until_begun=True))


@router.get("")
async def ls(
    request: Request,
    limit: Annotated[int, Query(ge=1, le=LISTED, description="At most so many files.")] = LISTED,
    after: Annotated[str | None, Query(description="List those after the file of this id.")] = None,
    order: Annotated[Literal["asc", "desc"], Query(description="By the time of their upload.")] = "desc",
    purpose: Annotated[str | None, Query(description="Those of this purpose alone.")] = None,
) -> dict[str, Any]:
    """A page of the files."""
    files = list((await run_document_call(request, _files)).values())
    bodies = [body for body in (_body(ids[0]) for ids in files) if purpose in (None, body["purpose"])]
    bodies.sort(key=lambda body: str(body["id"]), reverse=order == "desc")
    start = next((at + 1 for at, body in enumerate(bodies) if body["id"] == after), 0)
    if after is not None and not start:
        raise ApiError(400, f"after: there is no file {shortened(after)}", param="after", code="file_not_found")
    page = bodies[start : start + limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(bodies) > start + limit,
    }


@router.get("/{id_}")
async def retrieve(id_: str, request: Request) -> dict[str, Any]:
    """One file."""
    return _body((await run_document_call(request, lambda engine: _ids(engine, id_)))[0])


@router.get("/{id_}/content")
async def content(id_: str, request: Request) -> Response:
    """The text that was read from a file, its pages one after the other. The bytes that were sent are not kept.

    Where chunks overlap, what they share stands in it twice.
    """

    def read(engine: Engine) -> str:
        shown = (engine.documents.show(document) for document in _ids(engine, id_))
        # The first chunk begins with the title, which is of the name, or of a JSON line.
        return "\n".join("".join(chunk.text for chunk in chunks).removeprefix(f"{status.title}\n") for status, chunks in shown)

    return PlainTextResponse(await run_document_call(request, read))


@router.delete("/{id_}")
async def delete(id_: str, request: Request) -> dict[str, Any]:
    """Remove a file's documents, and the KV that no other document needs."""

    def remove(engine: Engine) -> None:
        for document in _ids(engine, id_):
            engine.documents.delete(document)

    await run_document_call(request, remove)
    return {"id": id_, "object": "file", "deleted": True}


@asynccontextmanager
async def _form(request: Request) -> AsyncIterator[FormData]:
    """The form of a request, whose body is there; parsed in a thread: 30 MiB of almost boundaries take seconds."""

    async def parse() -> FormData:
        return await request.form(max_files=1, max_fields=8)

    form = await run_in_threadpool(lambda: asyncio.run(parse()))
    try:
        yield form
    finally:
        await form.close()


async def _uploaded(file: object) -> tuple[str, bytes]:
    """Name and bytes of a form's file; of the name no folders.

    Raises:
        ApiError: it is missing, or its name is of no use.
    """
    if not isinstance(file, UploadFile):
        raise ApiError(400, "file: is missing; send it as a file of multipart/form-data", param="file", code="invalid_value")
    name = PurePosixPath(PureWindowsPath(file.filename or "").name).name
    if not name or len(name) > MAX_NAME_CHARACTERS or NO_ID.search(name) or "#" in name:
        message = f"file: its name must have 1 to {MAX_NAME_CHARACTERS} characters, no control characters and no #"
        raise ApiError(400, message, param="file", code="invalid_value")
    return name, await file.read()


def _documents(first: str, name: str, raw: bytes, most: int, check: Check) -> list[dict[str, Any]]:
    """The documents of a file, read as `cacheblend ingest` reads it; `check` ends the reading where nobody waits for it.

    Raises:
        ApiError: it cannot be read, or is too much.
    """
    checked_at = time.monotonic()

    def check_in_time() -> None:
        nonlocal checked_at
        if time.monotonic() - checked_at >= CHECK_EVERY_S:
            check()
            checked_at = time.monotonic()

    is_lines = name.lower().endswith(JSONL_SUFFIXES)
    if name.lower().endswith(PARQUET_SUFFIX):
        why = "file: Parquet is read by `cacheblend ingest` alone; send its rows as JSON lines"
        raise ApiError(400, why, param="file", code="invalid_value")
    with _written(name, raw) as path, FileConverter() as converter:
        documents, characters = list[dict[str, Any]](), 0
        try:
            title = PurePosixPath(name).stem
            read = file_documents(path, first, converter, title=title, where=name, check=check_in_time, limits=LINE_LIMITS)
            for number, document in enumerate(islice(read, most + 1), 1):
                documents.append({**document, "id": f"{first}#line={number}"} if is_lines else document)
                characters += len(document["text"])
                if len(documents) > most or characters > MAX_CHARACTERS:
                    why = f"file: more than {most} documents or {MAX_CHARACTERS} characters; split it"
                    raise ApiError(413, why, param="file", code="too_many_documents")
        except MissingExtraError as error:
            remedy = f"file: this kind needs the extra `{error.extra}` where the service runs; send it as text"
            raise ApiError(400, remedy, param="file", code="invalid_value") from error
        except InputError as error:
            why = str(error).replace(str(path.resolve()), name).replace(str(path), name)
            raise ApiError(400, f"file: {why}", param="file", code="invalid_value") from None
    return documents


@contextmanager
def _written(name: str, raw: bytes) -> Iterator[Path]:
    """A temporary file of these bytes, with the end of the name that says its kind.

    Raises:
        StoreFullError: it cannot be written.
    """
    known = next((suffix for suffix in JSONL_SUFFIXES if name.lower().endswith(suffix)), PurePosixPath(name.lower()).suffix)
    with ExitStack() as opened:
        try:
            folder = opened.enter_context(tempfile.TemporaryDirectory(prefix="cacheblend-", ignore_cleanup_errors=True))
            path = Path(folder, f"file{known if known in JSONL_SUFFIXES or _SUFFIX.fullmatch(known) else ''}")
            path.write_bytes(raw)
        except OSError as error:
            raise StoreFullError(f"an upload cannot be written to the folder of temporary files: {error}") from error
        yield path


def _files(engine: Engine, prefix: str = "file-") -> dict[str, list[str]]:
    """The ids of the documents of each file, or of those whose id begins with a text, by the file's id; pages in order."""
    files = dict[str, list[str]]()
    for document in sorted(engine.retriever.ids(prefix), key=part_order):
        if (found := _FILE.fullmatch(document)) is not None:
            files.setdefault(found[1], []).append(document)
    return files


def _ids(engine: Engine, id_: str) -> Sequence[str]:
    files = _files(engine, f"{id_}/")
    if id_ not in files:
        raise ApiError(404, f"there is no file {shortened(id_)}; `GET /v1/files` lists them", param="id", code="file_not_found")
    return files[id_]


def _body(document: str) -> dict[str, Any]:
    found = _FILE.fullmatch(document)
    assert found is not None, "the id of a file's document"
    return {
        "id": found[1],
        "object": "file",
        "bytes": int(found[3], 16),
        "created_at": int(found[2], 16),
        "filename": found[5],
        "purpose": found[4],
        "status": "processed",
        "expires_at": None,
        "status_details": None,
    }
