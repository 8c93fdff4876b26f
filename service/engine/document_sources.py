"""Documents of files: JSON lines, text of any encoding, what has a reader; of folders, URLs or standard input, in bounds."""

import codecs
import glob
import gzip
import json
import mimetypes
import os
import re
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from io import BufferedIOBase
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO

from cacheblend.base.errors import CacheBlendError, InputError, needs_extra
from cacheblend.retriever import Document, PlainTokenizer
from cacheblend.retriever.document import NO_ID, TITLED_SUFFIXES, front_title
from cacheblend.retriever.metadata import Metadata

from .file_converter import FileConverter
from .file_readers import KINDS
from .pdf_text import WITHOUT_TEXT
from .text_encoding import MAX_SAMPLE_BYTES, decoded
from .web_pages import SCHEMES, WebFiles

TEXT_SUFFIXES = (".txt", ".md", ".rst", ".csv")
JSONL_SUFFIXES = (".jsonl", ".jsonl.gz")
IGNORE_FILES = (".gitignore", ".cacheblendignore")
UNLISTED = "a folder that cannot be listed"
STANDARD_INPUT = "-"
MAX_VALUES = 200_000  # of one JSON text that a client sends: 2 bytes of JSON are up to 64 of Python's
# Of a document or a string of JSON: some 2 million tokens, whose tokenising needs about 2 GiB; Python's lock is held for all.
MAX_TEXT_BYTES = 8 * 2**20
TOO_LONG = f"a text of more than {MAX_TEXT_BYTES // 2**20} MiB; split it into several documents"
PIECE_BYTES = 2**16  # of a JSON text that are counted at once; then other threads may run
MAX_LINE_BYTES = 8 * 2**20  # of one JSON line, decompressed
LEAST_LINE_BYTES = 2684  # that a line counts as: 200,000 empty ones are as much work as half a GiB
CHARACTERS_PER_TOKEN = 4.0  # of English text, where none can be tokenised
SAMPLE_CHARACTERS, SAMPLE_DOCUMENTS = 1024, 64  # to count tokens in: enough to know a language by
Fault = Callable[[str, str], None]  # notes the place and the fault of a part of a file


class NoTextError(InputError):
    """A file of an unknown kind holds no text that can be used."""


@dataclass(slots=True)
class SourceReport:
    """Files that gave no documents, and why: faults of known kinds, and what is skipped as hidden, ignored, or no text.

    The first fault is raised if `strict`.
    """

    faults: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    strict: bool = False
    faulty_parts: int = field(default=0, init=False, compare=False)  # as often as they were noted
    versions: dict[str, str] = field(default_factory=dict, init=False, repr=False, compare=False)  # by document

    @contextmanager
    def noting(self, name: str, *, is_found: bool = True) -> Iterator[None]:
        """Enter an error of a file; a file without text is skipped if it was found in a folder or by a pattern."""
        try:
            yield
        except (CacheBlendError, OSError) as error:
            why = str(error) if isinstance(error, CacheBlendError) else f"{name}: {error.strerror or error}"
            if is_found and isinstance(error, NoTextError):
                self.skipped[name] = why.removeprefix(f"{name}: ")
            elif self.strict:
                raise
            else:
                self.faults[name] = why

    def note(self, place: str, why: str) -> None:
        """Enter a part of a file that gave no document, where others of it do; a page without text is skipped."""
        if why in WITHOUT_TEXT:
            self.skipped[place] = why
        else:
            self.faulty_parts += 1
            self.faults[place] = f"{place}: {why}"

    def distinct(self, source: str, documents: Iterable[Document]) -> Iterator[Document]:
        """The documents of a source; of two with one id and different texts, the later one is a fault."""
        for document in documents:
            if self.versions.setdefault(document.id, document.version) == document.version:
                yield document
            else:
                self.faults[f"{source}: {document.id}"] = f"{source}: another document has the id {document.id!r}; rename it"


