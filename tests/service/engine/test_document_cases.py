"""Documents as people have them: each kind's words come out once and in order, and what cannot be read is said."""

# ruff: noqa: RUF001  # texts of many languages

import gzip
import zipfile
from contextlib import closing
from email.message import EmailMessage
from pathlib import Path

import pytest
from fakes import tiny_tokenizer

from cacheblend.retriever import Retriever, RetrieverConfig
from cacheblend.retriever.document import file_of
from cacheblend.service.engine.document_sources import DocumentStream, SourceReport
from cacheblend.service.engine.file_readers import KINDS
from cacheblend.service.engine.pdf_text import WITHOUT_TEXT, clean, is_no_language

pytest.importorskip("pypdfium2", reason="needs the extra documents")
pytest.importorskip("chardet", reason="needs the extra rag")
CASES = next((up / "shared/cases/documents" for up in Path(__file__).resolve().parents if (up / "shared/cases").is_dir()), None)
PIERS = "| Pier | Depth in metres | Keeper |\n| --- | --- | --- |\n| Pier 1 | 5.1 | Keeper1 |"
CZECH = "Už týdny cloumá českou veřejností skandál s dědictvím. Přístav Děčín je zavřený, říká kapitán Žižka."
# By file: texts that come out, and after "-" texts that do not.
EXPECTED = {
    "01-pdf-one-bad-page/three-pages.pdf": ["built by Ada Lind", "Oskar follows her"],
    "02-pdf-form-values/claim-form.pdf": ["Name of the claimant: Ingrid Halvorsen", "Amount in crowns: 7741"],
    "03-pdf-partly-scanned/minutes.pdf": ["Page one: the council met in Varnholm"],
    "04-pdf-cjk-without-tounicode/90ms-rksj-h.pdf": ["港の船長は田中です。灯台は赤い。"],
    "04-pdf-cjk-without-tounicode/euc-h.pdf": ["港の船長は田中です。灯台は赤い。"],
    "04-pdf-cjk-without-tounicode/gbk-euc-h.pdf": ["港口的船长是田中。灯塔是红色的。"],
    "04-pdf-cjk-without-tounicode/identity-japan1.pdf": ["日翻翻日"],
    "04-pdf-cjk-without-tounicode/unijis-ucs2-h.pdf": ["港の船長は田中です。灯台は赤い。"],
    "06-pdf-fake-bold/notice.pdf": ["Total 2031 fee\n", "-", "fee Total", "NN"],
    "07-pdf-glued-table-cells/drawn-by-columns.pdf": ["| SK-1 | A-12 | 450 | 447 |", "| SK-3 | C-15 | 780 | 778 |"],
    "07-pdf-glued-table-cells/table.pdf": ["Alma 0 2,248 1,135 103,532"],
    "09-pdf-glyph-names/report.pdf": ["Overview of the harbour report, first line.", "-", "/g13"],
    "10-pdf-arabic-forms/minar.pdf": ["منار"],
    "11-docx-linked-picture/letter.docx": ["leaves at nine. Forty pages of text follow here.", "-", "!["],
    "12-docx-lost-parts/bidi.docx": ["דניאל הוא רב החובל and ليلى القبطانة"],
    "12-docx-lost-parts/comments.docx": ["The fee is 40 crowns.", "Vega objects: it must be 55 crowns"],
    "12-docx-lost-parts/fields.docx": ["The contract number is CT-9001 and the customer is Ingrid Halvorsen"],
    "12-docx-lost-parts/headers.docx": ["CONFIDENTIAL tariff number QX-7741", "Body text", "Valid until 31 March 2031"],
    "12-docx-lost-parts/ruby.docx": ["東京へ行く船"],
    "12-docx-lost-parts/textbox.docx": ["Before the box.", "Boxed: call pilot on channel 14"],
    "12-docx-lost-parts/underscores.docx": ["max_retry_count = 5 * base_delay", "(see [1] and <main>)", "-", "\\"],
    "14-text-encodings/cp1250-czech.txt": [CZECH],
    "14-text-encodings/cp1250-polish.txt": ["Łódź płynie z Gdańska do Świnoujścia, kapitan Wiśniewski pije kawę."],
    "14-text-encodings/cp1254-turkish.txt": ["İstanbul’dan kalkan gemi İzmir’e gidiyor, kaptan Şükrü Öğüt çayını içiyor"],
    "14-text-encodings/cp866-russian.txt": ["Капитан"],
    "14-text-encodings/late-latin1.log": ["Fähre für Müller"],
    "14-text-encodings/latin2-romanian.txt": ["şi încă aşteaptă"],
    "14-text-encodings/nul-bytes.log": ["the gauge reads 3.4 m", "-", "\0"],
    "14-text-encodings/utf16le-no-mark.txt": ["The purser of the Alma keeps the passenger list in Varnholm.", "-", "\0"],
    "14-text-encodings/utf8-cut-off.txt": ["Le phare de Noël est éclairé dès l’été à Orléans."],
    "14-text-encodings/utf8-one-bad-byte.txt": ["heißt Grüße aus Köln und fährt täglich.", "\ufffd"],
    "20-raw-markup/export.xls": ["| Alma | 40 |", "-", "<td>"],
    "20-raw-markup/mail.eml": ["From: Jürgen Müller", "Fähre fällt aus", "um 14 Uhr von Pier 7", "-", "AAAA"],
    "20-raw-markup/nb.ipynb": ["# Tides", "reads 3.4 m.", "plot()", "-", "iVBOR"],
    "20-raw-markup/note.doc": ["The dredger Skåne works at pier nine until Šaška signs."],
    "20-raw-markup/note.rtf": ["The dredger Skåne works at pier nine until Šaška signs."],
    "20-raw-markup/sub.srt": ["that the lamp had failed."],
    "21-html/hidden.html": ["# Ferry", "The ferry leaves at nine.", "-", "SECRET", "Also hidden", "tmpl"],
    "21-html/rowspan.html": ["| May | south | 9 |"],
    "21-html/title.html": ["Tariff of Varnholm harbour 2031", "Forty crowns a night."],
    "23-tables-lose-their-header/bigtable.docx": [PIERS],
    "23-tables-lose-their-header/bigsheet.xlsx": ["| pier | depth | keeper |\n| --- | --- | --- |\n| P001 | 7 | Keeper1 |"],
    "25-hash-in-name/Invoice #12.txt": ["The invoice12 boat"],
    "25-hash-in-name/C# guide.md": ["# Setup"],
}


