"""Damaged files are misses that are logged, counted and set aside; a full disk leaves nothing behind."""

import errno
import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import torch
from chunks import FILE_BYTES, file_of, files_under, flip_last_byte, make_chunk, put_all, same

from cacheblend.base.errors import DamagedEntryError, StoreDirectoryError, StoreFullError
from cacheblend.base.sqlite import Database
from cacheblend.store.catalog import Catalog
from cacheblend.store.layout import RESERVE_BYTES

pytestmark = pytest.mark.contract

PAIRS = [make_chunk(seed) for seed in range(3)]
KEY, KV = PAIRS[0]


DAMAGES: dict[str, Callable[[Path], object]] = {
    "bit flip": flip_last_byte,
    "truncated": lambda path: os.truncate(path, FILE_BYTES - 1),
    "empty": lambda path: os.truncate(path, 0),
    "longer": lambda path: os.truncate(path, FILE_BYTES + 1),
    "deleted": lambda path: path.unlink(),
    "garbage header": lambda path: path.write_bytes(path.read_bytes()[:8] + b"{" * (FILE_BYTES - 8)),
    "huge header": lambda path: path.write_bytes(b"\xff" * 8 + path.read_bytes()[8:]),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_file_is_a_miss(open_store, caplog, damage: str) -> None:
    """A damaged entry is None, once in the log and the count, out of the way, and can be put again."""
    put_all(open_store(), PAIRS).close()
    store = open_store()
    DAMAGES[damage](file_of(store, KEY))
    assert store.get(KEY) is None
    assert store.get(KEY) is None
    assert str(KEY) in caplog.text
    stats = store.stats()
    assert (stats.damaged, stats.misses, stats.nvme.entries, stats.nvme.bytes) == (1, 2, 2, 2 * FILE_BYTES)
    assert files_under(store, "damaged") == ([] if damage == "deleted" else [str(KEY)])
    assert not file_of(store, KEY).exists()
    assert same(store.get(PAIRS[1][0]), PAIRS[1][1])
    store.put(KEY, KV)
    assert same(store.get(KEY), KV)


def test_pinning_a_damaged_header(open_store) -> None:
    """An entry whose header is damaged is a miss in a pin."""
    open_store().put(KEY, KV)
    store = open_store()
    os.truncate(file_of(store, KEY), 100)
    with store.pin([KEY]) as placements:
        assert placements == [None]
    assert store.stats().damaged == 1


def test_damage_found_while_a_layer_is_read(open_store) -> None:
    """A placement raises at the damaged layer, reads the others, and the entry is set aside once."""
    open_store().put(KEY, KV)
    store = open_store()
    with store.pin([KEY]) as (placement,):
        flip_last_byte(file_of(store, KEY))
        assert torch.equal(placement.read_layer(0)[0], KV.layers[0][0])
        for _ in range(2):
            with pytest.raises(DamagedEntryError, match="layer 2"):
                placement.read_layer(2)
        assert KEY not in store
    assert store.stats().damaged == 1
    assert files_under(store, "damaged") == [str(KEY)]


def test_ram_copy_of_a_damaged_file(open_store) -> None:
    """A copy in RAM stays right when its file is damaged."""
    store = open_store()
    store.put(KEY, KV)
    flip_last_byte(file_of(store, KEY))
    assert same(store.get(KEY), KV)


def test_damage_that_was_mended_meanwhile(open_store) -> None:
    """An old file found damaged does not take the whole entry with it that was put since."""
    open_store().put(KEY, KV)
    store = open_store()
    with store.pin([KEY]) as (placement,):
        flip_last_byte(file_of(store, KEY))
        other = open_store()
        other.delete(KEY)
        other.put(KEY, KV)
        with pytest.raises(DamagedEntryError):
            placement.read_layer(2)
        assert KEY in store
    assert store.stats().damaged == 0


def test_too_many_open_files(open_store, monkeypatch, caplog) -> None:
    """An entry that the system cannot open now is a miss, not a damaged entry."""
    open_store().put(KEY, KV)
    store = open_store()

    def refuse(*_: object) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patch:
        patch.setattr("cacheblend.store.entry_file.os.open", refuse)
        assert store.get(KEY) is None
    assert "Too many open files" in caplog.text
    assert same(store.get(KEY), KV)


@pytest.mark.parametrize("call", ["write", "fsync", "replace", "second fsync", "commit"])
@pytest.mark.parametrize(("code", "error"), [(errno.ENOSPC, StoreFullError), (errno.EROFS, StoreDirectoryError)])
def test_disk_full(open_store, monkeypatch, call: str, code: int, error: type[Exception]) -> None:
    """A write that fails at any step raises, evicts nothing and leaves no file and no row."""
    store = put_all(open_store(nvme_budget_bytes=2 * FILE_BYTES), PAIRS[1:])
    owner, name = (Catalog, "change") if call == "commit" else (os, call.split()[-1])
    real, countdown = getattr(owner, name), 1 if call.startswith("second") else 0

    def fail(*args: object, **options: object) -> object:
        nonlocal countdown
        countdown -= 1
        if countdown < 0:
            raise OSError(code, os.strerror(code)) if owner is os else error("no room")
        return real(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, fail)
        with pytest.raises(error):
            store.put(KEY, KV)
    assert KEY not in store
    assert files_under(store, "entries") == sorted(str(key) for key, _ in PAIRS[1:])
    assert files_under(store, "writing") == []
    assert store.stats().nvme.bytes == 2 * FILE_BYTES
    assert store.verify().ok
    store.put(KEY, KV)
    assert same(store.get(KEY), KV)


def test_few_damaged_files_are_kept(open_store) -> None:
    """Files that were set aside do not fill the disk."""
    store = open_store(ram_budget_bytes=1)
    pairs = [make_chunk(seed) for seed in range(10)]
    for key, kv in pairs:
        store.put(key, kv)
        flip_last_byte(file_of(store, key))
        assert store.get(key) is None
    assert files_under(store, "damaged") == sorted(str(key) for key, _ in pairs[2:])


def alter_catalog(open_store, *statements: str) -> Path:
    """The folder of a store of three entries and a document, whose catalog was altered as a bad disk may alter it."""
    with put_all(open_store(), PAIRS) as store:
        store.documents.put([("a", "1", [KEY])])
    directory = Path(store.config.directory)
    with closing(sqlite3.connect(directory / "catalogue.sqlite")) as catalog, catalog:
        for statement in statements:
            catalog.execute(statement)
    return directory


@pytest.mark.parametrize(
    "statement",
    ["UPDATE totals SET bytes = bytes + (1 << 36)", "UPDATE entries SET bytes = bytes + (1 << 36) WHERE layers = 3"],
)
def test_wrong_numbers_evict_nothing(open_store, statement: str, caplog) -> None:
    """Totals or sizes that a flipped bit makes enormous are counted anew at the opening, before anything is evicted."""
    alter_catalog(open_store, statement)
    store = open_store(nvme_budget_bytes=10 * FILE_BYTES)
    assert (store.stats().nvme.entries, store.stats().nvme.bytes) == (3, 3 * FILE_BYTES)
    assert all(same(store.get(key), kv) for key, kv in PAIRS)
    assert "counted anew" in caplog.text or "sizes of 3 files" in caplog.text
    assert store.verify().ok


def test_a_time_of_use_beyond_all_times(open_store) -> None:
    """A time of use that a flipped bit puts at the end of time stops nothing."""
    alter_catalog(open_store, f"UPDATE entries SET used_ns = {2**63 - 1}")
    store = open_store(nvme_budget_bytes=3 * FILE_BYTES)
    assert store.get(KEY) is not None
    store.put(*make_chunk(9))
    assert KEY in store


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE entries SET namespace = CAST(x'ff41' AS TEXT)",
        "UPDATE entries SET namespace = x'41'",
        "UPDATE entries SET bytes = 'many'",
        "UPDATE documents SET id = x'41'",
        "UPDATE document_chunks SET digest = x'07'",
    ],
)
def test_a_row_that_is_no_row(open_store, statement: str) -> None:
    """A value that is no text, or not of its column's kind, is refused with what to do, which then helps."""
    directory = alter_catalog(open_store, statement)
    with pytest.raises(StoreDirectoryError, match=r"move catalogue.sqlite\* away"):
        open_store().ls()
    for path in directory.glob("catalogue.sqlite*"):
        path.unlink()
    assert len(open_store().ls()) == 3