@dataclass(slots=True)
class StreamSize:
    """Documents of a stream, the characters of the texts of the new ones, and the beginnings of the first ones."""

    documents: int = 0
    characters: int = 0
    sample: list[str] = field(default_factory=list, compare=False, repr=False)

    def tokens(self, tokenizer: Any) -> int:
        """About how many tokens the texts are; by the sample where there are a sample and a tokenizer."""
        sampled = sum(map(len, self.sample))
        if not sampled or tokenizer is None:
            return round(self.characters / CHARACTERS_PER_TOKEN)
        plain = PlainTokenizer(tokenizer)
        return round(self.characters * sum(len(plain.ids(piece)) for piece in self.sample) / sampled)


class DocumentStream:
    """Documents of files, of files below folders or of patterns, of URLs, or of JSON lines of standard input ("-").

    Memory holds one at a time. A line is a document `{"id", "title", "text"}`. A text file is one document, named after the
    file. Every page of a PDF, slide and sheet is one of its own, with an id such as `report.pdf#page=3`, so that an answer can
    cite it; short ones are joined, `report.pdf#page=3-4`. Of a folder, hidden files, what `.gitignore` and `.cacheblendignore`
    name, files that are no text, and symbolic links out of it are no documents.

    Of several files, those that cannot be used are reported, and the others are read. A single one must be right: it raises
    what `file_documents` does.

    Args:
        metadata: of all documents, beside those that lines have; a line's own come first.

    Attributes:
        report: of what was left out.
        ids: of the documents that were given so far.
        files: the ids of the files that they are parts of, without those of which a part could not be read.
    """

    def __init__(self, sources: Sequence[str], web: WebFiles | None = None, metadata: Metadata = MappingProxyType({})) -> None:
        self._sources, self._web, self._converter, self._metadata = sources, web or WebFiles(), FileConverter(), metadata
        self.ids, self.files = set[str](), set[str]()
        only = sources[0] if len(sources) == 1 else ""
        self.report = SourceReport(strict=only == STANDARD_INPUT or _is_url(only) or os.path.isfile(only))

    def measure(
        self, on_file: Callable[[Path], None] = lambda _: None, known: Callable[[str], str | None] | None = None
    ) -> StreamSize | None:
        """Read it all once, and raise InputError if it cannot be used; None for standard input, which can be read only once.

        `on_file` is called with each file before it is read; `known` has the version of a document that is not new.
        """
        if STANDARD_INPUT in self._sources:
            return None
        size = StreamSize()
        for document in self._documents(on_file):
            if size.documents < SAMPLE_DOCUMENTS:
                size.sample.append(document.text[:SAMPLE_CHARACTERS])
            size.documents += 1
            if known is None or known(document.id) != document.version:
                size.characters += len(document.text)
        if not size.documents:
            skipped = [f"{name}: {why}" for name, why in self.report.skipped.items()]
            whys = [*self.report.faults.values(), *skipped]
            more = [f"and {len(whys) - 5:,} more"] if len(whys) > 5 else []
            raise InputError("; ".join(["no documents to ingest", *(whys[:5] or ["give at least one"]), *more]))
        return size

    def __iter__(self) -> Iterator[Document]:
        for document in self._documents():
            self.ids.add(document.id)
            yield document

    def close(self) -> None:
        """End the process that converts files, and remove those that were fetched."""
        self._converter.close()
        self._web.close()

    def _documents(self, on_file: Callable[[Path], None] = lambda _: None) -> Iterator[Document]:
        self.report.versions.clear()  # of an earlier reading, as the files
        self.files.clear()
        for source in self._sources:
            yield from self.report.distinct(source, self._read(source, on_file))

    def _read(self, source: str, on_file: Callable[[Path], None]) -> Iterator[Document]:
        if source == STANDARD_INPUT:
            with self.report.noting(source, is_found=False):
                yield from _line_documents(_read_lines(sys.stdin.buffer, "standard input"), self.report.note, self._metadata)
        elif _is_url(source):
            with self.report.noting(source, is_found=False):
                path, title = self._web.fetch(source)
                yield from self._read_file(path, source.partition("#")[0], title=title, where=source)
        else:
            for file, id_ in source_files(source, self.report.skipped):
                with self.report.noting(str(file), is_found=Path(source) != file):
                    on_file(file)
                    yield from self._read_file(file, id_)

    def _read_file(self, path: Path, id_: str, **named: Any) -> Iterator[Document]:
        self.files.discard(id_)  # of another source
        before, note = self.report.faulty_parts, self.report.note
        yield from file_documents(path, id_, self._converter, metadata=self._metadata, fault=note, **named)
        self.files.update([id_] if self.report.faulty_parts == before else ())


