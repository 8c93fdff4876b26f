"""Files that are ingested: every kind is read, nothing from outside a folder or beyond limits; faults name place and remedy."""

import gzip
import io
import json
import os
import re
import signal
import sys
import tracemalloc
import zipfile
from contextlib import closing
from importlib.util import find_spec
from itertools import product
from pathlib import Path

import pytest
from engines import OpenEngine
from fakes import tiny_tokenizer
from office_files import docx, epub, pdf, pptx, xlsx, zipped

from cacheblend.base.errors import InputError
from cacheblend.retriever import Document, PlainTokenizer
from cacheblend.service.engine import file_converter
from cacheblend.service.engine.document_sources import (
    MAX_LINE_BYTES,
    MAX_TEXT_BYTES,
    DocumentStream,
    SourceReport,
    StreamSize,
    file_documents,
)
from cacheblend.service.engine.file_converter import FileConverter, TextPart, join_short_parts
from cacheblend.service.engine.pdf_text import PICTURES

LINE = json.dumps({"id": "one", "text": "some text"})
LONG = "The lamp is lit at dusk. " * 30  # makes a page long enough to be a document
needs_documents = pytest.mark.skipif(find_spec("pypdfium2") is None, reason="needs the extra documents")


def read(*sources: object) -> tuple[list[Document], SourceReport]:
    """The documents of sources, and the report of what gave none; InputError if all gave none."""
    with closing(DocumentStream(list(map(str, sources)))) as stream:
        stream.measure()
        return list(stream), stream.report


def ids(*sources: object) -> list[str]:
    return [document.id for document in read(*sources)[0]]


@pytest.fixture
def office(tmp_path: Path) -> Path:
    """A folder with one file of each kind."""
    pytest.importorskip("pypdfium2", reason="needs the extra documents")
    folder = tmp_path / "office"
    folder.mkdir()
    (folder / "report.pdf").write_bytes(pdf([f"{text}. {LONG}" for text in ("The lighthouse is red", "The keeper is Ada")]))
    turned = re.sub(rb"/Length \d+", b"/Length 999", pdf(["The pilot of the tug waits at the third pier until noon"]))
    turned = turned.replace(b"612 792]", b"612 792] /Rotate 90").replace(b"72 720 Td", b"0 1 -1 0 72 72 Tm")
    (folder / "turned.pdf").write_bytes(turned)
    (folder / "letter.docx").write_bytes(docx("The ferry leaves at nine"))
    (folder / "novel.epub").write_bytes(epub("The miller had a cat"))
    pptx(folder / "deck.pptx", ["Sales rose", "Costs fell"])
    xlsx(folder / "book.xlsx", {"North": "42 boats", "South": "17 boats"})
    page = f"<meta charset=gb2312><title>t</title><p>镕{'<b>' * 999}Café at the quay<script>x()</script>"  # 镕 is of GBK only
    (folder / "page.html").write_bytes(page.encode("gbk"))
    (folder / "list.csv").write_bytes("name;town\nMüller;Köln\n".encode("cp1252"))
    (folder / "tool.py").write_text("def harbour():\n    return 'pier'\n")
    return folder


def test_every_kind_is_read_with_its_place(office: Path) -> None:
    """The words of each file come out; a PDF's pages, slides and sheets are documents that can be cited."""
    found = {document.id: document.text for document in read(office)[0]}
    words = {
        "report.pdf#page=1": "The lighthouse is red",
        "report.pdf#page=2": "The keeper is Ada",
        "turned.pdf#page=1": "The pilot of the tug waits at the\nthird pier until noon",
        "letter.docx": "The ferry leaves at nine",
        "novel.epub": "The miller had a cat",
        "deck.pptx#slide=1-2": "Costs fell",
        "book.xlsx#sheet=North": "42 boats",
        "book.xlsx#sheet=South": "17 boats",
        "page.html": "Café at the quay",
        "list.csv": "Müller;Köln",
        "tool.py": "return 'pier'",
    }
    assert found.keys() == words.keys()
    assert {id_: text for id_, text in words.items() if text not in found[id_]} == {}
    assert "x()" not in found["page.html"]


