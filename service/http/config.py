"""Configuration of the HTTP API: its address, limits of its requests, and its tenants with their keys and budgets."""

import hashlib
import json
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cacheblend.base.errors import ConfigError
from cacheblend.base.options import MIB, check_whole, from_options, is_whole, option
from cacheblend.service.engine.config import TENANTS_FOLDER, EngineConfig

LOOPBACK = ("127.0.0.1", "::1", "localhost")  # hosts that only this machine reaches
API_KEY = r"[!-~]{8,}"
HOST_NAME = r"[0-9A-Za-z._-]+|\[[0-9A-Fa-f:.]+\]"
BUDGETS = ("ram_budget_bytes", "nvme_budget_bytes", "prefix_budget_bytes", "index_budget_bytes")


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
    require_key: bool = option(False, "Refuse to start without a key or tenants if others than this machine can connect.")
    cors_origins: tuple[str, ...] = option((), "A web origin whose pages may call the API; repeat for more.")
    allowed_hosts: tuple[str, ...] = option(
        (),
        "A host name that requests may be addressed to, beside `localhost`, `127.0.0.1`, `[::1]` and the host; repeat for "
        "more. With a key or tenants every name is allowed, unless some are named.",
    )
    default_chat_template_kwargs: str = option(
        "{}",
        'JSON object of variables of the chat template, unless a chat says otherwise, such as `{"enable_thinking": false}`.',
        panel="Serving",
    )
    max_body_bytes: int = option(32 * MIB, "Larger uploads of documents are refused.", panel="Serving")
    max_completion_bytes: int = option(8 * MIB, "Larger bodies of all other requests are refused.", panel="Serving")
    keep_alive_s: int = option(65, "An idle connection is closed after so many seconds; more than a proxy's.", panel="Serving")
    max_documents: int = option(1000, "Documents of one upload, and of one question that brings its own.", panel="Serving")

    def __post_init__(self) -> None:
        if not isinstance(self.host, str) or not self.host.strip():
            raise ConfigError("host", self.host, "an address or a host name")
        if not is_whole(self.port) or not 0 <= self.port <= 65535:
            raise ConfigError("port", self.port, "0 to 65535")
        for name in ("max_body_bytes", "max_completion_bytes", "max_documents", "keep_alive_s"):
            check_whole(name, getattr(self, name))
        if self.api_key is not None and not re.fullmatch(API_KEY, str(self.api_key)):
            allowed = "8 or more ASCII letters, digits and signs; `cacheblend api-key` makes one"
            raise ConfigError("api_key", "what is given (not shown)", allowed)
        for origin in self.cors_origins:
            if origin != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]{0,30}://[^\s,/]+", origin):
                raise ConfigError("cors_origins", origin, "origins such as https://example.org, in a variable parted by spaces")
        for name in self.allowed_hosts:
            if not re.fullmatch(HOST_NAME, name):
                raise ConfigError("allowed_hosts", name, "host names or addresses without a port, such as rag.example.org")
        self.template_kwargs()

    def template_kwargs(self) -> dict[str, Any]:
        """The chat template's variables by default."""
        given = self.default_chat_template_kwargs
        try:
            value = json.loads(given)
        except (TypeError, ValueError, RecursionError):
            value = None
        if not isinstance(value, dict):
            raise ConfigError("default_chat_template_kwargs", given, 'a JSON object such as {"enable_thinking": false}')
        return value


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantConfig:
    """One tenant. Its folder, its objects in the remote tier and its part of each budget are its own, so nothing of another is
    found, counted or evicted by it.

    Args:
        name: of the tenant, and of its folder below the store's.
        api_key_sha256: hex SHA-256 of the keys that it uses (`cacheblend api-key` makes one); the keys themselves are nowhere.

    Raises:
        ConfigError: a value is not allowed.
    """

    name: str
    api_key_sha256: tuple[str, ...]

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z0-9][a-z0-9_-]{0,62}", self.name):
            raise ConfigError("tenants", self.name, "lower-case letters, digits, - and _, at most 63")
        if not self.api_key_sha256:
            raise ConfigError(f"tenants.{self.name}.api_key_sha256", (), "the hash of a key; `cacheblend api-key` makes both")
        for digest in self.api_key_sha256:
            if not isinstance(digest, str) or not re.fullmatch(r"[0-9a-f]{64}", digest):
                given, allowed = "what is given (not shown, it may be a key)", "64 hex digits; `cacheblend api-key` prints them"
                raise ConfigError(f"tenants.{self.name}.api_key_sha256", given, allowed)


def new_key() -> str:
    """A fresh API key of 256 random bits."""
    return f"cb-{secrets.token_urlsafe(32)}"


def hash_key(key: str) -> str:
    """Hex SHA-256 of a key. Keys are random and long, so a plain hash cannot be searched."""
    return hashlib.sha256(key.encode(errors="surrogateescape")).hexdigest()


def engine_configs(config: EngineConfig, tenants: Sequence[TenantConfig]) -> dict[str, EngineConfig]:
    """The config of each tenant's engine, by name.

    The service's budgets are what all tenants have together, each an equal part: it is there for a tenant, whatever the others
    do.

    Raises:
        ConfigError: a budget is of fewer bytes than there are tenants.
    """
    owners = (config.store, config, config.retriever)
    totals = {budget: next(getattr(owner, budget) for owner in owners if hasattr(owner, budget)) for budget in BUDGETS}
    parts = {budget: total and total // len(tenants) for budget, total in totals.items()}  # None is no bound of the index
    configs = dict[str, EngineConfig]()
    for tenant in tenants:
        own: dict[str, Any] = {"store_dir": Path(config.store_dir) / TENANTS_FOLDER / tenant.name, "remote_tenant": tenant.name}
        configs[tenant.name] = from_options(EngineConfig, {**own, **parts}, config)
    return configs
