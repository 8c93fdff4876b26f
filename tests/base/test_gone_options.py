"""Options that are gone."""

import pytest

from cacheblend.base.errors import ConfigError
from cacheblend.base.options import from_options
from cacheblend.service import EngineConfig


def test_an_option_that_is_gone_names_what_took_its_place() -> None:
    """A configuration that still has it is refused, and the message says what to do."""
    with pytest.raises(ConfigError, match="on_miss='precompute' is not allowed: the option is gone; in its place: nothing"):
        from_options(EngineConfig, {"model": "m", "store_dir": "s", "on_miss": "precompute"})