def _is_url(source: str) -> bool:
    return source.partition("://")[0].lower() in SCHEMES and "://" in source


def source_files(path: str, skipped: dict[str, str]) -> list[tuple[Path, str]]:
    """The files of a file, a folder or a pattern, each with the id of its document; InputError if there are none.

    `skipped` collects the files that are left out, and why.
    """
    root = Path(path)
    if path and root.is_dir():
        files = files_below(root, skipped)
    elif path and root.exists():
        files, root = [root], root.parent
    elif glob.has_magic(path):
        found = [Path(name) for name in sorted(glob.glob(path, recursive=True)) if os.path.isfile(name)]
        root = Path(*Path(path).parts[: next(at for at, part in enumerate(Path(path).parts) if glob.has_magic(part))])
        files = _without_links_out(found, root, skipped)
    else:
        raise InputError(f"{path or 'an empty name'} does not exist; give a file, a folder, a pattern, or - for standard input")
    if not files:
        raise InputError(f"no file of {path} can be read; give one with text")
    return [(file, file.relative_to(root).as_posix()) for file in files]


def files_below(root: Path, skipped: dict[str, str]) -> list[Path]:
    """The files below a folder, in order, without the hidden and the ignored; links and stores are not entered.

    `skipped` receives the paths that are left out, and why: `UNLISTED` of a folder whose files are unknown.
    """
    with needs_extra("rag"):
        from pathspec import GitIgnoreSpec

    specs, found = dict[Path, GitIgnoreSpec](), list[Path]()

    def is_pattern(line: str) -> bool:
        with suppress(ValueError, re.error):  # git passes over such a line too
            return bool(GitIgnoreSpec.from_lines([line]))
        return False

    def is_ignored(path: Path, suffix: str = "") -> bool:
        verdict = None
        for folder in reversed(path.relative_to(root).parents):
            if (spec := specs.get(root / folder)) is not None:
                own = spec.check_file(path.relative_to(root / folder).as_posix() + suffix).include
                verdict = verdict if own is None else own
        return bool(verdict)

    for at, folders, names in os.walk(root, onerror=lambda error: skipped.update({str(error.filename): UNLISTED})):
        here, lines = Path(at), list[str]()
        for name in (one for one in IGNORE_FILES if os.path.isfile(here / one)):  # not a pipe, which may have no end
            with suppress(OSError), (here / name).open("rb") as file:  # one that cannot be read has none
                lines += file.read(MAX_SAMPLE_BYTES).decode("utf-8-sig", errors="replace").splitlines()
        if lines:
            specs[here] = GitIgnoreSpec.from_lines(filter(is_pattern, lines))
        for name in list(folders):
            path = here / name
            why = "hidden" if name.startswith(".") else "a link to a folder" if os.path.islink(path) else ""
            if os.path.isfile(path / "kv" / "store.json"):
                why = "a store"
            if why or is_ignored(path, "/"):
                folders.remove(name)
                skipped[f"{path}/"] = why or "ignored"
        for name in names:
            path = here / name
            kind = "" if os.path.isfile(path) else "no file" if os.path.lexists(path) else UNLISTED
            why = "hidden" if name.startswith(".") else "ignored" if is_ignored(path) else kind
            if why:
                skipped[str(path)] = why
            else:
                found.append(path)
    return _without_links_out(sorted(found), root, skipped)


