"""Text of marked-up files as Markdown: Word, PowerPoint, OpenDocument, HTML, EPUB, FictionBook.

One walk over the elements knows their names in all of these. An element that it does not know is walked for its text, so that
an odd one loses nothing.
"""

import copy
import posixpath
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from cacheblend.base.errors import InputError

from .pdf_text import markdown_table
from .text_encoding import MAX_SAMPLE_BYTES, decoded

# Deleted and hidden text, the readings of ruby, second copies of text boxes, fields' codes, and the controls of a web page.
_SKIPPED = re.compile(
    "delText|moveFrom|instrText|rt|rp|Fallback|tracked-changes|script|style|template|noscript|head|svg|button|select|textarea"
    "|input|iframe|binary|forms"
)
_BLOCKS = re.compile(
    "p|h|dt|dd|div|section|article|main|header|footer|nav|aside|form|fieldset|address|figure|figcaption|caption|blockquote|ul"
    "|ol|dl|hr|tr|td|th|summary|details|center|legend|body|list|title|subtitle|v|text-author|annotation|comment|ser"
)
_TABLES, _ROWS, _CELLS = {"tbl", "table"}, {"tr", "table-row"}, {"tc", "td", "th", "table-cell", "covered-table-cell"}
_BREAKS = {"br": "\n", "cr": "\n", "line-break": "\n", "tab": "\t", "s": " ", "noBreakHyphen": "-"}
MAX_SPAN = 100  # columns and rows that a cell spans or is repeated in
MIN_ARTICLE_CHARACTERS = 250  # of a page's text; of less trafilatura returns lines without tables and headings
MENU_SHARE = 0.2  # of a page's words that are links; a page of more has menus
# Of a page's words that are no links, which what is taken for its article has at least: with menus around it, and without.
MENU_ARTICLE_SHARE, ARTICLE_SHARE = 0.5, 0.9
_DECLARED = re.compile(
    rb"<(?:meta\b[^>]{0,200}?charset|\?xml\b[^>]{0,200}?encoding)\s*+=\s*+(?:[\"']\s*+)?([a-z0-9_-]+)", re.IGNORECASE
)
_HIDDEN = re.compile(r"(?:display\s*:\s*none|visibility\s*:\s*hidden)", re.IGNORECASE)
_TITLES = "//*[local-name()='sp'][.//*[local-name()='ph'][@type='title' or @type='ctrTitle']]//*[local-name()='p']"
_HEADING = re.compile(r"(?:heading (\d)|title)", re.IGNORECASE)


def _name(element: Any) -> str:
    """An element's name without its namespace; empty for a comment."""
    return element.tag.rpartition("}")[2] if isinstance(element.tag, str) else ""


def _attribute(element: Any, *names: str) -> str:
    """The first attribute of one of these names, in any namespace; empty if there is none."""
    found = (value for name in names for key, value in ({} if element is None else element).items() if key.endswith(name))
    return next(found, "")


def _number(text: str) -> int:
    return min(max(int(text), 1), MAX_SPAN) if text.isdecimal() else 1


def parsed(raw: bytes) -> Any:
    """The root of an XML text, as much of it as can be read; None if that is nothing."""
    from lxml import etree

    return etree.fromstring(raw, etree.XMLParser(resolve_entities=False, no_network=True, recover=True, huge_tree=True))