@needs_documents
def test_titles(tmp_path: Path) -> None:
    """A document has the title that its text begins with, an HTML page its own; others have the name of their file."""
    page = "<html><head><title>Harbour tariff 2031</title></head><body>{}</body></html>"
    titles = {
        "travel.md": ("# Travel policy\n\nTrains first.", "Travel policy"),
        "plain.md": ("Trains first.", "plain"),
        "list.txt": ("# a comment\nnumpy", "list"),
        "a.html": (page.format("<p>Forty crowns.</p>"), "Harbour tariff 2031"),
        "b.html": (page.format("<h1>Harbour tariff 2031</h1><p>Forty crowns.</p>"), "Harbour tariff 2031"),
        "c.html": ("<p>Forty crowns.</p>", "c"),
    }
    for name, (text, _) in titles.items():
        (tmp_path / name).write_text(text)
    pptx(tmp_path / "deck.pptx", ["# Sales"])
    wanted = {name: title for name, (_, title) in titles.items()} | {"deck.pptx#slide=1": "deck, slide 1"}
    assert {document.id: document.title for document in read(tmp_path)[0]} == wanted


@needs_documents
def test_pages_without_text(tmp_path: Path) -> None:
    """A page that is a picture or blank is named and no fault where others have text, and a file of them alone is one."""
    words = b"BT /F1 12 Tf 14 TL 72 720 Td (X ) Tj T* ET"
    (tmp_path / "cover.pdf").write_bytes(pdf(["X", LONG]).replace(words, b"0 0 99 99 re f".ljust(len(words))))
    documents, report = read(tmp_path / "cover.pdf")
    assert [document.id for document in documents] == ["cover.pdf#page=2"]
    assert (report.faults, report.skipped) == ({}, {f"{tmp_path / 'cover.pdf'}, page 1": PICTURES})
    (tmp_path / "scan.pdf").write_bytes(pdf([""]))
    assert list(read(tmp_path)[1].faults) == [str(tmp_path / "scan.pdf")]


@pytest.mark.parametrize(
    ("encoding", "text"),
    [
        ("utf-8-sig", "Zoë"),
        ("utf-16", "Zoë"),
        ("utf-32", "Zoë"),
        ("cp1252", "Der Preis beträgt 40 € je Stück."),
        ("cp1252", "4 °C"),
        ("cp850", "Das ist sehr schön."),
        ("cp850", "für"),
        ("cp866", "Копия"),
        ("gb18030", "name\uff1afoo"),
        ("iso-8859-2", "Oni są tu"),
        ("iso-8859-15", "Le cœur et l'œuvre"),
        ("latin-1", "Der Café schließt um zehn; müde Gäste gehen früh nach Hause."),
        ("cp1251", "Москва является столицей России и крупнейшим городом страны."),
        ("shift_jis", "東京は日本の首都であり、世界最大の都市の一つです。"),
        ("iso2022_jp", "ISO-2022の東京は日本の首都です。"),
        ("iso2022_kr", "서울은 대한민국의 수도이며 가장 큰 도시이다."),
        ("gb18030", "北京是中华人民共和国的首都也是全国的政治中心。"),
    ],
)
def test_encodings_are_detected(tmp_path: Path, encoding: str, text: str) -> None:
    """A text file need not be UTF-8."""
    (tmp_path / "some.txt").write_bytes(text.encode(encoding))
    assert [document.text for document in read(tmp_path / "some.txt")[0]] == [text]


