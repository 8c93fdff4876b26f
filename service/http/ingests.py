"""`/v1/ingests`: uploads as jobs, which outlive the requests and connections that brought them."""

import logging
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from fastapi import APIRouter, Request

from cacheblend.base.errors import CacheBlendError, ClientGoneError, QueueFullError, ServiceError, ShuttingDownError
from cacheblend.base.threads import Check, Progress
from cacheblend.service.engine.ingest import IngestReport
from cacheblend.service.serving.calls import Call

from .guard import ApiError, JsonRoute, error_body

logger = logging.getLogger(__name__)
router = APIRouter(route_class=JsonRoute)
MAX_ENDED = 100
MAX_NAME_CHARACTERS = 200  # of a file, and of an upload in a list
Work = Callable[[Progress], IngestReport]


@dataclass(slots=True, eq=False)
class Ingest:
    """An upload: its parts, which are files or one body of documents, and how far it is.

    Args:
        parts: the work of each by its name; done one after the other, and dropped then, since it holds the part's bytes.
        nbytes: of all parts.

    Attributes:
        progress: stage ("waiting", "read", "index", "precompute"), and documents, in "precompute" chunks, done of how many,
            of the part that is under way.
        parts_done: parts that are ingested or have failed.
        errors: the errors of parts that failed, by name.
        faults: pages without text, and why, by their places.
    """

    tenant: str
    parts: dict[str, Work]
    nbytes: int
    name: str = field(init=False)
    total: int = field(init=False)
    id: str = field(init=False, default_factory=lambda: f"ingest-{uuid.uuid4().hex}")
    progress: tuple[str, int, int] = ("waiting", 0, 0)
    parts_done: int = 0
    report: IngestReport = field(default_factory=IngestReport)
    errors: dict[str, Exception] = field(default_factory=dict)
    faults: dict[str, str] = field(default_factory=dict)
    call: Call[IngestReport] = field(init=False)

    def __post_init__(self) -> None:
        first, *others = self.parts
        self.name = f"{first[:MAX_NAME_CHARACTERS]}{f' and {len(others)} more' if others else ''}"
        self.total = len(self.parts)
        self.call = Call(self.run, tenant=self.tenant, until_begun=True)
        self.call.future.add_done_callback(self._note_end)

    def _note_end(self, ended: Future[IngestReport]) -> None:
        """Forget the bytes of an upload that never runs; log that the service's stop ended it, which no list has afterwards."""
        if self.call.begun is None:
            self.parts.clear()
        if not ended.cancelled() and isinstance(ended.exception(), ShuttingDownError):
            logger.warning("the stop ended the upload %s (%s); send it again", self.id, self.name)

    def run(self, check: Check) -> IngestReport:
        """Ingest the parts; raises the first one's error if all fail, and at once what ends the upload as such."""
        try:
            for name in list(self.parts):
                try:
                    self.report += self.parts.pop(name)(Progress(self.note, check))
                except ServiceError:
                    raise
                except CacheBlendError as error:
                    if error_body(error)["error"]["message"] != str(error):  # of which clients are not shown all
                        logger.error("the upload %s, %s: %s", self.id, name, error)
                    self.errors[name] = _bare(error)
                self.parts_done += 1
            if len(self.errors) == self.total:
                raise next(iter(self.errors.values()))
            stage, _, total = self.progress  # the last part may have failed
            self.progress = stage, total, total
        except Exception as error:
            if not isinstance(error, CacheBlendError):
                logger.exception("the upload %s met an error", self.id)
            raise _bare(error) from None
        finally:
            self.parts.clear()
        return self.report

    def note(self, stage: str, done: int, total: int) -> None:
        """Note how far the part is; from any thread."""
        self.progress = stage, done, total

    @property
    def status(self) -> str:
        """Of waiting, running, done, failed and cancelled; a job of which a part is ingested is done, if it was not ended."""
        if not self.call.future.done():
            return "waiting" if self.call.begun is None else "running"
        error = self.call.future.exception()
        return "done" if error is None else "cancelled" if isinstance(error, ClientGoneError) else "failed"

    def body(self) -> dict[str, Any]:
        """Plain values for JSON."""
        progress = dict(zip(("stage", "done", "total"), self.progress, strict=True))
        errors: dict[str, Exception] = {**self.errors}
        if self.status == "failed" and not errors and isinstance(error := self.call.future.exception(), Exception):
            errors = {self.name: error}
        return {
            "object": "ingest",
            "id": self.id,
            "name": self.name,
            "status": self.status,
            **progress,
            "files": {"done": self.parts_done, "total": self.total},
            "errors": [{"file": name, **error_body(error)["error"]} for name, error in errors.items()],
            "faults": [f"{place}: {why}" for place, why in self.faults.copy().items()],
            "report": self.report.as_dict(),
        }


