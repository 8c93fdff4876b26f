"""A store's options are checked where they are given."""

from __future__ import annotations

import pytest

from cacheblend.store import ConfigError, StoreConfig


@pytest.mark.parametrize("field", ["ram_budget_bytes", "nvme_budget_bytes"])
@pytest.mark.parametrize("value", [0, -1, 1.5, "2", True, None])
def test_budgets_are_whole_and_positive(field: str, value: object) -> None:
    """A budget that is not a positive whole number is refused by name and value."""
    with pytest.raises(ConfigError, match=f"{field}={value!r}"):
        StoreConfig(directory="store", **{field: value})


@pytest.mark.parametrize("directory", ["", None])
def test_directory_is_named(directory: object) -> None:
    """A store without a folder is refused."""
    with pytest.raises(ConfigError, match="directory"):
        StoreConfig(directory=directory)
