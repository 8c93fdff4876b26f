"""JSON lines of a file, a gzip file or standard input, read line by line within limits."""

from __future__ import annotations

import gzip
import io
import json
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from cacheblend.base.errors import InputError

MOST_LINE_BYTES = 32 * 2**20  # of one line, decompressed
_BOM = b"\xef\xbb\xbf"


def read_json_lines(path: Path) -> Iterator[tuple[str, Any]]:
    """Each line's place ("FILE, line N") and its JSON value, without empty lines; a file `*.gz` is decompressed.

    Memory holds one line, of at most `MOST_LINE_BYTES`, however small a compressed file is. A byte order mark is taken.

    Raises:
        InputError: a line that is too long or no JSON in UTF-8, named by file and line; a gzip file that is cut off or damaged.
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        if path.name.endswith(".gz"):
            with gzip.GzipFile(fileobj=file) as lines, _whole_gzip(path):
                yield from _values(lines, str(path))
        else:
            yield from _values(file, str(path))


def read_standard_input() -> Iterator[tuple[str, Any]]:
    """`read_json_lines` of standard input; raises as that does."""
    # A test's or a notebook's standard input may be text alone.
    lines = sys.stdin.buffer if hasattr(sys.stdin, "buffer") else io.BytesIO(sys.stdin.read().encode())
    yield from _values(lines, "standard input")


def decode(raw: bytes, where: str) -> str:
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
    while raw := lines.readline(MOST_LINE_BYTES + 1):
        number += 1
        where = f"{name}, line {number}"
        if len(raw) > MOST_LINE_BYTES:
            raise InputError(f"{where}: longer than {MOST_LINE_BYTES // 2**20} MiB; split it into several lines")
        if (text := decode(raw, where)).strip():
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


@contextmanager
def _whole_gzip(path: Path) -> Iterator[None]:
    try:
        yield
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise InputError(f"{path} is no whole gzip file ({error}); compress it again, or copy it again") from error
