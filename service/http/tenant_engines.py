"""What each tenant's engine may use: a folder of its own, and its part of the service's budgets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cacheblend.base.errors import ConfigError
from cacheblend.base.options import with_options
from cacheblend.service.engine.config import EngineConfig

from .tenants import BUDGETS, TenantConfig

TENANTS_FOLDER = "tenants"


def engine_configs(config: EngineConfig, tenants: Sequence[TenantConfig]) -> dict[str, EngineConfig]:
    """The config of each tenant's engine, by name.

    The service's budgets are what all tenants have together: a tenant that names a number has that, the others share the rest
    equally. So what a tenant has is there for it, whatever the others do.

    Args:
        config: the service's.
        tenants: each name once.

    Raises:
        ConfigError: the tenants' budgets are more than the service's together, or leave nothing for those without a number.
    """
    totals = (config.store.ram_budget_bytes, config.store.nvme_budget_bytes, config.prefix_budget_bytes)
    parts = {budget: _parts(budget, total, tenants) for budget, total in zip(BUDGETS, totals, strict=True)}
    return {tenant.name: _config_of(tenant, config, parts) for tenant in tenants}


def _config_of(tenant: TenantConfig, config: EngineConfig, parts: Mapping[str, Mapping[str, int]]) -> EngineConfig:
    own: dict[str, Any] = {budget: part[tenant.name] for budget, part in parts.items()}
    return with_options(config, {"store_dir": Path(config.store_dir) / TENANTS_FOLDER / tenant.name, **own})


def _parts(budget: str, total_bytes: int, tenants: Sequence[TenantConfig]) -> dict[str, int]:
    named = {tenant.name: int(given) for tenant in tenants if (given := getattr(tenant, budget)) is not None}
    others = [tenant.name for tenant in tenants if tenant.name not in named]
    rest_bytes = total_bytes - sum(named.values())
    if rest_bytes < len(others):
        raise ConfigError(
            f"tenants.*.{budget}",
            sum(named.values()),
            f"together at most {budget}={total_bytes}, which all tenants share, with room left for the {len(others)} without a "
            f"number of their own; raise {budget} or lower the tenants'",
        )
    return named | dict.fromkeys(others, rest_bytes // max(1, len(others)))
