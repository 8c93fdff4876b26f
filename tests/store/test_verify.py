"""`verify` finds every difference between files and catalog, and mends it."""

import os
import time

from chunks import FILE_BYTES, file_of, files_under, make_chunk, put_all, same

PAIRS = [make_chunk(seed) for seed in range(5)]
KEYS = [key for key, _ in PAIRS]


def test_a_sound_store(open_store) -> None:
    """A sound store is found sound, with progress told for every entry."""
    store = put_all(open_store(), PAIRS)
    told: list[tuple[int, int]] = []
    report = store.verify(on_progress=lambda done, total: told.append((done, total)))
    assert report.ok
    assert (report.entries, report.bytes) == (5, 5 * FILE_BYTES)
    assert told == [(done, 5) for done in range(1, 6)]


def test_all_kinds_of_trouble(open_store) -> None:
    """Damaged, missing, orphaned and half-written files are told apart, left alone without `repair` and mended with it."""
    with put_all(open_store(), PAIRS) as store:
        store._nvme.catalog.change(remove=[str(KEYS[2]), str(KEYS[3])])
    store = open_store()
    os.truncate(file_of(store, KEYS[0]), 5000)
    file_of(store, KEYS[1]).unlink()
    os.truncate(file_of(store, KEYS[3]), 5000)
    (store._nvme.folder.writing / "half").write_bytes(b"half")
    for repair in (False, True):
        report = store.verify(repair=repair)
        assert not report.ok
        assert report.repaired == repair
        assert (report.damaged, report.missing) == ((str(KEYS[0]),), (str(KEYS[1]),))
        assert report.orphans == tuple(sorted(str(key) for key in KEYS[2:4]))
        assert report.leftovers == 1
    assert store.verify().ok
    assert {row.key for row in store.ls()} == {KEYS[2], KEYS[4]}
    assert files_under(store, "damaged") == sorted([str(KEYS[0]), str(KEYS[3])])
    assert store.stats().nvme.bytes == 2 * FILE_BYTES
    assert same(store.get(KEYS[2]), PAIRS[2][1])


def test_repair_keeps_the_budget(open_store) -> None:
    """Files that come back into the catalog displace others where the budget asks for it."""
    with put_all(open_store(), PAIRS) as store:
        store._nvme.catalog.change(remove=[str(key) for key in KEYS])
        for age, key in enumerate(reversed(KEYS)):
            os.utime(file_of(store, key), ns=(0, time.time_ns() - age * 10**9))
    store = open_store(nvme_budget_bytes=2 * FILE_BYTES)
    assert len(store.verify(repair=True).orphans) == 5
    assert store.stats().nvme.bytes == 2 * FILE_BYTES
    assert {row.key for row in store.ls()} == {KEYS[3], KEYS[4]}
    assert len(files_under(store, "entries")) == 2


def test_a_catalog_that_says_something_else(open_store) -> None:
    """Rows that are not what their files are, and totals that are not the sum of the rows, are found and mended."""
    store = put_all(open_store(), PAIRS)
    with store._nvme.catalog.database.transaction() as transaction:
        transaction.execute("UPDATE entries SET bytes = 1, namespace = 'x' WHERE digest = ?", (str(KEYS[0]),))
    for repair in (False, True):
        report = store.verify(repair=repair)
        assert (report.mismatched, report.miscounted, report.ok) == ((str(KEYS[0]),), True, False)
    assert store.verify().ok
    assert store.stats().nvme.bytes == 5 * FILE_BYTES
    assert {row.key for row in store.ls()} == set(KEYS)
