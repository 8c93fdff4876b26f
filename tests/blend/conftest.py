"""An empty folder of compiled files, for tests of the kernels."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from cacheblend.blend import attention, cpu_modules, generation


@pytest.fixture
def fresh_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder of compiled files, and nothing loaded."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    loads = [module._load.cache_clear for module in (attention, generation, cpu_modules)]
    for clear in loads:
        clear()
    yield tmp_path
    for clear in loads:
        clear()
