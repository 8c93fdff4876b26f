"""Files of the web: fetched within bounds, from public addresses alone, and read by their content type."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from cacheblend.base.errors import InputError
from cacheblend.service.engine import web_pages
from cacheblend.service.engine.document_sources import DocumentStream, Shard
from cacheblend.service.engine.web_pages import WebFiles, is_public

PAGE = "<html><head><title>House &amp; garden</title></head><body><p>The gate is green. Größe</p></body></html>"
release = threading.Event()
asked: list[str] = []


class Handler(BaseHTTPRequestHandler):
    """A site with pages of some kinds, and some that should not be read."""

    def do_GET(self) -> None:
        asked.append(self.path)
        PAGES.get(self.path.partition("?")[0], Handler.missing)(self)

    def send(self, body: bytes, kind: str = "text/html; charset=utf-8", status: int = 200, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": kind, "Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def missing(self) -> None:
        self.send(b"", status=404)

    def slow(self) -> None:
        self.send_response(200)
        self.end_headers()
        while not release.wait(0.05):
            self.wfile.write(b"x")

    def log_message(self, *_: object) -> None:
        pass


BINARY = bytes(range(256))
WORD = "application/vnd.openxmlformats-officedocument.wordprocessingml.document"


def to(target: str) -> Callable[[Handler], None]:
    return lambda handler: handler.send(b"", status=302, Location=target)


PAGES: dict[str, Callable[[Handler], None]] = {
    "/": lambda handler: handler.send(PAGE.encode()),
    "/latin": lambda handler: handler.send(PAGE.encode("latin-1"), "text/html; charset=iso-8859-1"),
    "/binary.docx": lambda handler: handler.send(BINARY, f"{WORD}; charset=iso-8859-1"),
    "/vague.pdf": lambda handler: handler.send(BINARY, "text/plain; charset=iso-8859-1"),
    "/notes.md": lambda handler: handler.send(b"# Notes\n\nThe key is in the drawer.", "text/plain"),
    "/data": lambda handler: handler.send(b'{"id": "row", "text": "A row."}\n', "application/x-ndjson"),
    "/moved": to("/hop"),
    "/hop": to("notes.md"),
    "/loop": to("/loop"),
    "/file": to("file:///etc/passwd"),
    "/picture": lambda handler: handler.send(b"\x89PNG\0\0", "image/png"),
    "/large": lambda handler: handler.send(b"a " * 600, "text/plain"),
    "/cut": lambda handler: handler.send(b"half", "text/plain", **{"Content-Length": "9"}),
    "/gzip": lambda handler: handler.send(b"\x1f\x8b", Content_Encoding="gzip"),
    "/odd": lambda handler: handler.send(b"words", "text/plain; charset=zlib"),
    "/slow": Handler.slow,
}


@pytest.fixture
def site() -> Iterator[str]:
    """The URL of a local server."""
    release.clear()
    asked.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        release.set()
        server.shutdown()


def test_documents_of_urls(site: str) -> None:
    """Each is read by its content type, or its name where that says nothing; its URL is its id; it is fetched once."""
    pytest.importorskip("markitdown", reason="needs the extra documents")
    sources = [f"{site}/{path}" for path in ("", "latin", "notes.md#key", "data", "moved?a=b c".replace(" ", "%20"), "odd")]
    with closing(DocumentStream(sources, Shard(), allow_private_urls=True)) as stream:
        size = stream.measure()
        found = {document.id: document for document in stream}
        assert stream.report.faults == {}
    assert size is not None
    assert size.documents == len(found) == 6
    assert found[f"{site}/"].title == "House & garden"
    assert "The gate is green. Größe" in found[f"{site}/latin"].text
    assert (found[f"{site}/notes.md"].title, found["row"].text) == ("notes", "A row.")
    assert "drawer" in found[f"{site}/moved?a=b%20c"].text
    assert sorted(asked).count("/notes.md") == 2  # for itself, and by way of /moved
    assert asked.count("/data") == 1


@pytest.mark.parametrize("path", ["/binary.docx", "/vague.pdf"])
def test_a_charset_of_what_is_no_text(site: str, path: str) -> None:
    """The charset that some servers send with every file leaves the bytes of PDF and Office files as they are."""
    with closing(WebFiles(allow_private=True)) as web:
        assert web.fetch(f"{site}{path}").path.read_bytes() == BINARY


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("/none", "404"),
        ("/loop", "redirects"),
        ("/file", "no http or https URL"),
        ("/picture", "binary"),
        ("/large", "larger than"),
        ("/cut", "ended early"),
        ("/gzip", "compressed"),
        ("/slow", "not fetched within 0.4 s"),
    ],
)
def test_what_is_refused(site: str, monkeypatch: pytest.MonkeyPatch, path: str, why: str) -> None:
    """Of several sources it is a fault that names the URL; one that is named alone ends the command."""
    monkeypatch.setattr(web_pages, "MAX_BYTES", 1000)
    for sources in ([site + path], [site + path, f"{site}/notes.md"]):
        with closing(DocumentStream(sources, Shard(), allow_private_urls=True)) as stream:
            stream._web._timeout_s = 0.4 if path == "/slow" else 20
            if len(sources) == 1:
                with pytest.raises(InputError, match=why) as refused:
                    stream.measure()
                assert site + path in str(refused.value)
            else:
                stream.measure()
                assert [document.title for document in stream] == ["notes"]
                assert why in stream.report.faults[site + path]


@pytest.mark.parametrize(
    "url", ["ftp://a.b/c", "http://", "http://a:x/", "http://u:p@a.b/", "http://a.b/c d", "http://a.b/" + "c" * 2000]
)
def test_bad_urls(url: str) -> None:
    """What is no plain http or https URL is refused before anything is looked up."""
    with closing(WebFiles()) as web, pytest.raises(InputError):
        web.fetch(url)


def test_private_addresses(site: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither this machine nor private networks are asked, whatever name leads there, nor by a redirect, unless allowed."""
    port = site.rpartition(":")[2]
    lookups = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lambda _, *rest, **named: lookups("127.0.0.1", *rest, **named))
    with closing(WebFiles()) as web:
        for url in (f"{site}/", f"http://localhost:{port}/", f"http://innocent.example:{port}/"):
            with pytest.raises(InputError, match=r"127\.0\.0\.1 is a private address; --allow-private-urls"):
                web.fetch(url)
    assert asked == []
    checked: list[str] = []
    monkeypatch.setattr(web_pages, "is_public", lambda address: not checked.append(address) and len(checked) < 2)
    with closing(WebFiles()) as web, pytest.raises(InputError, match="private address"):
        web.fetch(f"{site}/moved")
    assert asked == ["/moved"]


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        *[
            (each, True)
            for each in ("93.184.215.14", "2606:2800:21f:cb07:6820:80da:af6b:8b2c", "::ffff:8.8.8.8", "64:ff9b::808:808")
        ],
        *[
            (each, False)
            for each in ("127.0.0.1", "10.1.2.3", "192.168.0.1", "169.254.169.254", "100.64.0.1", "0.0.0.0", "224.0.0.1")
        ],
        *[
            (each, False)
            for each in ("::1", "::", "fe80::1%eth0", "fc00::1", "::ffff:127.0.0.1", "64:ff9b::a00:1", "2002:7f00:1::1")
        ],
    ],
)
def test_is_public(address: str, expected: bool) -> None:
    """Addresses of machines, networks and clouds for themselves are not public, in whatever form."""
    assert is_public(address) == expected
