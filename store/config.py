"""Configuration of a store: its folder, and the bytes that each tier may hold."""

import os
from dataclasses import dataclass

from cacheblend.base.errors import ConfigError
from cacheblend.base.options import GIB, MIB, check_whole, is_number, option

REMOTE_PANEL = "Remote tier"  # the options' heading
CODEC_NAMES = ("raw", "int8", "int4")
MIN_SECRET = 16  # characters


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreConfig:
    """Folder and tiers of a store.

    Args:
        directory: a folder on a local file system; made when missing; an engine sets its own. Its file system needs room for
            one group of writes more than the NVMe budget, since new entries are written before older ones are removed.
        write_queue_bytes: bytes of entries that wait to be written before a put blocks.
        remote: no text shows it, since it may hold a password; `unix:///path` is a Redis too.
        remote_tenant: two tenants have no object in common.

    Raises:
        ConfigError: an empty directory name, or a number of bytes that is not a positive integer.
    """

    directory: str | os.PathLike[str] = "cacheblend-store/kv"
    ram_budget_bytes: int = option(2 * GIB, "Bytes of KV held in RAM, as it is stored; what is above lies on disk alone.")
    nvme_budget_bytes: int = option(
        50 * GIB, "Bytes of KV on disk, headers included; the least recently used is evicted. Each process applies its own."
    )
    write_queue_bytes: int = 512 * MIB
    remote: str | None = option(
        None,
        "URL of a tier that machines share: redis://, rediss:// (TLS), unix://, s3://bucket/prefix, gs://, az://, "
        "file:///folder. Others of the machine see a flag with a password in it, and no variable.",
        panel=REMOTE_PANEL,
        secret=True,
    )
    remote_secret: str | None = option(
        None,
        "Secret of the deployment, 16 characters or more: entries in the remote tier have names and checksums that nobody can "
        "make without it. Others of the machine see a flag, and no variable.",
        panel=REMOTE_PANEL,
        secret=True,
    )
    remote_tenant: str | None = option(
        None,
        "Tenant of the entries in the remote tier, for a command on the folder of one (tenants/NAME); a service sets it.",
        panel=REMOTE_PANEL,
    )
    remote_timeout_s: float = option(1.0, "Seconds after which a call to the remote tier has failed.", panel=REMOTE_PANEL)

    def __post_init__(self) -> None:
        if not isinstance(self.directory, str | os.PathLike) or not os.fspath(self.directory):
            raise ConfigError("directory", self.directory, "name the folder that holds the store")
        for name in ("ram_budget_bytes", "nvme_budget_bytes", "write_queue_bytes"):
            check_whole(name, getattr(self, name))
        if self.remote is not None:
            from .remote import RemoteAddress

            RemoteAddress(self.remote)
        self.read_secret()
        if self.remote_tenant is not None and (not isinstance(self.remote_tenant, str) or not self.remote_tenant):
            raise ConfigError("remote_tenant", self.remote_tenant, "a tenant's name, or nothing")
        if not is_number(self.remote_timeout_s) or self.remote_timeout_s <= 0:
            raise ConfigError("remote_timeout_s", self.remote_timeout_s, "seconds above 0")

    def read_secret(self) -> bytes | None:
        """The deployment's secret, None for none; raises ConfigError for one of fewer than 16 characters."""
        secret = self.remote_secret
        if secret is None:
            return None
        if not isinstance(secret, str) or len(secret) < MIN_SECRET:
            raise ConfigError("remote_secret", "what is given (not shown)", f"{MIN_SECRET} characters or more")
        return secret.encode()
