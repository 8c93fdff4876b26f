"""Conversion of PDF, Office, HTML and EPUB files to text, in a process of its own with bounds of time, memory and size.

The files are untrusted, and their parsers are large. A process without the service's environment imports the parsers, and is
forked for each file; the fork is confined (`confinement.py`), writes the parts of the text or an error as JSON into a pipe, and
ends. One that hangs or swells is killed, and only its file is lost; what has taken over one reads no other file.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from io import FileIO
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from cacheblend.base.errors import InputError, MissingExtraError

from .confinement import confine

logger = logging.getLogger(__name__)
EXTRA = "documents"
PAGE_SUFFIX = ".webpage"  # of a page that was fetched: its text is taken without its menus
ZIPPED_SUFFIXES = (".docx", ".pptx", ".xlsx", ".epub")
CONVERTERS = {suffix: f"{suffix[1:].title()}Converter" for suffix in (".html", *ZIPPED_SUFFIXES)} | {".htm": "HtmlConverter"}
CONVERTED_SUFFIXES = (".pdf", PAGE_SUFFIX, *CONVERTERS)
# A page or a slide of less is no document of its own: a quarter of a chunk of 512 tokens. In characters, as ids must follow
# from the file alone, whichever model and options read it.
SHORT_PART_CHARACTERS = 512
JOINED_KINDS = ("page", "slide")  # not sheets, which are tables of their own, and have names
MAX_FILE_BYTES = 256 * 2**20
MAX_UNPACKED_BYTES = 512 * 2**20  # of an archive's members, as its directory says; more than that is not unpacked
MAX_MEMBERS = 20_000
MAX_CHARACTERS = 32 * 2**20  # of all that comes out of a file
MAX_CACHED_CHARACTERS = 64 * 2**20  # of what is kept between counting and ingesting
TIMEOUT_S = 120.0  # a file, with the start of the process
CHECK_EVERY_S = 0.1  # while a file is converted
READ_BYTES = 2**20  # of an answer at once
MAX_ANSWER_BYTES = 12 * MAX_CHARACTERS + 2**24  # two escapes of JSON a character
MAX_PATH_BYTES = 2**15  # as JSON
TOO_MUCH_MEMORY = "needs more memory than a file may have"
CONVERTING = threading.Lock()  # one conversion at a time in all, since each may take the memory of one


@dataclass(frozen=True, slots=True)
class TextPart:
    """A page of a PDF, a slide or a sheet, or all of another file; short pages and slides with those that follow.

    Args:
        place: "page=3", "slide=2-4", "sheet=Sales"; empty for all of a file.
        text: Markdown, or plain text of a PDF.
    """

    place: str
    text: str


class FileConverter:
    """Converts files one after the other, in a process that begins with the first one and that `close` ends."""

    def __init__(self, timeout_s: float = TIMEOUT_S) -> None:
        self._timeout_s = timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._paths: socket.socket
        self._cache = dict[tuple[str, int, int], list[TextPart]]()
        self._cached_characters = 0

    def convert(self, path: Path, check: Callable[[], None] = lambda: None, where: str | None = None) -> list[TextPart]:
        """The text of a file, in parts that a citation can name; what `check` raises meanwhile ends the conversion.

        `where` names the file in messages, in place of its path.

        Raises:
            InputError: the file is too large, damaged, encrypted, without text, or took too long.
            MissingExtraError: the extra `documents` is not installed.
        """
        where, status = where or str(path), path.stat()
        if status.st_size > MAX_FILE_BYTES:
            raise InputError(f"{where}: larger than {MAX_FILE_BYTES // 2**20} MiB; split it")
        key = (str(path.resolve()), status.st_size, status.st_mtime_ns)
        if key in self._cache:
            return self._cache[key]
        while not CONVERTING.acquire(timeout=CHECK_EVERY_S):
            check()
        try:
            answer = self._ask(path, check)
        finally:
            CONVERTING.release()
        if lacks := answer.get("lacks"):
            _warn_of(*lacks)
        if missing := answer.get("missing"):
            raise MissingExtraError(missing, EXTRA)
        if error := answer.get("error"):
            raise InputError(f"{where}: {error}")
        parts = join_short_parts([TextPart(place, text) for place, text in answer["parts"] if text.strip()])
        if not parts:
            raise InputError(f"{where}: no text in it; of scanned pages, make a text by OCR first")
        characters = sum(len(part.text) for part in parts)
        if self._cached_characters + characters <= MAX_CACHED_CHARACTERS:
            self._cache[key] = parts
            self._cached_characters += characters
        return parts

    def _ask(self, path: Path, check: Callable[[], None]) -> dict[str, Any]:
        if self._process is None or self._process.poll() is not None:
            self._start()
        reading, writing = os.pipe()
        try:
            with open(reading, "rb", buffering=0) as answers:
                with open(writing, "wb"), suppress(BrokenPipeError):
                    socket.send_fds(self._paths, [json.dumps(str(path.resolve())).encode()], [writing])
                answer = self._read(answers, check)
        except BaseException:
            self.close()
            raise
        if answer is not None and answer.endswith(b"\n"):
            found: dict[str, Any] = json.loads(answer)
            return found
        self.close()
        if answer is None:
            return {"error": f"not read within {self._timeout_s:g} s; split it, or save it as text"}
        # A system short of memory kills the reader before its own limit is reached, and does not say so.
        return {"error": f"its reader ended: it is damaged, or {TOO_MUCH_MEMORY}; split it, or save it anew or as text"}

    def _start(self) -> None:
        self.close()
        self._paths, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "cacheblend.service.engine.file_converter"],
                env={"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"},  # no keys, no passwords
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,  # libraries print
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # it and its fork are killed together
            )

    def _read(self, answers: FileIO, check: Callable[[], None]) -> bytes | None:
        """An answer to its end; None of one that comes too late, or is longer than any text."""
        answer, late_at = bytearray(), time.monotonic() + self._timeout_s
        while time.monotonic() < late_at and len(answer) <= MAX_ANSWER_BYTES:
            if not wait([answers.fileno()], CHECK_EVERY_S):
                check()
            elif part := answers.read(READ_BYTES):
                answer += part
            else:
                return bytes(answer)
        return None

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._paths.close()
            self._process = None


@cache
def _warn_of(*lacks: str) -> None:
    logger.warning("files are read with less confinement than Linux has (docs/documents.md), for want of %s", "; ".join(lacks))


def join_short_parts(parts: Sequence[TextPart]) -> list[TextPart]:
    """Join pages and slides of fewer than `SHORT_PART_CHARACTERS` to the next, and the last to the one before.

    A page that says only "Chapter 3" would be a chunk of a few tokens. The place names all that were joined, "page=3-4", from
    the first to the last with text; an empty line, where chunks may end, stands between them.
    """
    joined = list[TextPart]()
    for part in parts:
        if joined and _is_short(joined[-1]) and _kind(joined[-1]) == _kind(part):
            joined[-1] = _join(joined[-1], part)
        else:
            joined.append(part)
    if len(joined) > 1 and _is_short(joined[-1]) and _kind(joined[-2]) == _kind(joined[-1]):
        joined[-2:] = [_join(*joined[-2:])]
    return joined


def _kind(part: TextPart) -> str:
    return part.place.partition("=")[0]


def _is_short(part: TextPart) -> bool:
    return _kind(part) in JOINED_KINDS and len(part.text.strip()) < SHORT_PART_CHARACTERS


def _join(first: TextPart, then: TextPart) -> TextPart:
    begin, end = first.place.partition("-")[0], re.split("[=-]", then.place)[-1]
    return TextPart(f"{begin}-{end}", f"{first.text.rstrip()}\n\n{then.text.lstrip()}")


def _parts(path: Path) -> Iterator[tuple[str, str]]:
    """Place and text of a file's parts."""
    suffix = path.suffix.lower()
    if suffix in ZIPPED_SUFFIXES:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
        if len(members) > MAX_MEMBERS or sum(member.file_size for member in members) > MAX_UNPACKED_BYTES:
            limits = f"{MAX_UNPACKED_BYTES // 2**20} MiB or {MAX_MEMBERS} members"
            raise _RefusedError(f"unpacks to more than {limits}; split it")
    if suffix == ".pdf":
        from pypdf import PdfReader

        reader = PdfReader(path)
        if reader.is_encrypted and not reader.decrypt(""):
            raise _RefusedError("locked with a password; save it without one")
        for number, page in enumerate(reader.pages, 1):
            yield f"page={number}", page.extract_text()
        return
    if suffix == PAGE_SUFFIX:
        import trafilatura

        if text := trafilatura.extract(path.read_bytes(), output_format="markdown", favor_recall=True):
            yield "", text
            return
        suffix = ".html"  # a page of a few words, all of which are its text
    from markitdown import StreamInfo, converters

    # One kind's own converter: the package's choice takes what it does not know for an archive, and unpacks that.
    converter = getattr(converters, CONVERTERS[suffix])()
    charset = None
    if suffix in (".html", ".htm"):
        with suppress(UnicodeDecodeError):
            path.read_text(encoding="utf-8")
            charset = "utf-8"
    with path.open("rb") as file:
        markdown = converter.convert(file, StreamInfo(extension=suffix, charset=charset)).markdown
    if suffix == ".pptx":
        yield from _cut(markdown, "<!-- Slide number: ", " -->", "slide")
    elif suffix == ".xlsx":
        yield from _cut("\n" + markdown, "\n## ", "\n", "sheet")
    else:
        yield "", markdown


