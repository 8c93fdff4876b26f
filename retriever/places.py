"""Places of chunks in their documents: the lines of the file, and the Markdown headings above."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .document import Chunk

MARKDOWN_SUFFIXES = (
    "",
    ".md",
    ".markdown",
    ".mdx",
    ".txt",
    ".docx",
    ".html",
    ".htm",
    ".epub",
)  # of ids; "# " elsewhere is a comment
CONVERTED_SUFFIXES = (".pdf", ".docx", ".pptx", ".xlsx", ".epub", ".html", ".htm")  # a line of their text is none of the file
_URL = re.compile(r"https?://[^/?#]*(?P<path>[^?#]*)", re.IGNORECASE)
MAX_HEADING_CHARACTERS = 80
_LINE = re.compile(r"^ {0,3}(?:(?P<fence>```|~~~)|(?P<marks>#{1,6})[ \t]+(?P<heading>\S.*))", re.MULTILINE)
_CLOSING = re.compile(r"[ \t]+#*[ \t]*$")


@dataclass(frozen=True, slots=True)
class ChunkPlace:
    """A chunk's place.

    Args:
        lines: its first and last line in the file, counted from 1; None where the text is not the file's own, or unknown.
        headings: those that it stands under, the outermost first, without the document's title and those in its own text.
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


def chunk_places(document_id: str, title: str, texts: Iterable[str], *, has_overlap: bool = False) -> Iterator[ChunkPlace]:
    """The place of each chunk of a document.

    Args:
        document_id: says by its suffix what kind of file it is of; a URL is of a page that was converted.
        title: stands in the first chunk's text, and not in the file.
        texts: of all its chunks, in order.
        has_overlap: chunks repeat the ends of those before, so that lines cannot be counted.
    """
    suffix = _suffix(document_id)
    has_lines = not has_overlap and suffix not in CONVERTED_SUFFIXES
    line = 1 - (title.count("\n") + 1 if title else 0)
    open_headings, fence = dict[int, str](), ""
    for text in texts:
        first = line + text[: len(text) - len(text.lstrip())].count("\n")
        last = line + text.rstrip().count("\n")
        first = min(first, last)  # of white space alone
        line += text.count("\n")
        above = dict(open_headings)
        for found in _LINE.finditer(text) if suffix in MARKDOWN_SUFFIXES else ():
            if found["fence"]:
                fence = "" if fence == found["fence"] else fence or found["fence"]
            elif not fence:
                level, heading = len(found["marks"]), _CLOSING.sub("", found["heading"][:MAX_HEADING_CHARACTERS].rstrip())
                open_headings = {each: open_headings[each] for each in open_headings if each < level} | {level: heading}
                if not text[: found.start()].strip():
                    above = {each: above[each] for each in above if each < level}
        headings = tuple(heading for heading in above.values() if heading.casefold() != title.casefold())
        yield ChunkPlace((max(first, 1), max(last, 1)) if has_lines else None, headings)


def _suffix(document_id: str) -> str:
    """The suffix of a document's file; of a page of the web ".html", whatever its address ends with."""
    url = _URL.match(document_id)
    suffix = PurePosixPath(url["path"] if url else document_id.partition("#")[0]).suffix.lower()
    return ".html" if url and suffix not in CONVERTED_SUFFIXES else suffix


def places_of(chunks: Sequence[Chunk], *, has_overlap: bool) -> list[ChunkPlace]:
    """The place of each of all the chunks of a document, in order; see `chunk_places`."""
    texts = [chunk.text for chunk in chunks]
    return list(chunk_places(chunks[0].document_id, chunks[0].title, texts, has_overlap=has_overlap)) if chunks else []


def found_texts(document_id: str, title: str, texts: Sequence[str], shorten: Callable[[str], str] = str) -> Iterator[str]:
    """What the chunks of a document are found by: each text, after the title and the headings that it stands under.

    The first chunk has the title in its text. Of the title, and of the headings of a chunk, there is what `shorten` leaves of a
    text; of the headings the innermost ones.
    """
    short = shorten(title)
    for position, (text, place) in enumerate(zip(texts, chunk_places(document_id, title, texts), strict=True)):
        paths = [" > ".join(place.headings[first:]) for first in range(len(place.headings))]
        path = next((each for each in paths if shorten(each) == each), shorten(paths[-1]) if paths else "")
        yield "\n".join([*filter(None, (short if position else "", path)), text])
