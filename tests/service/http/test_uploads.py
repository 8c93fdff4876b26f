"""Documents listed by pages and by files; files uploaded as forms: read, followed, refused without a path of the server."""

import asyncio
import gzip
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from api import bearer, serving, serving_tenants
from engines import DOCUMENTS, OpenEngine
from waiting import wait_until

from cacheblend.base.errors import MissingExtraError
from cacheblend.base.threads import Check
from cacheblend.retriever import Document
from cacheblend.service.http import documents, guard
from cacheblend.service.http.server import Server

multipart = pytest.importorskip("python_multipart.multipart")
TEXT = "The lighthouse at Kap Arkona was built by Karl Friedrich Schinkel. " * 4
BAD_FILES = {"binary.txt": bytes(range(256)), "broken.docx": b"PK no archive", "bad.jsonl": b"{", "picture.png": b"\x89PNG"}
BAD_FILES |= {"a.txt#page=b.txt": b"text", "r.pdf.gz": gzip.compress(b"%PDF", mtime=0)}


def post(client: httpx.Client, name: str, raw: bytes, **fields: str) -> httpx.Response:
    """Upload a file."""
    return client.post("/v1/documents?wait=true", files={"file": (name, raw)}, data=fields)


def texts(client: httpx.Client, prefix: str) -> dict[str, str]:
    """The texts of the documents whose ids begin so, by id, without their titles."""
    shown = {}
    for document in client.get("/v1/documents", params={"limit": 1000}).json()["data"]:
        if document["id"].startswith(prefix):
            content = client.get(f"/v1/documents/{document['id'].replace('#', '%23')}").json()["content"]
            shown[document["id"]] = "".join(chunk["text"] for chunk in content).removeprefix(f"{document['title']}\n")
    return shown


def test_pages(client: httpx.Client) -> None:
    """A list comes in pages like OpenAI's, each telling whether more follow and after which id."""
    ids, after = [], {}
    while True:
        page = client.get("/v1/documents", params={"limit": 2, **after}).raise_for_status().json()
        assert page["object"] == "list"
        own = [document["id"] for document in page["data"]]
        assert (page["first_id"], page["last_id"]) == (own[0], own[-1])
        ids += own
        if not page["has_more"]:
            break
        after = {"after": page["last_id"]}
    assert ids == [document["id"] for document in DOCUMENTS]
    nothing = client.get("/v1/documents", params={"after": ids[-1]}).json()
    assert nothing == {"object": "list", "data": [], "first_id": None, "last_id": None, "has_more": False}


@pytest.mark.parametrize("params", [{"limit": 0}, {"limit": 1001}, {"limit": "x"}, {"after": "nothing"}, {"by": "x"}])
def test_bad_pages(client: httpx.Client, params: dict[str, object]) -> None:
    """A page that there is not is refused, with the parameter's name."""
    response = client.get("/v1/documents", params=params)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == next(iter(params))


def test_a_file_is_a_document(client: httpx.Client) -> None:
    """A file's document has its name, or the id that is given; the same bytes again change nothing, another text replaces."""
    report = post(client, "Arkona.txt", TEXT.encode())
    assert (report.status_code, report.json()["added"]) == (201, 1)
    assert post(client, "Arkona.txt", TEXT.encode()).json()["unchanged"] == 1
    assert post(client, "Arkona.txt", TEXT[:-2].encode()).json()["replaced"] == 1
    assert texts(client, "Arkona") == {"Arkona.txt": TEXT[:-2]}
    assert post(client, "Arkona.txt", TEXT.encode(), id="lamps/1").json()["added"] == 1
    assert client.get("/v1/documents/lamps/1").json()["title"] == "Arkona"


def test_lines_are_documents(client: httpx.Client) -> None:
    """Each JSON line is a document with its own id, or one of its text."""
    lines = b'{"id": "a", "title": "A", "text": "first", "junk": [1]}\n{"text": "second"}\n'
    assert post(client, "a.jsonl", lines).json()["added"] == 2
    assert client.get("/v1/documents/a").json()["content"][0]["text"] == "A\nfirst"
    report = post(client, "b.jsonl", b'{"text": "third"}\n{bad\n{"text": "fourth"}\n').json()
    assert (report["added"], len(report["faults"])) == (2, 1), report  # a bad line costs itself alone


