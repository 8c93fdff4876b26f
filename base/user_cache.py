"""The user's cache folder: what is kept there may be deleted at any time, and is made anew."""

from __future__ import annotations

import os
from pathlib import Path


def user_cache_folder() -> Path:
    """`cacheblend` in `XDG_CACHE_HOME`, or in `~/.cache`; it may not exist yet."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cacheblend"