def test_hidden_and_ignored_files(tmp_path: Path) -> None:
    """Hidden and ignored files and stores are left out, at any depth, and said; a pattern's ids begin after its folder."""
    names = "a.txt .hidden.txt .git/config.txt build/out.txt sub/keep.log sub/drop.log sub/deep/x.tmp.txt"
    for name in (*names.split(), "store/kv/store.json", "store/settings.json"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / ".gitignore").write_text("build/\nbin\\\n!\n[z-a]\n*.log\n", encoding="utf-8-sig")
    (tmp_path / "sub" / ".cacheblendignore").write_text("!keep.log\n*.tmp.txt\n")
    os.mkfifo(tmp_path / "sub" / "deep" / ".gitignore")
    found, report = read(tmp_path)
    assert [one.id for one in found] == ["a.txt", "sub/keep.log"]
    said = {Path(name).relative_to(tmp_path).as_posix(): why for name, why in report.skipped.items()}
    hidden = {".hidden.txt", ".git", ".gitignore", "sub/.cacheblendignore", "sub/deep/.gitignore"}
    ignored = ("build", "sub/drop.log", "sub/deep/x.tmp.txt")
    assert said == dict.fromkeys(hidden, "hidden") | dict.fromkeys(ignored, "ignored") | {"store": "a store"}
    assert ids(tmp_path / "sub" / "**" / "*.log") == ["drop.log", "keep.log"]


BROKEN = {  # files that cannot be used, of each sort
    "binary.txt": bytes(range(256)) * 4,
    "elf.txt": b"\x7fELF\0\0",
    "cut.pdf": pdf(["some text"])[:60],
    "scanned.pdf": pdf(["", ""]),
    "empty.pdf": b"",
    "no.docx": b"PK\x03\x04 no archive",
    "other.docx": zipped({"a.txt": "b"}),
    "no.xlsx": b"text",
    "empty.html": b"<title>Our docs</title><div id=root></div>",
    "no.pptx": bytes(100),
    "no.epub": b"\xff" * 10,
    "line.jsonl": b'{"text": "fine"}\nnot json\n',
    "cut.jsonl.gz": b"\x1f\x8b\x08\x00",
}


def test_odd_files(office: Path, open_engine: OpenEngine) -> None:
    """Nothing crashes, each fault is named with its file; the good files are given, twice the same, and can be asked about."""
    for name, raw in BROKEN.items():
        (office / name).write_bytes(raw)
    for suffix in ("png", "bin", "so"):
        (office / f"media.{suffix}").write_bytes(b"\x89PNG\0" + bytes(range(50)))
    good = list(enumerate(product((".txt", ".md", ".log", "", ".a b"), ("utf-8", "utf-16", "cp1252"), (1, 9))))
    for number, (suffix, encoding, times) in good:
        text = f"Die Möwe {number} fliegt früh über die Häuser der Stadt, müde. " * times
        (office / f"{number}{suffix}").write_text(text, encoding=encoding)
    with closing(DocumentStream([str(office)])) as stream:
        size = stream.measure()
        report, documents = stream.report, list(stream)
    assert {Path(name).name.partition(",")[0] for name in report.faults} == set(BROKEN)
    assert {Path(name).stem for name in report.skipped} == {"media"}
    assert all(why.startswith(name) and len(why) > len(name) + 10 for name, why in report.faults.items())
    assert size is not None
    assert size.documents == len(documents)
    assert sum("müde" in document.text for document in documents) == len(good)
    engine = open_engine(chunk_tokens=64)
    assert engine.ingest_stream(documents).added == len(engine.documents.page()[0])
    for number, _ in good:
        ids = [hit.chunk.document_id for hit in engine.search(f"Wie fliegt Möwe {number}?", 3)]
        assert any(Path(id_).stem == str(number) for id_ in ids), number
    answer = engine.answer("Who is the keeper of the lighthouse? Ada?", num_chunks=6)
    assert "report.pdf#page=2" in {hit.chunk.document_id for hit in answer.chunks}
    assert (answer.plan.hits, answer.plan.misses) == (6, 0)


