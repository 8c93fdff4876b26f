"""What is refused by the headers alone: wrong hosts, keys, origins and kinds of body."""

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from api import MODEL, bearer, connected, key_of, serving, serving_tenants
from engines import DOCUMENTS, QUESTION

from cacheblend.base.errors import ConfigError
from cacheblend.service import Engine
from cacheblend.service.http.config import HttpConfig, TenantConfig, hash_key
from cacheblend.service.http.guard import PUBLIC_PATHS, ApiKeys

KEY = key_of("one")
UPLOAD = {"documents": [{"id": "new", "text": "new words"}]}
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 1}


@pytest.fixture
def tenant_address(model_dir: Path, tmp_path: Path) -> Iterator[str]:
    """A server whose API needs a key."""
    with serving_tenants(["one"], model_dir, tmp_path) as (_, address):
        yield address


def code_of(response: httpx.Response) -> tuple[int, str | None]:
    return response.status_code, response.json()["error"]["code"]


def exchange(address: str, sent: bytes) -> bytes:
    """The first bytes that come back for what is sent."""
    with connected(address) as connection:
        connection.sendall(sent)
        return connection.recv(65536)


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1@evil.example", ""])
def test_another_name_than_ours(client: httpx.Client, host: str) -> None:
    """A request to another host name, as a rebound web page sends it, is refused on every route, and changes nothing."""
    for method, path in (("GET", "/v1/documents"), ("GET", "/"), ("GET", "/metrics"), ("DELETE", "/v1/documents/for")):
        assert code_of(client.request(method, path, headers={"Host": host})) == (421, "unknown_host")
    headers = {"Host": host, "Origin": f"http://{host}"}
    assert code_of(client.post("/v1/documents", json=UPLOAD, headers=headers)) == (421, "unknown_host")
    assert len(client.get("/v1/documents").json()["data"]) == len(DOCUMENTS)


@pytest.mark.parametrize(
    ("options", "taken", "refused"),
    [
        ({}, ["localhost", "LOCALHOST.:80", "127.0.0.1:1", "[::1]:9"], ["192.168.1.5", "0.0.0.0", "::1"]),
        ({"host": "rag.example"}, ["rag.example:8000"], ["example", "a.rag.example"]),
        ({"host": "fd00::1"}, ["[fd00::1]:8000"], ["[fd00::2]"]),
        ({"host": "0.0.0.0"}, ["192.168.1.5:8000", "[fd00::1]", "localhost"], ["rag.example", "1.2.3.4.example"]),
        ({"allowed_hosts": ("Rag.example",)}, ["rag.example", "localhost"], ["other.example"]),
    ],
)
def test_names_that_are_ours(engine: Engine, options: dict[str, object], taken: list[str], refused: list[str]) -> None:
    """Names of this machine, of the address listened on and of the config are taken; with all addresses, any address."""
    with serving(engine, **options) as (_, address):
        for host in taken:
            assert httpx.get(f"{address}/healthz", headers={"Host": host}).status_code == 200, host
        for host in refused:
            assert httpx.get(f"{address}/healthz", headers={"Host": host}).status_code == 421, host


@pytest.mark.parametrize(
    "origin", ["http://evil.example", "null", "https://localhost.evil.example", "http://127.0.0.1:1", "http://["]
)
def test_pages_from_elsewhere(client: httpx.Client, origin: str) -> None:
    """A page of another origin changes nothing, though the browser asked for leave, and reads what is open to all. The
    service's own page writes; tests/service/http/test_clients.py has those of named origins.
    """
    headers = {"Origin": origin}
    uploads, chats = "/v1/documents", "/v1/chat/completions"
    for method, path, body in (("POST", uploads, UPLOAD), ("DELETE", f"{uploads}/for", None), ("POST", chats, CHAT)):
        assert code_of(client.request(method, path, json=body, headers=headers)) == (403, "foreign_origin")
    assert client.get("/v1/models", headers=headers).status_code == 200
    own = {"Origin": str(client.base_url).rstrip("/")}
    assert client.post(chats, json=CHAT, headers=own).status_code == 200


