"""Only a store, or an empty place for one, is opened."""

import errno
import itertools
import json
import os
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
from chunks import files_under, make_chunk, same
from waiting import wait_until

from cacheblend.base.errors import ConfigError, StoreDirectoryError
from cacheblend.store import KVStore, StoreConfig
from cacheblend.store.layout import WriteLock

KEY, KV = make_chunk(1)


def make_store(directory: str | Path) -> None:
    with KVStore(StoreConfig(directory=directory)) as store:
        store.put(KEY, KV)


def refuse(directory: Path, message: str) -> None:
    with pytest.raises(StoreDirectoryError, match=message):
        KVStore(StoreConfig(directory=directory))


def test_made_where_missing(tmp_path: Path) -> None:
    """A store is made in a folder that does not exist yet, or is empty but for what file systems put there."""
    (tmp_path / "disk" / "lost+found").mkdir(parents=True)
    for directory in (tmp_path / "a" / "b", tmp_path / "disk"):
        make_store(str(directory))
        with KVStore(StoreConfig(directory=directory)) as store:
            assert same(store.get(KEY), KV)


def test_something_else(tmp_path: Path) -> None:
    """A file is not a store, and a folder that holds something else is left as it is."""
    (tmp_path / "thesis.tex").write_text("text")
    refuse(tmp_path / "thesis.tex", "is a file")
    refuse(tmp_path / "thesis.tex" / "below", "cannot be written")
    refuse(tmp_path, r"not a store: it holds thesis\.tex")
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize("marker", ["", "[]", "[" * 100_000, '{"kind": "photo-store", "format": 1}'])
def test_other_markers(tmp_path: Path, marker: str) -> None:
    """A folder of another kind is refused with what to do."""
    (tmp_path / "store.json").write_text(marker)
    refuse(tmp_path, "holds store.json, and store.json does not mark it as one; name an empty")


@pytest.mark.parametrize(
    "marker",
    [None, b"", b"\xff\xfe", b"[]", b'{"format": 1}', b'{"kind": "cacheblend-stora", "format": 1}', b"[" * 100_000],
    ids=["gone", "empty", "no text", "a list", "half", "another kind", "deep"],
)
def test_a_marker_is_made_again(tmp_path: Path, marker: bytes | None, caplog: pytest.LogCaptureFixture) -> None:
    """A store whose marker alone is gone or damaged is opened, with a warning and all that it holds."""
    make_store(tmp_path)
    (tmp_path / "store.json").unlink()
    if marker is not None:
        (tmp_path / "store.json").write_bytes(marker)
    with KVStore(StoreConfig(directory=tmp_path)) as store:
        assert same(store.get(KEY), KV)
    assert "store.json is missing or damaged" in caplog.text
    assert json.loads((tmp_path / "store.json").read_text()) == {"kind": "cacheblend-store"}


def test_marker_that_a_crash_cut_off(tmp_path: Path) -> None:
    """A crash while the marker was written leaves a folder that can still become a store."""
    (tmp_path / "store.json.new.123").write_text('{"kind"')
    with KVStore(StoreConfig(directory=tmp_path)):
        assert json.loads((tmp_path / "store.json").read_text())["kind"]


@pytest.mark.parametrize("call", ["mkdir", "open"])
def test_read_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """A folder that cannot be written is refused with the remedy."""
    make_store(tmp_path / "store")

    def read_only(*_: object, **__: object) -> int:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, call, read_only)
    refuse(tmp_path / ("new" if call == "mkdir" else "store"), "make it writable")


def test_folder_without_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that another user owns is refused with the remedy."""
    make_store(tmp_path)
    monkeypatch.setattr(os, "access", lambda *_: False)
    refuse(tmp_path, "Permission denied; make it writable")


def test_catalog_of_another_schema(tmp_path: Path) -> None:
    """A catalog of a later version is refused and left as it is."""
    make_store(tmp_path)
    with closing(sqlite3.connect(tmp_path / "catalogue.sqlite", isolation_level=None)) as later:
        later.execute("PRAGMA user_version = 7")
    refuse(tmp_path, "schema 7.*use the version that made it")


def test_catalog_that_is_not_one(tmp_path: Path) -> None:
    """A destroyed catalog is refused; moved away, it is made again from the files."""
    make_store(tmp_path)
    for path in tmp_path.glob("catalogue.sqlite*"):
        path.write_bytes(b"garbage" * 1000)
    refuse(tmp_path, r"move catalogue.sqlite\* away")
    for path in tmp_path.glob("catalogue.sqlite*"):
        path.unlink()
    with KVStore(StoreConfig(directory=tmp_path)) as store:
        assert store.verify().ok
        assert same(store.get(KEY), KV)


def test_leftovers_of_a_crash_are_removed(tmp_path: Path) -> None:
    """A file whose writing was cut off is gone when the store is opened again, and was never an entry."""
    make_store(tmp_path)
    (tmp_path / "writing" / ("ab" * 32)).write_bytes(b"half")
    with KVStore(StoreConfig(directory=tmp_path)) as store:
        assert files_under(store, "writing") == []
        assert store.stats().nvme.entries == 1


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *itertools.product(("ram_budget_bytes", "nvme_budget_bytes"), (0, -1, 1.5, "2", True, None)),
        *itertools.product(("directory",), ("", None)),
    ],
)
def test_bad_values_of_options(field: str, value: object) -> None:
    """A budget that is not a positive whole number, and no folder, are refused by name and value."""
    with pytest.raises(ConfigError, match=f"{field}={value!r}"):
        StoreConfig(**{"directory": "store", field: value})


def test_a_wait_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A process logs which lock of another it waits for, and has it once that is released; without a wait it logs nothing."""
    with closing(WriteLock(tmp_path / "lock")) as held, closing(WriteLock(tmp_path / "lock", said_after_s=0)) as wanted:
        with ThreadPoolExecutor(1) as thread:
            with held:
                waiting = thread.submit(wanted.__enter__)
                wait_until(lambda: f"waiting for another process, which holds {tmp_path / 'lock'}" in caplog.text)
                assert not waiting.done()
            waiting.result()
            thread.submit(wanted.__exit__, None, None, None).result()
        caplog.clear()
        with wanted:
            assert not caplog.text
