"""The gate: what a request's headers alone decide, before its body is read, by the tenants' keys above all."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Mapping
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send

from cacheblend.base.errors import ConfigError
from cacheblend.retriever.document import NO_ID
from cacheblend.service.engine.engine import Engine

from .auth import TenantConfig, hash_key
from .config import HOST_NAME, HttpConfig
from .errors import ApiError, error_response, shortened
from .page import FILES

# Without a key, and for reading alone.
PUBLIC_PATHS = frozenset({"/health", "/healthz", "/readyz", "/metrics", "/openapi.json", *FILES})
READING = frozenset({"GET", "HEAD", "OPTIONS"})
OWN_HOSTS = frozenset({"localhost", "127.0.0.1", "[::1]"})
ANY_ADDRESS = frozenset({"0.0.0.0", "::", "[::]"})  # what a server on all of a machine's addresses listens on


class ApiKeys:
    """Finds the tenant of a key.

    Args:
        tenants: none where the service has one key, or is open to all who reach it.
        api_key: of a service without tenants; None leaves it open.

    Raises:
        ConfigError: two tenants share a name or a key, or there are tenants and a key.
    """

    def __init__(self, tenants: Iterable[TenantConfig], api_key: str | None = None) -> None:
        self._tenants: dict[str, str] = {} if api_key is None else {hash_key(api_key): ""}
        names = set[str]()
        for tenant in tenants:
            if api_key is not None:
                remedy = "not beside [tenants.NAME] tables, which have keys of their own"
                raise ConfigError("api_key", "what is given (not shown)", remedy)
            if tenant.name in names:
                raise ConfigError("tenants", tenant.name, "each name once")
            names.add(tenant.name)
            for digest in tenant.api_key_sha256:
                if digest in self._tenants:
                    raise ConfigError(f"tenants.{tenant.name}.api_key_sha256", digest, "a key of one tenant alone")
                self._tenants[digest] = tenant.name

    @property
    def required(self) -> bool:
        """Whether the service asks for a key."""
        return bool(self._tenants)

    def tenant(self, authorization: str | None) -> str | None:
        """The tenant of an `Authorization` header, "" where there are none, None where the key is not known."""
        if not self._tenants:
            return ""
        scheme, _, key = (authorization or "").partition(" ")
        return self._tenants.get(hash_key(key.strip())) if scheme.lower() == "bearer" else None


class Gate:
    """Middleware: refuses by Host, key, Origin, Content-Type and path, in this order, and finds whose request it is.

    - 421, without keys: a Host that is not this service's. A web page whose own name was pointed at this machine (DNS
      rebinding) is of the same origin as the API for a browser, and its Host alone distinguishes it from a page of ours.
    - 401, with tenants or an API key: no key, or none that is known, on every path that is not in `PUBLIC_PATHS`.
    - 403: a write from a web page of another origin that `cors_origins` does not name.
    - 400: a body that is not said to be JSON, which a browser sends without asking first (of a form to `/v1/documents` the
      Origin alone is checked); a path with control characters.

    The answer does not wait for the body; what comes of it is dropped. What is let through has `tenant` and `engine` in its
    state.

    Args:
        app: the application that the gate protects.
        http: hosts and origins.
        keys: of the tenants.
        engines: by tenant; "" where there are none.
    """

    def __init__(self, app: ASGIApp, http: HttpConfig, keys: ApiKeys, engines: Mapping[str, Engine]) -> None:
        self._app, self._http, self._keys, self._engines = app, http, keys, engines
        named = frozenset(name.lower() for name in http.allowed_hosts)
        bound = http.host.lower() if re.fullmatch(HOST_NAME, http.host) else f"[{http.host.lower()}]"
        self._hosts = None if keys.required and not named else OWN_HOSTS | named | {bound}
        self._takes_addresses = http.host in ANY_ADDRESS

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            self._check(scope)
        except ApiError as error:
            await error_response(error)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        headers: dict[bytes, bytes] = {}
        for name, value in scope["headers"]:
            headers.setdefault(name, value)
        path, writes = scope["path"], scope["method"] not in READING
        host = headers.get(b"host", b"").decode("latin-1").lower()
        self._check_host(host)
        tenant = self._keys.tenant(headers[b"authorization"].decode("latin-1") if b"authorization" in headers else None)
        if tenant is not None:
            scope.setdefault("state", {}).update(tenant=tenant, engine=self._engines[tenant])
        elif path not in PUBLIC_PATHS or writes:
            message = "the API key is missing or not known; send it as `Authorization: Bearer KEY`"
            raise ApiError(401, message, code="invalid_api_key")
        if writes and b"origin" in headers:
            self._check_origin(headers[b"origin"].decode("latin-1"), host)
        if NO_ID.search(path):
            message = "the path has a control character, or a byte that is no UTF-8; no document has such an id"
            raise ApiError(400, message, code="invalid_value")
        has_body = headers.get(b"content-length", b"0").strip() != b"0" or b"transfer-encoding" in headers
        if writes and has_body:
            sent = headers.get(b"content-type", b"").decode("latin-1")
            kind = sent.partition(";")[0].strip().lower()
            is_form = path == "/v1/documents" and kind == "multipart/form-data"
            if not is_form and not re.fullmatch(r"application/([\w.-]+\+)?json", kind, re.ASCII):
                came = shortened(sent) if sent else "no Content-Type"
                raise ApiError(400, f"the body came with {came}; send JSON with Content-Type: application/json")

    def _check_host(self, host: str) -> None:
        if self._hosts is None:
            return
        named = re.fullmatch(rf"({HOST_NAME})\.?(:\d*)?", host)
        name = named[1].removesuffix(".") if named else ""
        if name in self._hosts or (self._takes_addresses and _is_address(name)):
            return
        message = f"this service is not called {shortened(host)}; if it is, name that in allowed_hosts (--allowed-hosts)"
        raise ApiError(421, message, code="unknown_host")

    def _check_origin(self, origin: str, host: str) -> None:
        allowed = self._http.cors_origins
        if "*" in allowed or origin in allowed or (host and _address_of(origin) == host):
            return
        message = f"pages of {shortened(origin)} may not change anything here; name that in cors_origins if they should"
        raise ApiError(403, message, code="foreign_origin")


def _address_of(origin: str) -> str:
    """Host and port of an origin; nothing of what is no address."""
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:  # "http://[" and the like
        return ""


def _is_address(name: str) -> bool:
    """Whether a host is an address, which no name server can point elsewhere."""
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True
