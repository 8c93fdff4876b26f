"""Files of the web: fetched within bounds, from public addresses alone, and read by their content type."""

import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec

import pytest

from cacheblend.base.errors import InputError
from cacheblend.service.engine.document_sources import DocumentStream
from cacheblend.service.engine.web_pages import WebFiles, is_public

ARTICLE = "The lamp of the lighthouse is lit at dusk, and put out when the sun is up. " * 9
MENU = "<nav><ul><li><a href='/a'>Imprint</a></li><li><a href='/b'>Careers</a></li></ul></nav>"
PAGE = "<html><head><title>House &amp; garden</title></head><body><p>The gate is green. Größe</p></body></html>"
needs_documents = pytest.mark.skipif(find_spec("pypdfium2") is None, reason="needs the extra documents")
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
    "/article": lambda handler: handler.send(f"<html><body>{MENU}<article><p>{ARTICLE}</p></article></body></html>".encode()),
    "/latin": lambda handler: handler.send(PAGE.encode("latin-1"), "text/html; charset=iso-8859-1"),
    "/binary.docx": lambda handler: handler.send(BINARY, f"{WORD}; charset=iso-8859-1"),
    "/export": lambda handler: handler.send(BINARY, WORD, **{"Content-Encoding": "identity"}),
    "/vague.pdf": lambda handler: handler.send(BINARY, "text/plain; charset=iso-8859-1"),
    "/rows": lambda handler: handler.send("да".encode("cp1251"), "text/tab-separated-values; charset=windows-1251"),
    "/notes.md": lambda handler: handler.send(b"# Notes\n\nThe key is in the drawer.", "text/plain"),
    "/data": lambda handler: handler.send(b'{"id": "row", "text": "A row."}\n', "application/x-ndjson"),
    "/no_lines": lambda handler: handler.send(b"{", "application/x-ndjson"),
    "/moved": to("/hop"),
    "/hop": to("notes.md"),
    "/loop": to("/loop"),
    "/file": to("file:///etc/passwd"),
    "/picture": lambda handler: handler.send(b"\x89PNG\0\0", "image/png"),
    "/large": lambda handler: handler.send(b"a " * 600, "text/plain"),
    "/cut": lambda handler: handler.send(b"half", "text/plain", **{"Content-Length": "9"}),
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
    pytest.importorskip("trafilatura", reason="needs the extra documents")
    sources = [f"{site}/{path}" for path in ("", "article", "latin", "notes.md#key", "data", "moved?a=b%20c", "odd", "rows")]
    with closing(DocumentStream(sources, WebFiles(allow_private=True))) as stream:
        size = stream.measure()
        found = {document.id: document for document in stream}
        assert stream.report.faults == {}
        assert f"{site}/notes.md" in stream.files  # whose pages that are gone are deleted
    assert size is not None
    assert size.documents == len(found) == 8
    assert found[f"{site}/"].title == "House & garden"
    assert ARTICLE.strip() in found[f"{site}/article"].text
    assert "Careers" not in found[f"{site}/article"].text
    assert "The gate is green. Größe" in found[f"{site}/latin"].text
    assert (found[f"{site}/notes.md"].title, found["row"].text) == ("Notes", "A row.")
    assert found[f"{site}/rows"].text == "да"
    assert "drawer" in found[f"{site}/moved?a=b%20c"].text
    assert sorted(asked).count("/notes.md") == 2  # for itself, and by way of /moved
    assert asked.count("/data") == 1


