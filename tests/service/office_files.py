"""Files of office programs, made for tests."""

import io
import zipfile
from pathlib import Path

import pytest


def pdf(pages: list[str]) -> bytes:
    """A PDF of lines of eight words, written by hand."""
    count = len(pages)
    kids = " ".join(f"{4 + 2 * number} 0 R" for number in range(count))
    objects = ["<< /Type /Catalog /Pages 2 0 R >>", f"<< /Type /Pages /Kids [{kids}] /Count {count} >>"]
    objects.append("<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>")
    for number, text in enumerate(pages):
        words = text.split()
        lines = "".join(f"({' '.join(words[at : at + 8])} ) Tj T* " for at in range(0, len(words), 8))
        content = f"BT /F1 12 Tf 14 TL 72 720 Td {lines}ET" if text else ""
        resources = f"/Resources << /Font << /F1 3 0 R >> >> /Contents {5 + 2 * number} 0 R"
        objects.append(f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] {resources} >>")
        objects.append(f"<< /Length {len(content)} >>\nstream\n{content}\nendstream")
    raw, offsets = b"%PDF-1.4\n", []
    for number, body in enumerate(objects, 1):
        offsets.append(len(raw))
        raw += f"{number} 0 obj\n{body}\nendobj\n".encode()
    table = "".join(f"{offset:010d} 00000 n \n" for offset in offsets)
    end = f"xref\n0 {len(objects) + 1}\n0000000000 65535 f \n{table}trailer\n<< /Size {len(objects) + 1} /Root 1 0 R >>\n"
    return raw + f"{end}startxref\n{len(raw)}\n%%EOF\n".encode()


def zipped(members: dict[str, str]) -> bytes:
    raw = io.BytesIO()
    with zipfile.ZipFile(raw, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in members.items():
            archive.writestr(name, text)
    return raw.getvalue()


def docx(text: str) -> bytes:
    office = "http://schemas.openxmlformats.org"
    types = '<Default Extension="rels" ContentType="application/vnd.openxmlformats-package.relationships+xml"/>'
    main = "application/vnd.openxmlformats-officedocument.wordprocessingml.document.main+xml"
    types += f'<Override PartName="/word/document.xml" ContentType="{main}"/>'
    relation = (
        f'<Relationship Id="r1" Type="{office}/officeDocument/2006/relationships/officeDocument" Target="word/document.xml"/>'
    )
    members = {
        "[Content_Types].xml": f'<Types xmlns="{office}/package/2006/content-types">{types}</Types>',
        "_rels/.rels": f'<Relationships xmlns="{office}/package/2006/relationships">{relation}</Relationships>',
        "word/document.xml": f'<w:document xmlns:w="{office}/wordprocessingml/2006/main"><w:body><w:p><w:r>'
        f"<w:t>{text}</w:t></w:r></w:p></w:body></w:document>",
    }
    return zipped(members)


def epub(text: str) -> bytes:
    container = '<container><rootfiles><rootfile full-path="book.opf"/></rootfiles></container>'
    package = '<package xmlns="http://www.idpf.org/2007/opf"><metadata xmlns:dc="http://purl.org/dc/elements/1.1/">'
    package += '<dc:title>Book</dc:title></metadata><manifest><item id="a" href="a.xhtml" media-type="application/xhtml+xml"/>'
    package += '</manifest><spine><itemref idref="a"/></spine></package>'
    page = f"<html><body><p>{text}</p></body></html>"
    return zipped({"META-INF/container.xml": container, "book.opf": package, "a.xhtml": page})


def pptx(path: Path, texts: list[str]) -> None:
    presentation = pytest.importorskip("pptx", reason="needs the extra documents").Presentation()
    for text in texts:
        presentation.slides.add_slide(presentation.slide_layouts[5]).shapes.title.text = text
    presentation.save(path)


def xlsx(path: Path, sheets: dict[str, str]) -> None:
    book = pytest.importorskip("openpyxl", reason="needs the extra documents").Workbook()
    book.remove(book.active)
    for name, text in sheets.items():
        book.create_sheet(name).append(["what", text])
    book.save(path)