def read(*sources: object) -> tuple[dict[str, str], SourceReport]:
    """Texts by the ids of documents, and the report of what gave none."""
    with closing(DocumentStream(list(map(str, sources)))) as stream:
        return {document.id: document.text for document in stream}, stream.report


@pytest.mark.skipif(CASES is None, reason="the inputs that people had are not here")
def test_replay() -> None:
    """Every file of the trials gives the words that a person sees in it."""
    assert CASES is not None
    wrong, texts = dict[str, list[str]](), read(CASES)[0]
    for name, words in EXPECTED.items():
        text = "\n\n".join(text for id_, text in texts.items() if file_of(id_) == name) + "\n"
        border = words.index("-") if "-" in words else len(words)
        missing = [one for one in words[:border] if one not in text]
        if found := missing + [one for one in words[border + 1 :] if one in text]:
            wrong[name] = found
    print(f"{len(EXPECTED) - len(wrong)} of {len(EXPECTED)} files are right")
    assert wrong == {}


@pytest.mark.skipif(CASES is None, reason="the inputs that people had are not here")
def test_pages_without_text_are_named() -> None:
    """A page that is damaged, a picture, or in fonts that say no characters is named, and the others are read."""
    assert CASES is not None
    _, report = read(CASES / "01-pdf-one-bad-page", CASES / "03-pdf-partly-scanned", CASES / "09-pdf-glyph-names")
    said = {place.partition(".pdf, ")[2]: why for place, why in (report.skipped | report.faults).items() if ".pdf" in place}
    assert {place: "OCR" in why for place, why in said.items()} == {"page 2": True, "page 2, 3": True}
    assert set(report.skipped.values()) == set(WITHOUT_TEXT)


