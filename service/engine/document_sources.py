"""Documents of files: JSON lines, text of any encoding, PDF and Office files, folders or standard input, within limits."""

from __future__ import annotations

import glob
import logging
import mimetypes
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from cacheblend.base.errors import CacheBlendError, InputError, needs_extra
from cacheblend.retriever import Document, PlainTokenizer

from .file_converter import CONVERTED_SUFFIXES, FileConverter
from .json_lines import LineLimits, read_json_lines, read_lines
from .web_pages import SCHEMES, WebFiles

logger = logging.getLogger(__name__)

TEXT_SUFFIXES = (".txt", ".md", ".rst", ".csv")
JSONL_SUFFIXES = (".jsonl", ".jsonl.gz")
PARQUET_SUFFIX = ".parquet"
KNOWN_SUFFIXES = (*TEXT_SUFFIXES, *JSONL_SUFFIXES, PARQUET_SUFFIX, *CONVERTED_SUFFIXES)  # of others those with text are read
IGNORE_FILES = (".gitignore", ".cacheblendignore")
STANDARD_INPUT = "-"
MAX_TEXT_BYTES = 8 * 2**20  # of one document: some 2 million tokens, whose tokenising takes about 2 GiB of memory
PARQUET_ROWS = 64  # in memory at once
MAX_SAMPLE_BYTES = 2**16  # that a text's encoding is detected by
CHARACTERS_PER_TOKEN = 4.0  # of English text, where none can be tokenised
PIECE_CHARACTERS, SAMPLE_PIECES = 1024, 64  # to count tokens in: enough to know a language by
# Tried where a text is no UTF-8: one of each script, since close relatives are distinguished by chance.
_ENCODINGS = ["cp1252", "cp1251", "koi8_r", "cp1253", "cp1255", "cp1256", "shift_jis", "euc_jp", "gb18030", "big5", "euc_kr"]
_CONTROL_BYTES = bytes(set(range(32)) - set(b"\t\n\r\f\x1b"))


@dataclass(slots=True)
class SourceReport:
    """Files that gave no documents, and why.

    Args:
        faults: by file; a file of a known kind that cannot be used.
        skipped: by file; hidden, ignored, no text, a link out of its folder.
        on_file: called with each file before it is read.
    """

    faults: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    on_file: Callable[[Path], None] = lambda _: None

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {"faults": self.faults, "skipped": self.skipped}


@contextmanager
def noting_faults(faults: dict[str, str] | None, name: str) -> Iterator[None]:
    """Enter an error of a file in `faults` in place of raising it; with None it is raised."""
    try:
        yield
    except (CacheBlendError, OSError) as error:
        if faults is None:
            raise
        faults[name] = str(error) if isinstance(error, CacheBlendError) else f"{name}: {error.strerror or error}"


class DistinctIds:
    """The documents of several files, of which no two have one id and different texts: the later one is a fault.

    Args:
        faults: collects these.
    """

    def __init__(self, faults: dict[str, str]) -> None:
        self._faults, self._versions = faults, dict[str, str]()

    def of(self, source: str, documents: Iterable[dict[str, Any]]) -> Iterator[Document]:
        """The documents of a source without the faults."""
        for document in map(Document.of, documents):
            if self._versions.setdefault(document.id, document.version) == document.version:
                yield document
            else:
                self._faults[f"{source}: {document.id}"] = f"another document has the id {document.id!r}; rename it"


@dataclass(slots=True)
class StreamSize:
    """Size of a stream.

    Args:
        documents: how many.
        characters: of their texts.
        sample: pieces at even distances of all texts together, as if these were one; `SAMPLE_PIECES` at most.
    """

    documents: int = 0
    characters: int = 0
    sample: list[str] = field(default_factory=list, compare=False, repr=False)
    _distance: int = field(default=PIECE_CHARACTERS, init=False, compare=False, repr=False)

    def add(self, text: str) -> None:
        """Count a document, and take the pieces that fall into its text."""
        while (at := len(self.sample) * self._distance - self.characters) < len(text):
            self.sample.append(text[at : at + PIECE_CHARACTERS])
            if len(self.sample) > SAMPLE_PIECES:
                self.sample, self._distance = self.sample[::2], 2 * self._distance
        self.documents, self.characters = self.documents + 1, self.characters + len(text)

    def tokens(self, tokenizer: Any) -> int:
        """About how many tokens the texts are; by the sample where there are a sample and a tokenizer."""
        sampled = sum(map(len, self.sample))
        if not sampled or tokenizer is None:
            return round(self.characters / CHARACTERS_PER_TOKEN)
        plain = PlainTokenizer(tokenizer)
        return round(self.characters * sum(len(plain.ids(piece)) for piece in self.sample) / sampled)