def _cut(markdown: str, begin: str, end: str, kind: str) -> Iterator[tuple[str, str]]:
    """Parts of a Markdown text, cut before each mark, whose name stands between `begin` and `end`."""
    first, *parts = markdown.split(begin)
    yield "", first
    for part in parts:
        name, _, text = part.partition(end)
        yield f"{kind}={name.strip()}", text


class _RefusedError(ValueError):
    """A sound file that is not taken; the message has the remedy."""


def _answer(path: Path) -> dict[str, Any]:
    parts, characters = list[tuple[str, str]](), 0
    try:
        for place, text in _parts(path):
            parts.append((place, text.encode(errors="replace").decode()))
            if (characters := characters + len(text)) > MAX_CHARACTERS:
                raise _RefusedError(f"more than {MAX_CHARACTERS // 2**20} million characters; split it")
    except ModuleNotFoundError as error:
        return {"missing": error.name or "markitdown"}
    except MemoryError:
        raise
    except _RefusedError as error:
        return {"error": str(error)}
    except Exception as error:  # any parser's, of any file
        why = " ".join(str(error).split())[:200] or type(error).__name__
        return {"error": f"cannot be read as {path.suffix[1:].upper()} ({why}); open it and save it anew"}
    return {"parts": parts}


def main() -> None:
    """Fork for each path that comes, until no more come; its answer goes into the pipe that came with it."""
    logging.disable()
    for name in ("markitdown", "trafilatura", "pypdf"):  # before the bounds: what these need to begin is not of a document
        with suppress(ModuleNotFoundError):
            importlib.import_module(name)
    with suppress(OSError):  # Linux: where memory is short, these processes go, not the service
        Path("/proc/self/oom_score_adj").write_text("1000")
    with socket.socket(fileno=0) as paths:
        while (came := socket.recv_fds(paths, MAX_PATH_BYTES, 1))[1]:
            path, (writing,) = Path(json.loads(came[0])), came[1]
            if not os.fork():
                try:
                    paths.close()
                    with open(writing, "w", encoding="ascii") as answers:
                        answers.write(_confined_answer(path) + "\n")
                finally:
                    os._exit(0)
            os.close(writing)
            os.wait()


def _confined_answer(path: Path) -> str:
    """The answer of a process that ends with it, as JSON."""
    lacks = confine(path)
    try:
        return json.dumps({**_answer(path), "lacks": lacks})
    except MemoryError:  # also of what makes the answer of the parts
        return json.dumps({"error": f"{TOO_MUCH_MEMORY}; split it"})


if __name__ == "__main__":
    main()