def test_a_shorter_file_leaves_no_page_behind(client: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pages that a file had before and has not any more are deleted; documents of other files stay."""
    pages = 3

    def read(_: Path, id_: str, *__: Any, fault: Any, **___: Any) -> Any:
        for page in range(4, 6 + documents.MAX_FAULTS):  # more than are listed
            fault(f"page {page}", documents.WITHOUT_TEXT[0])
        yield from (Document(f"{id_}#page={page}", "", f"page {page}") for page in range(1, pages + 1))

    monkeypatch.setattr(documents, "file_documents", read)
    post(client, "r.pdf", b"x")
    post(client, "r.pdf.old", b"x")
    pages = 1
    assert post(client, "r.pdf", b"x").json()["unchanged"] == 1
    assert sorted(texts(client, "r.pdf")) == ["r.pdf#page=1", *(f"r.pdf.old#page={page}" for page in (1, 2, 3))]


@pytest.mark.parametrize(("name", "raw"), [*BAD_FILES.items()])
def test_bad_files(client: httpx.Client, name: str, raw: bytes) -> None:
    """What cannot be read is a 400 that names the file and no folder of the server, and leaves nothing."""
    before = client.get("/v1/documents").json()
    answer = post(client, name, raw)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "file"), answer.text
    assert ("uploads" not in answer.text, "unpack it" in answer.text) == (True, name.endswith(".gz"))
    assert client.get("/v1/documents").json() == before


@pytest.mark.parametrize(("sent", "name"), [("the %22old%22 lamp.txt", 'the "old" lamp.txt'), ("100%2541.txt", "100%2541.txt")])
def test_names_as_browsers_write_them(client: httpx.Client, sent: str, name: str) -> None:
    """Quotation marks, which browsers write as %22, come back; other per cent signs are the name's own."""
    head = f'Content-Disposition: form-data; name="file"; filename="{sent}"'
    body, form = f"--x\r\n{head}\r\n\r\n{TEXT}\r\n--x--\r\n", {"Content-Type": "multipart/form-data; boundary=x"}
    assert client.post("/v1/documents?wait=true", content=body.encode(), headers=form).status_code == 201
    assert name in [one["id"] for one in client.get("/v1/documents", params={"order": "desc"}).json()["data"]]
    assert client.post("/v1/documents", content=body.replace("lamp", "%0A").encode(), headers=form).is_error == ("lamp" in sent)


@pytest.mark.parametrize("name", ["a." + "\U00020000" * 62, "a." + "x" * 190, "notes.é"])
def test_odd_ends_of_names(client: httpx.Client, name: str) -> None:
    """Whatever stands after a name's last dot, a text is read as a text."""
    answer = post(client, name, TEXT.encode())
    assert answer.status_code == 201, answer.text
    assert texts(client, name) == {name: TEXT}


def test_no_room_for_temporary_files(
    client: httpx.Client, server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A file that the folder of temporary files has no room for is a fault, or a 507; only the log names the folder."""
    folder = str(server.uploads_folder)

    def fill(_: Path, id_: str, *__: Any, **___: Any) -> Any:
        yield Document(id_, "", TEXT)
        shutil.rmtree(folder)

    monkeypatch.setattr(documents, "file_documents", fill)
    answers = [client.post("/v1/documents?wait=true", files=[("file", (name, TEXT.encode())) for name in "ab"]) for _ in "12"]
    assert ([answer.status_code for answer in answers], answers[1].json()["error"]["code"]) == ([201, 507], "store_full")
    assert not any(folder in answer.text for answer in answers)
    assert [folder in line for line in caplog.messages if ", b: " in line] == [True, True]


def test_a_large_form_needs_no_temporary_file(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A form of megabytes is read without the folder of temporary files."""
    monkeypatch.setattr("starlette.formparsers.SpooledTemporaryFile.rollover", lambda _: pytest.fail("it was written"))
    with serving(engine) as (_, address), httpx.Client(base_url=address, timeout=60) as client:
        answer = post(client, "a.txt", bytes(3 * 2**20))
    assert (answer.status_code, "binary" in answer.text) == (400, True)


def test_files_of_a_killed_service_are_removed(open_engine: OpenEngine) -> None:
    """A service removes at its start the uploads of one that was killed, and none of one that runs."""
    engine = open_engine()
    left = Path(engine.config.store_dir, "uploads", "left", "file.txt")
    left.parent.mkdir(parents=True)
    left.write_text("secret")
    with Server(engine.config, engine=engine) as server:
        assert list(server.uploads_folder.iterdir()) == []
        (own := server.uploads_folder / "own").mkdir()
        with Server(engine.config, engine=engine):
            assert own.exists()


def test_a_missing_extra_is_named(client: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a package is missing, the message names the extra that brings it."""

    def missing(*_: Any, **__: Any) -> Any:
        raise MissingExtraError("charset_normalizer", "rag")

    monkeypatch.setattr(documents, "file_documents", missing)
    answer = post(client, "a.txt", TEXT.encode())
    assert (answer.status_code, "the extra `rag`" in answer.text) == (400, True)


@pytest.mark.parametrize("line", ["\n", " \n"])
def test_a_small_file_of_endless_lines(client: httpx.Client, line: str) -> None:
    """Lines without documents are counted too, and a small file that unpacks to many is refused by the limit."""
    raw = gzip.compress(line.encode() * 200_100, mtime=0)
    assert len(raw) < 20_000
    answer = post(client, "a.jsonl.gz", raw)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "file")
    assert "a.jsonl.gz: more than 200,026 lines or 512 MiB" in answer.json()["error"]["message"]


def test_a_client_that_leaves_ends_the_reading(address: str, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reading of a file ends with the client that sent it, and others have the turn."""
    begun = threading.Event()

    def endless(*_: Any, check: Check, **__: Any) -> Any:
        begun.set()
        while True:
            check()
            threading.Event().wait(0.01)
            yield from ()

    monkeypatch.setattr(documents, "file_documents", endless)

    async def leave() -> None:
        async with httpx.AsyncClient(base_url=address, timeout=60) as leaving:
            sent = asyncio.create_task(leaving.post("/v1/documents?wait=true", files={"file": ("a.txt", b"x")}))
            assert await asyncio.to_thread(begun.wait, 60)
            assert server.uploads.is_busy
            sent.cancel()

    asyncio.run(leave())
    wait_until(lambda: not server.uploads.is_busy)
    monkeypatch.undo()
    with httpx.Client(base_url=address, timeout=60) as other:
        assert post(other, "b.txt", TEXT.encode()).status_code == 201


def test_bad_forms(client: httpx.Client) -> None:
    """A form without a file or with a wrong field names the field; a long one is a 413; a foreign page's is refused."""
    raw, file = TEXT.encode(), {"file": ("a.txt", TEXT.encode())}
    form = {"Content-Type": "multipart/form-data; boundary=x"}
    missing = client.post(
        "/v1/documents", content=b'--x\r\nContent-Disposition: form-data; name="id"\r\n\r\n1\r\n--x--\r\n', headers=form
    )
    assert (missing.status_code, missing.json()["error"]["param"]) == (400, "file")
    for headers in (form, {"Content-Type": "multipart/form-data"}):
        assert client.post("/v1/documents", content=b"no form", headers=headers).status_code == 400
    for id_ in ("a#page=1", "x" * 201, "a\nb"):
        assert post(client, "a.txt", raw, id=id_).json()["error"]["param"] == "id"
    assert "'purpose': is no field" in post(client, "a.txt", raw, purpose="batch").json()["error"]["message"]
    assert post(client, "a.txt", b"x" * 30_000).status_code == 413
    assert client.post("/v1/documents", files=file, headers={"Origin": "https://example.org"}).status_code == 403
    assert texts(client, "a") == {}


@pytest.mark.parametrize("as_file", [False, True])
def test_bodies_are_read_beside_the_others(client: httpx.Client, monkeypatch: pytest.MonkeyPatch, as_file: bool) -> None:
    """While a body is read, which takes seconds where it is made for that, the service answers others."""
    begun, answered = threading.Event(), threading.Event()
    in_time = list[bool]()
    owner, name = (multipart.MultipartParser, "write") if as_file else (guard, "read_body")
    read = getattr(owner, name)

    def held(*arguments: Any) -> Any:
        begun.set()
        in_time.append(answered.wait(60))
        return read(*arguments)

    monkeypatch.setattr(owner, name, held)
    body: dict[str, Any] = {"json": {"documents": [{"text": "x" * 17_000}]}}
    body = {"files": {"file": ("a.txt", TEXT.encode())}} if as_file else body
    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(client.post, "/v1/documents?wait=true", **body)
        assert begun.wait(60)
        assert httpx.get(f"{client.base_url}/healthz").status_code == 200
        answered.set()
        assert sent.result().status_code == 201
    assert all(in_time)


def test_an_upload_is_listed_to_its_tenant(model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While an upload runs its chunks are counted for its tenant, and for no other; afterwards nothing is listed."""
    going_on, one, two, text = threading.Event(), bearer("one"), bearer("two"), str(DOCUMENTS[0]["text"])
    with (
        serving_tenants(["one", "two"], model_dir, tmp_path) as (server, address),
        httpx.Client(base_url=address, timeout=60) as client,
        ThreadPoolExecutor(1) as other,
    ):
        store, stored = server.engines["one"].store, list[object]()
        put = store.put

        def hold(*arguments: Any, **options: Any) -> Any:
            stored.append(arguments)
            if len(stored) == 2:
                going_on.wait(60)
            return put(*arguments, **options)

        monkeypatch.setattr(store, "put", hold)
        file = {"file": ("for.txt", text.encode())}
        upload = other.submit(client.post, "/v1/documents?wait=true", headers=one, files=file)

        def listed(headers: dict[str, str]) -> Any:
            return client.get("/v1/ingests", headers=headers).raise_for_status().json()["data"]

        try:
            wait_until(lambda: [(ingest["stage"], ingest["done"]) for ingest in listed(one)] == [("precompute", 1)])
            (ingest,) = listed(one)
            assert (ingest["object"], ingest["name"]) == ("ingest", "for.txt")
            assert listed(two) == []
        finally:
            going_on.set()
        assert upload.result().is_success
        assert listed(one) == []
        assert ingest["total"] == len(server.engines["one"].retriever.chunks())