class DocumentStream:
    """Documents of files, folders or standard input; memory holds one at a time. A context manager, for its converter.

    Of several files, those that cannot be used are reported, and the others are read. A single file must be right.

    Args:
        sources: see `read_documents`; beside that URLs, each of which is fetched once.
        web: fetches URLs.

    Attributes:
        characters: of the texts that were given so far.
        report: what was left out.
    """

    def __init__(self, sources: Sequence[str], web: WebFiles | None = None) -> None:
        self._sources = sources
        self._web = web or WebFiles()
        self._goes_on = len(sources) > 1 or any(_is_many(source) for source in sources)
        self._converter = FileConverter()
        self.characters = 0
        self.report = SourceReport()

    def measure(self) -> StreamSize | None:
        """Read it all once and check it; None for standard input, which can be read only once.

        Raises:
            InputError: a source, or the one file, cannot be used, or there is no document at all.
        """
        if STANDARD_INPUT in self._sources:
            return None
        size = StreamSize()
        for document in self._documents():
            size.add(document.text)
        if not size.documents:
            skipped = [f"{name}: {why}" for name, why in self.report.skipped.items()]
            whys = [*self.report.faults.values(), *skipped]
            more = [f"and {len(whys) - 5:,} more"] if len(whys) > 5 else []
            raise InputError("; ".join(["no documents to ingest", *(whys[:5] or ["give at least one"]), *more]))
        return size

    def __iter__(self) -> Iterator[Document]:
        for document in self._documents():
            self.characters += len(document.text)
            yield document

    def close(self) -> None:
        """End the process that converts files, and remove those that were fetched."""
        self._converter.close()
        self._web.close()

    def _documents(self) -> Iterator[Document]:
        several = DistinctIds(self.report.faults)
        for source in self._sources:
            if self._goes_on and source != STANDARD_INPUT:
                yield from several.of(source, self._read(source, self.report))
            else:
                yield from map(Document.of, self._read(source, None))

    def _read(self, source: str, report: SourceReport | None) -> Iterator[dict[str, Any]]:
        if not _is_url(source):
            yield from read_documents(source, report=report, converter=self._converter)
            return
        with noting_faults(report.faults if report else None, source):
            file = self._web.fetch(source)
            yield from file_documents(file.path, file.url, self._converter, title=file.title, where=source)


def _is_many(source: str) -> bool:
    return not Path(source).is_file() and source != STANDARD_INPUT and not _is_url(source)


def _is_url(source: str) -> bool:
    return source.partition("://")[0].lower() in SCHEMES and "://" in source


def read_documents(
    path: str, leave_out: Path | None = None, report: SourceReport | None = None, converter: FileConverter | None = None
) -> Iterator[dict[str, Any]]:
    """Documents of a file, of the files below a folder or of a pattern, or of standard input ("-") as JSON lines.

    A line is a document `{"id", "title", "text"}` or a case `{"passages": [{"title", "text"}, ...]}` whose passages are the
    documents. A text file is one document, named after the file. Every page of a PDF, slide and sheet is one of its own, with
    an id such as `report.pdf#page=3`, so that an answer can cite it; short ones are joined, `report.pdf#page=3-4`. Of a folder,
    hidden files, what `.gitignore` and `.cacheblendignore` name, files that are no text, and `leave_out` are no documents. A
    symbolic link that leads out of the folder is left out with a warning.

    Args:
        path: a file, a folder, a pattern such as `docs/**/*.pdf`, or "-".
        leave_out: a file that is no document.
        report: collects the files that cannot be used; without it the first one ends the reading.
        converter: of PDF and Office files; without it one of its own.

    Raises:
        InputError: no such file, an unknown kind, or a line or file that is no document, named by file and line.
        MissingExtraError: a file needs the extra `documents`.
    """
    if path == STANDARD_INPUT:
        yield from _line_documents(read_lines(sys.stdin.buffer, "standard input"))
        return
    skipped = report.skipped if report else {}
    files = source_files(path, skipped, leave_out)
    with ExitStack() as opened:
        converter = converter or opened.enter_context(FileConverter())
        for file, id_ in files:
            with noting_faults(report.faults if report else None, str(file)):
                if report is not None:
                    report.on_file(file)
                yield from file_documents(file, id_, converter, skipped if Path(path) != file else None)