def test_one_key(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    """With `api_key` the service has no tenants and asks for that key; no log and no text of the config shows it."""
    assert KEY not in f"{HttpConfig(api_key=KEY)}{HttpConfig(api_key=KEY)!r}"
    with caplog.at_level("DEBUG"), serving(engine, api_key=KEY) as (_, address):
        for headers in ({}, {"Authorization": "Bearer other-key"}, {"Authorization": KEY}, {"Authorization": f"Basic {KEY}"}):
            assert code_of(httpx.post(f"{address}/v1/chat/completions", json=CHAT, headers=headers)) == (401, "invalid_api_key")
            assert httpx.get(f"{address}/health", headers=headers).status_code == 200
        key = bearer("one")
        for headers in (key, {"x-api-key": KEY}):  # the latter is Anthropic's
            assert httpx.post(f"{address}/v1/chat/completions", json=CHAT, headers=headers, timeout=60).status_code == 200
        assert len(httpx.get(f"{address}/v1/documents", headers=key).json()["data"]) == len(DOCUMENTS)
    assert KEY not in caplog.text
    with pytest.raises(ConfigError, match="not shown") as wrong:
        HttpConfig(api_key="a secret")
    assert "a secret" not in str(wrong.value)


@pytest.mark.parametrize(
    ("tenants", "key", "named"),
    [
        ([("a", "x")], KEY, r"not beside \[tenants.NAME\]"),
        ([("a", "x"), ("a", "y")], None, "each name once"),
        ([("a", "x"), ("b", "x")], None, "only one tenant"),
    ],
)
def test_keys_of_two(tenants: list[tuple[str, str]], key: str | None, named: str) -> None:
    """A key beside tenants, and tenants who share a name or a key, are refused."""
    with pytest.raises(ConfigError, match=named):
        ApiKeys([TenantConfig(name=name, api_key_sha256=(hash_key(own),)) for name, own in tenants], key)


def test_no_key_no_body(tenant_address: str) -> None:
    """Who has no key is answered before a byte of the body is there, and is not asked for it."""
    head = b"POST /v1/documents HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 33554432\r\n"
    for more in (b"\r\n", b"Expect: 100-continue\r\n\r\n", b"\r\n" + b"[" * 100_000):
        assert exchange(tenant_address, head + more).startswith(b"HTTP/1.1 401")
    body = json.dumps({"documents": [[]] * 2_000_000})
    response = httpx.post(f"{tenant_address}/v1/documents", content=body, headers={"Content-Type": "application/json"})
    assert code_of(response) == (401, "invalid_api_key")
    assert response.headers["WWW-Authenticate"] == "Bearer"


@pytest.mark.parametrize("host", ["a/metrics?", "a/healthz#", "x/", "@/metrics"])
def test_the_host_is_no_path(tenant_address: str, host: str) -> None:
    """A Host with a public path in it opens nothing: what counts is the request line."""
    for path in ("/v1/models", "/v1/documents", "/v1/store"):
        sent = f"GET {path} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode()
        assert exchange(tenant_address, sent).split(b" ")[1] in (b"400", b"401")


def test_what_is_not_public_needs_a_key(tenant_address: str) -> None:
    """Without a key all there is are the public paths, to be read; even what there is not is not told. With one the service is
    asked under any name, which a proxy in front may have.
    """
    with httpx.Client(base_url=tenant_address) as client:
        for path in PUBLIC_PATHS:
            assert client.get(path).status_code == 200, path
            assert code_of(client.post(path, json={})) == (401, "invalid_api_key"), path
        for path in ("/v1/models", "/v1/documents", "/none", "/healthz/", "/metrics;x"):
            assert code_of(client.get(path)) == (401, "invalid_api_key"), path
        assert client.get("/v1/documents", headers={**bearer("one"), "Host": "rag.example"}).status_code == 200
