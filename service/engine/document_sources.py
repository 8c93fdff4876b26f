"""Documents of files: JSON lines, plain text, folders of them or standard input, read one by one within limits."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import logging
import re
import sys
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from cacheblend.base.errors import ConfigError, InputError
from cacheblend.retriever import Document

logger = logging.getLogger(__name__)

TEXT_SUFFIXES = (".txt", ".md", ".rst")
JSONL_SUFFIXES = (".jsonl", ".jsonl.gz")
STANDARD_INPUT = "-"
MAX_TEXT_BYTES = 8 * 2**20  # of one document: some 2 million tokens, whose tokenising takes about 2 GiB of memory
MAX_LINE_BYTES = 32 * 2**20  # of one line, decompressed
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class Shard:
    """The `index`-th of `count` shares, counted from 1. A document's share follows from its id alone, in whatever order.

    Raises:
        ConfigError: there is no such share.
    """

    index: int = 1
    count: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.index <= self.count:
            raise ConfigError("shard", f"{self.index}/{self.count}", "i/n with i from 1 to n, such as 2/4")

    @classmethod
    def parse(cls, text: str) -> Shard:
        """Read "i/n"; raises as the class does."""
        if (found := re.fullmatch(r"(\d+)/(\d+)", text)) is None:
            raise ConfigError("shard", text, "i/n with i from 1 to n, such as 2/4")
        return cls(int(found[1]), int(found[2]))

    def holds(self, document_id: str) -> bool:
        """Whether the document is of this share."""
        digest = hashlib.sha256(document_id.encode()).digest()
        return int.from_bytes(digest, "big") % self.count == self.index - 1


@dataclass(frozen=True, slots=True)
class StreamSize:
    """Size of a stream: documents, and characters of their texts."""

    documents: int
    characters: int


class DocumentStream:
    """Documents of files, folders or standard input; memory holds one at a time.

    Args:
        sources: see `read_documents`.
        shard: gives only the documents of this share.

    Attributes:
        characters: of the texts that were given so far.
    """

    def __init__(self, sources: Sequence[str], shard: Shard) -> None:
        self._sources, self._shard = sources, shard
        self.characters = 0

    def measure(self) -> StreamSize | None:
        """Read it all once and check it; None for standard input, which can be read only once.

        Raises:
            InputError: a source or a document cannot be used, or there is none at all.
        """
        if STANDARD_INPUT in self._sources:
            return None
        documents = characters = given = 0
        for document in self._documents():
            given += 1
            if self._shard.holds(document.id):
                documents, characters = documents + 1, characters + len(document.text)
        if not given:
            raise InputError("no documents to ingest; give at least one")
        return StreamSize(documents, characters)

    def __iter__(self) -> Iterator[Document]:
        for document in self._documents():
            if self._shard.holds(document.id):
                self.characters += len(document.text)
                yield document

    def _documents(self) -> Iterator[Document]:
        for source in self._sources:
            yield from map(Document.of, read_documents(source))


def read_documents(path: str, leave_out: Path | None = None) -> Iterator[dict[str, Any]]:
    """Documents of a file, of every known file below a folder, or of standard input ("-") as JSON lines.

    A line is a document `{"id", "title", "text"}` or a case `{"passages": [{"title", "text"}, ...]}` whose passages are the
    documents. A text file is one document, named after the file. Of a folder, the file `leave_out` is no document, and a
    symbolic link that leads out of the folder is left out with a warning.

    Raises:
        InputError: no such file, an unknown kind, or a line or file that is no document, named by file and line.
    """
    if path == STANDARD_INPUT:
        # A test's or a notebook's standard input may be text alone.
        lines = sys.stdin.buffer if hasattr(sys.stdin, "buffer") else io.BytesIO(sys.stdin.read().encode())
        yield from _line_documents(_values(lines, "standard input"))
        return
    root = Path(path)
    if not root.exists():
        raise InputError(f"{path} does not exist; give a file, a folder, or - for standard input")
    if root.is_dir():
        files = _files_below(root)
        if leave_out is not None:
            files = [file for file in files if file.resolve() != leave_out.resolve()]
        if not files:
            raise InputError(f"{path} holds no {', '.join(TEXT_SUFFIXES + JSONL_SUFFIXES)} file")
    else:
        files = [root]
    for file in files:
        yield from _file(file, root if root.is_dir() else root.parent)


def _files_below(root: Path) -> list[Path]:
    """The known files below a folder, in order; folders that are links are not entered."""
    inside = root.resolve()
    files = []
    for file in sorted(root.rglob("*")):
        if not file.name.endswith(TEXT_SUFFIXES + JSONL_SUFFIXES) or not file.is_file():
            continue
        if file.resolve().is_relative_to(inside):
            files.append(file)
        else:
            logger.warning("%s is a link out of %s and was left out; give the file itself to ingest it", file, root)
    return files


def _file(path: Path, root: Path) -> Iterator[dict[str, Any]]:
    if path.name.endswith(JSONL_SUFFIXES):
        yield from _line_documents(read_json_lines(path))
    elif path.name.endswith(TEXT_SUFFIXES):
        with path.open("rb") as file:
            raw = file.read(MAX_TEXT_BYTES + 1)  # a device or a file that grows has no end
        if len(raw) > MAX_TEXT_BYTES:
            raise _too_long(str(path))
        yield _checked(
            {"id": path.relative_to(root).as_posix(), "title": path.stem, "text": _decode(raw, str(path))}, str(path)
        )
    else:
        raise InputError(f"{path} is of no known kind; give one of {', '.join(TEXT_SUFFIXES + JSONL_SUFFIXES)}")


def _line_documents(lines: Iterator[tuple[str, Any]]) -> Iterator[dict[str, Any]]:
    for where, value in lines:
        passages = value.get("passages") if isinstance(value, dict) else None
        for document in [value] if passages is None else passages if isinstance(passages, list) else [None]:
            if not isinstance(document, dict) or not isinstance(document.get("text"), str):
                raise InputError(f'{where}: neither a document {{"id", "title", "text"}} nor a case with "passages"')
            yield _checked(document, where)


def _checked(document: dict[str, Any], where: str) -> dict[str, Any]:
    if len(document["text"]) > MAX_TEXT_BYTES:
        raise _too_long(where)
    try:
        Document.of(document)
    except InputError as error:
        raise InputError(f"{where}: {error}") from None
    return document


def _too_long(where: str) -> InputError:
    return InputError(f"{where}: a text of more than {MAX_TEXT_BYTES // 2**20} MiB; split it into several documents")


def read_json_lines(path: Path) -> Iterator[tuple[str, Any]]:
    """Each line's place ("FILE, line N") and its JSON value, without empty lines; a file `*.gz` is decompressed.

    Memory holds one line, of at most `MAX_LINE_BYTES`, however small a compressed file is. A byte order mark is taken.

    Raises:
        InputError: a line that is too long or no JSON in UTF-8, named by file and line; a gzip file that is cut off or damaged.
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        if path.name.endswith(".gz"):
            try:
                with gzip.GzipFile(fileobj=file) as lines:
                    yield from _values(lines, str(path))
            except (EOFError, gzip.BadGzipFile, zlib.error) as error:
                raise InputError(f"{path} is no whole gzip file ({error}); compress it again, or copy it again") from error
        else:
            yield from _values(file, str(path))