def source_files(path: str, skipped: dict[str, str], leave_out: Path | None = None) -> list[tuple[Path, str]]:
    """The files of a file, a folder or a pattern, each with the id of its document; see `read_documents`.

    `skipped` collects the files that are left out, and why.

    Raises:
        InputError: there is no such file, or none that holds text.
    """
    root = Path(path)
    if root.is_dir():
        files = list(files_below(root, skipped))
    elif root.exists():
        files, root = [root], root.parent
    elif glob.has_magic(path):
        files = [Path(found) for found in sorted(glob.glob(path, recursive=True)) if Path(found).is_file()]
        root = Path(*Path(path).parts[: next(at for at, part in enumerate(Path(path).parts) if glob.has_magic(part))])
        files = list(_without_links_out(files, root, skipped))
    else:
        raise InputError(f"{path} does not exist; give a file, a folder, a pattern, or - for standard input")
    files = [file for file in files if leave_out is None or file.resolve() != leave_out.resolve()]
    if not files:
        raise InputError(f"{path} holds no {', '.join(KNOWN_SUFFIXES)} or other text file")
    return [(file, file.relative_to(root).as_posix()) for file in files]


def files_below(root: Path, skipped: dict[str, str], on_error: Callable[[OSError], None] | None = None) -> Iterator[Path]:
    """The files below a folder, in order, without the hidden and the ignored; folders that are links are not entered.

    Args:
        root: the folder.
        skipped: takes the paths that are left out, and why.
        on_error: called with the error of a folder that cannot be listed.
    """
    with needs_extra("rag"):
        from pathspec import GitIgnoreSpec

    specs = dict[Path, GitIgnoreSpec]()
    found: list[Path] = []

    def is_ignored(path: Path, suffix: str = "") -> bool:
        verdict = None
        for folder in reversed(path.relative_to(root).parents):
            if (spec := specs.get(root / folder)) is not None:
                own = spec.check_file(path.relative_to(root / folder).as_posix() + suffix).include
                verdict = verdict if own is None else own
        return bool(verdict)

    for at, folders, names in os.walk(root, onerror=on_error):
        here = Path(at)
        lines = list[str]()
        for name in filter(names.__contains__, IGNORE_FILES):
            with suppress(OSError), (here / name).open("rb") as file:  # one that cannot be read has none
                lines += file.read(MAX_SAMPLE_BYTES).decode(errors="replace").splitlines()
        if lines:
            specs[here] = GitIgnoreSpec.from_lines(lines)
        for name in list(folders):
            path = here / name
            why = "hidden" if name.startswith(".") else "a link to a folder" if path.is_symlink() else ""
            if why or is_ignored(path, "/"):
                folders.remove(name)
                skipped[f"{path}/"] = why or "ignored"
        for name in names:
            path = here / name
            why = "hidden" if name.startswith(".") else "ignored" if is_ignored(path) else "" if path.is_file() else "no file"
            if why:
                skipped[str(path)] = why
            else:
                found.append(path)
    yield from _without_links_out(sorted(found), root, skipped)


def _without_links_out(files: Sequence[Path], root: Path, skipped: dict[str, str]) -> Iterator[Path]:
    """The files that are in a folder, also where they are links."""
    inside = root.resolve()
    for file in files:
        if file.resolve().is_relative_to(inside):
            yield file
        else:
            logger.warning("%s is a link out of %s and was left out; give the file itself to ingest it", file, root)
            skipped[str(file)] = "a link out of the folder"


def file_documents(
    path: Path,
    id_: str,
    converter: FileConverter,
    skipped: dict[str, str] | None = None,
    *,
    title: str | None = None,
    where: str | None = None,
    check: Callable[[], None] = lambda: None,
    limits: LineLimits | None = None,
) -> Iterator[dict[str, Any]]:
    """The documents of a file.

    Args:
        path: the file.
        id_: of its document; parts of it have their place appended.
        converter: of PDF and Office files.
        skipped: collects a file of an unknown kind that is no text; without it that is a fault.
        title: in place of the file's name.
        where: names the file in messages; its path where left out.
        check: called once a line, and again and again during a conversion; what it raises ends the reading.
        limits: of JSON lines.

    Raises:
        InputError, MissingExtraError, OSError: see `read_documents`.
    """
    name, where, title = path.name.lower(), where or str(path), title or path.stem
    if name.endswith((*JSONL_SUFFIXES, PARQUET_SUFFIX)):
        is_parquet = name.endswith(PARQUET_SUFFIX)
        yield from _line_documents(_parquet_rows(path, where) if is_parquet else read_json_lines(path, check, limits))
        return
    if name.endswith(CONVERTED_SUFFIXES):
        for part in converter.convert(path, check):
            place = f"#{part.place}" if part.place else ""
            of_part = f"{title}, {part.place.replace('=', ' ')}" if place else title
            yield _checked({"id": id_ + place, "title": of_part, "text": part.text}, where)
        return
    try:
        text = _read_text(path, where)
    except InputError as error:
        if skipped is None or name.endswith(TEXT_SUFFIXES):
            raise
        skipped[where] = str(error).removeprefix(f"{where}: ")
        return
    yield _checked({"id": id_, "title": title, "text": text}, where)


