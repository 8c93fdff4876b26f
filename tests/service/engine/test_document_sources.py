"""Files that are ingested: nothing from outside a folder, nothing without limits, and each fault with its place and remedy."""

from __future__ import annotations

import gzip
import io
import json
import sys
import tracemalloc
from contextlib import closing
from pathlib import Path

import pytest
from fakes import tiny_tokenizer

from cacheblend.base.errors import InputError
from cacheblend.retriever import PlainTokenizer
from cacheblend.service.engine import document_sources, json_lines
from cacheblend.service.engine.document_sources import DocumentStream, read_documents

LINE = json.dumps({"id": "one", "text": "some text"})


def ids(path: Path) -> list[str]:
    return [document["id"] for document in read_documents(str(path))]


def test_links_out_of_a_folder_are_not_followed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A link to a file outside is left out with a warning, one to a file inside is read; the folder itself may be a link."""
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
        caplog.clear()
        assert ids(given) == ["again.txt", "own.txt"]
        assert [record.args[0].name for record in caplog.records] == ["cases.jsonl", "key.txt"]  # type: ignore[index,union-attr]
        assert "is a link out of" in caplog.text


@pytest.mark.parametrize(
    ("raw", "place", "says"),
    [
        (LINE.encode() + b"\n" + b"[" * 100_000, "line 2", "nested too deeply"),
        (b'{"text": "x", "n": ' + b"9" * 5000 + b"}", "line 1", "write such a number as text"),
        (LINE.encode() + b"\n\ncaf\xe9\n", "line 3", r"not UTF-8 \(byte 0xe9 at 4\); save it as UTF-8"),
        (LINE.encode("utf-16"), "line 1", "save it as UTF-8"),
        (LINE.encode() + b'\n{"text": " "}', "line 2", "empty text"),
        (LINE.encode() + b'\n{"text": "x", "id": 7}', "line 2", "id must be text"),
        (b'{"passages": [{"text": "x"}, {"title": "y"}]}', "line 1", "neither a document"),
        (b'{"text": "\\ud800"}', "line 1", "is not Unicode"),
    ],
)
@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz"])
def test_a_fault_has_its_place_and_remedy(tmp_path: Path, raw: bytes, place: str, says: str, suffix: str) -> None:
    """Whatever is wrong in JSON lines is an `InputError` with file, line and what to do, gzipped or not."""
    path = tmp_path / f"some{suffix}"
    path.write_bytes(gzip.compress(raw) if suffix.endswith("gz") else raw)
    with pytest.raises(InputError, match=rf"some{suffix}, {place}: .*{says}"):
        list(read_documents(str(path)))


@pytest.mark.parametrize("damage", ["cut", "flipped", "no gzip"])
def test_a_damaged_gzip(tmp_path: Path, damage: str) -> None:
    """A gzip file that is not whole is said to be that, not to be of another encoding."""
    whole = gzip.compress("".join(f'{{"text": "text {number**9}"}}\n' for number in range(2000)).encode())
    middle = len(whole) // 2
    broken = {
        "cut": whole[:-20],
        "flipped": whole[:middle] + bytes([whole[middle] ^ 0xFF]) + whole[middle + 1 :],
        "no gzip": LINE.encode(),
    }
    path = tmp_path / "some.jsonl.gz"
    path.write_bytes(broken[damage])
    with pytest.raises(InputError, match=r"some\.jsonl\.gz") as caught:
        list(read_documents(str(path)))
    assert "no whole gzip file" in str(caught.value) or damage == "flipped"
    assert "UTF-8" not in str(caught.value) or damage == "flipped"


@pytest.mark.parametrize("name", ["some.txt", "some.jsonl", "some.jsonl.gz"])
def test_a_byte_order_mark_is_taken(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Windows' editors write it; the text begins after it. Standard input too."""
    raw = b"\xef\xbb\xbf" + (LINE.encode() if "json" in name else b"some text")
    (tmp_path / name).write_bytes(gzip.compress(raw) if name.endswith("gz") else raw)
    (document,) = read_documents(str(tmp_path / name))
    assert document["text"] == "some text"
    if name == "some.jsonl":
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(raw)))
        assert list(read_documents("-")) == [document]


def test_a_gzip_bomb_is_refused_in_little_memory(tmp_path: Path) -> None:
    """Half a megabyte that unpacks to one line of 512 MiB is refused by file and line, at the limit."""
    path = tmp_path / "bomb.jsonl.gz"
    with gzip.open(path, "wb", compresslevel=1) as file:
        for _ in range(64):
            file.write(bytes(8 * 2**20))
    tracemalloc.start()
    with pytest.raises(InputError, match=r"bomb\.jsonl\.gz, line 1: longer than 8 MiB; split"):
        list(read_documents(str(path)))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4 * json_lines.MAX_LINE_BYTES


def test_a_line_of_many_values_is_refused_unparsed(tmp_path: Path) -> None:
    """A field that no document has cannot fill the memory: values are counted before a line is parsed."""
    path = tmp_path / "junk.jsonl"
    path.write_text(json.dumps({"id": "a", "text": "b", "junk": [[1], [2]]}))
    assert list(read_documents(str(path))) == [{"id": "a", "text": "b"}]
    path.write_text('{"text": "b", "junk": [' + "[]," * 2**20 + "[]]}")
    tracemalloc.start()
    with pytest.raises(InputError, match=r"junk\.jsonl, line 1: more than 200000 values"):
        list(read_documents(str(path)))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4 * path.stat().st_size


def test_long_texts_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A text that one tokeniser run cannot hold is refused by its place, in a file of its own and in a line."""
    monkeypatch.setattr(document_sources, "MAX_TEXT_BYTES", 2**20)
    (tmp_path / "long.txt").write_bytes(b"x" * 2**20 + "é".encode())  # the limit tears the last character
    (tmp_path / "long.jsonl").write_text(LINE + "\n" + json.dumps({"text": "y" * (2**20 + 1)}))
    for name, place in (("long.txt", r"long\.txt"), ("long.jsonl", r"long\.jsonl, line 2")):
        with pytest.raises(InputError, match=rf"{place}: a text of more than 1 MiB; split it into several documents"):
            list(read_documents(str(tmp_path / name)))


@pytest.mark.parametrize("lengths", [[30], [1_000_000], [400] * 3000, [100_000, 7, 0, 100_000]])
def test_tokens_of_a_stream(tmp_path: Path, lengths: list[int]) -> None:
    """They are counted in pieces from all over the texts, so that every language counts as it is written."""
    tokenizer = tiny_tokenizer()
    for place, length in enumerate(lengths):
        kind = "while the loop " if place % 2 else "\u6f22\u5b57"
        text = (kind * length)[:length] or "x"
        (tmp_path / f"{place:04}.txt").write_text(text, encoding="utf-8")
    with closing(DocumentStream([str(tmp_path)])) as stream:
        size = stream.measure()
        tokens = sum(len(PlainTokenizer(tokenizer).ids(document.text)) for document in stream)
    assert size is not None
    assert sum(map(len, size.sample)) <= 2**16
    assert size.tokens(tokenizer) == pytest.approx(tokens, rel=0.2)
    assert size.tokens(None) == round(size.characters / 4)
