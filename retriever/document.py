"""A document as a caller brings it; a chunk, the piece of it that is embedded, found, and whose KV is cached; and the chunk's
place in the document: the lines of the file, and the Markdown headings above.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from pathlib import PurePosixPath

import numpy as np
from numpy.typing import NDArray

from cacheblend.base.errors import InputError

from .metadata import Metadata, as_json, read_metadata

HASH_DIGITS = 32  # 128 bits: enough that two documents never share one by chance
# C0 and C1 control characters, which paths and terminals do not show, and what bytes that are no UTF-8 are read as.
NO_ID = re.compile("[\x00-\x1f\x7f-\x9f\ufffd\ud800-\udfff]")
MAX_TITLE_CHARACTERS = 1000
MAX_ID_BYTES = 2048  # in UTF-8: the longest URL that is fetched, with its page, fits
# Files whose text is made of them: a line of it is none of the file.
CONVERTED_SUFFIXES = re.compile(
    r"\.(pdf|doc[xm]?|dot[xm]|ppt[xm]?|pps[xm]|potx|xls[xm]?|xlt[xm]|f?od[tsp]|ott|epub|fb2|x?html?|mht(ml)?|eml|mbox|rtf|ipynb)"
)
MARKDOWN_SUFFIXES = ("", ".md", ".markdown", ".mdx", ".txt")  # and the converted; "# " elsewhere is a comment
TITLED_SUFFIXES = (".md", ".markdown", ".mdx")  # and the converted: a first heading is the title, no comment
CSV_SUFFIXES = (".csv", ".tsv")
# A file's part, and the file.
_PART = re.compile(r"\A(.+?)#(?:page|slide|sheet|line|message)=.*", re.DOTALL)
# The head of a Markdown table, and its rows.
_TABLE = re.compile(r"^(\|[^\n]*\n\|(?:[ :]*-+[ :]*\|)+[ \t]*\n)(?:\|[^\n]*\n?)*+", re.MULTILINE)
_URL = re.compile(r"https?://[^/?#]*(?P<path>[^?#]*)", re.IGNORECASE)
MAX_HEADING_CHARACTERS = 80
_LINE = re.compile(r"^ {0,3}(?:(?P<fence>```|~~~)|(?P<marks>#{1,6})[ \t]+(?P<heading>\S.*))", re.MULTILINE)
# What a Markdown text begins with: the title of its front matter, or a heading of the first level without links and pictures.
_MATTER, _PLAIN = r"---[ \t\r]*\n(?:(?!---)[^\n]{0,999}\n){0,32}?", r"((?:(?!\][(\[]|<\w)[^\n]){1,200})"
_FRONT = re.compile(
    rf"\A\s*+(?:{_MATTER}title:[ \t]++([^\n]{{1,200}})|(?:{_MATTER}---\s++)?(?:#[ \t]++{_PLAIN}|{_PLAIN}\n===[=\s]*))$",
    re.MULTILINE,
)
# The heading that a text begins with, of any level.
_FIRST = re.compile(r"\A\s*+(?:#{1,6}[ \t]++(\S.*)|(\S.*)\n=++[ \t\r]*+$(?!\n\S.*\n=++[ \t\r]*+$))", re.MULTILINE)
_CLOSING = re.compile(r"(?<![ \t])[ \t]++#*+[ \t]*+$")


@dataclass(frozen=True, slots=True)
class Document:
    """A document to split and index.

    Args:
        id: the caller's name for it, without control characters, at most `MAX_ID_BYTES`; adding the same id again replaces it.
        title: may be empty, at most `MAX_TITLE_CHARACTERS`; stands in front of the first chunk only, see `title_line`.
        text: must hold more than white space.
        metadata: see `read_metadata`; what a filter looks at, and no part of the text.

    `version` is the hash of title, text and metadata: another version under the same id is another document.

    Raises:
        InputError: a field is not text, cannot be encoded as UTF-8, id or text is empty, an id has a control character, an id
            or a title is too long, or the metadata are not allowed.
    """

    id: str
    title: str
    text: str
    metadata: Metadata = field(default_factory=dict)
    version: str = field(init=False)

    def __post_init__(self) -> None:
        for name in ("id", "title", "text"):
            value = getattr(self, name)
            if not isinstance(value, str):
                raise InputError(f"document {self.id!r}: {name} must be text, got {type(value).__name__}; convert it to str")
            try:
                value.encode()
            except UnicodeEncodeError as error:
                raise InputError(f"document {self.id!r}: {name} is not Unicode ({error.reason}); clean it first") from None
        id_bytes, size = len(self.id.encode()), len(self.title)
        shown = f"{self.id[:60]!r}..." if id_bytes > MAX_ID_BYTES else repr(self.id)
        faults = {
            ": id has a control character or U+FFFD; take one without": NO_ID.search(self.id),
            f": its id has {id_bytes} bytes, and {MAX_ID_BYTES} are allowed; give it a shorter one": id_bytes > MAX_ID_BYTES,
            " has an empty id; give it one, or leave id out to have its content's hash": not self.id.strip(),
            " has an empty text; leave it out, or delete the document if it was ingested": not self.text.strip(),
            f": its title has {size} characters, {MAX_TITLE_CHARACTERS} are allowed; shorten it": size > MAX_TITLE_CHARACTERS,
        }
        if fault := next((fault for fault, is_so in faults.items() if is_so), None):
            raise InputError(f"document {shown}{fault}")
        try:
            metadata = read_metadata(self.metadata)
        except InputError as error:
            raise InputError(f"document {shown}: {error}") from None
        object.__setattr__(self, "metadata", metadata)
        object.__setattr__(self, "version", content_hash(self.title, self.text + (as_json(metadata) if metadata else "")))

    @classmethod
    def of(cls, raw: Document | Mapping[str, object]) -> Document:
        """Read `{"id": str, "title": str, "text": str, "metadata": {}}`; other keys are ignored.

        A missing id becomes the content's hash.

        Raises:
            InputError: not such a mapping, or a field is not allowed.
        """
        if isinstance(raw, Document):
            return raw
        if not isinstance(raw, Mapping):
            raise InputError(f'a document must be a dict {{"id", "title", "text"}}, got {type(raw).__name__} {str(raw)[:60]!r}')
        id_, title, text = raw.get("id"), raw.get("title"), raw.get("text")
        title = "" if title is None else title
        if text is None:
            raise InputError(f'document {id_ or title!r} has no "text"; its keys are {sorted(map(str, raw))}')
        if id_ is None:
            id_ = content_hash(str(title), str(text))
        return cls(id_, title, text, raw.get("metadata") or {})  # type: ignore[arg-type]  # __post_init__ checks the types

    @property
    def content(self) -> str:
        """The text that is split into chunks: the title's line, then the text."""
        return title_line(self.title, self.text) + self.text


