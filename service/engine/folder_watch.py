"""Folders that are followed: files that come, change and go become documents that come, change and go."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from cacheblend.base.errors import CacheBlendError, InputError
from cacheblend.base.extras import needs_extra
from cacheblend.base.files import replacing
from cacheblend.retriever import Document

from .document_sources import file_documents, files_below
from .engine import Engine
from .file_converter import FileConverter
from .ingest import IngestReport

RECORD_FILE = "watched.json"
QUIET_MS = 500  # without a change, before changes are followed: a file that is being written is left alone
MOST_WAIT_MS = 5000  # for that
RESCAN_MS = 60_000  # also without an event: network shares send none


@dataclass(frozen=True, slots=True)
class WatchedFile:
    """What was ingested of a file: its size and time of change then, and the versions of its documents by id."""

    size: int
    mtime_ns: int
    documents: Mapping[str, str]


@dataclass(slots=True)
class FollowReport:
    """What following did: the ingests together, documents that were deleted, and faults by file."""

    ingested: IngestReport = field(default_factory=IngestReport.empty)
    deleted: int = 0
    faults: dict[str, str] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.ingested.added or self.ingested.replaced or self.deleted or self.faults)

    def __str__(self) -> str:
        one = self.ingested
        return (
            f"documents: {one.added} new, {one.replaced} changed, {self.deleted} deleted; chunks whose KV was computed: "
            f"{one.computed} ({one.seconds:.1f} s)"
        )


class FolderWatch:
    """Ingests the files of folders, and follows their changes.

    A document is deleted where its file, or its page of a file, is gone, and nobody has replaced it since: never what was
    ingested from elsewhere. A file that cannot be used keeps what was ingested of it before. What was ingested of which file
    is noted beside the store, so that files which go while nobody watches are found out later.

    Args:
        engine: ingests and deletes; nothing else changes its documents meanwhile, or it takes them for others'.
        folders: of the files.
    """

    def __init__(self, engine: Engine, folders: Sequence[str]) -> None:
        self._engine = engine
        self._folders = [Path(folder).absolute() for folder in folders]
        self._record = Path(engine.config.store_dir) / RECORD_FILE
        self._files = _read_record(self._record)

    def run(self, on_change: Callable[[FollowReport], None], stop: threading.Event | None = None) -> None:
        """Follow until `stop`, or until an exception such as KeyboardInterrupt ends it.

        Raises:
            MissingExtraError: `watchfiles` is not installed.
        """
        with needs_extra("rag"):
            from watchfiles import watch

        folders = [folder for folder in self._folders if folder.is_dir()]
        # Yields at once where something changes, and else now and then: a change between two waits is found then.
        changes = watch(
            *folders,
            watch_filter=None,
            stop_event=stop,
            step=QUIET_MS,
            debounce=MOST_WAIT_MS,
            rust_timeout=RESCAN_MS,
            yield_on_timeout=True,
            ignore_permission_denied=True,
        )
        for _ in changes:
            if report := self.follow():
                on_change(report)

    def follow(self) -> FollowReport:
        """Ingest what is new or changed, and then delete what is gone, so that what moved keeps its KV."""
        report = FollowReport()
        for folder in self._folders:
            if folder.is_dir():  # else it is unmounted or renamed, and its documents stay
                self._follow(folder, self._files.setdefault(str(folder), {}), report)
        return report

    def _follow(self, folder: Path, known: dict[str, WatchedFile], report: FollowReport) -> None:
        before = dict(known)
        found = {str(file): file for file in files_below(folder, {})}
        gone = [known.pop(name).documents for name in known.keys() - found.keys()]
        owners = {id_: name for name, one in known.items() for id_ in one.documents}
        with FileConverter() as converter:
            for name, file in found.items():
                try:
                    status = file.stat()
                except OSError:  # gone again
                    continue
                last = known.get(name, WatchedFile(-1, 0, {}))
                if (last.size, last.mtime_ns) == (status.st_size, status.st_mtime_ns):
                    continue
                documents: Mapping[str, str] = last.documents
                try:
                    documents = self._ingest(file, file.relative_to(folder).as_posix(), converter, owners, report)
                except (CacheBlendError, OSError) as error:
                    report.faults[name] = str(error)
                known[name] = WatchedFile(status.st_size, status.st_mtime_ns, documents)
                owners |= dict.fromkeys(documents, name)
                gone.append({id_: last.documents[id_] for id_ in last.documents.keys() - documents.keys()})
        self._delete(gone, report)
        if known != before:
            _write_record(self._record, self._files)

    def _ingest(
        self, file: Path, id_: str, converter: FileConverter, owners: Mapping[str, str], report: FollowReport
    ) -> dict[str, str]:
        """Ingest what of a file is not here yet; the versions of all its documents."""
        documents = [Document.of(one) for one in file_documents(file, id_, converter, {})]
        for one in documents:
            if owners.get(one.id, str(file)) != str(file):
                raise InputError(f"{file}: {owners[one.id]} has a document of the id {one.id!r}; rename it")
        changed = [one for one in documents if self._engine.retriever.version(one.id) != one.version]
        if changed:
            report.ingested += self._engine.ingest_stream(changed)
        return {one.id: one.version for one in documents}

    def _delete(self, gone: Sequence[Mapping[str, str]], report: FollowReport) -> None:
        """Delete documents, but for those that have another version by now, or stand in another file."""
        if any(gone):
            others = {id_ for files in self._files.values() for file in files.values() for id_ in file.documents}
            for id_, version in (one for documents in gone for one in documents.items()):
                if id_ not in others and self._engine.retriever.version(id_) == version:
                    with suppress(InputError):  # deleted meanwhile
                        self._engine.documents.delete(id_)
                        report.deleted += 1


def _read_record(path: Path) -> dict[str, dict[str, WatchedFile]]:
    """What was ingested of which file, by folder; nothing where there is no record that can be read."""
    with suppress(OSError, ValueError, TypeError, AttributeError):
        folders: dict[str, dict[str, Any]] = json.loads(path.read_bytes())
        return {
            folder: {name: WatchedFile(one["size"], one["mtime_ns"], dict(one["documents"])) for name, one in files.items()}
            for folder, files in folders.items()
        }
    return {}


def _write_record(path: Path, folders: Mapping[str, Mapping[str, WatchedFile]]) -> None:
    value = {folder: {name: asdict(one) for name, one in files.items()} for folder, files in folders.items()}
    with replacing(path) as file:
        file.write(json.dumps(value).encode())


def check_folders(sources: Sequence[str], store_dir: Path, shard: str) -> None:
    """Refuse to watch what is no folder, holds the store, or is read in shares.

    Raises:
        InputError: so.
    """
    for source in sources:
        if not os.path.isdir(source):
            raise InputError(f"--watch follows folders, and {source} is none; ingest files, patterns and URLs without it")
        if store_dir.resolve().is_relative_to(Path(source).resolve()):
            raise InputError(
                f"--watch: the store {store_dir} lies in {source} and would be read, too; give another --store-dir"
            )
    if shard != "1/1":
        raise InputError("--watch does not go with --shard; watch each share's folder by itself")
