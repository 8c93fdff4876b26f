"""The service's TOML file: options by their names, and a table for each tenant."""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from cacheblend.store.errors import ConfigError, InputError

from .http.tenants import TenantConfig

TENANT_FIELDS = {field.name: field for field in fields(TenantConfig) if field.name != "name"}


def read_serve_file(file: Path, known: Collection[str]) -> dict[str, Any]:
    """The options of a file; `known` names those there are.

    Raises:
        InputError: the file cannot be read, or is not TOML.
        ConfigError: an option that there is not.
    """
    try:
        values = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"cannot read {file}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{file} is not TOML: {error}") from error
    for name, value in values.items():
        if name not in known and name != "tenants":
            raise ConfigError(name, value, f"{file} may set {', '.join(sorted(known))}, and [tenants.NAME] tables")
    return values


def tenants_of(tables: Mapping[str, Any]) -> list[TenantConfig]:
    """The tenants of a file's tables.

    Raises:
        ConfigError: a table has another field, or misses one.
    """
    tenants = []
    for name, table in tables.items():
        given = dict(table) if isinstance(table, Mapping) else {"": table}
        for field, value in given.items():
            if field not in TENANT_FIELDS:
                raise ConfigError(f"tenants.{name}.{field}", value, f"one of {', '.join(TENANT_FIELDS)}")
        for field, declared in TENANT_FIELDS.items():
            if declared.default is MISSING and field not in given:
                raise ConfigError(
                    f"tenants.{name}.{field}", None, "it is needed; `cacheblend api-key` makes a key and its hash"
                )
        keys = given.pop("api_key_sha256")
        tenants.append(TenantConfig(name=name, api_key_sha256=(keys,) if isinstance(keys, str) else tuple(keys), **given))
    return tenants