@needs_documents
def test_bombs_and_long_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An archive that unpacks to more than the limit is not unpacked; one that takes too long loses only itself."""
    path = tmp_path / "bomb.docx"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive, archive.open("a", "w") as member:
        member.writelines([bytes(2**24)] * 33)
    (tmp_path / "fine.docx").write_bytes(docx("some words"))
    with closing(FileConverter()) as converter:
        with pytest.raises(InputError, match="unpacks to more than 512 MiB"):
            converter.convert(path)
        assert "some words" in converter.convert(tmp_path / "fine.docx")[0].text
        (tmp_path / "late.docx").write_bytes(docx("other words"))
        converter._process.send_signal(signal.SIGSTOP)  # alive, and silent, when it is asked
        process, read = converter._process, converter._read
        monkeypatch.setattr(converter, "_read", lambda *asked: process.kill() or read(*asked))
        with pytest.raises(InputError, match="its reader ended"):
            converter.convert(tmp_path / "late.docx")
        monkeypatch.undo()
        assert "other words" in converter.convert(tmp_path / "late.docx")[0].text
    with closing(FileConverter(timeout_s=0.001)) as converter, pytest.raises(InputError, match=r"not read within 0\.001 s"):
        converter.convert(tmp_path / "fine.docx")
    with path.open("r+b") as file:
        file.truncate(file_converter.MAX_FILE_BYTES + 1)
    with closing(FileConverter()) as converter, pytest.raises(InputError, match="larger than 256 MiB"):
        converter.convert(path)


def test_a_file_that_needs_much_memory_is_refused(tmp_path: Path) -> None:
    """A sheet of 5 kB that is one merged cell is refused; one with a cell in its last column of its last row is read."""
    book = pytest.importorskip("openpyxl", reason="needs the extra documents").Workbook()
    book.active["XFD1048576"] = "some words"
    book.save(tmp_path / "fine.xlsx")
    with zipfile.ZipFile(tmp_path / "fine.xlsx") as fine:
        members = {name: fine.read(name).decode() for name in fine.namelist()}
    merged = '</sheetData><mergeCells count="1"><mergeCell ref="A1:XFD1048576"/></mergeCells>'
    members["xl/worksheets/sheet1.xml"] = members["xl/worksheets/sheet1.xml"].replace("</sheetData>", merged)
    (tmp_path / "bomb.xlsx").write_bytes(zipped(members))
    with closing(FileConverter(timeout_s=600)) as converter:
        with pytest.raises(InputError, match="needs more memory than a file may have"):
            converter.convert(tmp_path / "bomb.xlsx")
        assert "some words" in converter.convert(tmp_path / "fine.xlsx")[0].text


def test_a_reader_that_was_taken_over_is_not_believed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever it answers is an error of its file, in bounds, and what it says of its confinement is no text of its own."""
    (tmp_path / "hostile.pdf").write_bytes(pdf([LONG]))
    answers = [
        *({}, [], 3, None, {"lacks": [[1]]}, {"error": {}}, {"missing": [1]}, {"error": "bad", "lacks": ["forged\nline"]}),
        *({"parts": parts} for parts in (5, [5], [["page=1"]], [["page=1", 2, ""]], [["", "text", "", ""]])),
    ]
    many = b'{"a": [' + b"[]," * 2**20 + b"3]}"
    given = [*(json.dumps(one).encode() for one in answers), b"", b"{", b"\xff", b"[" * 100_000, many]

    class Taken(FileConverter):
        def _read(self, *_: object) -> bytes:
            return given.pop() + b"\n"

    with closing(Taken()) as converter:
        while given:
            with pytest.raises(InputError, match=r"hostile\.pdf: "):
                converter.convert(tmp_path / "hostile.pdf")
        given.append(json.dumps({"parts": [["page=1", LONG, ""]], "lacks": ["forged", "seccomp"]}).encode())
        assert converter.convert(tmp_path / "hostile.pdf") == [TextPart("page=1", LONG)]
    assert "forged" not in caplog.text


