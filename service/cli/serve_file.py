"""The service's TOML file: options by their names, and a table for each tenant."""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from cacheblend.base.errors import ConfigError, InputError
from cacheblend.service.http.tenants import TenantConfig

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
    for name in values:  # whose value may be a key in the wrong place, and is not shown
        if name not in known and name != "tenants":
            raise ConfigError("option", name, f"{file} may set {', '.join(sorted(known))}, and [tenants.NAME] tables")
    if "tenants" in values and (not isinstance(values["tenants"], dict) or not values["tenants"]):
        remedy = f"{file} must have a [tenants.NAME] table for each, or no tenants at all, which opens the API to everybody"
        raise ConfigError("tenants", type(values["tenants"]).__name__, remedy)
    return values


def tenants_of(tables: Mapping[str, Any]) -> list[TenantConfig]:
    """The tenants of a file's tables.

    Raises:
        ConfigError: a table has another field, or misses one.
    """
    tenants = []
    for name, table in tables.items():
        if not isinstance(table, Mapping):
            raise ConfigError(f"tenants.{name}", type(table).__name__, f"a [tenants.NAME] table of {', '.join(TENANT_FIELDS)}")
        given = dict(table)
        for field in given:  # whose value may be the key itself, and is not shown
            if field not in TENANT_FIELDS:
                raise ConfigError(f"tenants.{name}", field, f"its fields are {', '.join(TENANT_FIELDS)}")
        for field, declared in TENANT_FIELDS.items():
            if declared.default is MISSING and field not in given:
                raise ConfigError(
                    f"tenants.{name}.{field}", None, "it is needed; `cacheblend api-key` makes a key and its hash"
                )
        keys = given.pop("api_key_sha256")
        if not isinstance(keys, str | list):
            raise ConfigError(f"tenants.{name}.api_key_sha256", type(keys).__name__, "a hash, or a list of hashes")
        tenants.append(TenantConfig(name=name, api_key_sha256=(keys,) if isinstance(keys, str) else tuple(keys), **given))
    return tenants
