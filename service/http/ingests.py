"""`/v1/ingests`: what is being uploaded, and how far it is."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request

if TYPE_CHECKING:
    from cacheblend.service.engine.document_encoder import Progress

router = APIRouter(prefix="/v1/ingests")
MAX_NAME_CHARACTERS = 200


@dataclass(frozen=True, slots=True)
class Ingest:
    """An upload that has not ended.

    Args:
        name: of the file, or the first document's id.
        stage: "waiting" for its turn, "read" into text, "index" or "precompute".
        done: documents, in "precompute" chunks.
        total: of them; 0 where that is not known.
    """

    name: str
    stage: str
    done: int
    total: int


class RunningIngests:
    """The uploads of all tenants that have not ended. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: dict[object, tuple[str, Ingest]] = {}  # by a token of each: its tenant, and how far it is

    @contextmanager
    def follow(self, tenant: str, name: str) -> Iterator[Progress]:
        """List an upload while the block runs; what it gives is called with the stage, how much is done, and of how much."""
        token, name = object(), name[:MAX_NAME_CHARACTERS]

        def report(stage: str, done: int, total: int) -> None:
            with self._lock:
                if token in self._running:  # a thread may go on for a moment after its client has left
                    self._running[token] = tenant, Ingest(name, stage, done, total)

        with self._lock:
            self._running[token] = tenant, Ingest(name, "waiting", 0, 0)
        try:
            yield report
        finally:
            with self._lock:
                del self._running[token]

    def of(self, tenant: str) -> list[Ingest]:
        """A tenant's, in the order of their coming."""
        with self._lock:
            return [ingest for owner, ingest in self._running.values() if owner == tenant]


@router.get("")
async def ls(request: Request) -> dict[str, Any]:
    """The uploads that have not ended, each with its stage and how much of it is done."""
    running: RunningIngests = request.app.state.server.ingests
    return {"object": "list", "data": [{"object": "ingest", **asdict(ingest)} for ingest in running.of(request.state.tenant)]}