class Parts(FileConverter):
    """Of every file, a sheet that is longer than a document may be, and one that is not."""

    def convert(self, *_: object) -> list[TextPart]:
        return [TextPart("sheet=A", "x" * (MAX_TEXT_BYTES + 1)), TextPart("sheet=B", "some words")]


def test_a_long_sheet_leaves_the_others(tmp_path: Path) -> None:
    """It is a fault with its place, and those that follow it are read."""
    report = SourceReport()
    documents = list(file_documents(tmp_path / "a.xlsx", "a.xlsx", Parts(), where="a.xlsx", fault=report.note))
    assert [one.id for one in documents] == ["a.xlsx#sheet=B"]
    [(place, why)] = report.faults.items()
    assert (place, why.count("a.xlsx"), why.count("a text of more than 8 MiB")) == ("a.xlsx, sheet=A", 1, 1)


def test_files_that_were_not_read_whole_keep_their_pages(tmp_path: Path) -> None:
    """Only those count as read, whose missing pages are deleted, of which nothing failed, in the last reading."""
    (tmp_path / "bad.txt").write_bytes(b"\0\0")
    (tmp_path / "part.jsonl").write_text(f"{LINE}\nnot json\n")
    for name in ("good.txt", "gone.txt", "later.txt"):
        (tmp_path / name).write_text(name)
    with closing(DocumentStream([str(tmp_path)])) as stream:
        stream.measure()
        assert stream.files == {"good.txt", "gone.txt", "later.txt"}
        (tmp_path / "gone.txt").unlink()
        (tmp_path / "later.txt").write_bytes(b"\0\0")
        assert {one.id for one in stream} == {"good.txt", "one"}
        assert stream.files == {"good.txt"}


@needs_documents
def test_a_conversion_that_nobody_waits_for_ends(tmp_path: Path) -> None:
    """What `check` raises while a file is converted, or another converter works, ends it, and the next file is converted."""
    (tmp_path / "first.docx").write_bytes(docx("some words"))
    (tmp_path / "late.docx").write_bytes(docx("other words"))

    def gone() -> None:
        raise LookupError

    with closing(FileConverter()) as converter:
        with file_converter.CONVERTING, pytest.raises(LookupError):
            converter.convert(tmp_path / "first.docx", gone)
        converter.convert(tmp_path / "first.docx")
        process = converter._process
        assert process is not None
        process.send_signal(signal.SIGSTOP)
        with pytest.raises(LookupError):
            converter.convert(tmp_path / "late.docx", gone)
        assert process.poll() is not None
        assert "other words" in converter.convert(tmp_path / "late.docx")[0].text


def joined(texts: dict[str, str]) -> dict[str, str]:
    return {part.place: part.text for part in join_short_parts([TextPart(*one) for one in texts.items()])}


def test_short_pages_are_joined() -> None:
    """A page of a few words goes to the next page, and the last one to that before; the place names all that are in it."""
    title, end = "Chapter 3", "The end"
    assert joined({"page=3": title, "page=4": LONG, "page=5": LONG, "page=6": end, "page=7": end}) == {
        "page=3-4": f"{title}\n\n{LONG}",
        "page=5-7": f"{LONG.rstrip()}\n\n{end}\n\n{end}",
    }
    assert joined({f"page={page}": title for page in (8, 9, 11)}) == {"page=8-11": "\n\n".join([title] * 3)}
    assert joined({"slide=1": title, "slide=2": end}) == {"slide=1-2": f"{title}\n\n{end}"}
    apart = {"": title, "page=1": LONG, "sheet=North": title, "sheet=South": end, "slide=1": title}
    assert joined(apart) == apart
    assert joined({}) == {}