class MarkdownWriter:
    """Writes elements as Markdown.

    Args:
        is_mixed: whether text stands between elements, as in HTML; else in some elements, as in Office files.
        level: the level of a heading; 0 for what is none.
    """

    def __init__(self, *, is_mixed: bool, level: Callable[[Any], int] = lambda _: 0) -> None:
        self._is_mixed, self._level = is_mixed, level

    def __call__(self, element: Any) -> str:
        """The text of an element, with an empty line between paragraphs."""
        groups = groupby((line.rstrip() for line in self._walk(element).split("\n")), key=bool)
        return "\n".join(line for is_text, lines in groups for line in (lines if is_text else [""])).strip()

    def _walk(self, element: Any) -> str:
        name = _name(element)
        if not name or _SKIPPED.fullmatch(name):
            return ""
        if name in _BREAKS and not (self._is_mixed and (len(element) or element.text)):
            return _BREAKS[name]
        if name == "pre":
            return f"\n\n```\n{''.join(element.itertext()).strip()}\n```\n\n"
        if name in _TABLES and (rows := self._rows(element)):
            return f"\n\n{''.join(map(self, element.iterfind('caption')))}\n\n{markdown_table(rows)}\n\n"
        text = self._own(element.text, name)
        for child in element:
            text += self._walk(child) + self._own(child.tail, "")
        level = self._level(element) or (int(name[1]) if re.fullmatch("h[1-6]", name) else 0)
        if level and text.strip():
            return f"\n\n{'#' * level} {' '.join(text.split())}\n\n"
        if name in ("li", "list-item") or (name == "p" and element.find("{*}pPr/{*}numPr") is not None):
            return f"\n- {text.strip()}" if text.strip() else ""
        return f"\n\n{text.strip() if self._is_mixed else text}\n\n" if _BLOCKS.fullmatch(name) else text

    def _own(self, text: str | None, name: str) -> str:
        """The text of an element of a name, or between two."""
        if not text or not (self._is_mixed or name in ("t", "v", "text")):
            return ""
        return re.sub(r"\s+", " ", text) if self._is_mixed else f"{text} " if name == "v" else text

    def _rows(self, table: Any) -> list[list[str]]:
        """The rows of a table, spanned cells repeated; none of one that lays out a page: of one column, or of tables."""
        rows, below, width = list[list[str]](), dict[int, tuple[int, str]](), 0  # the first row's, with its empty cells
        if any(_name(inner) in _TABLES for inner in table.iterdescendants()):
            return []
        for row in (each for each in table.iter() if _name(each) in _ROWS):
            cells = list[str]()
            for cell in [*(each for each in row.iter() if _name(each) in _CELLS and not each.get("hMerge")), None]:
                while (above := below.pop(len(cells), (0, "")))[0]:
                    below[len(cells)] = (above[0] - 1, above[1])
                    cells.append(above[1])
                if cell is None:
                    break
                text = self(cell) or _attribute(cell, "}value", "}boolean-value", "}date-value")
                merge = cell.find("{*}tcPr/{*}vMerge")
                if rows and (cell.get("vMerge") or (merge is not None and _attribute(merge, "val") != "restart")):
                    text = "".join(rows[-1][len(cells) : len(cells) + 1])
                span = cell.find("{*}tcPr/{*}gridSpan")
                across = _number(_attribute(span, "val") or _attribute(cell, "colspan", "gridSpan"))
                across = 1 if rows and across >= width else across  # over all columns: a heading, once
                for _ in range(max(across, _number(_attribute(cell, "columns-repeated")))):
                    below[len(cells)] = (_number(_attribute(cell, "rowspan")) - 1, text)
                    cells.append(text)
            width = width or len(cells)
            while cells and not cells[-1]:
                cells.pop()
            rows += [cells] * _number(_attribute(row, "rows-repeated")) if cells else []
        return rows if max(map(len, rows), default=0) > 1 else []


