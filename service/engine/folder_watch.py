"""Folders that are followed: files that come, change and go become documents that come, change and go."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
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
MAX_WAIT_MS = 5000  # for that
RESCAN_MS = 60_000  # also without an event: network shares send none


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedFile:
    """Record of a file that was ingested.

    Args:
        size: of the file then; -1 where it is to be read again.
        mtime_ns: its time of change then.
        documents: the versions of its documents by id.
        fault: why it could not be used as it was then.
        taken_id: of a document of it that another file had with another text.
    """

    size: int = -1
    mtime_ns: int = 0
    documents: Mapping[str, str] = field(default_factory=dict)
    fault: str = ""
    taken_id: str = ""


class _TakenIdError(InputError):
    """Another watched file has a document of the same id."""

    def __init__(self, message: str, id_: str) -> None:
        super().__init__(message)
        self.id = id_


@dataclass(slots=True)
class FollowReport:
    """Report of following: the ingests together, documents that were deleted, and new faults by file."""

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
    ingested from elsewhere. A file that cannot be used keeps what was ingested of it before. Of two files with documents of one
    id and different texts the first one read is taken, and the other as soon as that one is gone. What was ingested of which
    file is noted beside the store, so that files which go while nobody watches are found out later.

    Args:
        engine: ingests and deletes; nothing else changes its documents meanwhile, or it takes them for others'.
        folders: of the files.
    """

    def __init__(self, engine: Engine, folders: Sequence[str]) -> None:
        self._engine = engine
        self._folders = [Path(folder).absolute() for folder in folders]
        self._record = Path(engine.config.store_dir) / RECORD_FILE
        self._files = _read_record(self._record)
        self._noted = _record_bytes(self._files)
        self._passing: dict[str, str] = {}  # what was in the way of a file, a deletion or the record, and may be gone soon

    @property
    def faults(self) -> dict[str, str]:
        """Files that cannot be used as they are, and why."""
        found = {name: one.fault for files in self._files.values() for name, one in files.items() if one.fault}
        return found | self._passing

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
            debounce=MAX_WAIT_MS,
            rust_timeout=RESCAN_MS,
            yield_on_timeout=True,
            ignore_permission_denied=True,
        )
        for _ in changes:
            if report := self.follow():
                on_change(report)

    def follow(self) -> FollowReport:
        """Ingest what is new or changed, and then delete what is gone, so that what moved keeps its KV.

        What met an error that is not the file's own, such as a full disk, is tried again by the next call.
        """
        report, before, gone = FollowReport(), self.faults, list[_Gone]()
        self._passing = {}
        # 1. Forget files that are gone. A folder that is gone is unmounted or renamed, and its documents stay.
        found = {folder: list(files_below(folder, {})) for folder in self._folders if folder.is_dir()}
        for folder, files in found.items():
            known = self._files.setdefault(str(folder), {})
            for name in known.keys() - set(map(str, files)):
                gone += [_Gone(known, name, *one) for one in known.pop(name).documents.items()]
        # 2. Ingest; twice, since a file may wait for an id that a later one lets go.
        owners = _owners(self._files)
        with FileConverter() as converter:
            for folder, files in [*found.items(), *found.items()]:
                for file in files:
                    gone += self._take(file, folder, converter, owners, report)
        # 3. Delete, and note what is there now.
        for one in gone:
            if one.id not in owners:
                with self._trying(one.file):
                    self._delete(one, report)
        with self._trying(str(self._record)):
            if (now := _record_bytes(self._files)) != self._noted:
                with replacing(self._record) as noted:
                    noted.write(now)
                self._noted = now
        report.faults = {name: why for name, why in self.faults.items() if before.get(name) != why}
        return report

    def _take(
        self, file: Path, folder: Path, converter: FileConverter, owners: dict[str, dict[str, str]], report: FollowReport
    ) -> list[_Gone]:
        """Ingest a file if it is new or has changed; what it has no more."""
        name, known = str(file), self._files[str(folder)]
        last = known.get(name, WatchedFile())
        try:
            status = file.stat()
        except OSError:  # gone again
            return []
        is_taken = bool(set(owners.get(last.taken_id, ())) - {name})
        unchanged = (last.size, last.mtime_ns) == (status.st_size, status.st_mtime_ns)
        if name in self._passing or (unchanged and (is_taken or not last.taken_id)):
            return []
        documents, fault, taken_id = last.documents, "", ""
        with self._trying(name):
            try:
                documents = self._ingest(file, file.relative_to(folder).as_posix(), converter, owners, report)
            except InputError as error:
                fault, taken_id = str(error), error.id if isinstance(error, _TakenIdError) else ""
        if name in self._passing:
            return []
        known[name] = WatchedFile(
            size=status.st_size, mtime_ns=status.st_mtime_ns, documents=documents, fault=fault, taken_id=taken_id
        )
        for id_, version in documents.items():
            owners.setdefault(id_, {})[name] = version
        gone = [_Gone(known, name, id_, last.documents[id_]) for id_ in last.documents.keys() - documents.keys()]
        for one in gone:
            del owners[one.id][name]
            if not owners[one.id]:
                del owners[one.id]
        return gone

    def _ingest(
        self,
        file: Path,
        id_: str,
        converter: FileConverter,
        owners: Mapping[str, Mapping[str, str]],
        report: FollowReport,
    ) -> dict[str, str]:
        """Ingest what of a file is not here yet; the versions of all its documents."""
        documents = [Document.of(one) for one in file_documents(file, id_, converter, {})]
        for one in documents:
            for owner, version in owners.get(one.id, {}).items():
                if owner != str(file) and version != one.version:
                    raise _TakenIdError(f"{file}: {owner} has a document of the id {one.id!r}; rename it", one.id)
        changed = [one for one in documents if self._engine.retriever.version(one.id) != one.version]
        if changed:
            report.ingested += self._engine.ingest_stream(changed)
        return {one.id: one.version for one in documents}

    def _delete(self, gone: _Gone, report: FollowReport) -> None:
        """Delete a document, unless it has another version by now; after an error its file is there to lose it again."""
        try:
            if self._engine.retriever.version(gone.id) == gone.version:
                with suppress(InputError):  # deleted meanwhile
                    self._engine.documents.delete(gone.id)
                    report.deleted += 1
        except (CacheBlendError, OSError):
            last = gone.known.get(gone.file, WatchedFile())
            gone.known[gone.file] = replace(last, size=-1, documents={**last.documents, gone.id: gone.version})
            raise

    @contextmanager
    def _trying(self, name: str) -> Iterator[None]:
        """An error of what is in the way of something, until the next try."""
        try:
            yield
        except CacheBlendError as error:
            self._passing[name] = str(error)
        except OSError as error:
            self._passing[name] = f"{name}: {error.strerror or error}"


@dataclass(frozen=True, slots=True)
class _Gone:
    """A document that its file has no more, and the files of the folder that are known."""

    known: dict[str, WatchedFile]
    file: str
    id: str
    version: str


def _owners(folders: Mapping[str, Mapping[str, WatchedFile]]) -> dict[str, dict[str, str]]:
    """By document id the files that have it, each with its version."""
    owners: dict[str, dict[str, str]] = {}
    for files in folders.values():
        for name, one in files.items():
            for id_, version in one.documents.items():
                owners.setdefault(id_, {})[name] = version
    return owners


def _read_record(path: Path) -> dict[str, dict[str, WatchedFile]]:
    """What was ingested of which file, by folder; nothing where there is no record that can be read."""
    with suppress(OSError, ValueError, TypeError, AttributeError):
        folders: dict[str, dict[str, Any]] = json.loads(path.read_bytes())
        return {folder: {name: WatchedFile(**one) for name, one in files.items()} for folder, files in folders.items()}
    return {}


def _record_bytes(folders: Mapping[str, Mapping[str, WatchedFile]]) -> bytes:
    value = {folder: {name: asdict(one) for name, one in files.items()} for folder, files in folders.items()}
    return json.dumps(value).encode()


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