def test_encrypted_pdfs(tmp_path: Path) -> None:
    """One that opens without a password, as forms and statements do, is read; one with a password says so, and the remedy."""
    pypdf = pytest.importorskip("pypdf", reason="needs the extra documents")
    pytest.importorskip("cryptography", reason="needs the extra documents")
    (tmp_path / "plain.pdf").write_bytes(pdf(["what the statement says"]))
    for name, user in (("open", ""), ("locked", "secret")):
        writer = pypdf.PdfWriter(clone_from=tmp_path / "plain.pdf")
        writer.encrypt(user, "the owner's", algorithm="AES-256")
        writer.write(tmp_path / f"{name}.pdf")
    with closing(FileConverter()) as converter:
        assert [part.text for part in converter.convert(tmp_path / "open.pdf")] == ["what the statement says"]
        with pytest.raises(InputError, match=r"locked\.pdf: locked with a password; save it without one$"):
            converter.convert(tmp_path / "locked.pdf")


def test_a_folder_without_documents_says_what_is_in_it(tmp_path: Path) -> None:
    """Files that are no text are named, not only those that are damaged."""
    for number in range(7):
        (tmp_path / f"{number}.png").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(range(256)))
    with closing(DocumentStream([str(tmp_path)])) as stream, pytest.raises(InputError) as failed:
        stream.measure()
    assert "no documents to ingest" in str(failed.value)
    assert "0.png: " in str(failed.value)
    assert str(failed.value).endswith("and 2 more")
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(InputError, match="no documents to ingest; give at least one"):
        DocumentStream([str(tmp_path / "empty.jsonl")]).measure()


def test_links_out_of_a_folder_are_not_followed(tmp_path: Path) -> None:
    """A link to a file outside is left out and named, one to a file inside is read; the folder itself may be a link."""
    folder, outside = tmp_path / "docs", tmp_path / "outside"
    folder.mkdir()
    outside.mkdir()
    (outside / "key.txt").write_text("secret")
    (folder / "own.txt").write_text("own")
    (folder / "again.txt").symlink_to("own.txt")
    (folder / "key.txt").symlink_to(outside / "key.txt")
    (folder / "cases.jsonl").symlink_to(outside / "key.txt")
    (folder / "sub").symlink_to(outside)
    (folder / "loop.txt").symlink_to("loop.txt")
    (tmp_path / "named").symlink_to(folder)
    for given in (folder, tmp_path / "named"):
        found, report = read(given)
        assert [one.id for one in found] == ["again.txt", "own.txt"]
        out = [Path(name).name for name, why in report.skipped.items() if why == "a link out of the folder"]
        assert out == ["cases.jsonl", "key.txt"]


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (LINE.encode() + b"\n" + b"[" * 100_000, "line 2: .*nested too deeply"),
        (b'{"text": "x", "n": ' + b"9" * 5000 + b"}", "line 1: .*write such a number as text"),
        (LINE.encode() + b"\n\ncaf\xe9\n", r"line 3: not UTF-8 \(byte 0xe9 at 4\); save it as UTF-8"),
        (LINE.encode() + b'\n{"text": " "}', "line 2: .*empty text"),
        (LINE.encode() + b'\n{"text": "x", "id": [7]}', "line 2: .*id must be text"),
        (b'{"title": "y"}', "line 1: not a document"),
        (b'{"id": "a", "text": "x"}\n{"id": "a", "text": "y"}', "another document has the id 'a'; rename it"),
        (b'{"text": "\\ud800"}', "line 1: .*is not Unicode"),
    ],
)
@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz"])
def test_a_fault_has_its_place_and_remedy(tmp_path: Path, raw: bytes, says: str, suffix: str) -> None:
    """Whatever is wrong in JSON lines is a fault with file, line and what to do, gzipped or not; the other lines are read."""
    whole = raw + b'\n{"text": "last", "id": 7}\n'
    (tmp_path / f"some{suffix}").write_bytes(gzip.compress(whole) if suffix.endswith("gz") else whole)
    documents, report = read(tmp_path / f"some{suffix}")
    [fault] = report.faults.values()
    assert re.search(rf"some{suffix}[,:] {says}", fault)
    assert documents[-1] == Document("7", "", "last")


