"""Documents from files: JSON lines, plain text, or folders of them."""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from cacheblend.store.errors import InputError

TEXT_SUFFIXES = (".txt", ".md", ".rst")
JSONL_SUFFIXES = (".jsonl", ".jsonl.gz")


def read_documents(path: str, leave_out: Path | None = None) -> Iterator[dict[str, Any]]:
    """Documents of a file, of every known file below a folder, or of standard input ("-") as JSON lines.

    A line is a document `{"id", "title", "text"}` or a case `{"passages": [{"title", "text"}, ...]}` whose passages are the
    documents. A text file is one document, named after the file. Of a folder, the file `leave_out` is no document.

    Raises:
        InputError: no such file, an unknown kind, or a line that is neither, named by file and line.
    """
    if path == "-":
        yield from _json_lines(sys.stdin, "standard input")
        return
    root = Path(path)
    if not root.exists():
        raise InputError(f"{path} does not exist; give a file, a folder, or - for standard input")
    if root.is_dir():
        files = sorted(
            file for file in root.rglob("*") if file.is_file() and file.name.endswith(TEXT_SUFFIXES + JSONL_SUFFIXES)
        )
        if leave_out is not None:
            files = [file for file in files if file.resolve() != leave_out.resolve()]
        if not files:
            raise InputError(f"{path} holds no {', '.join(TEXT_SUFFIXES + JSONL_SUFFIXES)} file")
    else:
        files = [root]
    for file in files:
        yield from _file(file, root if root.is_dir() else root.parent)


def _file(path: Path, root: Path) -> Iterator[dict[str, Any]]:
    try:
        if path.name.endswith(".gz"):
            with gzip.open(path, "rt", encoding="utf-8") as lines:
                yield from _json_lines(lines, str(path))
        elif path.name.endswith(JSONL_SUFFIXES):
            with path.open(encoding="utf-8") as lines:
                yield from _json_lines(lines, str(path))
        elif path.name.endswith(TEXT_SUFFIXES):
            yield {"id": path.relative_to(root).as_posix(), "title": path.stem, "text": path.read_text(encoding="utf-8")}
        else:
            raise InputError(f"{path} is of no known kind; give one of {', '.join(TEXT_SUFFIXES + JSONL_SUFFIXES)}")
    except (UnicodeDecodeError, gzip.BadGzipFile, EOFError) as error:
        raise InputError(f"{path} cannot be read: {error}; save it as UTF-8") from error


def _json_lines(lines: TextIO, name: str) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except json.JSONDecodeError as error:
            raise InputError(f"{name}, line {number}: not JSON ({error.msg} at column {error.colno})") from error
        passages = value.get("passages") if isinstance(value, dict) else None
        for document in [value] if passages is None else passages if isinstance(passages, list) else [None]:
            if not isinstance(document, dict) or not isinstance(document.get("text"), str):
                raise InputError(
                    f'{name}, line {number}: neither a document {{"id", "title", "text"}} nor a case with "passages"'
                )
            yield document
