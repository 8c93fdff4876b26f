"""Pages and files of the web as documents: fetched once, with bounds of size, time and redirects, from public addresses only.

Only the person who runs a command names URLs; no client of the service does.
"""

import asyncio
import ipaddress
import socket
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from mimetypes import guess_extension
from pathlib import Path, PurePosixPath

import httpx

from cacheblend.base.errors import InputError

from .text_encoding import code_page, decoded

SCHEMES = ("http", "https")
SUFFIXES = {"text/html": ".html", "application/xhtml+xml": ".html", "application/pdf": ".pdf"}
SUFFIXES |= {"application/x-ndjson": ".jsonl", "application/json": ".txt", "application/xml": ".txt"}
SUFFIXES |= {"text/markdown": ".md", "text/rtf": ".rtf"}  # other texts are plain
MAX_URL_CHARACTERS = 2000
HEADERS = {"User-Agent": "cacheblend", "Accept-Encoding": "gzip"}
HOLDS_V4, GLOBAL_V6 = list(map(ipaddress.ip_network, ("::ffff:0:0/96", "64:ff9b::/96"))), ipaddress.ip_network("2000::/3")
# Networks that `is_global` passes: clouds' own services, multicast, and addresses that hold another one.
INTERNAL = list(map(ipaddress.ip_network, ("192.0.0.0/24", "168.63.129.16/32", "224.0.0.0/4", "2001::/32", "2002::/16")))


def addresses_of(host: str) -> list[str]:
    """The IP addresses of a host, of the kinds that this machine has itself."""
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_ADDRCONFIG)
    return [str(address[0]) for *_, address in found]


def is_public(address: str) -> bool:
    """Whether an IP address is one of the internet, also where it holds another one."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if any(ip in network for network in HOLDS_V4):
        ip = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
    return ip.is_global and (ip.version == 4 or ip in GLOBAL_V6) and not any(ip in network for network in INTERNAL)


@dataclass(slots=True, kw_only=True)
class WebFiles:
    """Fetches files, each once; `close` removes them."""

    allow_private: bool = False
    timeout_s: float = 60.0  # of a file, with its redirects
    max_bytes: int = 64 * 2**20
    resolver: Callable[[str], list[str]] = addresses_of
    _folder: tempfile.TemporaryDirectory[str] | None = None
    _files: dict[str, tuple[Path, str] | InputError] = field(default_factory=dict)

    def fetch(self, url: str) -> tuple[Path, str]:
        """The file at a URL, and its name; InputError if it cannot be had, or is beyond bounds or at a private address."""
        if url not in self._files:
            try:
                self._files[url] = asyncio.run(self._fetch(url))
            except (InputError, OSError, UnicodeError, httpx.HTTPError, httpx.InvalidURL) as error:
                why = f"{str(error) or f'not within {self.timeout_s:g} s'}; look at it in a browser, or ingest a copy"
                self._files[url] = InputError(f"{url[:200]} cannot be fetched: {why}")  # a source is read twice
        if isinstance(found := self._files[url], InputError):
            raise found
        return found

    def close(self) -> None:
        """Remove the files."""
        if self._folder is not None:
            self._folder.cleanup()

    async def _fetch(self, url: str) -> tuple[Path, str]:
        client = httpx.AsyncClient(transport=_Transport(self), timeout=None, follow_redirects=True, max_redirects=5)
        async with asyncio.timeout(self.timeout_s), client, client.stream("GET", url, headers=HEADERS) as answer:
            packed = answer.headers.get("Content-Encoding", "")  # what nobody asked for may unpack without bounds
            if answer.status_code != httpx.codes.OK or packed not in ("", "identity", "gzip"):
                raise InputError(f"the server says {answer.status_code} {answer.reason_phrase} {packed}".rstrip())
            body = bytearray()
            async for part in answer.aiter_bytes():
                body += part
                if len(body) > self.max_bytes:
                    raise InputError(f"it is larger than {self.max_bytes / 2**20:g} MiB")
            return self._saved(answer, bytes(body))

    def _saved(self, answer: httpx.Response, body: bytes) -> tuple[Path, str]:
        """An answer's body in a file, whose suffix names its kind, and its name."""
        name = PurePosixPath(answer.url.path)
        kind = answer.headers.get("Content-Type", "").partition(";")[0].strip().lower()
        guess = None if kind.startswith("text/") else guess_extension(kind)
        suffix = SUFFIXES.get(kind) or (name.suffix.lower() if name.suffix[1:].isalnum() else guess or ".txt")
        if suffix in (".html", ".txt", ".md", ".csv") and (charset := code_page(answer.charset_encoding or "")):
            body = (decoded(body, charset) or "").encode() or body
        self._folder = self._folder or tempfile.TemporaryDirectory(prefix="cacheblend-web-")
        path = Path(self._folder.name, f"{len(self._files)}{'.jsonl' * name.name.lower().endswith('.jsonl.gz')}{suffix}")
        path.write_bytes(body)
        return path, name.stem or answer.url.host


class _Transport(httpx.AsyncHTTPTransport):
    """Checks all addresses of a host, and connects to the first, so that no second look-up counts; after https to https."""

    def __init__(self, files: WebFiles) -> None:
        super().__init__(trust_env=False)
        self._files, self._schemes = files, list(SCHEMES)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Called for each redirect, too."""
        url, host = request.url, request.url.raw_host.decode()
        if url.scheme not in self._schemes or not host or url.userinfo or len(str(url)) > MAX_URL_CHARACTERS:
            allowed = f"{' or '.join(self._schemes)} URL without a password, of at most {MAX_URL_CHARACTERS} characters"
            raise InputError(f"{str(url)[:200]} is no {allowed}")
        self._schemes = self._schemes[self._schemes.index(url.scheme) :]
        addresses = await asyncio.to_thread(self._files.resolver, host)
        if private := [address for address in addresses if not self._files.allow_private and not is_public(address)]:
            raise InputError(f"{private[0]} is a private address; --allow-private-urls allows it")
        there, extensions = url.copy_with(host=addresses[0]), {**request.extensions, "sni_hostname": host}
        # The certificate must have the host's name.
        return await super().handle_async_request(httpx.Request("GET", there, headers=request.headers, extensions=extensions))
