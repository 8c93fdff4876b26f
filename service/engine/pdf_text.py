"""Text of PDF files by PDFium: pages as they are read, tables by position, values of forms, comments.

A rectangle is left, bottom, right, top, in points from the page's lower left corner.
"""

import ctypes
import re
import unicodedata
from collections.abc import Iterator, Sequence
from itertools import groupby
from math import inf
from pathlib import Path
from statistics import median
from typing import Any

from cacheblend.base.errors import InputError

Rectangle = tuple[float, float, float, float]
PICTURES = "pictures without text; make a text by OCR first"
BLANK = "blank, or damaged"
WITHOUT_TEXT = (PICTURES, BLANK)  # pages that nothing is lost of, where others have text
NO_LANGUAGE = "its fonts do not say which characters they draw; make a text by OCR first"
ODD_SHARE = 0.3  # of characters that no language has, in a text that is none
LATIN_SHARE = 0.5  # of accented letters: 0.15 in Vietnamese, nearly all where the bytes of another script are shown
CELL_GAP = 0.6  # between two cells, in heights of a line; words are less apart, or in one box
CELL_WIDTH, MAX_CELL_WIDTH = 0.22, 0.35  # of a page, that half of a table's cells, and all, have at most; prose is wider
FILLED = 0.6  # of a table's cells, at least; formulas in a text leave more of them empty
TABLE_ROWS, TABLE_COLUMNS = 3, 3  # of a table: two columns may be prose, and PDFium reads a table of two row by row
_FORMS = re.compile("[\ufb00-\ufb06\ufb50-\ufdff\ufe70-\ufefc]+")  # ligatures, letters in the shape of their place
_CUT_WORD = re.compile(r"(?:[\x02\ufffe]\s*|(?<=[a-zà-ÿ])-\n(?=[a-zà-ÿ]))")  # PDFium has its own marks of a word's hyphen
# Of a number or a name: no word is cut where these meet.
_HYPHEN = re.compile(r"[\x02\ufffe](?:(?=\s*\d)|(?<=[a-zà-ÿ].)(?=\s*[A-ZÀ-Þ])|(?<=[A-ZÀ-Þ\d].)(?=\s*[a-zà-ÿ]))\s*")
_ACCENTS = {"\xa8": "\u0308", "\xb4": "\u0301", "\u02c6": "\u0302", "\u02dc": "\u0303", "\u02c7": "\u030c"}
# TeX draws an accent, then its letter, at times with a space around it.
_ACCENTED = re.compile("(?: (?=. ))?([{}]) ?([AEIOUYaeiouyNn\u0131])".format("".join(_ACCENTS)))
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\uffff]")


def pdf_parts(path: Path) -> Iterator[tuple[str, str, str]]:
    """Place, text and fault of each page; raises InputError for a file that is locked."""
    import pypdfium2
    from pypdfium2 import raw

    try:
        pdf = pypdfium2.PdfDocument(path)
    except pypdfium2.PdfiumError as error:
        if "password" in str(error).lower():
            raise InputError("locked with a password; save it without one") from None
        raise
    if pdf.get_formtype() == raw.FORMTYPE_XFA_FULL:
        raise InputError("an XFA form, whose pages only Adobe's programs draw; print it to a PDF there")
    pdf.init_forms()
    for number in range(len(pdf)):
        text = fault = ""
        try:
            page = pdf[number]
            text = _page_text(page, pdf.formenv)
            if is_no_language(text):
                text, fault = "", NO_LANGUAGE
            elif not text.strip():
                fault = PICTURES if any(True for _ in page.get_objects()) else BLANK
        except pypdfium2.PdfiumError as error:
            fault = f"damaged ({error}); open the file and save it anew"
        yield f"page={number + 1}", clean(text), fault


def is_no_language(text: str) -> bool:
    """Whether many of a text's characters are none that a language has: codes of glyphs, or bytes of another script."""
    inked = [character for character in text if character not in " \r\n\t\x02\ufffe"]
    odd = sum(unicodedata.category(character) in ("Cc", "Cn", "Co") or character == "\ufffd" for character in inked)
    latin = sum("\x80" <= character <= "\xff" for character in inked)
    return odd > ODD_SHARE * len(inked) or latin > LATIN_SHARE * max(len(inked), 16)


def clean(text: str) -> str:
    """A text with words that line ends cut, with letters in place of their shapes, and without control characters."""
    text = _CUT_WORD.sub("", _HYPHEN.sub("-", text.replace("\r\n", "\n").replace("\r", "\n")))
    text = _ACCENTED.sub(lambda found: unicodedata.normalize("NFC", found[2].replace("\u0131", "i") + _ACCENTS[found[1]]), text)
    text = _CONTROLS.sub("", _FORMS.sub(lambda found: unicodedata.normalize("NFKC", found[0]), text))
    return "\n".join(map(str.rstrip, text.split("\n")))


def _page_text(page: Any, form: Any) -> str:
    """The text of a page: line by line if a form was filled in, else as PDFium reads it, tables row by row."""
    shown = page.get_textpage()
    values, comments = _annotations(page, form)
    boxes: list[Rectangle] = [shown.get_rect(number) for number in range(shown.count_rects())]
    if values:
        texts = {box: shown.get_text_bounded(*box).strip() for box in boxes} | values
        return "\n".join([*(" ".join(texts[box] for box in row) for row in _rows(list(texts))), *comments])
    if page.get_rotation():  # PDFium gives the lines of a rectangle without their ends
        return "\n".join([shown.get_text_range(), *comments])
    pieces, top, plain = list[str](), None, shown.get_text_bounded()
    for table in _tables(_rows(boxes), page.get_width()):
        pieces.append(shown.get_text_bounded(bottom=max(_around(cell)[3] for cell in table[0] if cell), top=top))
        cells = [[shown.get_text_bounded(*_around(cell)) if cell else "" for cell in row] for row in table]
        pieces.append(markdown_table(cells))
        top = min(_around(cell)[1] for cell in table[-1] if cell)
    pieces.append(shown.get_text_bounded(top=top))
    is_complete = sorted(filter(str.isalnum, "".join(pieces))) == sorted(filter(str.isalnum, plain))  # no line is cut
    return "\n".join(filter(str.strip, [*(pieces if is_complete else [plain]), *comments]))