@pytest.mark.parametrize("digest", ["char(0) || substr(digest, 2)", "'../' || substr(digest, 4)", "substr(digest, 2)"])
def test_a_key_that_names_no_file(open_store, digest: str) -> None:
    """A row whose key is damaged is dropped at the opening; its file is found again by `verify`."""
    tables = ("entries", "document_chunks")
    alter_catalog(open_store, *(f"UPDATE {table} SET digest = {digest} WHERE digest = '{KEY}'" for table in tables))
    store = open_store()
    assert store.get(KEY) is None
    assert store.verify(repair=True).orphans == (str(KEY),)
    assert same(store.get(KEY), KV)
    store.documents.delete("a")
    assert store.verify().ok


@pytest.mark.parametrize(
    ("operation", "freed"),
    [(operation, freed) for operation in ("delete", "delete a document", "shrink") for freed in ("reserve", "entries")],
)
def test_removals_on_a_full_disk(open_store, monkeypatch, freed: str, operation: str) -> None:
    """Where the catalog has no room for a change that frees some, the reserve makes it, and else the files that go."""
    store = put_all(open_store(), PAIRS)
    store.documents.put([("a", "1", [KEY, PAIRS[1][0]]), ("b", "1", [PAIRS[1][0]])])
    place = Path(store.config.directory) / "reserve" if freed == "reserve" else file_of(store, KEY)
    assert place.exists()
    transaction = Database.transaction

    @contextmanager
    def full(database: Database) -> Iterator[object]:
        with transaction(database) as connection:
            yield connection
            if place.exists():
                raise StoreFullError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(Database, "transaction", full)
        match operation:
            case "delete":
                store.delete(KEY)
            case "delete a document":
                store.documents.delete("a")
            case "shrink":
                store._nvme.budget_bytes = 2 * FILE_BYTES
                assert store._nvme.shrink()
        if freed == "reserve":  # which also ends what an upload has begun in the index
            store.documents.put([("c", "1", [])])
    assert {row.key for row in store.ls()} == {key for key, _ in PAIRS[1:]}
    assert same(store.get(PAIRS[1][0]), PAIRS[1][1])
    assert store.verify().ok
    store.delete(PAIRS[2][0])
    assert (Path(store.config.directory) / "reserve").stat().st_size == RESERVE_BYTES


def test_opening_on_a_full_disk(open_store, tmp_path, monkeypatch) -> None:
    """A store is opened where the disk has room for nothing: the reserve is given up, and taken again later."""
    put_all(open_store(), PAIRS).close()
    reserve = tmp_path / "store" / "reserve"
    connect = Database._connect

    def full(database: Database) -> sqlite3.Connection:
        if reserve.exists():
            raise StoreFullError("no room")
        return connect(database)

    with monkeypatch.context() as patch:
        patch.setattr(Database, "_connect", full)
        store = open_store()
    assert same(store.get(KEY), KV)
    assert reserve.exists()


def test_a_disk_without_room_for_a_reserve(open_store, monkeypatch) -> None:
    """Half of a reserve is not kept: it would only take what others need."""
    write = os.write

    def full(fd: int, data: memoryview) -> int:
        if len(data) == RESERVE_BYTES:
            return write(fd, data[:1000])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr("cacheblend.store.layout.os.write", full)
        store = open_store()
        assert not (Path(store.config.directory) / "reserve").exists()
    store.put(KEY, KV)
    assert (Path(store.config.directory) / "reserve").exists()
