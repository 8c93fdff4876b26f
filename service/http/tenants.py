"""Who may use the service: each tenant has its keys, its documents, and its part of the budgets."""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass

from cacheblend.base.checks import check_bytes
from cacheblend.base.errors import ConfigError

KEY_PREFIX = "cb-"
BUDGETS = ("ram_budget_bytes", "nvme_budget_bytes", "prefix_budget_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantConfig:
    """One tenant. Its folder and its part of each budget are its own, so nothing of another is found, counted or evicted by it.

    Args:
        name: of the tenant, and of its folder below the store's.
        api_key_sha256: hex SHA-256 of the keys that it uses (`cacheblend api-key` makes one); the keys themselves are nowhere.
        ram_budget_bytes: its part of the service's RAM budget, reserved and most at once; None for an equal part of what the
            tenants with a number leave.
        nvme_budget_bytes: the same of the NVMe budget.
        prefix_budget_bytes: the same of the budget of prefix blocks.

    Raises:
        ConfigError: a value is not allowed.
    """

    name: str
    api_key_sha256: tuple[str, ...]
    ram_budget_bytes: int | None = None
    nvme_budget_bytes: int | None = None
    prefix_budget_bytes: int | None = None

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z0-9][a-z0-9_-]{0,62}", self.name):
            raise ConfigError("tenants", self.name, "lower-case letters, digits, - and _, at most 63")
        if not self.api_key_sha256:
            raise ConfigError(f"tenants.{self.name}.api_key_sha256", (), "give the hash of at least one key")
        for digest in self.api_key_sha256:
            if not isinstance(digest, str) or not re.fullmatch(r"[0-9a-f]{64}", digest):
                given = "what is given (not shown, it may be a key)"
                raise ConfigError(
                    f"tenants.{self.name}.api_key_sha256", given, "64 hex digits; `cacheblend api-key` prints them"
                )
        for budget in BUDGETS:
            if (budget_bytes := getattr(self, budget)) is not None:
                check_bytes(f"tenants.{self.name}.{budget}", budget_bytes)


class ApiKeys:
    """Finds the tenant of a key.

    Args:
        tenants: none where the service is open to all who reach it.

    Raises:
        ConfigError: two tenants share a name or a key.
    """

    def __init__(self, tenants: Iterable[TenantConfig]) -> None:
        self._tenants: dict[str, str] = {}
        names = set[str]()
        for tenant in tenants:
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
        """The tenant of an `Authorization` header, "" where the service is open, None where the key is not known."""
        if not self._tenants:
            return ""
        scheme, _, key = (authorization or "").partition(" ")
        return self._tenants.get(hash_key(key.strip())) if scheme.lower() == "bearer" else None


def new_key() -> str:
    """A fresh API key of 256 random bits."""
    return KEY_PREFIX + secrets.token_urlsafe(32)


def hash_key(key: str) -> str:
    """Hex SHA-256 of a key. Keys are random and long, so a plain hash cannot be searched."""
    return hashlib.sha256(key.encode(errors="surrogateescape")).hexdigest()