class _Package:
    """The parts of an Office file, found by the relations between them."""

    def __init__(self, path: Path) -> None:
        self.archive = zipfile.ZipFile(path)
        types = self.read("[Content_Types].xml")
        mains = [one.get("PartName", "")[1:] for one in types if "main+xml" in one.get("ContentType", "")]
        self.main = next((name for name in mains if name in self.archive.NameToInfo), "")
        if not self.main:
            raise InputError("has no document in it; save it anew")

    def read(self, name: str) -> Any:
        """The root of a part, or an empty list."""
        root = parsed(self.archive.read(name)) if name in self.archive.NameToInfo else None
        return [] if root is None else root

    def targets(self, name: str) -> dict[str, str]:
        """The names of the parts that a part refers to, by the ids of the relations."""
        folder, base = posixpath.split(name)
        own = [one for one in self.read(f"{folder}/_rels/{base}.rels") if one.get("TargetMode") != "External"]
        return {one.get("Id"): posixpath.normpath(posixpath.join("/", folder, one.get("Target")))[1:] for one in own}

    def texts(self, names: Iterable[str], kind: str, write: MarkdownWriter) -> list[str]:
        """The texts of the parts of a kind, each once."""
        roots = (self.read(name) for name in sorted(names) if re.search(rf"(?:{kind})\d*\.xml$", name))
        return list(dict.fromkeys(filter(None, (write(root) for root in roots if len(root)))))

    def around(self, names: Iterable[str], write: MarkdownWriter) -> list[str]:
        """Notes, diagrams, charts and comments."""
        notes = self.texts(names, "notes|notesSlide|data|chart", write)
        return notes + [f"Comment: {text}" for text in self.texts(names, r"comments|comment\w*", write)]


def word_parts(path: Path) -> Iterator[tuple[str, str, str]]:
    """All of a Word file: headers, the text, notes, diagrams, charts, comments, pages put into it, footers."""
    package = _Package(path)
    names = [one for one in package.targets(package.main).values() if one in package.archive.NameToInfo]
    levels = dict[str, int]()
    for style in package.read(next((name for name in names if name.endswith("styles.xml")), "")):
        if found := _HEADING.fullmatch(_attribute(style.find("{*}name"), "val")):
            levels[_attribute(style, "styleId")] = min(int(found[1] or 1), 6)

    def level(element: Any) -> int:
        return levels.get(_attribute(element.find("{*}pPr/{*}pStyle"), "val"), 0) if _name(element) == "p" else 0

    write = MarkdownWriter(is_mixed=False, level=level)
    body, pages = write(package.read(package.main)), [name for name in names if name.endswith(("html", "htm"))]
    inserted = [html_text(package.archive.read(name)) for name in pages]
    headers, footers = package.texts(names, "header", write), package.texts(names, "footer", write)
    yield "", "\n\n".join(filter(None, [*headers, body, *package.around(names, write), *inserted, *footers])), ""


def slide_parts(path: Path) -> Iterator[tuple[str, str, str]]:
    """The slides of a PowerPoint file in their order, each with notes, diagrams, charts and comments."""
    package = _Package(path)
    slides = package.targets(package.main)
    for number, one in enumerate(package.read(package.main).iterfind("{*}sldIdLst/{*}sldId"), 1):
        name = slides.get(_attribute(one, "}id"), "")
        root = package.read(name)
        if len(root):
            titles = frozenset(root.xpath(_TITLES))
            write = MarkdownWriter(is_mixed=False, level=lambda one, titles=titles: int(one in titles))  # type: ignore[misc]
            yield f"slide={number}", "\n\n".join([write(root), *package.around(package.targets(name).values(), write)]), ""


def open_document_parts(path: Path) -> Iterator[tuple[str, str, str]]:
    """An OpenDocument file, packed or flat: its text with headers and footers, its slides, or its sheets."""
    is_packed = zipfile.is_zipfile(path)
    if is_packed:
        with zipfile.ZipFile(path) as archive:
            if b"manifest:encryption-data" in archive.read("META-INF/manifest.xml"):
                raise InputError("locked with a password; save it without one")
            root = parsed(archive.read("content.xml"))
            styles = parsed(archive.read("styles.xml")) if "styles.xml" in archive.NameToInfo else root
    else:
        root = styles = parsed(path.read_bytes())

    write = MarkdownWriter(
        is_mixed=True, level=lambda one: _name(one) == "h" and min(_number(_attribute(one, "outline-level")), 6)
    )
    body = next(root.iter("{*}body"))
    for number, page in enumerate(body.iterfind("{*}presentation/{*}page"), 1):
        yield f"slide={number}", write(page), ""
    for sheet in body.iterfind("{*}spreadsheet/{*}table"):
        yield f"sheet={_attribute(sheet, '}name')}", write(sheet), ""
    margins = [write(one) for one in styles.iter("{*}header", "{*}footer")]
    for text in body.iterfind("{*}text"):
        yield "", "\n\n".join([write(text), *dict.fromkeys(filter(None, margins))]), ""


