"""Documents from files: JSON lines, plain text, or folders of them."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cacheblend.base.errors import InputError
from cacheblend.retriever import Document

from .json_lines import decode, read_json_lines, read_standard_input

logger = logging.getLogger(__name__)

TEXT_SUFFIXES = (".txt", ".md", ".rst")
JSONL_SUFFIXES = (".jsonl", ".jsonl.gz")
MOST_TEXT_BYTES = 8 * 2**20  # of one document: some 2 million tokens, whose tokenising takes about 2 GiB of memory


def read_documents(path: str, leave_out: Path | None = None) -> Iterator[dict[str, Any]]:
    """Documents of a file, of every known file below a folder, or of standard input ("-") as JSON lines.

    A line is a document `{"id", "title", "text"}` or a case `{"passages": [{"title", "text"}, ...]}` whose passages are the
    documents. A text file is one document, named after the file. Of a folder, the file `leave_out` is no document, and a
    symbolic link that leads out of the folder is left out with a warning.

    Raises:
        InputError: no such file, an unknown kind, or a line or file that is no document, named by file and line.
    """
    if path == "-":
        yield from _line_documents(read_standard_input())
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
            raw = file.read(MOST_TEXT_BYTES + 1)  # a device or a file that grows has no end
        if len(raw) > MOST_TEXT_BYTES:
            raise _too_long(str(path))
        yield _checked({"id": path.relative_to(root).as_posix(), "title": path.stem, "text": decode(raw, str(path))}, str(path))
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
    if len(document["text"]) > MOST_TEXT_BYTES:
        raise _too_long(where)
    try:
        Document.of(document)
    except InputError as error:
        raise InputError(f"{where}: {error}") from None
    return document


def _too_long(where: str) -> InputError:
    return InputError(f"{where}: a text of more than {MOST_TEXT_BYTES // 2**20} MiB; split it into several documents")