def test_text_that_is_no_language() -> None:
    """Codes of glyphs and bytes of another script are found; languages with many accents, formulas and figures are not."""
    languages = (
        "Čtyři žluté koně",
        "Việt Nam đã sẵn sàng",
        "Größe",
        "x² + y² = 4",
        "2,248 1,135",
        "灯台は赤い。",
        "ﻣﻨﺎﺭ",
        "🚢 ahoy",
    )
    assert not any(map(is_no_language, languages))
    assert all(map(is_no_language, ("\x01\x02\x03\x04 \x05", "\ue001\ue002\ue003", "Ä¿Â¼ÔÚÎÒÃÇµÄÊÀ½çÉÏ")))
    assert clean("R¨as¨anen, Lemaˆıtre, M ´ exico, but σˆΨ, don´t") == "Räsänen, Lemaître, México, but σˆΨ, don´t"
    assert clean("The ofﬁce ﬁled the pre-\r\nliminary\x02\r\n note X\x02\r\n7") == "The office filed the preliminarynote X-7"


def office(path: Path, main: str, kind: str, **parts: str) -> None:
    """An Office file of a main part and others, whose names have `_` for a folder and are related to it."""
    types = f'<Types xmlns="t"><Override PartName="/{main}" ContentType="application/{kind}.main+xml"/></Types>'
    names = {key: key.replace("_", "/") + ".xml" for key in parts}
    folder, base = main.rsplit("/", 1)
    related = "".join(f'<R Id="{key}" Target="/{name}"/>' for key, name in names.items())
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("[Content_Types].xml", types)
        archive.writestr(f"{folder}/_rels/{base}.rels", f"<Relationships>{related}</Relationships>")
        for key, text in parts.items():
            archive.writestr(names[key], text)


def test_office_files_with_odd_parts(tmp_path: Path) -> None:
    """A shape without geometry, notes of slides, an EPUB with a prefix, OpenDocument, cells as the sheet shows them."""
    shape = '<p:sp xmlns:p="p" xmlns:a="a">{}<a:p><a:r><a:t>{}</a:t></a:r></a:p></p:sp>'
    slide = "<sld>" + shape.format("<p:ph type='title'/>", "Tides") + shape.format("", "High at noon") + "</sld>"
    main = '<p xmlns:r="r"><sldIdLst><sldId id="256" r:id="ppt_slide1"/></sldIdLst></p>'
    notes = "<a><p><t>Say it slowly</t></p></a>"
    office(tmp_path / "deck.pptm", "ppt/presentation.xml", "presentation", ppt_presentation=main, ppt_slide1=slide)
    with zipfile.ZipFile(tmp_path / "deck.pptm", "a") as deck:
        deck.writestr("ppt/_rels/slide1.xml.rels", '<R><R Id="n" Target="notesSlide1.xml"/></R>')
        deck.writestr("ppt/notesSlide1.xml", notes)
    with zipfile.ZipFile(tmp_path / "book.epub", "w") as book:
        book.writestr("META-INF/container.xml", '<c><rootfile full-path="o/b.opf"/></c>')
        items = '<o:item id="a" href="a.xhtml"/><o:itemref idref="a"/>'
        book.writestr("o/b.opf", f'<o:package xmlns:o="o" xmlns:dc="d"><dc:title>Quay</dc:title>{items}</o:package>')
        book.writestr("o/a.xhtml", "<html><body><p>The quay is long.</p></body></html>")
    cells = '<x:table><x:table-row><x:table-cell><x:p>A</x:p></x:table-cell><x:table-cell x:value="7"/></x:table-row></x:table>'
    flat = '<x:h x:outline-level="2">Fees</x:h><x:p>Forty crowns</x:p>'
    flat = f'<o xmlns:x="x"><x:body><x:text>{flat}{cells}</x:text></x:body></o>'
    (tmp_path / "fees.fodt").write_text(flat)
    (tmp_path / "hall.html").write_text("<table><caption>Hire<tr><td>A<td>B<tr><td colspan=2>By day<tr><td>1<td>2</table>")
    odd = "<body hidden>Line\vone<button>Copy</button>: <img alt='\\pi'> <a>here</a>.<pre>a<br>b</pre>"
    (tmp_path / "odd.html").write_text(f"{odd}<table><tr><td>P<td><td><tr><td colspan=2>Q<td>R</table>")
    (tmp_path / "mail.html").write_text("<table><tr><td>Dear Ann,</td></tr><tr><td colspan=2>it ships</td></tr></table>")
    openpyxl = pytest.importorskip("openpyxl")
    sheet = (workbook := openpyxl.Workbook()).active
    for row in (
        ["Tariff 2031", None, None],
        ["Boat", "Share", 1234],
        ["Alma", 0.25, -1.6],
        ["Bern", 12, "NA"],
        [55667788, 5e6, 1.23e-5],
    ):
        sheet.append(row)
    forms = {"B3": "0%", "C3": "+0.0;-0.0", "C2": '"Z-"00000', "A5": "000-00-000", "B5": '#,##0,,"M"', "C5": "0.00E+00"}
    for cell, form in forms.items():
        sheet[cell].number_format = form
    sheet["B4"].comment = openpyxl.comments.Comment("ask Vega", "v")
    workbook.save(tmp_path / "tariff.xlsm")
    texts, report = read(tmp_path)
    assert report.faults == {}
    assert texts == {
        "deck.pptm#slide=1": "# Tides\n\nHigh at noon\n\nSay it slowly",
        "book.epub": "# Quay\n\nThe quay is long.",
        "fees.fodt": "## Fees\n\nForty crowns\n\n| A | 7 |\n| --- | --- |",
        "hall.html": "Hire\n\n| A | B |\n| --- | --- |\n| By day |  |\n| 1 | 2 |",
        "mail.html": "Dear Ann,\n\nit ships",
        "odd.html": "Line one: \\pi here.\n\n```\na\nb\n```\n\n| P |  |  |\n| --- | --- | --- |\n| Q | Q | R |",
        "tariff.xlsm#sheet=Sheet": "Tariff 2031\n\n| Boat | Share | Z-01234 |\n| --- | --- | --- |\n| Alma | 25% | -1.6 |\n"
        "| Bern | 12 (comment: ask Vega) | NA |\n| 55667788 | 5M | 1.23E-05 |",
    }