def _read_text(path: Path, where: str) -> str:
    """The text of a text file.

    Raises:
        InputError: the file is of another kind, too long, binary or empty.
    """
    with path.open("rb") as file:
        raw = file.read(MAX_TEXT_BYTES + 1)  # a device or a file that grows has no end
    kind = (mimetypes.guess_type(path.name.lower())[0] or "").partition("/")[0]
    if kind in ("image", "audio", "video", "font"):
        raise InputError(f"{where}: {kind}; describe it in a text file")
    if len(raw) > MAX_TEXT_BYTES:
        raise _too_long(where)
    text = _text(raw, where)
    if not text.strip():
        raise InputError(f"{where}: empty; write something into it, or leave it out")
    return text


def _text(raw: bytes, where: str) -> str:
    """The text of bytes in UTF-8, in UTF-16 or 32 with their marks, or in an encoding that is detected.

    Raises:
        InputError: they are no text.
    """
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError:
        with needs_extra("rag"):
            from charset_normalizer import from_bytes
            from charset_normalizer.utils import identify_sig_or_bom

        encoding, _ = identify_sig_or_bom(raw)
        if encoding is None and len(raw.translate(None, _CONTROL_BYTES)) == len(raw):
            best = from_bytes(raw[:MAX_SAMPLE_BYTES], cp_isolation=_ENCODINGS).best()
            encoding = best.encoding if best else None
        text = raw.decode(encoding, errors="replace") if encoding else "\0"
    if "\0" in text:
        raise InputError(f"{where}: binary, or text in no known encoding; save it as UTF-8")
    return text


def _line_documents(lines: Iterator[tuple[str, Any]]) -> Iterator[dict[str, Any]]:
    for where, value in lines:
        passages = value.get("passages") if isinstance(value, dict) else None
        for document in [value] if passages is None else passages if isinstance(passages, list) else [None]:
            if not isinstance(document, dict) or not isinstance(document.get("text"), str):
                raise InputError(f'{where}: neither a document {{"id", "title", "text"}} nor a case with "passages"')
            yield _checked(document, where)


def _checked(document: dict[str, Any], where: str) -> dict[str, Any]:
    """Check a document, and drop the fields that no document has: their values would stay in memory until it is ingested."""
    if len(document["text"]) > MAX_TEXT_BYTES:
        raise _too_long(where)
    try:
        Document.of(document)
    except InputError as error:
        raise InputError(f"{where}: {error}") from None
    return {name: document[name] for name in ("id", "title", "text") if name in document}


def _too_long(where: str) -> InputError:
    return InputError(f"{where}: a text of more than {MAX_TEXT_BYTES // 2**20} MiB; split it into several documents")


def _parquet_rows(path: Path, where: str) -> Iterator[tuple[str, Any]]:
    """Each row's place ("FILE, row N") and its columns `id`, `title` and `text`, of which the first two may be missing.

    Raises:
        InputError: the file is no Parquet, or has no column `text`.
    """
    with needs_extra("ray"):
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    try:
        with ParquetFile(path) as file:
            columns = [name for name in ("id", "title", "text") if name in file.schema_arrow.names]
            if "text" not in columns:
                raise InputError(f"{where}: no column 'text'; its columns are {', '.join(file.schema_arrow.names)}")
            rows = chain.from_iterable(batch.to_pylist() for batch in file.iter_batches(PARQUET_ROWS, columns=columns))
            for number, row in enumerate(rows, start=1):
                yield f"{where}, row {number}", row | ({} if row.get("id") is None else {"id": str(row["id"])})
    except ArrowException as error:
        raise InputError(f"{where}: no Parquet file that can be read ({error})") from error
