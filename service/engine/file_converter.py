"""Conversion of files that are no plain text (see `KINDS`), in a process of its own with bounds of time, memory and size.

The files are untrusted, and their parsers are large. A process without the service's environment imports the parsers, and is
forked for each file; the fork is confined (`confinement.py`), writes the parts of the text or an error as JSON into a pipe, and
ends. One that hangs or swells is killed, and only its file is lost; what has taken over one reads no other file.
"""

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
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from io import FileIO
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from cacheblend.base.errors import InputError, MissingExtraError

from .confinement import MEANS, confine
from .file_readers import read_parts

logger = logging.getLogger(__name__)
EXTRA = "documents"
# A page or a slide of less is no document of its own: a quarter of a chunk of 512 tokens. In characters, as ids must follow
# from the file alone, whichever model and options read it.
SHORT_PART_CHARACTERS = 512
JOINED_KINDS = ("page", "slide")  # not sheets, which are tables of their own, and have names
MAX_FILE_BYTES = 256 * 2**20
MAX_CHARACTERS = 32 * 2**20  # of all that comes out of a file
MAX_CACHED_CHARACTERS = 64 * 2**20  # of what is kept between counting and ingesting
TIMEOUT_S = 120.0  # a file, with the start of the process
CHECK_EVERY_S = 0.1  # while a file is converted
READ_BYTES = 2**20  # of an answer at once
MAX_ANSWER_BYTES = 12 * MAX_CHARACTERS + 2**24  # two escapes of JSON a character
MAX_ANSWER_VALUES = 2_000_000  # strings, commas and brackets: some 7 a part
MAX_PATH_BYTES = 2**15  # as JSON
TOO_MUCH_MEMORY = "needs more memory than a file may have"
CONVERTING = threading.Lock()  # one conversion at a time in all, since each may take the memory of one


@dataclass(frozen=True, slots=True)
class TextPart:
    """A page of a PDF, a slide or a sheet, or all of another file; short pages and slides with those that follow.

    Args:
        place: "page=3", "slide=2-4", "sheet=Sales"; empty for all of a file.
        text: Markdown, or plain text of a PDF.
        fault: why a page has no text.
    """

    place: str
    text: str
    fault: str = ""


class FileConverter:
    """Converts files one after the other, in a process that begins with the first one and that `close` ends."""

    def __init__(self, timeout_s: float = TIMEOUT_S) -> None:
        self._timeout_s = timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._paths: socket.socket
        self._cache = dict[tuple[str, int, int], list[TextPart]]()
        self._cached_characters = 0

    def convert(self, path: Path, check: Callable[[], None] = lambda: None, where: str | None = None) -> list[TextPart]:
        """The text of a file, in parts that a citation can name, then the faults of others; what `check` raises ends it.

        `where` names the file in messages, in place of its path.

        Raises:
            InputError: the file is too large, damaged, encrypted, without text, or took too long.
            MissingExtraError: the extra `documents` is not installed.
        """
        where, status = where or str(path), path.stat()
        if status.st_size > MAX_FILE_BYTES:
            raise InputError(f"{where}: larger than {MAX_FILE_BYTES // 2**20} MiB; split it")
        key = (str(path.absolute()), status.st_size, status.st_mtime_ns)
        if key in self._cache:
            return self._cache[key]
        while not CONVERTING.acquire(timeout=CHECK_EVERY_S):
            check()
        try:
            answer = self._ask(path, check)
        finally:
            CONVERTING.release()
        if lacks := [means for means in MEANS if means in answer.get("lacks", ())]:
            _warn_of(*lacks)
        if missing := answer.get("missing"):
            raise MissingExtraError(missing, EXTRA)
        if error := answer.get("error"):
            raise InputError(f"{where}: {error}")
        faults = [part for part in answer["parts"] if part.fault]
        parts = join_short_parts([part for part in answer["parts"] if part.text.strip()])
        if not parts:
            raise InputError(f"{where}: {faults[0].fault if faults else 'no text in it; leave it out'}")
        parts += _same_faults(faults)
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
                    socket.send_fds(self._paths, [json.dumps(str(path.absolute())).encode()], [writing])
                answer = self._read(answers, check)
        except BaseException:
            self.close()
            raise
        if answer is not None and answer.endswith(b"\n") and (found := _parsed(answer)):
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
                [sys.executable, "-P", "-m", "cacheblend.service.engine.file_converter"],
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


