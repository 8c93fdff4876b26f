"""Pages and files of the web as documents: fetched once, with bounds of size, time and redirects, from public addresses only.

Only the person who runs a command names URLs; no client of the service does.
"""

from __future__ import annotations

import asyncio
import html
import ipaddress
import re
import socket
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path, PurePosixPath
from urllib.parse import unquote

import httpx

from cacheblend.base.errors import InputError

from .file_converter import PAGE_SUFFIX

SCHEMES = ("http", "https")
SUFFIXES = {"text/html": PAGE_SUFFIX, "application/xhtml+xml": PAGE_SUFFIX, "application/pdf": ".pdf"}
SUFFIXES |= {"application/x-ndjson": ".jsonl", "application/json": ".txt", "application/xml": ".txt"}
MAX_BYTES, MAX_REDIRECTS, MAX_URL_CHARACTERS = 64 * 2**20, 5, 2000
TIMEOUT_S = 60.0  # of a file, with its redirects
HEADERS = {"User-Agent": "cacheblend", "Accept-Encoding": "gzip"}
NAT64, GLOBAL_V6 = ipaddress.IPv6Network("64:ff9b::/96"), ipaddress.IPv6Network("2000::/3")
# Networks that `is_global` passes: clouds' own services, and addresses that hold another one.
INTERNAL = [ipaddress.ip_network(each) for each in ("192.0.0.0/24", "168.63.129.16/32", "2001::/32", "2002::/16")]
_TITLE = re.compile(r"<title[^>]*>([^<]{1,300})</title>", re.IGNORECASE)
_CHARSET = re.compile(r"(utf|iso|cp|windows|latin|koi8|shift|sjis|euc|gb|big5|us-ascii)", re.IGNORECASE)  # others may be slow


def addresses_of(host: str) -> list[str]:
    """The IP addresses of a host, of the kinds that this machine has itself."""
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_ADDRCONFIG)
    return [str(address[0]) for *_, address in found]


def is_public(address: str) -> bool:
    """Whether an IP address is one of the internet, also where it holds another one."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address) and ip not in GLOBAL_V6:
        if ip.ipv4_mapped is None and ip not in NAT64:
            return False
        ip = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
    return ip.is_global and not ip.is_multicast and not any(ip in network for network in INTERNAL)


class WebFiles:
    """Fetches files, each once; `close` removes them.

    All addresses that `resolver` names of a host are checked, and the first is connected to, so that no second look-up counts.
    """

    def __init__(
        self,
        *,
        allow_private: bool = False,
        timeout_s: float = TIMEOUT_S,
        max_bytes: int = MAX_BYTES,
        resolver: Callable[[str], list[str]] = addresses_of,
    ) -> None:
        self._allow_private, self._timeout_s, self._max_bytes, self._resolver = allow_private, timeout_s, max_bytes, resolver
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._files = dict[str, tuple[Path, str] | InputError]()

    def fetch(self, url: str) -> tuple[Path, str]:
        """The file at a URL, and its title; InputError if it cannot be had, or is beyond bounds or at a private address."""
        if url not in self._files:
            try:
                self._files[url] = asyncio.run(self._fetch(url))
            except InputError as error:  # noted too: a source is read twice, and the second time it fails at once
                self._files[url] = InputError(f"{url[:200]}: {error}")
            except (OSError, UnicodeError, httpx.HTTPError, httpx.InvalidURL) as error:
                late = f"not fetched within {self._timeout_s:g} s" if isinstance(error, TimeoutError) else ""
                why = late or f"cannot be fetched ({str(error) or type(error).__name__})"
                self._files[url] = InputError(f"{url}: {why}; look at it in a browser, or ingest a copy")
        if isinstance(found := self._files[url], InputError):
            raise found
        return found

    def close(self) -> None:
        """Remove the files."""
        if self._folder is not None:
            self._folder.cleanup()

    async def _fetch(self, named: str) -> tuple[Path, str]:
        if len(named) > MAX_URL_CHARACTERS:
            raise InputError(f"longer than {MAX_URL_CHARACTERS} characters; ingest a copy")
        url = httpx.URL(named)
        async with asyncio.timeout(self._timeout_s), httpx.AsyncClient(trust_env=False, timeout=None) as client:
            for _ in range(MAX_REDIRECTS + 1):
                there, headers = url.copy_with(host=await self._address(url)), {**HEADERS, "Host": url.netloc.decode()}
                name = {"sni_hostname": url.raw_host.decode()}  # that the certificate must have
                async with client.stream("GET", there, headers=headers, extensions=name) as answer:
                    if not answer.has_redirect_location:
                        return self._saved(answer, await self._body(answer), url)
                url, last = url.join(answer.headers["Location"]), url
                if (last.scheme, url.scheme) == ("https", "http"):
                    raise InputError(f"leads from https to http; name {url} if you want that")
        raise InputError(f"more than {MAX_REDIRECTS} redirects; name the page that they lead to")

    async def _address(self, url: httpx.URL) -> str:
        """The address of a URL's host that is connected to, when all of them are allowed."""
        if url.scheme not in SCHEMES or not url.host or url.userinfo:
            why = "is no http or https URL without a password; give one such as https://example.org/page.html"
            raise InputError(f"{str(url)[:200]!r} {why}")
        addresses = await asyncio.to_thread(self._resolver, url.raw_host.decode())
        if private := [address for address in addresses if not self._allow_private and not is_public(address)]:
            raise InputError(f"{private[0]} is a private address; --allow-private-urls allows it")
        return addresses[0]

    async def _body(self, answer: httpx.Response) -> bytes:
        if answer.status_code != httpx.codes.OK:
            raise InputError(f"the server says {answer.status_code} {answer.reason_phrase}; look at it in a browser")
        if (packed := answer.headers.get("Content-Encoding", "").strip().lower()) not in ("", "identity", "gzip"):
            raise InputError(f"it comes packed as {packed!r}, unasked; fetch it by hand and ingest it")
        body = bytearray()
        async for part in answer.aiter_bytes():
            body += part
            if len(body) > self._max_bytes:
                raise InputError(f"larger than {self._max_bytes / 2**20:g} MiB; fetch it by hand and split it")
        return bytes(body)

    def _saved(self, answer: httpx.Response, body: bytes, url: httpx.URL) -> tuple[Path, str]:
        """An answer's body in a file, whose suffix names its kind, and its title."""
        name = PurePosixPath(unquote(url.path))
        kind = answer.headers.get("Content-Type", "").partition(";")[0].strip().lower()
        suffix = SUFFIXES.get(kind) or (name.suffix.lower() if name.suffix[1:].isalnum() else ".txt")
        charset = answer.charset_encoding or ""
        if suffix in (PAGE_SUFFIX, ".txt", ".md", ".csv") and _CHARSET.match(charset):
            with suppress(LookupError, UnicodeError):  # where the server is wrong, the file's own bytes decide
                body = body.decode(charset).encode()
        found = _TITLE.search(body[: 2**16].decode(errors="replace")) if suffix == PAGE_SUFFIX else None
        self._folder = self._folder or tempfile.TemporaryDirectory(prefix="cacheblend-web-")
        path = Path(self._folder.name, f"{len(self._files)}{suffix}")
        path.write_bytes(body)
        title = " ".join(html.unescape(found[1]).split()) if found else name.stem
        return path, title or url.host