def _without_links_out(files: Sequence[Path], root: Path, skipped: dict[str, str]) -> list[Path]:
    """The files that are in a folder, also where they are links."""
    inside = root.resolve()
    out = {file for file in files if not file.resolve().is_relative_to(inside)}
    skipped.update(dict.fromkeys(map(str, sorted(out)), "a link out of the folder"))
    return [file for file in files if file not in out]


def file_documents(
    path: Path,
    id_: str,
    converter: FileConverter,
    *,
    fault: Fault,
    title: str | None = None,
    where: str | None = None,
    metadata: Metadata = MappingProxyType({}),
    check: Callable[[], None] = lambda: None,
    max_bytes: int | None = None,
) -> Iterator[Document]:
    """The documents of a file; see `DocumentStream`.

    Parts of it have their place appended to `id_`; `where` names it in messages, in place of its path. A text that begins with
    no title has `title`; left out, the file's name. `metadata` are as in `DocumentStream`. `check` is called once a line, and
    again and again during a conversion; what it raises ends the reading. `max_bytes` bounds JSON lines, unpacked. `fault` is
    called with the place and the fault of a line or a page that is no document.

    Raises:
        InputError: the file is no document. NoTextError: it is empty, or of an unknown kind and no text.
        MissingExtraError: the file needs the extra `documents`.
        OSError: it cannot be read.
    """
    name, where, title = path.name.lower(), where or str(path), title or path.stem
    if NO_ID.search(id_):
        raise InputError(f"{where}: a name with control characters, or bytes that are no UTF-8; rename the file")
    ends = [end for end in KINDS if name.removesuffix(".gz").endswith(end)]
    kind = None if not ends else "unpack it" if name.endswith(".gz") else KINDS[ends[0]]
    if isinstance(kind, str):
        raise InputError(f"{where}: a file of this kind is not read; {kind}")
    if name.endswith(JSONL_SUFFIXES):
        with _opened(path, where) as lines:
            yield from _line_documents(_read_lines(lines, where, check, max_bytes), fault, metadata)
        return
    if kind is not None:
        for part in converter.convert(path, check, where):
            place, at = (f"#{part.place}", f"{where}, {part.place}") if part.place else ("", where)
            of_part = f"{title}, {part.place.replace('=', ' ')}" if place else front_title(part.text) or title
            try:
                if part.fault:
                    raise InputError(part.fault)
                yield _document({"id": id_ + place, "title": of_part, "text": part.text}, at, metadata)
            except InputError as error:
                fault(at, str(error).removeprefix(f"{at}: "))
        return
    text = _read_text(path, where)
    title = (name.removesuffix(".gz").endswith(TITLED_SUFFIXES) and front_title(text)) or title
    yield _document({"id": id_, "title": title, "text": text}, where, metadata)


def _read_text(path: Path, where: str) -> str:
    """The text of a file, or of one in a gzip file, in UTF-8, UTF-16 or 32, or an encoding that is detected.

    Raises InputError if it is too long, or binary although its name says text; else NoTextError if it has none.
    """
    name = path.name.lower().removesuffix(".gz")
    with _opened(path, where) as file:
        raw = file.read(MAX_SAMPLE_BYTES)
        kind = (mimetypes.guess_type(name)[0] or "").partition("/")[0]
        if kind in ("image", "font") or (kind in ("audio", "video") and decoded(raw) is None):  # some texts' names are theirs
            raise NoTextError(f"{where}: {kind}; describe it in a text file")
        if (text := decoded(raw)) is not None:
            raw += file.read(MAX_TEXT_BYTES + 1 - len(raw))  # a device or a file that grows has no end
            if len(raw) > MAX_TEXT_BYTES:
                raise InputError(f"{where}: {TOO_LONG}")
            text = decoded(raw)
    if text is None:
        error = InputError if name.endswith(TEXT_SUFFIXES) else NoTextError
        raise error(f"{where}: binary, or text in no known encoding; save it as UTF-8")
    if not text.strip():
        raise NoTextError(f"{where}: empty; write something into it, or leave it out")
    return text