@pytest.mark.parametrize("path", ["/binary.docx", "/vague.pdf"])
def test_a_charset_of_what_is_no_text(site: str, path: str) -> None:
    """The charset that some servers send with every file leaves the bytes of PDF and Office files as they are."""
    with closing(WebFiles(allow_private=True)) as web:
        assert web.fetch(f"{site}{path}")[0].read_bytes() == BINARY


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("/none", "404"),
        ("/loop", "redirects"),
        ("/file", "no http or https URL"),
        ("/picture", "image; describe it"),
        pytest.param("/export", "cannot be read as DOCX", marks=needs_documents),
        ("/no_lines", "line 1: not JSON"),
        ("/large", "larger than"),
        ("/cut", "cannot be fetched"),
        ("/slow", "not within 2 s"),
    ],
)
def test_what_is_refused(site: str, path: str, why: str) -> None:
    """Of several sources it is a fault that names the URL; one that is named alone ends the command."""
    for sources in ([site + path], [site + path, f"{site}/notes.md"]):
        web = WebFiles(allow_private=True, timeout_s=2 if path == "/slow" else 60, max_bytes=1000)
        with closing(DocumentStream(sources, web)) as stream:
            if len(sources) == 1:
                with pytest.raises(InputError, match=why) as refused:
                    stream.measure()
                assert site + path in str(refused.value)
            else:
                stream.measure()
                assert [document.title for document in stream] == ["Notes"]
                assert any(name.startswith(site + path) and why in fault for name, fault in stream.report.faults.items())


@pytest.mark.parametrize(
    "url", ["ftp://a.b/c", "http://", "http://a:x/", "http://u:p@a.b/", "http://a.b/\n", "http://a.b/" + "c" * 2000]
)
def test_bad_urls(url: str) -> None:
    """What is no plain http or https URL is refused before anything is looked up."""
    with closing(WebFiles()) as web, pytest.raises(InputError):
        web.fetch(url)


def test_private_addresses(site: str) -> None:
    """Neither this machine nor private networks are asked, whatever name leads there, unless allowed."""
    port = site.rpartition(":")[2]
    for found in (["127.0.0.1"], ["93.184.215.14", "127.0.0.1"], ["::1"]):
        with closing(WebFiles(resolver=lambda _, found=found: found)) as web:
            for url in (f"{site}/", f"http://localhost:{port}/", f"https://innocent.example:{port}/"):
                with pytest.raises(InputError, match=rf"{found[-1]} is a private address; --allow-private-urls"):
                    web.fetch(url)
    assert asked == []


def test_a_redirect_is_checked_too(site: str) -> None:
    """Each host on the way is looked up and checked, and a connection goes to the checked address."""
    port, looked_up = site.rpartition(":")[2], list[str]()

    def resolver(host: str) -> list[str]:
        looked_up.append(host)
        return ["127.0.0.1"]

    with closing(WebFiles(allow_private=True, resolver=resolver)) as web:
        assert b"drawer" in web.fetch(f"http://innocent.example:{port}/moved")[0].read_bytes()
    assert looked_up == ["innocent.example"] * 3
    with closing(WebFiles(allow_private=True, resolver=resolver)) as web, pytest.raises(InputError, match="no http or https"):
        web.fetch(f"http://innocent.example:{port}/file")


PUBLIC = "93.184.215.14 2606:2800:21f:cb07:6820:80da:af6b:8b2c ::ffff:8.8.8.8 64:ff9b::808:808"
PRIVATE = """127.0.0.1 10.1.2.3 192.168.0.1 169.254.169.254 100.64.0.1 0.0.0.0 224.0.0.1 192.0.0.192 168.63.129.16
::1 :: fe80::1%eth0 fc00::1 ::ffff:127.0.0.1 64:ff9b::a00:1 2002:7f00:1::1 64:ff9b:1::808:808 fec0::1 ::8.8.8.8
::ffff:0:8.8.8.8 2001:0:1::1 ::ffff:169.254.169.254"""


@pytest.mark.parametrize(
    ("address", "expected"), [*((each, True) for each in PUBLIC.split()), *((each, False) for each in PRIVATE.split())]
)
def test_is_public(address: str, expected: bool) -> None:
    """Addresses of machines, networks and clouds for themselves are not public, in whatever form."""
    assert is_public(address) == expected