def _annotations(page: Any, form: Any) -> tuple[dict[Rectangle, str], list[str]]:
    """The values of a page's form by their places, and the comments of readers."""
    from pypdfium2 import raw

    values, comments = dict[Rectangle, str](), list[str]()
    for number in range(raw.FPDFPage_GetAnnotCount(page)):
        annotation = raw.FPDFPage_GetAnnot(page, number)
        kind, place = raw.FPDFAnnot_GetSubtype(annotation), raw.FS_RECTF()
        raw.FPDFAnnot_GetRect(annotation, place)
        if kind == raw.FPDF_ANNOT_WIDGET and form:
            value = _string(raw.FPDFAnnot_GetFormFieldValue, form, annotation)
            field = raw.FPDFAnnot_GetFormFieldType(form, annotation)
            if field in (raw.FPDF_FORMFIELD_CHECKBOX, raw.FPDF_FORMFIELD_RADIOBUTTON):
                value = "[x]" if raw.FPDFAnnot_IsChecked(form, annotation) else ""
            if value.strip():
                values[place.left, place.bottom, place.right, place.top] = value.strip()
        elif kind not in (raw.FPDF_ANNOT_LINK, raw.FPDF_ANNOT_POPUP):
            comments.append(_string(raw.FPDFAnnot_GetStringValue, annotation, b"Contents"))
        raw.FPDFPage_CloseAnnot(annotation)
    return values, [f"Comment: {one.strip()}" for one in comments if one.strip()]


def _string(call: Any, *arguments: Any) -> str:
    """A string that a function of PDFium writes into a buffer, in UTF-16."""
    size = call(*arguments, None, 0)
    buffer = ctypes.create_string_buffer(size)
    call(*arguments, ctypes.cast(buffer, ctypes.POINTER(ctypes.c_ushort)), size)
    return buffer.raw[: max(size - 2, 0)].decode("utf-16-le", errors="replace")


def _rows(boxes: Sequence[Rectangle]) -> list[list[Rectangle]]:
    """The boxes of each line of a page, from the top, each from the left."""
    rows = list[list[Rectangle]]()
    for box in sorted(boxes, key=lambda box: -(box[1] + box[3])):
        _, low, _, high = rows[-1][0] if rows else (0, inf, 0, 0)
        if abs(box[1] + box[3] - low - high) >= max(box[3] - box[1], high - low, 2):
            rows.append([])
        rows[-1].append(box)
    return [sorted(row) for row in rows]


def _tables(rows: Sequence[Sequence[Rectangle]], width: float) -> Iterator[list[list[list[Rectangle]]]]:
    """Tables of a page: rows that follow each other, of cells, of boxes; a cell without text is empty."""
    split = [_runs(row, CELL_GAP * max(4.0, *(box[3] - box[1] for box in row))) for row in rows]
    # The second line of a cell belongs to the table, too.
    short = [len(line) == 1 and line[0][-1][2] - line[0][0][0] <= CELL_WIDTH * width for line in split]
    inside = [len(line) > 1 or (at > 0 and short[at] and len(split[at - 1]) > 1) for at, line in enumerate(split)]
    for is_table, group in groupby(range(len(split)), key=inside.__getitem__):
        lines = [split[at] for at in group]
        if not is_table or sum(len(line) > 1 for line in lines) < TABLE_ROWS:
            continue
        cells = [_around(cell) for line in lines for cell in line]
        columns = [_around(run) for run in _runs(cells, 0)]
        widths = [(right - left) / width for left, _, right, _ in cells]
        is_narrow = median(widths) <= CELL_WIDTH and max(widths) <= MAX_CELL_WIDTH
        if len(columns) >= TABLE_COLUMNS and is_narrow and len(cells) >= FILLED * len(columns) * len(lines):
            row_boxes = [[box for cell in line for box in cell] for line in lines]
            yield [[[box for box in row if begin <= box[0] <= end] for begin, _, end, _ in columns] for row in row_boxes]


def _around(boxes: Sequence[Rectangle]) -> Rectangle:
    """The rectangle around some boxes."""
    left, bottom, right, top = zip(*boxes, strict=True)
    return min(left), min(bottom), max(right), max(top)


def _runs(boxes: Sequence[Rectangle], gap: float) -> list[list[Rectangle]]:
    """Boxes from the left, together where the gap between them is no wider."""
    runs, end = list[list[Rectangle]](), -inf
    for box in sorted(boxes):
        if box[0] - end > gap:
            runs.append([])
        runs[-1].append(box)
        end = max(end, box[2])
    return runs


def markdown_table(rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table, whose first row is its head."""
    cells = [[" ".join(cell.split()).replace("|", "\\|") for cell in row] for row in rows]
    width = max(map(len, cells), default=0)
    lines = [f"| {' | '.join([*row, *[''] * (width - len(row))])} |" for row in cells]
    return "\n".join([*lines[:1], "|" + " --- |" * width, *lines[1:]]) if lines else ""