@pytest.mark.parametrize(
    ("name", "raw", "says"),
    [
        ("cut.jsonl.gz", gzip.compress(LINE.encode() * 9, mtime=0)[:-9], "is no whole gzip file"),
        ("text.jsonl.gz", LINE.encode(), "is no whole gzip file"),
        ("long.txt", b"x" * MAX_TEXT_BYTES + "é".encode(), "a text of more than 8 MiB; split it into several documents"),
        ("a\nb.txt", b"words", ".*rename the file"),
        ("a\udcff.txt", b"words", ".*rename the file"),
    ],
)
def test_a_faulty_file_is_named(tmp_path: Path, name: str, raw: bytes, says: str) -> None:
    """A gzip file that is not whole, a text whose limit tears a character, a name that is no id: each is said to be that."""
    (tmp_path / name).write_bytes(raw)
    with pytest.raises(InputError, match=rf"{name}:? {says}"):
        read(tmp_path / name)


@pytest.mark.parametrize("name", ["some.txt", "some.jsonl", "some.jsonl.gz"])
def test_a_byte_order_mark_is_taken(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Windows' editors write it; the text begins after it. Standard input too."""
    raw = b"\xef\xbb\xbf" + (LINE.encode() if "json" in name else b"some text")
    (tmp_path / name).write_bytes(gzip.compress(raw) if name.endswith("gz") else raw)
    [document], _ = read(tmp_path / name)
    assert document.text == "some text"
    if name == "some.jsonl":
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(raw)))
        assert read("-")[0] == [document]
        assert DocumentStream(["-"]).measure() is None


def refused_in_bytes(path: Path, says: str) -> int:
    """The memory that it takes to refuse a file."""
    tracemalloc.start()
    with pytest.raises(InputError, match=says):
        read(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak


def test_a_gzip_bomb_is_refused_in_little_memory(tmp_path: Path) -> None:
    """Half a megabyte that unpacks to one line of 512 MiB is refused by file and line, at the limit."""
    path = tmp_path / "bomb.jsonl.gz"
    with gzip.open(path, "wb", compresslevel=1) as file:
        for _ in range(64):
            file.write(bytes(8 * 2**20))
    says = r"bomb\.jsonl\.gz, line 1: longer than 8 MiB; split"
    assert refused_in_bytes(path, says) < 4 * MAX_LINE_BYTES


def test_a_line_of_many_values_is_refused_unparsed(tmp_path: Path) -> None:
    """A field that no document has cannot fill the memory: values are counted before a line is parsed."""
    path = tmp_path / "junk.jsonl"
    path.write_text(json.dumps({"id": "a", "text": "b", "junk": [[1], [2]]}))
    assert read(path)[0] == [Document("a", "", "b")]
    path.write_text('{"text": "b", "junk": [' + "[]," * 2**20 + "[]]}")
    assert refused_in_bytes(path, r"junk\.jsonl, line 1: more than 200000 values") < 4 * path.stat().st_size


@pytest.mark.parametrize("lengths", [[30], [100_000], [400] * 300, [100_000, 7, 0, 100_000]])
def test_tokens_of_a_stream(tmp_path: Path, lengths: list[int]) -> None:
    """They are counted in the beginnings of the first texts, so that a language counts as it is written."""
    tokenizer = tiny_tokenizer()
    for place, length in enumerate(lengths):
        kind = "while the loop " if place % 2 else "\u6f22\u5b57"
        text = (kind * length)[:length] or "x"
        (tmp_path / f"{place:04}.txt").write_text(text, encoding="utf-8")
    with closing(DocumentStream([str(tmp_path)])) as stream:
        size = stream.measure()
        tokens = sum(len(PlainTokenizer(tokenizer).ids(document.text)) for document in stream)
    assert size == StreamSize(len(lengths), sum(length or 1 for length in lengths))
    assert sum(map(len, size.sample)) <= 2**16
    assert size.tokens(tokenizer) == pytest.approx(tokens, rel=0.2)
    assert size.tokens(None) == round(size.characters / 4)