class Ingests:
    """The uploads of all tenants, in the order of their coming; of the event loop's thread.

    Args:
        limit_bytes: of one tenant's bodies that wait or are being ingested.
        max_ended: uploads of a tenant that are remembered after their end, the last ones.
    """

    def __init__(self, limit_bytes: int, max_ended: int = MAX_ENDED) -> None:
        self._limit_bytes, self._max_ended = limit_bytes, max_ended
        self._all: dict[str, Ingest] = {}

    def add(self, ingest: Ingest) -> None:
        """List an upload, and forget the earliest ones that have ended; QueueFullError for too many bytes together."""
        ended = [one for one in self.of(ingest.tenant) if one.call.future.done()]
        held_bytes = sum(one.nbytes for one in self.of(ingest.tenant) if not one.call.future.done())
        if held_bytes and held_bytes + ingest.nbytes > self._limit_bytes:
            why = "your uploads that wait have too many bytes together; wait for one of `GET /v1/ingests`, or cancel it"
            raise QueueFullError(why, 5)
        for one in ended[: max(0, len(ended) - self._max_ended)]:
            self.forget(one)
        self._all[ingest.id] = ingest

    def forget(self, ingest: Ingest) -> None:
        """List an upload no more."""
        self._all.pop(ingest.id, None)

    def of(self, tenant: str) -> list[Ingest]:
        """Uploads of a tenant."""
        return [one for one in self._all.values() if one.tenant == tenant]

    def find(self, tenant: str, id_: str) -> Ingest:
        """An upload of a tenant; a 404 if there is none, or it is another's."""
        found = self._all.get(id_)
        if found is None or found.tenant != tenant:
            why = "it never was, or ended long ago, or the service was started anew; `GET /v1/ingests` lists all"
            raise ApiError(404, f"there is no such upload: {why}", param="id", code="ingest_not_found")
        return found


def _bare(error: Exception) -> Exception:
    """The error without its frames and those before it, which hold the documents."""
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)


@router.get("/v1/ingests")
async def ls(request: Request) -> dict[str, Any]:
    """The uploads that wait, run, or have ended lately, each with its stage and how much of it is done."""
    ingests: Ingests = request.app.state.server.ingests
    return {"object": "list", "data": [ingest.body() for ingest in ingests.of(request.state.tenant)]}


@router.get("/v1/ingests/{id_}")
async def show(id_: str, request: Request) -> dict[str, Any]:
    """One upload; `files` says how many are done, `errors` which could not be ingested."""
    ingests: Ingests = request.app.state.server.ingests
    return ingests.find(request.state.tenant, id_).body()


@router.delete("/v1/ingests/{id_}")
async def cancel(id_: str, request: Request) -> dict[str, Any]:
    """End an upload that waits or runs: nothing stays of the file under way; those before it do."""
    server = request.app.state.server
    ingest: Ingest = server.ingests.find(request.state.tenant, id_)
    if ingest.call.future.done():
        why = f"the upload is {ingest.status} already; delete its documents with `DELETE /v1/documents/{{id}}`"
        raise ApiError(409, why, param="id", code="ingest_ended")
    server.uploads.leave(ingest.call, ClientGoneError("the upload was cancelled"))
    return ingest.body()
