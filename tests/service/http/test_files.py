"""`/v1/files`: OpenAI's client uploads, lists, reads and deletes; bad files are refused, with no path of the server."""

from __future__ import annotations

import asyncio
import errno
import gzip
import json
import threading
import zipfile
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from waiting import wait_until

from cacheblend.base.errors import MissingExtraError
from cacheblend.service.engine.document_encoder import Check
from cacheblend.service.engine.json_lines import LineLimits
from cacheblend.service.http import files
from cacheblend.service.http.server import Server

multipart = pytest.importorskip("python_multipart.multipart")
TEXT = "The lighthouse at Kap Arkona was built by Karl Friedrich Schinkel. " * 4


def test_openais_client(openai_client: openai.OpenAI, client: httpx.Client) -> None:
    """A file that was uploaded is listed, told, read and deleted, and is a document meanwhile."""
    made = openai_client.files.create(file=("Arkona.txt", TEXT.encode()), purpose="user_data")
    assert (made.object, made.filename, made.bytes, made.purpose) == ("file", "Arkona.txt", len(TEXT), "user_data")
    assert [file.id for file in openai_client.files.list()] == [made.id]
    assert list(openai_client.files.list(purpose="batch")) == []
    assert openai_client.files.retrieve(made.id) == made
    assert "Karl Friedrich Schinkel" in openai_client.files.content(made.id).text
    ids = [document["id"] for document in client.get("/v1/documents").json()["data"]]
    assert f"{made.id}/user_data/Arkona.txt" in ids
    assert openai_client.files.delete(made.id).deleted
    with pytest.raises(openai.NotFoundError):
        openai_client.files.retrieve(made.id)
    assert not [one for one in client.get("/v1/documents").json()["data"] if one["id"].startswith(made.id)]


def test_the_same_file_again(openai_client: openai.OpenAI) -> None:
    """The same bytes under the same name are the file that is there; another text, name or purpose is another file."""
    made = openai_client.files.create(file=("a.txt", TEXT.encode()), purpose="user_data")
    assert openai_client.files.create(file=("a.txt", TEXT.encode()), purpose="user_data") == made
    assert [file.id for file in openai_client.files.list()] == [made.id]
    lines = b'{"text": "first"}\n{"text": "second"}\n'
    parts = [openai_client.files.create(file=("a.jsonl", lines), purpose="user_data").id for _ in range(2)]
    assert len(set(parts)) == 1
    others = [("a.txt", TEXT[:-1], "user_data"), ("b.txt", TEXT, "user_data"), ("a.txt", TEXT, "batch")]
    ids = {openai_client.files.create(file=(name, text.encode()), purpose=purpose).id for name, text, purpose in others}
    assert (len(ids), len(ids | {made.id})) == (3, 4)


def test_html_is_converted(openai_client: openai.OpenAI) -> None:
    """A file of a kind that the extra `documents` reads becomes its text."""
    pytest.importorskip("markitdown")
    page = f"<html><body><h1>Arkona</h1><p>{TEXT}</p><script>alert(1)</script></body></html>"
    made = openai_client.files.create(file=("a.html", page.encode()), purpose="assistants")
    text = openai_client.files.content(made.id).text
    assert "lighthouse" in text
    assert "<p>" not in text


def _bomb() -> bytes:
    archive = BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr(zipfile.ZipInfo("word/document.xml"), "no document")  # whose time is fixed: workers collect the same test
    return archive.getvalue()