def fiction_parts(path: Path) -> Iterator[tuple[str, str, str]]:
    """A FictionBook."""
    write = MarkdownWriter(is_mixed=True, level=lambda element: 2 * (_name(element) == "title"))
    yield "", write(parsed(path.read_bytes())), ""


def book_parts(path: Path) -> Iterator[tuple[str, str, str]]:
    """An EPUB: title, authors, chapters in their order."""
    with zipfile.ZipFile(path) as archive:
        [package, *_] = [one.get("full-path") for one in parsed(archive.read("META-INF/container.xml")).iter("{*}rootfile")]
        root = parsed(archive.read(package))
        files = {one.get("id"): one.get("href") for one in root.iter("{*}item")}
        chapters = list[str]()
        for one in root.iter("{*}itemref"):
            name = posixpath.normpath(posixpath.join(posixpath.dirname(package), unquote(files.get(one.get("idref")) or "")))
            if name in archive.NameToInfo and (text := html_text(archive.read(name), is_page=False)):
                chapters.append(text)
    if not chapters:
        raise InputError("has no chapters in it; save it anew")
    names = [
        "# " * (_name(one) == "title") + " ".join(one.text.split()) for one in root.iter("{*}title", "{*}creator") if one.text
    ]
    yield "", "\n\n".join([*names, *chapters]), ""


def html_text(raw: bytes, *, is_page: bool = True) -> str:
    """The text of HTML: of a page its title, and where it has menus, its article."""
    from lxml import html

    if not raw.strip():
        return ""
    declared = _DECLARED.search(raw[:MAX_SAMPLE_BYTES])
    text = decoded(raw, declared[1].decode() if declared else "utf-8") or raw.decode(errors="replace")
    tree = html.document_fromstring(text.encode(), parser=html.HTMLParser(encoding="utf-8", huge_tree=True))
    for element in list(tree.iter()):
        is_hidden = element.get("hidden") is not None or _HIDDEN.search(element.get("style") or "")
        if element.tag not in ("html", "head", "body") and (is_hidden or _SKIPPED.fullmatch(_name(element))):
            element.clear(keep_tail=True)  # lxml's `drop_tree` fails at control characters in the text around it
            element.tag = "script"
        elif element.tag == "img" and "\\" in (formula := element.get("alt") or ""):
            element.tag, element.text = "span", "".join(one if one.isprintable() else " " for one in formula)
    for line_break in tree.iterfind(".//pre//br"):
        line_break.tag, line_break.text = "span", "\n"
    text = MarkdownWriter(is_mixed=True)(tree)
    if not is_page:
        return text
    words, linked = len(text.split()), sum(len(link.text_content().split()) for link in tree.iter("a"))
    if linked and len(text) >= MIN_ARTICLE_CHARACTERS:
        from trafilatura import extract

        article = extract(copy.deepcopy(tree), output_format="markdown", favor_recall=True, include_comments=False) or ""
        least = MENU_ARTICLE_SHARE if linked > MENU_SHARE * words else ARTICLE_SHARE
        text = article if len(article.split()) >= least * (words - linked) else text
    title = " ".join((tree.findtext(".//title") or "").split())
    is_titled = text.startswith("# ") and title in text[: 2 * len(title) + 2]
    return text if is_titled or not title or not text else f"# {title}\n\n{text}"
