"""Configuration of the HTTP API: its address, and limits of its requests."""

from __future__ import annotations

import re
from dataclasses import dataclass

from cacheblend.base.checks import MIB, check_whole, is_whole
from cacheblend.base.errors import ConfigError
from cacheblend.base.options import option

LOOPBACK = ("127.0.0.1", "::1", "localhost")  # hosts that only this machine reaches
API_KEY = r"[!-~]{8,}"
HOST_NAME = r"[0-9A-Za-z._-]+|\[[0-9A-Fa-f:.]+\]"


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpConfig:
    """Settings of the HTTP API.

    Raises:
        ConfigError: a value is not allowed.
    """

    host: str = option("127.0.0.1", "Address to listen on; only this machine reaches 127.0.0.1.")
    port: int = option(8000, "Port to listen on; 0 is any free one.")
    served_model_name: str | None = option(None, "What clients call the model; left out, the last part of its path.")
    api_key: str | None = option(
        None,
        "The key that clients send as `Authorization: Bearer KEY`; not beside tenants. Others of the machine see a flag, and "
        "no variable.",
        secret=True,
    )
    require_key: bool = option(
        False, "Refuse to start without a key or tenants where others than this machine are listened to."
    )
    cors_origins: tuple[str, ...] = option((), "A web origin whose pages may call the API; repeat for more.")
    allowed_hosts: tuple[str, ...] = option(
        (),
        "A host name that requests may be addressed to, beside `localhost`, `127.0.0.1`, `[::1]` and the host; repeat for "
        "more. With tenants every name is allowed, unless some are named.",
    )
    max_body_bytes: int = option(32 * MIB, "Larger uploads of documents are refused.", panel="Serving")
    max_completion_bytes: int = option(MIB, "Larger bodies of all other requests are refused.", panel="Serving")
    max_documents: int = option(1000, "Documents of one upload, and of one question that brings its own.", panel="Serving")

    def __post_init__(self) -> None:
        if not isinstance(self.host, str) or not self.host.strip():
            raise ConfigError("host", self.host, "an address or a host name")
        if not is_whole(self.port) or not 0 <= self.port <= 65535:
            raise ConfigError("port", self.port, "0 to 65535")
        for name in ("max_body_bytes", "max_completion_bytes", "max_documents"):
            check_whole(name, getattr(self, name))
        if self.api_key is not None and not re.fullmatch(API_KEY, str(self.api_key)):
            given, allowed = (
                "what is given (not shown)",
                "8 or more ASCII letters, digits and signs; `cacheblend api-key` makes one",
            )
            raise ConfigError("api_key", given, allowed)
        for origin in self.cors_origins:
            if origin != "*" and not origin.startswith(("http://", "https://")):
                raise ConfigError("cors_origins", origin, "origins such as https://example.org")
        for name in self.allowed_hosts:
            if not re.fullmatch(HOST_NAME, name):
                raise ConfigError("allowed_hosts", name, "host names or addresses without a port, such as rag.example.org")
