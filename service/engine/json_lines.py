"""JSON lines: the values of a file's lines, one in memory at a time, each named by its place in messages."""

from __future__ import annotations

import codecs
import gzip
import json
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from cacheblend.base.errors import InputError

MAX_LINE_BYTES = 8 * 2**20  # of one line, decompressed
MAX_VALUES = 200_000  # of one JSON text that a client sends: 2 bytes of JSON are up to 64 of Python's
MAX_TEXT_BYTES = 8 * 2**20  # of one of its strings; a call on a string holds Python's lock for all of it
PIECE_BYTES = 2**16  # of a JSON text that are counted at once; then other threads may run


@dataclass(frozen=True, slots=True)
class LineLimits:
    """Bounds of a file from somebody who is not trusted: a small one may unpack to any size.

    Args:
        lines: those without a value count too.
        decompressed_bytes: of all lines.
    """

    lines: int
    decompressed_bytes: int


def read_json_lines(
    path: Path, check: Callable[[], None] = lambda: None, limits: LineLimits | None = None
) -> Iterator[tuple[str, Any]]:
    """Each line's place ("FILE, line N") and its JSON value, without empty lines; a file `*.gz` is decompressed.

    Memory holds one line, of at most `MAX_LINE_BYTES`, however small a compressed file is. A byte order mark is taken.

    Args:
        path: the file.
        check: called once a line; what it raises ends the reading.
        limits: bounds of the file; None for none.

    Raises:
        InputError: a line that is too long or no JSON in UTF-8, named by file and line; a gzip file that is cut off or damaged;
            more than the limits.
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        if path.name.endswith(".gz"):
            try:
                with gzip.GzipFile(fileobj=file) as lines:
                    yield from read_lines(lines, str(path), check, limits)
            except (EOFError, gzip.BadGzipFile, zlib.error) as error:
                raise InputError(f"{path} is no whole gzip file ({error}); compress it again, or copy it again") from error
        else:
            yield from read_lines(file, str(path), check, limits)


def read_lines(
    lines: BinaryIO | gzip.GzipFile, name: str, check: Callable[[], None] = lambda: None, limits: LineLimits | None = None
) -> Iterator[tuple[str, Any]]:
    """`read_json_lines` of what is open already; `name` is its name in messages."""
    number = read_bytes = 0
    while raw := lines.readline(MAX_LINE_BYTES + 1):
        check()
        number, read_bytes = number + 1, read_bytes + len(raw)
        where = f"{name}, line {number}"
        if len(raw) > MAX_LINE_BYTES:
            raise InputError(f"{where}: longer than {MAX_LINE_BYTES // 2**20} MiB; split it into several lines")
        if limits is not None and (number > limits.lines or read_bytes > limits.decompressed_bytes):
            bound = f"{limits.lines:,} lines or {limits.decompressed_bytes // 2**20} MiB"
            raise InputError(f"{name}: more than {bound}, unpacked; split it")
        check_values(raw, where)
        if (text := _decode(raw, where)).strip():
            yield where, parse_json(text, where)


def check_values(raw: bytes, where: str, max_values: int = MAX_VALUES, piece_bytes: int = PIECE_BYTES) -> None:
    """Refuse JSON of too many values (strings, and what commas and brackets separate) or with too long a string, unread.

    Raises:
        InputError: more than `max_values` values, or a string of more than `MAX_TEXT_BYTES`; it names `where`.
    """
    values = text_bytes = start = 0
    in_text = False
    while start < len(raw):
        piece = raw[start : start + piece_bytes]
        if (len(piece) - len(piece.rstrip(b"\\"))) % 2:  # its last backslash escapes the byte after it
            piece = raw[start : start + len(piece) + 1]
        start += len(piece)
        # What is left of quotation marks opens or closes a string.
        for number, part in enumerate(piece.replace(rb"\\", b"__").replace(rb"\"", b"__").split(b'"')):
            if number:
                in_text, text_bytes = not in_text, 0
                values += in_text
            if in_text:
                text_bytes += len(part)
            else:
                values += part.count(b",") + part.count(b"[") + part.count(b"{")
            if text_bytes > MAX_TEXT_BYTES:
                raise InputError(f"{where}: a text of more than {MAX_TEXT_BYTES} bytes; split it into several documents")
        if values > max_values:
            raise InputError(f"{where}: more than {max_values} values; send it in parts")


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


def _decode(raw: bytes, where: str) -> str:
    """The text of UTF-8 bytes, with or without a byte order mark.

    Raises:
        InputError: they are no UTF-8.
    """
    raw = raw.removeprefix(codecs.BOM_UTF8)
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        found = f"byte 0x{raw[error.start]:02x} at {error.start + 1}"
        raise InputError(f"{where}: not UTF-8 ({found}); save it as UTF-8") from None
