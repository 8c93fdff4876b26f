"""Readers of files that are no plain text, by their suffixes: each yields place, text and fault of a file's parts."""

import json
import re
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import datetime, time
from email import message_from_bytes, policy
from email.headerregistry import ContentDispositionHeader, HeaderRegistry
from email.message import EmailMessage, MIMEPart
from pathlib import Path
from typing import Any

from cacheblend.base.errors import InputError

from .markup_text import book_parts, fiction_parts, html_text, open_document_parts, slide_parts, word_parts
from .pdf_text import markdown_table, pdf_parts
from .text_encoding import code_page, decoded

Parts = Iterator[tuple[str, str, str]]
MAX_UNPACKED_BYTES = 512 * 2**20  # of an archive's members, as its directory says; more than that is not unpacked
MAX_MEMBERS = 20_000
_OLE = b"\xd0\xcf\x11\xe0"  # of the Office of before 2007, in which a newer file with a password is packed
_HEADERS = ("From", "To", "Cc", "Date", "Subject")
_REGISTRY = HeaderRegistry(use_default_map=False)  # Python's parsers of addresses and dates raise at odd ones
_REGISTRY.map_to_type("content-disposition", ContentDispositionHeader)  # type: ignore[arg-type]  # a mixin, as BaseHeader asks
_POLICY = policy.default.clone(header_factory=_REGISTRY)
_NUMBER_FORMAT = re.compile(r"[#0?](?:[#0?,]*[#0?])?(?:\.([#0?]+))?(,*)(?: ?%)?(?:E[+-]0+)?")
_FORMAT_MARKS = re.compile(r'\[\$([^]-]{0,32})[^]]{0,32}\]|\[[^]]{0,64}\]|[_*].|["\\]')  # currencies, colours, blanks, quotes


def read_parts(path: Path) -> Parts:
    """The parts of a file of one of `KINDS`; raises InputError for one that is sound and not read, with the remedy."""
    reader, head = KINDS[path.suffix.lower()], _head(path)
    assert not isinstance(reader, str)
    if head.startswith(_OLE) and reader is not _old_parts:
        raise InputError("locked with a password; save it without one")
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
        if len(members) > MAX_MEMBERS or sum(member.file_size for member in members) > MAX_UNPACKED_BYTES:
            raise InputError(f"unpacks to more than {MAX_UNPACKED_BYTES // 2**20} MiB or {MAX_MEMBERS} members; split it")
    return reader(path)


