"""Files of an ingest on Ray, here or in an object store: listed where the command runs, read in tasks a batch at a time."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cacheblend.base.errors import InputError
from cacheblend.base.extras import needs_extra
from cacheblend.retriever import Document
from cacheblend.service.engine import document_sources, ingest
from cacheblend.service.engine.document_sources import SourceReport
from cacheblend.service.engine.file_converter import FileConverter

OBJECT_STORES = ("s3", "gs", "gcs", "abfs", "abfss", "hdfs")  # schemes of URLs that pyarrow opens


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFile:
    """A file whose text becomes documents.

    Args:
        name: its path, or its URL in an object store.
        id: of its document.
        bytes: its size.
        is_found: in a folder or by a pattern; a file that was named itself must be right.
    """

    name: str
    id: str
    bytes: int
    is_found: bool


@dataclass(frozen=True, slots=True)
class ReadBatch:
    """Documents for one actor, and the files that gave none, with the reason."""

    documents: Sequence[Document] = ()
    faults: Mapping[str, str] = field(default_factory=dict)
    skipped: Mapping[str, str] = field(default_factory=dict)


def scheme_of(source: str) -> str:
    """The scheme of a URL; empty for a path."""
    before, found, _ = source.partition("://")
    return before.lower() if found else ""


def list_files(sources: Sequence[str], skipped: dict[str, str]) -> list[SourceFile]:
    """The files of sources, without the hidden and the ignored.

    Args:
        sources: files, folders and patterns, or URLs of an object, or of all below a prefix.
        skipped: receives the files that are left out, and why.

    Raises:
        InputError: a source does not exist, holds nothing, or is of a kind that cannot be read in another process.
    """
    files: list[SourceFile] = []
    for source in sources:
        if scheme_of(source) in OBJECT_STORES:
            files += _objects(source)
        elif source == document_sources.STANDARD_INPUT or scheme_of(source):
            raise InputError(f"{source} cannot be ingested with --ray; save it as a file, or ingest it without")
        else:
            is_found = not Path(source).is_file()
            for path, id_ in document_sources.source_files(source, skipped):
                files.append(SourceFile(name=str(path.absolute()), id=id_, bytes=path.stat().st_size, is_found=is_found))
    return files


def in_groups(files: Sequence[SourceFile], batch_documents: int) -> Iterator[list[SourceFile]]:
    """Files that are read one after the other: small ones together, so that their documents fill a batch."""
    group: list[SourceFile] = []
    for file in files:
        group.append(file)
        if len(group) == batch_documents or sum(one.bytes for one in group) >= ingest.BATCH_CHARACTERS:
            yield group
            group = []
    if group:
        yield group


def read_batches(files: Sequence[SourceFile], batch_documents: int) -> Iterator[ReadBatch]:
    """Batches of the documents of files, as the local ingest makes them; memory holds one.

    A file that cannot be used is a fault, and the others are read. Its documents before the fault are ingested.
    """
    report = SourceReport()
    with closing(FileConverter()) as converter:
        for batch in ingest.batches(_documents(files, converter, report), batch_documents):
            yield ReadBatch(batch)
    if report.faults or report.skipped:
        yield ReadBatch((), report.faults, report.skipped)


def _documents(files: Sequence[SourceFile], converter: FileConverter, report: SourceReport) -> Iterator[Document]:
    several = document_sources.DistinctIds(report.faults)
    for file in files:
        with document_sources.noting_faults(report.faults, file.name):
            yield from several.of(file.name, _documents_of(file, converter, report.skipped))


def _documents_of(file: SourceFile, converter: FileConverter, skipped: dict[str, str]) -> Iterator[dict[str, Any]]:
    of_unknown_kind = skipped if file.is_found else None
    if not scheme_of(file.name):
        yield from document_sources.file_documents(Path(file.name), file.id, converter, of_unknown_kind)
        return
    with _local_copy(file) as path:
        title = Path(file.id).stem
        yield from document_sources.file_documents(path, file.id, converter, of_unknown_kind, title=title, where=file.name)


def _objects(url: str) -> list[SourceFile]:
    """An object, or all below a prefix but those whose names begin with a dot; raises InputError if there is none."""
    with needs_extra("ray"):
        from pyarrow import ArrowException
        from pyarrow.fs import FileSelector, FileSystem, FileType

    try:
        filesystem, path = FileSystem.from_uri(url)
        info = filesystem.get_file_info(path)
        is_found = info.type != FileType.File
        infos = filesystem.get_file_info(FileSelector(path, recursive=True)) if is_found else [info]
    except (OSError, ArrowException) as error:
        raise InputError(f"{url} cannot be listed: {error}") from error
    root = path.rstrip("/") if is_found else path.rpartition("/")[0]
    before = url[: url.index("://") + 3]
    files = []
    for one in sorted(infos, key=lambda one: str(one.path)):
        id_ = one.path.removeprefix(root).lstrip("/")
        if one.type == FileType.File and not any(part.startswith(".") for part in id_.split("/")):
            files.append(SourceFile(name=before + one.path, id=id_, bytes=one.size, is_found=is_found))
    if not files:
        raise InputError(f"{url} holds no object; name one, or a prefix that has some below it")
    return files


@contextmanager
def _local_copy(file: SourceFile) -> Iterator[Path]:
    """An object as a file on this machine, by its own name, for the readers of files."""
    from pyarrow.fs import FileSystem

    filesystem, path = FileSystem.from_uri(file.name)
    with tempfile.TemporaryDirectory(prefix="cacheblend-") as folder:
        copy = Path(folder) / Path(path).name
        with filesystem.open_input_stream(path) as source, copy.open("wb") as target:
            shutil.copyfileobj(source, target, 2**20)
        yield copy