def _decode(raw: bytes, where: str) -> str:
    """The text of UTF-8 bytes, with or without a byte order mark.

    Raises:
        InputError: they are no UTF-8.
    """
    try:
        return raw.removeprefix(_BOM).decode()
    except UnicodeDecodeError as error:
        found = f"byte 0x{raw.removeprefix(_BOM)[error.start]:02x} at {error.start + 1}"
        raise InputError(f"{where}: not UTF-8 ({found}); save it as UTF-8") from None


def _values(lines: BinaryIO | gzip.GzipFile, name: str) -> Iterator[tuple[str, Any]]:
    number = 0
    while raw := lines.readline(MAX_LINE_BYTES + 1):
        number += 1
        where = f"{name}, line {number}"
        if len(raw) > MAX_LINE_BYTES:
            raise InputError(f"{where}: longer than {MAX_LINE_BYTES // 2**20} MiB; split it into several lines")
        if (text := _decode(raw, where)).strip():
            yield where, parse_json(text, where)


def parse_json(text: str, where: str) -> Any:
    """The value of a JSON text; raises InputError, which names `where`, if it is none."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise InputError(f"{where}: not JSON ({error.msg} at column {error.colno})") from None
    except RecursionError:
        raise InputError(f"{where}: JSON that is nested too deeply; a document has texts alone") from None
    except ValueError as error:  # a number of thousands of digits
        raise InputError(f"{where}: JSON that cannot be read ({error}); write such a number as text") from None
