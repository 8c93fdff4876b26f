"""Who may read what is written, and on which systems it is written."""

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from engines import DOCUMENTS, QUESTION, OpenEngine
from profiles import linear_profile

from cacheblend.base.files import make_folder
from cacheblend.loader.profile import write_profile


@pytest.fixture(params=[0o000, 0o022])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


@pytest.mark.usefixtures("umask")
def test_nobody_else_reads_a_store(open_engine: OpenEngine, tmp_path: Path) -> None:
    """Under any umask every file of store, index and profiles is 0600, every folder 0700."""
    engine = open_engine(store_dir=tmp_path / "deep" / "store")
    engine.ingest(DOCUMENTS)
    engine.answer(QUESTION, documents=[{"text": "brought along"}])
    engine.drain()
    write_profile(engine.config.profile_dir, linear_profile())
    while_open = _modes(tmp_path / "deep")
    engine.close()
    for modes in (while_open, _modes(tmp_path / "deep")):
        assert {path: oct(mode) for path, mode in modes.items() if mode != (0o700 if path.is_dir() else 0o600)} == {}
    names = {path.name for path in while_open}
    assert {"catalogue.sqlite", "catalogue.sqlite-wal", "store.json", "lock", "journal", "entries"} <= names


def test_a_folder_that_is_there_keeps_its_mode(tmp_path: Path) -> None:
    """Whoever made a folder for a group has it so."""
    (tmp_path / "group").mkdir(mode=0o750)
    (tmp_path / "group").chmod(0o750)
    make_folder(tmp_path / "group" / "a" / "b")
    modes = [stat.S_IMODE((tmp_path / "group" / below).stat().st_mode) for below in ("", "a", "a/b")]
    assert modes == [0o750, 0o700, 0o700]
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        make_folder(tmp_path / "file")


def test_windows_is_refused_with_a_sentence() -> None:
    """Where there is no fcntl, the import says what is needed."""
    code = "import sys; sys.modules['fcntl'] = None; import cacheblend.store"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1].startswith("ImportError: CacheBlend needs Linux or macOS")


def _modes(root: Path) -> dict[Path, int]:
    paths = [root, *root.rglob("*")]
    return {path: stat.S_IMODE(path.stat().st_mode) for path in paths}