def title_line(title: str, text: str) -> str:
    """The line before a text, or before its first chunk: the title; empty if the text begins with it as a heading."""
    found = _FIRST.match(text)
    heading = _CLOSING.sub("", (found[1] or found[2]).rstrip()) if found else ""
    return f"{title}\n" if title and heading.casefold().split() != title.casefold().split() else ""


def content_hash(title: str, text: str) -> str:
    """Hex digits of the SHA-256 of a title and a text."""
    data = f"{len(title)}:{title}{text}".encode(errors="surrogatepass")
    return hashlib.sha256(data).hexdigest()[:HASH_DIGITS]


def with_one_text(documents: Iterable[Document]) -> Iterator[Document]:
    """The documents, until one has the id of an earlier one and another text.

    Raises:
        InputError: two documents have one id and different texts.
    """
    versions: dict[str, str] = {}
    for document in documents:
        if versions.setdefault(document.id, document.version) != document.version:
            raise InputError(f"two documents have the id {document.id!r} and different texts; give each its own id")
        yield document


@dataclass(frozen=True, slots=True)
class Chunk:
    """One piece of a document with its token ids, which are final: nobody tokenises it again."""

    document_id: str
    version: str  # of the document
    position: int  # its number within the document, from 0
    title: str  # the document's, part of `text` in chunk 0 only
    text: str  # without the separator
    token_ids: tuple[int, ...]  # `text` and its trailing separator, tokenised once, by itself, without special tokens


