"""Where the API listens and what it takes."""

from __future__ import annotations

from dataclasses import dataclass

from cacheblend.store.errors import ConfigError

MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpConfig:
    """Settings of the HTTP API.

    Args:
        host: address to listen on; 127.0.0.1 is reached from this machine alone.
        port: 0 takes any free one.
        model_name: what `/v1/models` calls the model; None for the last part of the model's path.
        max_body_bytes: larger requests are refused.
        max_documents: most documents of one ingest, and of one question that brings its own.
        cors_origins: web origins whose pages may call the API from a browser; none unless named.

    Raises:
        ConfigError: a value is not allowed.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    model_name: str | None = None
    max_body_bytes: int = 32 * MIB
    max_documents: int = 1000
    cors_origins: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.host, str) or not self.host.strip():
            raise ConfigError("host", self.host, "an address or a host name")
        if not _is_whole(self.port) or not 0 <= self.port <= 65535:
            raise ConfigError("port", self.port, "0 to 65535")
        for name in ("max_body_bytes", "max_documents"):
            if not _is_whole(value := getattr(self, name)) or value < 1:
                raise ConfigError(name, value, "a whole number of at least 1")
        for origin in self.cors_origins:
            if origin != "*" and not origin.startswith(("http://", "https://")):
                raise ConfigError("cors_origins", origin, "origins such as https://example.org")


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