def _head(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(1024)


def _old_parts(path: Path) -> Parts:
    """The parts of a file that only by its name is one of Office before 2007."""
    suffix, head = path.suffix.lower(), _head(path)
    if head.startswith(_OLE):
        raise InputError(f"is not read; save it as {suffix}x")
    if zipfile.is_zipfile(path):
        return {".doc": word_parts, ".xls": _sheet_parts, ".ppt": slide_parts}[suffix](path)
    return _rtf_parts(path) if head.startswith(b"{\\rtf") else _html_parts(path) if b"<" in head[:64] else _plain_parts(path)


def _plain_parts(path: Path) -> Parts:
    yield "", decoded(path.read_bytes()) or "", ""


def _html_parts(path: Path) -> Parts:
    yield "", html_text(path.read_bytes()), ""


def _rtf_parts(path: Path) -> Parts:
    from striprtf.striprtf import rtf_to_text

    yield "", rtf_to_text(path.read_bytes().decode("latin-1"), errors="replace"), ""


def _notebook_parts(path: Path) -> Parts:
    """The cells of a notebook, code in fences, and what the cells printed."""
    pieces = list[str]()
    for cell in json.loads(path.read_bytes())["cells"]:
        source = "".join(cell.get("source", ""))
        pieces.append(f"```\n{source}\n```" if cell.get("cell_type") == "code" else source)
        for output in cell.get("outputs", ()):
            pieces.append("".join(output.get("text") or output.get("data", {}).get("text/plain") or output.get("evalue", "")))
    yield "", "\n\n".join(filter(str.strip, pieces)), ""


def _mail_parts(path: Path) -> Parts:
    raw = path.read_bytes()
    raw = (decoded(raw) or "").encode() if b"\0" in raw[:1024] else raw  # saved in UTF-16
    yield "", _mail_text(message_from_bytes(raw, policy=_POLICY)), ""


def _mailbox_parts(path: Path) -> Parts:
    """The mails of a mailbox, each of which begins with a line "From "."""
    for number, raw in enumerate(re.split(rb"^From .*\n", path.read_bytes(), flags=re.MULTILINE)[1:], 1):
        text, fault = "", "cannot be read; save it anew"
        with suppress(AttributeError, LookupError, ValueError):  # what odd headers run into: the other mails are read
            text, fault = _mail_text(message_from_bytes(raw, policy=_POLICY)), ""
        yield f"message={number}", text, fault


def _mail_text(message: EmailMessage) -> str:
    """The headers that people read, the text, and the texts and the names of what is attached."""
    pieces = ["\n".join(f"{name}: {message[name]}" for name in _HEADERS if message[name])]
    kinds = ("html", "plain") if message.get_content_type() == "multipart/related" else ("plain", "html")
    for part in _leaves(message, kinds):
        name = part.get_filename() or ""
        text = _content(part) if re.match("text/(?!css)|message/", part.get_content_type()) else ""
        pieces.append(f"Attachment: {name}\n\n{text}".strip() if name else text)
    return "\n\n".join(filter(str.strip, pieces))


def _leaves(part: MIMEPart, kinds: Sequence[str], bodies: Sequence[MIMEPart | None] = ()) -> list[MIMEPart]:
    """List the parts of a mail in order, of alternatives one of `kinds`, without the pictures that stand in a text."""
    kind = part.get_content_type()
    if not kind.startswith("multipart/"):
        return [part] if not bodies or part in bodies or part.is_attachment() else []
    if kind == "multipart/alternative":
        bodies = bodies or [part.get_body(kinds)]
    own = part.iter_parts()
    inner = (one for one in own if kind != "multipart/related" or one.get_content_maintype() != "image" or one.is_attachment())
    return [leaf for one in inner for leaf in _leaves(one, kinds, bodies)]


def _content(part: MIMEPart) -> str:
    if part.get_content_maintype() == "message":
        return "\n\n".join(_mail_text(inner) for inner in part.iter_parts() if isinstance(inner, EmailMessage))
    raw = part.get_payload(decode=True)
    raw = raw if isinstance(raw, bytes) else b""
    charset, text = part.get_content_charset("utf-8"), ""
    if not code_page(charset) and not re.fullmatch("(us-)?ascii|utf-?8", charset):  # one that only mails have, such as UTF-7
        with suppress(LookupError, ValueError):
            text = raw.decode(charset)
    text = text or decoded(raw, charset) or ""
    return html_text(text.encode(), is_page=False) if part.get_content_subtype() == "html" and text.strip() else text


def _sheet_parts(path: Path) -> Parts:
    """The sheets of a workbook as tables of what the cells show, each with the rows above as lines."""
    from openpyxl import load_workbook

    if not (sheets := load_workbook(path, data_only=True).worksheets):
        raise InputError("its sheets are strict Open XML, or charts alone; save it as a plain Excel workbook")
    for sheet in sheets:
        shown = {place: _shown(cell) for place, cell in sheet._cells.items()}  # a million rows may be empty
        for merged in sheet.merged_cells.ranges:
            text = shown.get((merged.min_row, merged.min_col), "")
            shown |= {place: text for place in merged.cells if place in shown}
        columns = sorted({column for (_, column), text in shown.items() if text})
        rows = sorted({row for (row, _), text in shown.items() if text})
        blocks = list[list[list[str]]]()
        for at, row in enumerate(rows):
            cells = [shown.get((row, column), "") for column in columns]
            is_head = all(not text or not re.match(r"\A[\d.,%€$£¥-]++\Z", text) for text in cells)
            if at == 0 or (row > rows[at - 1] + 1 and is_head):
                blocks.append([])
            blocks[-1].append(cells)
        yield f"sheet={sheet.title}", "\n\n".join(map(_block, blocks)), ""


def _block(rows: list[list[str]]) -> str:
    """A table without empty columns, after its first rows as lines while they have one text each."""
    title = 0
    while title < len(rows) and len(set(filter(None, rows[title]))) == 1 and len(rows[0]) > 1:
        title += 1
    lines = ["".join(dict.fromkeys(filter(None, row))) for row in rows[:title]]
    columns = [column for column in zip(*rows[title:], strict=True) if any(column)]
    return "\n\n".join([*lines, markdown_table(list(zip(*columns, strict=True)))]).strip()


def _shown(cell: Any) -> str:
    """A cell as the sheet shows it, and its comment."""
    value, text = cell.value, str(cell.value if cell.value is not None else "")
    if isinstance(value, bool):
        text = text.upper()
    elif isinstance(value, datetime) and value.time() == time():
        text = str(value.date())
    elif isinstance(value, int | float):
        text = f"{value:.15g}"
        form, *forms = _FORMAT_MARKS.sub(r"\1", cell.number_format or "").split(";")
        if value < 0 and forms:
            form, value = forms[0], -value
        if (found := _NUMBER_FORMAT.search(form)) and not re.search(r"\A/|[#0?]", form[found.end() :]):  # a fraction, groups
            value /= 1000 ** len(found[2])  # a comma after the digits scales
            comma = "," * ("," in found[0].removesuffix(found[2]))
            digits = found[0].partition(".")[0].count("0") + len(found[1] or "") + bool(found[1]) + (value < 0)
            kind = f"0{digits}{comma}.{len(found[1] or '')}{'%' if '%' in found[0] else 'E' if 'E' in found[0] else 'f'}"
            text = f"{form[: found.start()]}{value:{kind}}{form[found.end() :]}".strip()
    note = " ".join(cell.comment.text.rpartition("Comment:\n")[2].split()) if cell.comment else ""
    return f"{text} (comment: {note})" if note else text


# Of a file by the end of its name: its reader, or the remedy for a kind that is not read.
KINDS: dict[str, Callable[[Path], Parts] | str] = {
    ".pdf": pdf_parts,
    **dict.fromkeys((".html", ".htm", ".xhtml"), _html_parts),
    **dict.fromkeys((".docx", ".docm", ".dotx", ".dotm"), word_parts),
    **dict.fromkeys((".pptx", ".pptm", ".ppsx", ".ppsm", ".potx"), slide_parts),
    **dict.fromkeys((".xlsx", ".xlsm", ".xltx", ".xltm"), _sheet_parts),
    **dict.fromkeys((".odt", ".ods", ".odp", ".ott", ".fodt", ".fods", ".fodp"), open_document_parts),
    ".epub": book_parts,
    ".fb2": fiction_parts,
    ".rtf": _rtf_parts,
    ".ipynb": _notebook_parts,
    **dict.fromkeys((".eml", ".mhtml", ".mht"), _mail_parts),
    ".mbox": _mailbox_parts,
    **dict.fromkeys((".doc", ".xls", ".ppt"), _old_parts),
    **dict.fromkeys((".msg", ".pst"), "save its mails as .eml or .mbox"),
    **dict.fromkeys((".xlsb", ".numbers", ".et"), "save it as .xlsx"),
    **dict.fromkeys((".pages", ".key", ".one", ".vsd", ".vsdx", ".pub", ".wpd", ".wps", ".hwp", ".odg"), "save it as PDF"),
    **dict.fromkeys((".ps", ".eps", ".djvu", ".xps", ".chm", ".mobi", ".azw3"), "convert it to PDF"),
    **dict.fromkeys((".zip", ".tar", ".tgz", ".7z", ".rar", ".bz2", ".xz", ".zst"), "unpack it"),
    **dict.fromkeys((".parquet", ".arrow", ".feather", ".sqlite", ".mdb", ".accdb"), "write its rows as JSON lines"),
}