@dataclass(frozen=True, slots=True)
class CatalogedDocument:
    """A document as the catalog lists it.

    It is `damaged` if its id, title, version or number of chunks is not what was written; its title is left out then.
    """

    id: str
    version: str
    title: str
    chunks: int
    damaged: bool = False


@dataclass(frozen=True, slots=True)
class EmbeddedDocument:
    """A document, its chunks, and their vectors, float32 (N, D), before they are written."""

    document: Document
    chunks: Sequence[Chunk]
    vectors_ND: NDArray[np.float32]

    @property
    def token_ids(self) -> list[tuple[int, ...]]:
        """Those of each chunk."""
        return [chunk.token_ids for chunk in self.chunks]


@dataclass(frozen=True, slots=True)
class ChunkPlace:
    """A chunk's first and last line in the file, and the headings above it, the outermost first.

    Lines count from 1, and are None where the text is not the file's own, or unknown. The document's title and the chunk's own
    headings are not among the headings.
    """

    lines: tuple[int, int] | None = None
    headings: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, object]:
        """Plain values for JSON."""
        return {"lines": None if self.lines is None else list(self.lines), "headings": list(self.headings)}

    def __str__(self) -> str:
        """In words, after the name of the document: ", lines 3-9, under Travel > Abroad"."""
        first, last = self.lines or (0, 0)
        lines = f", lines {first}-{last}" if first < last else f", line {first}" if first else ""
        return lines + (f", under {' > '.join(self.headings)}" if self.headings else "")


@dataclass(frozen=True, slots=True)
class ScoredChunk:
    """A chunk found for a question.

    The score is the cosine similarity of question and chunk, however the chunk was found; best is 1. With an earlier question
    it is the better one of both ways to ask.
    """

    chunk: Chunk
    distance: float  # squared L2 distance of question and chunk; nearest is 0
    score: float = math.nan  # without a search
    place: ChunkPlace = field(default_factory=ChunkPlace)
    metadata: Metadata = field(default_factory=dict)  # of its document


def chunk_places(document_id: str, title: str, texts: Sequence[str]) -> Iterator[ChunkPlace]:
    """The place of each chunk of a document.

    Args:
        document_id: says by its suffix what kind of file it is of; a URL is of a page that was converted.
        title: its line, see `title_line`, stands in the first chunk's text, and not in the file.
        texts: of all its chunks, in order; the heads of tables that they repeat are no lines of the file.
    """
    front = title_line(title, "".join(texts[:1]))
    suffix, table = _suffix(document_id), TableHead(document_id, front)
    has_lines = not CONVERTED_SUFFIXES.fullmatch(suffix)
    line = 1 - front.count("\n")
    headings_above = _headings_above(texts) if suffix in MARKDOWN_SUFFIXES or not has_lines else repeat(())
    for text, above in zip(texts, headings_above, strict=False):
        head = table.head
        table.follow(text)
        text = text.removeprefix(head)
        last = line + text.rstrip().count("\n")
        first = min(line + text[: len(text) - len(text.lstrip())].count("\n"), last)  # white space alone has no last line
        line += text.count("\n")
        headings = tuple(heading for heading in above if heading.casefold() != title[:MAX_HEADING_CHARACTERS].casefold())
        yield ChunkPlace((max(first, 1), max(last, 1)) if has_lines else None, headings)


