"""Files of the web as documents: fetched once, within bounds of size, time and redirects, and from public addresses alone.

Only who runs a command names them: no client of the service does.
"""

from __future__ import annotations

import html
import ipaddress
import re
import socket
import ssl
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from pathlib import Path, PurePosixPath
from urllib.parse import SplitResult, quote, unquote, urljoin, urlsplit

from cacheblend.base.errors import InputError

SCHEMES = ("http", "https")
SUFFIXES = {
    "text/html": ".html",
    "application/xhtml+xml": ".html",
    "application/pdf": ".pdf",
    "application/epub+zip": ".epub",
    "application/vnd.openxmlformats-officedocument.wordprocessingml.document": ".docx",
    "application/vnd.openxmlformats-officedocument.presentationml.presentation": ".pptx",
    "application/vnd.openxmlformats-officedocument.spreadsheetml.sheet": ".xlsx",
    "application/x-ndjson": ".jsonl",
    "application/json": ".txt",
    "application/xml": ".txt",
}
BINARY_SUFFIXES = (".pdf", ".epub", ".docx", ".pptx", ".xlsx", ".parquet", ".gz")
VAGUE_TYPES = ("", "text/plain", "application/octet-stream", "binary/octet-stream")  # whose kind is the URL's suffix
MAX_BYTES = 64 * 2**20
MAX_URL_CHARACTERS = 2000
MAX_REDIRECTS = 5
TIMEOUT_S = 60.0  # of a file, with its redirects
_TITLE = re.compile(r"<title[^>]*>([^<]{1,300})</title>", re.IGNORECASE)
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_CHARSET = re.compile(r"(utf|iso|cp|windows|latin|koi8|shift|sjis|euc|gb|big5|us-ascii)", re.IGNORECASE)  # others may be slow
_SUFFIX = re.compile(r"\.[a-z0-9]{1,8}")
_SAFE = "/%:@!$&'()*+,;=~-._?"


@dataclass(frozen=True, slots=True)
class WebFile:
    """A fetched file: where it lies, the URL that is its id, and its title."""

    path: Path
    url: str
    title: str


class WebFiles:
    """Fetches files, each once; a context manager, with whose end they are gone.

    Args:
        allow_private: also from addresses of this machine and of private networks.
        timeout_s: of one file.
    """

    def __init__(self, *, allow_private: bool = False, timeout_s: float = TIMEOUT_S) -> None:
        self._allow_private, self._timeout_s = allow_private, timeout_s
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._files = dict[str, WebFile | InputError]()

    def fetch(self, url: str) -> WebFile:
        """The file at a URL.

        Raises:
            InputError: it cannot be had, is too large, too slow, of a private address or behind too many redirects.
        """
        if url not in self._files:
            self._folder = self._folder or tempfile.TemporaryDirectory(prefix="cacheblend-web-")
            try:
                self._files[url] = self._fetch(url, Path(self._folder.name) / str(len(self._files)))
            except InputError as error:
                self._files[url] = error  # a source is read twice, and so long is waited once
        if isinstance(found := self._files[url], InputError):
            raise found
        return found

    def close(self) -> None:
        """Remove the files."""
        if self._folder is not None:
            self._folder.cleanup()
        self._folder = None
        self._files.clear()

    def _fetch(self, url: str, folder: Path) -> WebFile:
        late, sockets = threading.Event(), list[socket.socket]()

        def end() -> None:
            late.set()
            for each in sockets:
                with suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)

        timer = threading.Timer(self._timeout_s, end)
        timer.daemon = True
        timer.start()
        try:
            where = parts = _checked_parts(url, url)
            for _ in range(MAX_REDIRECTS + 1):
                with self._answer(parts, sockets) as answer:
                    target = answer.getheader("Location") if answer.status in (301, 302, 303, 307, 308) else None
                    saved = _saved(answer, url, parts, folder) if target is None else None
                if saved is not None and not late.is_set():
                    return saved
                if target is None:
                    break
                where, parts = parts, _checked_parts(urljoin(parts.geturl(), target), url)
                if (where.scheme, parts.scheme) == ("https", "http"):
                    raise InputError(f"{url}: leads from https to http; name {parts.geturl()} if you want that")
            else:
                raise InputError(f"{url}: more than {MAX_REDIRECTS} redirects; name the page that they lead to")
        except (OSError, HTTPException, UnicodeError) as error:
            if not late.is_set():
                raise InputError(
                    f"{url}: cannot be fetched ({error or type(error).__name__}); look at it in a browser"
                ) from error
        finally:
            timer.cancel()
            timer.join()
        raise InputError(f"{url}: not fetched within {self._timeout_s:g} s; fetch it by hand and ingest the file")

    @contextmanager
    def _answer(self, parts: SplitResult, sockets: list[socket.socket]) -> Iterator[HTTPResponse]:
        host, port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
        raw = self._connected(host.encode("idna").decode() if not host.isascii() else host, port)
        sockets.append(raw)
        connection: HTTPConnection
        if parts.scheme == "https":
            connection = HTTPSConnection(host, port)
            secure = ssl.create_default_context().wrap_socket(raw, server_hostname=host, do_handshake_on_connect=False)
            sockets.append(secure)
            secure.do_handshake()
            connection.sock = secure
        else:
            connection = HTTPConnection(host, port)
            connection.sock = raw
        try:
            path = quote(parts.path or "/", safe=_SAFE) + (f"?{quote(parts.query, safe=_SAFE)}" if parts.query else "")
            connection.request(
                "GET", path, headers={"User-Agent": "cacheblend", "Accept": "*/*", "Accept-Encoding": "identity"}
            )
            with connection.getresponse() as answer:
                yield answer
        finally:
            connection.close()
            raw.close()

    def _connected(self, host: str, port: int) -> socket.socket:
        """A socket to one of a host's addresses that may be asked; it is the address itself that is checked."""
        error: OSError | None = None
        for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            if not self._allow_private and not is_public(str(address[0])):
                raise InputError(f"http://{host}: {address[0]} is a private address; --allow-private-urls allows it")
            opened = socket.socket(family, kind, protocol)
            try:
                opened.settimeout(self._timeout_s)
                opened.connect(address)
            except OSError as failed:
                opened.close()
                error = failed
            else:
                return opened
        raise error or OSError(f"{host} has no address")