def _parsed(answer: bytes) -> dict[str, Any] | None:
    """The values of an answer, checked, since a file may have taken its reader over; None of one that no reader gives."""
    from .document_sources import check_json  # which imports this module

    try:
        check_json(answer, "the answer", MAX_ANSWER_VALUES, max_text_bytes=MAX_ANSWER_BYTES)
        found: dict[str, Any] = json.loads(answer)
        parts, words = found.get("parts", []), [found.get(name, "") for name in ("error", "missing")]
        "".join([*words, *found.get("lacks", []), *(text for part in parts for text in part)])  # TypeError if one is no text
        return {**found, "parts": [TextPart(*part) for part in parts]}
    except (ValueError, TypeError, AttributeError, RecursionError):
        return None


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


def _same_faults(parts: Sequence[TextPart]) -> list[TextPart]:
    """The faults, each once, of the parts together that have it: "page 2, 3, 7"."""
    places = dict[str, list[str]]()
    for part in parts:
        places.setdefault(part.fault, []).append(part.place.partition("=")[2])
    kind = parts[0].place.partition("=")[0] if parts else ""
    return [TextPart(f"{kind} {', '.join(numbers)}", "", fault) for fault, numbers in places.items()]


def _answer(path: Path) -> dict[str, Any]:
    parts, characters = list[tuple[str, str, str]](), 0
    try:
        for place, text, fault in read_parts(path):
            parts.append((place, text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"), fault))
            if (characters := characters + len(text)) > MAX_CHARACTERS:
                raise InputError(f"more than {MAX_CHARACTERS // 2**20} million characters; split it")
    except ModuleNotFoundError as error:
        return {"missing": error.name or "pypdfium2"}
    except MemoryError:
        raise
    except InputError as error:
        return {"error": str(error)}
    except Exception as error:  # any parser's, of any file
        why = " ".join(str(error).split())[:200] or type(error).__name__
        return {"error": f"cannot be read as {path.suffix[1:].upper()} ({why}); open it and save it anew"}
    return {"parts": parts}


def main() -> None:
    """Fork for each path that comes, until no more come; its answer goes into the pipe that came with it."""
    logging.disable()
    sys.setrecursionlimit(10_000)  # elements of web pages that nobody closed lie in each other
    # Before the bounds: what these need to begin is not of a document.
    for name in ("trafilatura", "pypdfium2", "openpyxl", "chardet", "striprtf.striprtf", "lxml.html"):
        with suppress(ModuleNotFoundError):
            importlib.import_module(name)
    with suppress(OSError):  # Linux: where memory is short, these processes go, not the service
        Path("/proc/self/oom_score_adj").write_text("1000")
    with socket.socket(fileno=0) as paths:
        while (came := socket.recv_fds(paths, MAX_PATH_BYTES, 1))[1]:
            path, (writing,) = Path(json.loads(came[0])), came[1]
            if not os.fork():
                paths.close()
                _end_with_answer(path, writing)
            os.close(writing)
            os.wait()


def _end_with_answer(path: Path, writing: int) -> None:
    """Confine this process, write its answer, and end it."""
    try:
        lacks = confine(path)
        try:
            answer = json.dumps({**_answer(path), "lacks": lacks})
        except MemoryError:  # also of what makes the answer of the parts
            answer = json.dumps({"error": f"{TOO_MUCH_MEMORY}; split it"})
        with open(writing, "w", encoding="ascii") as answers:
            answers.write(answer + "\n")
    finally:
        os._exit(0)


if __name__ == "__main__":
    main()