def front_title(text: str) -> str:
    """The title that a Markdown text begins with; empty if there is none."""
    found = _FRONT.match(text)
    return _CLOSING.sub("", (found[1] or found[2] or found[3]).strip("\"' \t\r")) if found else ""


def _headings_above(texts: Iterable[str]) -> Iterator[tuple[str, ...]]:
    """The Markdown headings above each text, without those that its own first lines close."""
    open_: dict[int, str] = {}  # by level
    fence = ""  # of the code that a text before has begun
    for text in texts:
        above = open_
        for found in _LINE.finditer(text):
            if found["fence"]:
                fence = "" if fence == found["fence"] else fence or found["fence"]
            if found["fence"] or fence:
                continue
            level, heading = len(found["marks"]), _CLOSING.sub("", found["heading"][:MAX_HEADING_CHARACTERS].rstrip())
            open_ = _outside(open_, level) | {level: heading}
            if not text[: found.start()].strip():
                above = _outside(above, level)
        yield tuple(above.values())


def _outside(headings: dict[int, str], level: int) -> dict[int, str]:
    """The headings that a heading of a level stands under."""
    return {each: heading for each, heading in headings.items() if each < level}


def _suffix(document_id: str) -> str:
    """The suffix of a document's file; of a page of the web ".html", whatever its address ends with."""
    url = _URL.match(document_id)
    suffix = PurePosixPath(url["path"] if url else file_of(document_id).removesuffix(".gz")).suffix.lower()
    return ".html" if url and not CONVERTED_SUFFIXES.fullmatch(suffix) else suffix


def _file_name(document_id: str) -> str:
    """The name, without its suffix, of the file of a document that may have another title; else empty."""
    path, suffix = PurePosixPath(file_of(document_id)), _suffix(document_id)
    is_titled = suffix in TITLED_SUFFIXES or CONVERTED_SUFFIXES.fullmatch(suffix)
    return path.stem if is_titled and not _URL.match(document_id) else ""


def file_of(document_id: str) -> str:
    """The id of the file that a document is a part of, else its own."""
    found = _PART.fullmatch(document_id)
    return found[1] if found else document_id


class TableHead:
    """The head of the table that a document's next chunk begins in, which the chunk repeats; empty outside of tables.

    Args:
        document_id: says by its suffix what kind of file it is of.
        title: the line in front of the first chunk's text, see `title_line`.
    """

    def __init__(self, document_id: str, title: str) -> None:
        self._is_csv, self._title_characters = _suffix(document_id) in CSV_SUFFIXES, len(title)
        self.head = ""

    def all_of(self, content: str) -> set[str]:
        """The heads of all tables of a document's content."""
        if self._is_csv:
            return {content[self._title_characters : content.find("\n", self._title_characters) + 1]}
        return {found[1] for found in _TABLE.finditer(content)}

    def follow(self, text: str) -> None:
        """Read a chunk, the first one with the title."""
        if self._is_csv:
            self.head = self.head or min(self.all_of(text))
        else:
            last = deque(_TABLE.finditer(text), maxlen=1)
            self.head = last[0][1] if last and last[0].end() == len(text) else ""


def found_texts(document_id: str, title: str, texts: Sequence[str], shorten: Callable[[str], str] = str) -> Iterator[str]:
    """Texts to embed and to search for a document's chunks: each text after the file's name, the title and its headings.

    The first chunk has the title in its text. `shorten` cuts the title and the headings; the innermost headings remain.
    """
    short, name = shorten(title), _file_name(document_id)
    name = "" if name.casefold() in title.casefold() else shorten(name)
    for position, (text, place) in enumerate(zip(texts, chunk_places(document_id, title, texts), strict=True)):
        paths = [" > ".join(place.headings[first:]) for first in range(len(place.headings))]
        path = next((each for each in paths if shorten(each) == each), shorten(paths[-1]) if paths else "")
        yield "\n".join([*filter(None, (name, short if position else "", path)), text])
