"""Where the API listens and what it takes."""

from __future__ import annotations

import re
from dataclasses import dataclass

from cacheblend.base.errors import ConfigError

MIB = 2**20
HOST_NAME = r"[0-9A-Za-z._-]+|\[[0-9A-Fa-f:.]+\]"


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpConfig:
    """Settings of the HTTP API.

    Args:
        host: address to listen on; 127.0.0.1 is reached from this machine alone.
        port: 0 takes any free one.
        served_model_name: what `/v1/models` calls the model; None for the last part of the model's path.
        max_body_bytes: larger uploads of documents are refused.
        max_completion_bytes: larger bodies of all other requests are refused, questions among them; `max_body_bytes` holds too.
        max_documents: most documents of one ingest, and of one question that brings its own.
        cors_origins: web origins whose pages may call the API from a browser; none unless named.
        allowed_hosts: host names that requests may be addressed to, beside `localhost`, `127.0.0.1`, `[::1]` and `host`. With
            tenants every name is taken, unless some are named here.

    Raises:
        ConfigError: a value is not allowed.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: str | None = None
    max_body_bytes: int = 32 * MIB
    max_completion_bytes: int = MIB
    max_documents: int = 1000
    cors_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.host, str) or not self.host.strip():
            raise ConfigError("host", self.host, "an address or a host name")
        if not _is_whole(self.port) or not 0 <= self.port <= 65535:
            raise ConfigError("port", self.port, "0 to 65535")
        for name in ("max_body_bytes", "max_completion_bytes", "max_documents"):
            if not _is_whole(value := getattr(self, name)) or value < 1:
                raise ConfigError(name, value, "a whole number of at least 1")
        for origin in self.cors_origins:
            if origin != "*" and not origin.startswith(("http://", "https://")):
                raise ConfigError("cors_origins", origin, "origins such as https://example.org")
        for name in self.allowed_hosts:
            if not re.fullmatch(HOST_NAME, name):
                raise ConfigError("allowed_hosts", name, "host names or addresses without a port, such as rag.example.org")


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