def test_kinds_that_are_refused_and_texts_in_gzip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kind of document that is not read is a fault with a remedy; gzip of texts, mails, boxes of mails are read."""
    not_read = [suffix for suffix, kind in KINDS.items() if isinstance(kind, str)]
    for suffix in not_read:
        (tmp_path / f"some{suffix}").write_bytes(b"x")
    not_read.append(".html.gz")
    (tmp_path / "some.html.gz").write_bytes(gzip.compress(b"<p>x"))
    (tmp_path / "old.doc").write_bytes(b"\xd0\xcf\x11\xe0" + bytes(600))
    (tmp_path / "locked.docx").write_bytes(b"\xd0\xcf\x11\xe0" + bytes(600))
    _, report = read(tmp_path)
    assert report.skipped == {}
    assert {Path(name).name for name in report.faults} == {f"some{suffix}" for suffix in not_read} | {"old.doc", "locked.docx"}
    assert "save it as .docx" in report.faults[str(tmp_path / "old.doc")]
    assert "locked with a password" in report.faults[str(tmp_path / "locked.docx")]
    mail, within = EmailMessage(), b"Subject: Deep\n\nThe deepest."
    mail["From"], mail["Subject"] = "Jürgen <j@example.org>", "Fähre"
    mail.set_content("<p>Sie fällt aus.</p>", subtype="html")
    mail.add_attachment(b"\x89PNG" * 99, maintype="image", subtype="png", filename="a.png")
    mail.add_attachment("Sent by a list", disposition="inline")
    mail.add_attachment("<p>Moles", subtype="html", filename="b.html")
    for depth in range(14):  # of mails in mails, each of which was read twice for the one above
        within = b"From: %d\nContent-Type: message/rfc822\nContent-Disposition: attachment\n\n%b" % (depth, within)
        within = b"Content-Type: multipart/alternative; boundary=B%d\n\n--B%d\n%b\n--B%d--\n" % (depth, depth, within, depth)
    signed = b"Subject: Two\nContent-Type: multipart/signed; boundary=S\n\n--S\n%b\n--S--\n" % mail.as_bytes()
    other = tmp_path / "other"
    other.mkdir()
    (other / "deep.eml").write_bytes(within)
    (other / "log.txt.gz").write_bytes(gzip.compress("Müde Möwen".encode()))
    odd = b"From c\nContent-Disposition: attachment; filename*\n\nOdd."
    (other / "box.mbox").write_bytes(b'From a\n%b\nFrom b\nTo: "\n%b\n%b' % (mail.as_bytes(), signed, odd))
    (other / "note.rtf").write_bytes(rb"{\rtf1\ansi Fee \u-10179?\u-8704? due}")
    (tmp_path / "chardet.py").write_text("raise SystemExit")  # whoever wrote what is ingested runs no code
    monkeypatch.chdir(tmp_path)
    texts, report = read(other)
    assert any("message 3: cannot be read" in fault for fault in report.faults.values())
    assert texts["note.rtf"] == "Fee \U0001f600 due"
    assert texts["log.txt.gz"] == "Müde Möwen"
    assert texts["deep.eml"] == "Subject: Deep\n\nThe deepest."
    parts = "\n\nSie fällt aus.\n\nAttachment: a.png\n\nSent by a list\n\n\nAttachment: b.html\n\nMoles"
    assert texts["box.mbox#message=1"] == f"From: Jürgen <j@example.org>\nSubject: Fähre{parts}"
    assert texts["box.mbox#message=2"] == f'To: "\nSubject: Two{parts}'


def test_tables_are_found_and_shown_with_their_heads() -> None:
    """Every chunk of a table begins with its head; lines are the file's; a code finds its row; equal chunks come once."""
    rows = [f"P{number:03},{number % 23}.5,Keeper{number}" for number in range(400)]
    table = "\n".join(["| Pier | Depth |", "| --- | --- |", *(f"| Pier {number} | {number % 17} m |" for number in range(200))])
    with Retriever(RetrieverConfig(chunk_tokens=128), tiny_tokenizer(), _Flat()) as retriever:
        retriever.add(
            [
                {"id": "big.csv", "title": "big", "text": "pier,depth_m,keeper\n" + "\n".join(rows)},
                {"id": "table.md", "title": "table", "text": f"# Piers\n\n{table}\n\nNo more piers."},
                *({"id": f"{copy}.txt", "title": copy, "text": "The contract ends in May."} for copy in "abc"),
            ]
        )
        chunks = retriever.chunks("big.csv")
        assert all(chunk.text.startswith("pier,depth_m,keeper\n") for chunk in chunks[1:])
        joined = "".join(chunk.text.removeprefix("pier,depth_m,keeper\n") for chunk in chunks[1:])
        assert chunks[0].text + joined == "big\npier,depth_m,keeper\n" + "\n".join(rows)
        lines = [place.lines or (0, 0) for place in retriever.places(chunks)]
        assert [first for first, _ in lines[1:]] == [last + 1 for _, last in lines[:-1]]
        assert (lines[0][0], lines[-1][1]) == (1, 401)
        assert all("| Pier | Depth |" in chunk.text for chunk in retriever.chunks("table.md")[:-1])
        for number in range(0, 400, 20):
            assert any(f"P{number:03}," in hit.chunk.text for hit in retriever.search(f"How deep is pier P{number:03}?", 6))
        found = [hit.chunk.document_id for hit in retriever.search("When does the contract end?", 6)]
        assert len({"a.txt", "b.txt", "c.txt"}.intersection(found)) == 1