def is_public(address: str) -> bool:
    """Whether an IP address is one of the internet, also where it holds another one."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        if ip.sixtofour is not None or ip.teredo is not None:
            return False
        in_nat64 = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF) if ip in _NAT64 else None
        ip = ip.ipv4_mapped or in_nat64 or ip
    return ip.is_global and not ip.is_multicast


def _checked_parts(url: str, named: str) -> SplitResult:
    """A URL's parts; raises InputError, which names the first URL, where it is none that is fetched."""
    try:
        parts = urlsplit(url)
        port_is_good = parts.port is None or parts.port > 0
    except ValueError:
        parts, port_is_good = urlsplit(""), False
    if len(url) > MAX_URL_CHARACTERS or not port_is_good or parts.scheme not in SCHEMES or not parts.hostname:
        raise InputError(f"{named}: {url[:200]!r} is no http or https URL; give one such as https://example.org/page.html")
    if parts.username is not None or re.search(r"[\x00-\x20\x7f]", url):
        raise InputError(f"{named}: a URL with a name, a password or a space; fetch it by hand and ingest the file")
    return parts


def _saved(answer: HTTPResponse, url: str, parts: SplitResult, folder: Path) -> WebFile:
    """What a server answered, in a file whose suffix is its kind."""
    if answer.status != 200:
        raise InputError(f"{url}: the server says {answer.status} {answer.reason}; look at it in a browser")
    if answer.getheader("Content-Encoding", "identity") != "identity":
        raise InputError(f"{url}: the server sends it compressed unasked; fetch it by hand and ingest the file")
    name = PurePosixPath(unquote(parts.path)).name
    kind = answer.headers.get_content_type() if answer.getheader("Content-Type") else ""
    suffix = PurePosixPath(name).suffix.lower()
    suffix = suffix if _SUFFIX.fullmatch(suffix) else ""
    if kind not in VAGUE_TYPES:
        suffix = SUFFIXES.get(kind, ".txt" if kind.startswith("text/") and suffix not in (".md", ".csv", ".rst") else suffix)
    parts_read, size = list[bytes](), 0
    while part := answer.read1(2**16):
        parts_read.append(part)
        if (size := size + len(part)) > MAX_BYTES:
            raise InputError(f"{url}: larger than {MAX_BYTES // 2**20} MiB; fetch it by hand and split it")
    if answer.length:  # of what was announced something is left
        raise OSError("the connection ended early")
    raw = b"".join(parts_read)
    # Some servers name a charset with every file: of what is no text it means nothing.
    is_text = (kind.startswith("text/") or kind.endswith(("json", "xml"))) and suffix not in BINARY_SUFFIXES
    if is_text and _CHARSET.match(charset := answer.headers.get_content_charset("")):
        with suppress(LookupError, UnicodeError):  # where the server is wrong, the file's own bytes decide
            raw = raw.decode(charset).encode()
    stem = PurePosixPath(name).stem or parts.hostname or "page"
    found = _TITLE.search(raw[: 2**16].decode(errors="replace")) if suffix in (".html", ".htm") else None
    title = " ".join(html.unescape(found[1]).split()) if found else stem
    folder.mkdir()
    path = folder / f"file{suffix or '.txt'}"
    path.write_bytes(raw)
    return WebFile(path, url.partition("#")[0], title or stem)