@pytest.mark.parametrize(
    ("name", "raw", "field"),
    [
        ("empty.txt", b"", "file"),
        ("binary.txt", bytes(range(256)), "file"),
        ("broken.docx", b"PK no archive", "file"),
        ("wrong.docx", _bomb(), "file"),
        ("broken.pdf", b"%PDF-1.7 nothing", "file"),
        ("bad.jsonl", b"{", "file"),
        ("rows.parquet", b"PAR1", "file"),
        ("picture.png", b"\x89PNG", "file"),
        ("a#b.txt", b"text", "file"),
    ],
)
def test_bad_files(client: httpx.Client, name: str, raw: bytes, field: str) -> None:
    """What cannot be read is a 400 that names the file and no folder of the server, and leaves nothing."""
    before = client.get("/v1/documents").json()
    answer = client.post("/v1/files", files={"file": (name, raw)}, data={"purpose": "user_data"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field), answer.text
    assert "/tmp" not in answer.text
    assert "cacheblend-" not in answer.text
    assert client.get("/v1/documents").json() == before


@pytest.mark.parametrize("name", ["table.csv", "lamps.py"])
def test_content_is_the_text(openai_client: openai.OpenAI, name: str) -> None:
    """The content of a text file of many chunks is its text, character by character: no breaks at chunks, and no title."""
    text = "".join(f"{number},lamp {number} of the harbour,green{number}\n" for number in range(300))
    made = openai_client.files.create(file=(name, text.encode()), purpose="user_data")
    assert openai_client.files.content(made.id).text == text


def test_parquet_is_refused(client: httpx.Client) -> None:
    """Rows with ids of their own would replace the tenant's documents: the message says what to send."""
    answer = client.post("/v1/files", files={"file": ("rows.PARQUET", b"PAR1")}, data={"purpose": "batch"})
    assert "JSON lines" in answer.json()["error"]["message"]


@pytest.mark.parametrize("name", ["a." + "\U00020000" * 62, "a." + "x" * 190, "notes.é"])
def test_odd_ends_of_names(client: httpx.Client, name: str) -> None:
    """Whatever stands after a name's last dot, a text is read as a text."""
    answer = client.post("/v1/files", files={"file": (name, TEXT.encode())}, data={"purpose": "batch"})
    assert (answer.status_code, answer.json().get("filename")) == (200, name), answer.text


def test_no_room_for_temporary_files(client: httpx.Client, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An upload that the folder of temporary files has no room for is a 507 that names no folder."""

    def full(*_: Any, **__: Any) -> str:
        raise OSError(errno.ENOSPC, "No space left on device", str(tmp_path))

    monkeypatch.setattr(files.tempfile, "mkdtemp", full)
    answer = client.post("/v1/files", files={"file": ("a.txt", TEXT.encode())}, data={"purpose": "batch"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (507, "store_full")
    assert str(tmp_path) not in answer.text


def test_a_missing_extra_is_named(client: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a package is missing, the message names the extra that brings it."""

    def missing(*_: Any, **__: Any) -> Any:
        raise MissingExtraError("charset_normalizer", "rag")

    monkeypatch.setattr(files, "file_documents", missing)
    answer = client.post("/v1/files", files={"file": ("a.txt", TEXT.encode())}, data={"purpose": "batch"})
    assert (answer.status_code, "the extra `rag`" in answer.text) == (400, True)


@pytest.mark.parametrize("line", ["\n", " \n", '{"passages": []}\n'])
def test_a_small_file_of_endless_lines(client: httpx.Client, line: str) -> None:
    """Lines without documents are counted too, and a small file that unpacks to many is refused by the limit."""
    raw = gzip.compress(line.encode() * 200_001, mtime=0)
    assert len(raw) < 20_000
    answer = client.post("/v1/files", files={"file": ("a.jsonl.gz", raw)}, data={"purpose": "batch"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "file")
    assert "a.jsonl.gz: more than 200,000 lines or 512 MiB" in answer.json()["error"]["message"]


def test_unpacked_bytes_are_bounded(client: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of few lines is bounded by what it unpacks to."""
    monkeypatch.setattr(files, "LINE_LIMITS", LineLimits(lines=100, decompressed_bytes=2**20))
    raw = gzip.compress((json.dumps({"passages": [], "more": "x" * 2**18}).encode() + b"\n") * 4, mtime=0)
    answer = client.post("/v1/files", files={"file": ("a.jsonl.gz", raw)}, data={"purpose": "batch"})
    assert (answer.status_code, "lines or 1 MiB" in answer.text) == (400, True)


def test_a_client_that_leaves_ends_the_reading(address: str, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reading of a file ends with the client that sent it, and others have the turn."""
    begun = threading.Event()

    def endless(*_: Any, check: Check, **__: Any) -> Any:
        begun.set()
        while True:
            check()
            threading.Event().wait(0.01)
            yield from ()

    monkeypatch.setattr(files, "file_documents", endless)

    async def leave() -> None:
        async with httpx.AsyncClient(base_url=address, timeout=60) as leaving:
            sent = asyncio.create_task(leaving.post("/v1/files", files={"file": ("a.txt", b"x")}, data={"purpose": "batch"}))
            assert await asyncio.to_thread(begun.wait, 60)
            assert server.uploads.is_busy
            sent.cancel()

    asyncio.run(leave())
    wait_until(lambda: not server.uploads.is_busy)


def test_bad_forms(client: httpx.Client) -> None:
    """A form without a file or with a wrong field names the field; a long one is a 413; a foreign page's is refused."""
    file = {"file": ("a.txt", TEXT.encode())}
    assert client.post("/v1/files", data={"purpose": "user_data"}, files={}).status_code == 400
    assert client.post("/v1/files", data={"purpose": "x"}, files=file).json()["error"]["param"] == "purpose"
    extra = client.post("/v1/files", data={"purpose": "batch", "expires_after[anchor]": "created_at"}, files=file)
    assert (extra.status_code, "expires_after" in extra.text) == (400, True)
    long = {"file": ("a.txt", b"x" * 30_000)}
    assert client.post("/v1/files", data={"purpose": "batch"}, files=long).status_code == 413
    foreign = client.post("/v1/files", data={"purpose": "batch"}, files=file, headers={"Origin": "https://example.org"})
    assert foreign.status_code == 403
    assert client.post("/v1/documents", data={"purpose": "batch"}, files=file).status_code == 400
    assert client.get("/v1/files/file-0").status_code == 404
    assert client.get("/v1/files").json()["data"] == []


def test_a_form_is_parsed_beside_the_others(client: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a form is parsed, which takes seconds where it is made for that, the service answers others."""
    begun, answered = threading.Event(), threading.Event()
    in_time = list[bool]()
    write = multipart.MultipartParser.write

    def held(self: object, data: bytes) -> int:
        begun.set()
        in_time.append(answered.wait(60))
        written: int = write(self, data)
        return written

    monkeypatch.setattr(multipart.MultipartParser, "write", held)
    form = {"data": {"purpose": "user_data"}, "files": {"file": ("a.txt", TEXT.encode())}}
    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(client.post, "/v1/files", **form)
        assert begun.wait(60)
        assert httpx.get(f"{client.base_url}/healthz").status_code == 200
        answered.set()
        assert sent.result().status_code == 200
    assert all(in_time)