@pytest.mark.parametrize(
    ("texts", "question"),
    [
        (["出差报销由财务部的李敏签字。", "年假为十五天，必须提前申请。"], "年假有多少天？"),
        (["食堂は十一時半に開きます。", "契約書の原本は赤い棚にあります。"], "契約書の原本はどこですか？"),
        (["เรือออกเวลาเก้าโมง", "ประภาคารเป็นสีแดง"], "ประภาคารสีอะไร"),
        (["今天下雨。", "我们的AI模型在2024年"], "AI模型"),
        (["배는 아홉 시에 떠난다.", "등대는 빨간색이다."], "등대의 색은?"),
    ],
)
def test_words_of_scripts_without_spaces(texts: list[str], question: str) -> None:
    """Words are found where nothing stands between them, although the embedder knows nothing of the language."""
    with Retriever(RetrieverConfig(), tiny_tokenizer(), _Flat()) as retriever:
        texts = [*texts, *(f"A text in English, number {number}." for number in range(8))]
        retriever.add([{"id": str(number), "text": text} for number, text in enumerate(texts)])
        assert retriever.search(question, 1)[0].chunk.document_id == "1"


class _Flat:
    """An embedder to which all texts are alike."""

    name, dimensions = "flat", 2

    def encode(self, texts: list[str]) -> list[list[float]]:
        return [[1.0, 0.0]] * len(texts)
