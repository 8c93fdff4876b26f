"""Folders that are followed: files that come, change and go become documents that come, change and go."""

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from cacheblend.base.errors import InputError, needs_extra
from cacheblend.base.files import replacing
from cacheblend.retriever import Document

from .document_sources import UNLISTED, NoTextError, SourceReport, file_documents, files_below
from .engine import Engine
from .file_converter import FileConverter
from .ingest import IngestReport

RECORD_FILE = "watched.json"
RESCAN_MS = 60_000  # also without an event: network shares send none


@dataclass(slots=True)
class FollowReport:
    """Report of following: the ingests and deletions together, and new faults by file."""

    ingested: IngestReport = field(default_factory=IngestReport)
    faults: dict[str, str] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.ingested.added or self.ingested.replaced or self.ingested.deleted or self.faults)


class WatchedFile(NamedTuple):
    """Record of a file: size and time of change as it was read, the versions of its documents by id, and why it is unusable."""

    seen: Sequence[int] = ()
    documents: Mapping[str, str] = {}
    fault: str = ""


class FolderWatch:
    """Ingests the files of folders, and follows their changes.

    A document is deleted when its file, or its page of a file, is gone and nobody has replaced it since; a document from
    elsewhere never is, nor all of a folder at once: one that is empty may be unmounted. A file that cannot be used keeps what
    was ingested of it before. What was ingested of which file is noted beside the store, so that files which go while nobody
    watches are found later. `faults` has those that cannot be used.
    """

    def __init__(self, engine: Engine, folders: Sequence[str]) -> None:
        self._engine, self._folders = engine, [Path(folder).absolute() for folder in folders]
        self._record = Path(engine.config.store_dir) / RECORD_FILE
        self._files, self.faults = self._noted(), dict[str, str]()

    def _noted(self) -> dict[str, WatchedFile]:
        with suppress(OSError, ValueError, TypeError, AttributeError):
            noted = json.loads(self._record.read_bytes()).items()
            return {name: WatchedFile(*one) for name, one in noted if isinstance(one, list)}
        return {}

    def reports(self) -> Iterator[FollowReport]:
        """Follow until an exception such as KeyboardInterrupt ends it; reports come when something has changed."""
        with needs_extra("rag"):
            from watchfiles import watch

        folders = [folder for folder in self._folders if os.path.isdir(folder)]
        changes = watch(*folders, rust_timeout=RESCAN_MS, yield_on_timeout=True, ignore_permission_denied=True)
        yield from filter(None, (self.follow() for _ in chain([None], changes)))

    def follow(self) -> FollowReport:
        """Ingest what is new or changed, then delete what is gone, so that a document that moved keeps its KV.

        An error that is not the file's own, such as a full disk, leaves the file to the next call.
        """
        report, notes, left_out = FollowReport(), SourceReport(), dict[str, str]()
        # A folder that is gone or empty is unmounted or renamed: its documents stay, as those of one that cannot be listed.
        folders = [folder for folder in self._folders if os.path.isdir(folder)]
        found = {str(file): (file, folder) for folder in folders for file in files_below(folder, left_out)}
        unknown = [name for name, why in left_out.items() if why == UNLISTED]
        filled = {folder for _, folder in found.values()}
        lost = [name for name in self._files.keys() - found.keys() if _is_in(name, filled) and not _is_in(name, unknown)]
        gone = {name: self._files.pop(name) for name in lost}
        with closing(FileConverter()) as converter:
            for name, (file, folder) in found.items():
                with notes.noting(name):
                    self._follow_file(file, file.relative_to(folder).as_posix(), converter, report)
        with notes.noting(next(iter(gone), "")):
            self._delete({name: left.documents for name, left in gone.items()}, report)
            gone.clear()
        self._files |= gone  # until their documents are deleted
        self._files = {name: one for name, one in self._files.items() if _is_in(name, self._folders)}
        self._files |= {name: one for name, one in self._noted().items() if not _is_in(name, self._folders)}  # another watch's
        with notes.noting(str(self._record)), replacing(self._record) as noted:
            # What could not be read is tried again after a start: it may have lacked time or memory.
            files = {name: one._replace(seen=()) if one.fault else one for name, one in self._files.items()}
            noted.write(json.dumps(files).encode())
        report.faults = {name: why for name, why in notes.faults.items() if self.faults.get(name) != why}
        self.faults = notes.faults
        return report

    def _follow_file(self, file: Path, id_: str, converter: FileConverter, report: FollowReport) -> None:
        """Ingest a file if it is new or has changed, and delete the documents that it has no more."""
        name, status = str(file), file.stat()
        seen, last = [status.st_size, status.st_mtime_ns], self._files.get(name, WatchedFile())
        if seen == last.seen:
            if last.fault:
                raise InputError(last.fault)
            return
        documents, notes = list[Document](), SourceReport()
        try:
            with suppress(NoTextError):
                documents += notes.distinct(name, file_documents(file, id_, converter, fault=notes.note))
        except InputError as error:
            self._files[name] = WatchedFile(seen, last.documents, str(error))
            raise
        for one in documents:
            if others := [other for other in self._others(name, one.id) if self._files[other].documents[one.id] != one.version]:
                raise InputError(f"{file}: {others[0]} has a document of the id {one.id!r}; rename it")
        if changed := [one for one in documents if self._engine.retriever.version(one.id) != one.version]:
            report.ingested += self._engine.ingest_stream(changed)
        now = {**(last.documents if notes.faults else {}), **{one.id: one.version for one in documents}}
        self._delete({name: {one: last.documents[one] for one in last.documents.keys() - now}}, report)
        self._files[name] = WatchedFile(seen, now, fault := "; ".join(notes.faults.values()))
        if fault:
            raise InputError(fault)

    def _delete(self, files: Mapping[str, Mapping[str, str]], report: FollowReport) -> None:
        """Delete the documents of files that no other file has, unless they have another version by now."""
        version = self._engine.retriever.version
        known = [(name, *one) for name, documents in files.items() for one in documents.items()]
        gone = {id_ for name, id_, last in known if not self._others(name, id_) and version(id_) == last}
        self._engine.documents.remove(sorted(gone))  # at once: each call rewrites the index's file
        report.ingested += IngestReport(deleted=len(gone))

    def _others(self, name: str, id_: str) -> list[str]:
        """Names of other files that have a document of an id."""
        return [other for other, file in self._files.items() if id_ in file.documents and other != name]


def _is_in(name: str, folders: Iterable[str | Path]) -> bool:
    return any(map(Path(name).is_relative_to, folders))


def check_folders(sources: Sequence[str], store_dir: Path) -> None:
    """Raise InputError for a source that is no folder or holds the store."""
    for source in map(Path, sources):
        if not source.is_dir():
            raise InputError(f"--watch follows folders, and {source} is none; ingest files, patterns and URLs without it")
        if store_dir.resolve().is_relative_to(source.resolve()):
            raise InputError(f"--watch: the store {store_dir} lies in {source} and would be read; give another --store-dir")
