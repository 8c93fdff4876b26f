"""Address of a remote tier, a URL whose secrets no text shows; and the registry of backends by its scheme."""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING
from urllib.parse import urlsplit, urlunsplit

from cacheblend.base.checks import check_user_info
from cacheblend.base.errors import ConfigError
from cacheblend.base.extras import needs_extra

if TYPE_CHECKING:
    from .backend import BackendLimits, RemoteBackend

# Scheme: the module and class of its backend, and the extra that brings its library.
REMOTE_BACKENDS: dict[str, tuple[str, str, str]] = {
    **dict.fromkeys(("redis", "rediss", "unix"), (".redis_backend", "RedisBackend", "redis")),
    **dict.fromkeys(("s3", "gs", "az", "file"), (".object_backend", "ObjectBackend", "objects")),
}


@dataclass(frozen=True, slots=True)
class RemoteAddress:
    """Address of a remote tier.

    Args:
        url: of a scheme in `REMOTE_BACKENDS`. Its user, password and query are in no text of this object.

    Raises:
        ConfigError: another scheme, nothing after it, or a password or a folder's name that is not percent-encoded.
    """

    url: str = field(repr=False)
    shown: str = field(init=False)

    def __post_init__(self) -> None:
        url = self.url if isinstance(self.url, str) else ""
        if not url.startswith("file:///"):  # which has no password, and folders may have any name
            check_user_info("remote", url)
        parts = urlsplit(url)
        schemes = ", ".join(f"{scheme}://" for scheme in REMOTE_BACKENDS)
        if parts.scheme not in REMOTE_BACKENDS or not (parts.netloc or parts.path.strip("/")):
            raise ConfigError("remote", "what is given (not shown)", f"a URL that begins with one of {schemes}")
        if parts.scheme == "file" and (parts.netloc or "?" in url or "#" in url):  # another folder would be taken
            allowed = "file:///folder; percent-encode % (%25), ? (%3F) and # (%23) in its name"
            raise ConfigError("remote", "what is given (not shown)", allowed)
        host = parts.netloc.rpartition("@")[2]
        object.__setattr__(self, "shown", urlunsplit((parts.scheme, host, parts.path, "", "")))

    def __str__(self) -> str:
        return self.shown

    @property
    def scheme(self) -> str:
        """The part before `://`."""
        return urlsplit(self.url).scheme

    def open(self, limits: BackendLimits) -> RemoteBackend:
        """A backend for the address; connects at its first use.

        Raises:
            MissingExtraError: its library is not installed.
            ConfigError: the rest of the URL is not allowed.
        """
        module, name, extra = REMOTE_BACKENDS[self.scheme]
        with needs_extra(extra):
            backend: RemoteBackend = getattr(import_module(module, __package__), name)(self, limits)
        return backend