@contextmanager
def _opened(path: Path, where: str) -> Iterator[BinaryIO | gzip.GzipFile]:
    """A file, decompressed if it is `*.gz`; InputError if that is cut off or damaged."""
    with gzip.open(path) if path.name.lower().endswith(".gz") else path.open("rb") as file:
        try:
            yield file
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise InputError(f"{where} is no whole gzip file ({error}); compress it again, or copy it again") from error


def read_json_lines(path: Path) -> Iterator[tuple[str, Any]]:
    """Each line's place ("FILE, line N") and its JSON value, without empty lines; a file `*.gz` is decompressed.

    Memory holds one line, of at most `MAX_LINE_BYTES`, however small a compressed file is. A byte order mark is dropped.

    Raises:
        InputError: a line that is too long or no JSON in UTF-8, named by file and line; a gzip file that is cut off or damaged.
        OSError: the file cannot be read.
    """
    with _opened(path, str(path)) as lines:
        for place, raw in _read_lines(lines, str(path)):
            yield place, _line_value(raw, place)


def _read_lines(
    lines: BinaryIO | BufferedIOBase, name: str, check: Callable[[], None] = lambda: None, max_bytes: int | None = None
) -> Iterator[tuple[str, bytes]]:
    """Place and bytes of each line that is not empty; `name` is that of the file.

    `max_bytes` bounds all lines unpacked, each of which counts as `LEAST_LINE_BYTES` or more.
    """
    number = read_bytes = 0
    while raw := lines.readline(MAX_LINE_BYTES + 1):
        check()
        number, read_bytes = number + 1, read_bytes + max(len(raw), LEAST_LINE_BYTES)
        where = f"{name}, line {number}"
        if len(raw) > MAX_LINE_BYTES:
            raise InputError(f"{where}: longer than {MAX_LINE_BYTES // 2**20} MiB; split it; no line after it was read")
        if max_bytes is not None and read_bytes > max_bytes:
            bound = f"{max_bytes // LEAST_LINE_BYTES:,} lines or {max_bytes // 2**20} MiB"
            raise InputError(f"{name}: more than {bound}, unpacked; split it")
        if raw.removeprefix(codecs.BOM_UTF8).strip():
            yield where, raw


def _line_value(raw: bytes, where: str) -> Any:
    check_json(raw, where)
    try:
        return parse_json(raw.decode("utf-8-sig"), where)
    except UnicodeDecodeError as error:
        found = f"byte 0x{error.object[error.start]:02x} at {error.start + 1}"
        raise InputError(f"{where}: not UTF-8 ({found}); save it as UTF-8") from None


def check_json(
    raw: bytes, where: str, max_values: int = MAX_VALUES, piece_bytes: int = PIECE_BYTES, max_text_bytes: int = MAX_TEXT_BYTES
) -> None:
    """Raise InputError for JSON, unread, of over `max_values` values (strings, and what commas and brackets separate), or
    with a string of over `max_text_bytes`.
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
            if text_bytes > max_text_bytes:
                raise InputError(f"{where}: a text of more than {max_text_bytes} bytes; split it into several documents")
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


def _line_documents(lines: Iterable[tuple[str, bytes]], fault: Fault, metadata: Metadata) -> Iterator[Document]:
    for where, raw in lines:
        try:
            value = _line_value(raw, where)
            if not isinstance(value, dict) or not isinstance(value.get("text"), str):
                raise InputError(f'{where}: not a document {{"id", "title", "text"}}; give each line a text')
            if isinstance(value.get("id"), int):
                value["id"] = str(value["id"])
            yield _document(value, where, metadata)
        except InputError as error:
            fault(where, str(error).removeprefix(f"{where}: "))


def _document(raw: dict[str, Any], where: str, metadata: Metadata) -> Document:
    if len(raw["text"]) > MAX_TEXT_BYTES:
        raise InputError(f"{where}: {TOO_LONG}")
    try:
        document = Document.of(raw)
        return replace(document, metadata={**metadata, **document.metadata}) if metadata else document
    except InputError as error:
        raise InputError(f"{where}: {error}") from None
