"""Stores are merged into one: every entry whole, once, and every document as if it had been ingested there."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sqlite3
import tracemalloc
from pathlib import Path

import pytest
from chunks import FILE_BYTES, MODEL, file_of, flip_last_byte, make_chunk, same
from crashes import processes

from cacheblend.base.errors import InputError
from cacheblend.store import KVStore, StoreConfig, StoreDirectoryError, StoreFullError
from cacheblend.store.catalog import StoredDocument
from cacheblend.store.merge import merge
from cacheblend.store.nvme_tier import NvmeTier

PAIRS = [make_chunk(seed) for seed in range(6)]
KEYS = [key for key, _ in PAIRS]


def open_store(directory: Path) -> KVStore:
    return KVStore(StoreConfig(directory=directory, ram_budget_bytes=1, nvme_budget_bytes=100 * FILE_BYTES))


def make_store(directory: Path, chunks: range, **documents: tuple[str, list[int]]) -> Path:
    """A store of some chunks, and documents by id: version and chunks."""
    with open_store(directory) as store:
        for chunk in chunks:
            store.put(*PAIRS[chunk])
        store.documents.put((id_, version, [KEYS[chunk] for chunk in own]) for id_, (version, own) in documents.items())
    return directory


def documents_of(store: KVStore) -> dict[str, StoredDocument]:
    return {document.id: document for document in store.documents.ls()}


@pytest.fixture
def shards(tmp_path: Path) -> list[Path]:
    """Chunks 0 to 2 with document a, and chunks 2 to 4 with document b, which is pinned; they share chunk 2."""
    one = make_store(tmp_path / "one", range(3), a=("1", [0, 1, 2]))
    two = make_store(tmp_path / "two", range(2, 5), b=("1", [2, 3, 4]))
    with open_store(two) as store:
        store.documents.pin("b")
    return [one, two]


def test_entries_and_documents(shards: list[Path], tmp_path: Path) -> None:
    """The target has every entry bit for bit, shared ones once, and the documents with their pins; the sources keep theirs."""
    steps: list[tuple[int, int]] = []
    report = merge(shards, tmp_path / "all", on_progress=lambda *step: steps.append(step))
    assert (report.entries, report.already_stored, report.damaged, report.documents, report.dropped) == (5, 1, 0, 2, 0)
    assert report.as_dict()["bytes"] == 5 * FILE_BYTES
    assert steps == [(done, 6) for done in range(1, 7)]
    with open_store(tmp_path / "all") as store:
        assert all(same(store.get(key), kv) for key, kv in PAIRS[:5])
        assert store.verify().ok
        documents = documents_of(store)
        assert {id_: (one.version, one.pinned, one.stored_chunks, one.shared_chunks) for id_, one in documents.items()} == {
            "a": ("1", False, 3, 1),
            "b": ("1", True, 3, 1),
        }
    for shard in shards:
        with open_store(shard) as store:
            assert store.stats().nvme.entries == 3
            assert store.verify().ok


def test_many_entries_in_little_memory(tmp_path: Path) -> None:
    """The entries of a catalog come in order of use, as they were at the first step, and never all at once into memory."""
    with open_store(tmp_path / "one") as store:
        columns = "(digest, model, codec, namespace, tokens, layers, bytes, created_ns, used_ns)"
        with store._nvme.catalog.database.transaction() as transaction:
            rows = ((f"{number:064x}", MODEL, "raw", "", 1, 1, 1, 0, 20_000 - number) for number in range(20_000))
            transaction.executemany(f"INSERT INTO entries {columns} VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", rows)
        entries = store._nvme.catalog.entries()
        assert next(entries).used_ns == 1
        store.put(*PAIRS[0])
        tracemalloc.start()
        expected = 2
        for entry in entries:
            assert entry.used_ns == expected
            expected += 1
        _, peak_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert expected == 20_001
        assert peak_bytes < 2**20


def test_in_the_order_of_use(shards: list[Path], tmp_path: Path) -> None:
    """What was used longest ago in a source is the first to go from the target."""
    with open_store(shards[0]) as store:
        store.get(KEYS[0])
    merge(shards[:1], tmp_path / "all")
    with KVStore(StoreConfig(directory=tmp_path / "all", nvme_budget_bytes=2 * FILE_BYTES)) as store:
        assert [row.key for row in store.ls()] == [KEYS[2], KEYS[0]]


def test_more_documents_than_a_page(tmp_path: Path) -> None:
    """Every document is noted, with its pin, however many there are."""
    ids = [f"{number:03}" for number in range(150)]
    one = make_store(tmp_path / "one", range(1), **{id_: ("1", [0]) for id_ in ids})
    with open_store(one) as store:
        store.documents.pin(ids[149])
    assert merge([one], tmp_path / "all").documents == 150
    with open_store(tmp_path / "all") as store:
        documents = documents_of(store)
        assert list(documents) == ids
        assert [id_ for id_, document in documents.items() if document.pinned] == [ids[149]]


def test_again(shards: list[Path], tmp_path: Path) -> None:
    """A merge that is repeated copies nothing."""
    merge(shards, tmp_path / "all")
    report = merge(shards, tmp_path / "all")
    assert (report.entries, report.bytes, report.already_stored) == (0, 0, 6)


def die_while_merging(shards: list[Path], target: Path, writes: int) -> None:
    """Merge, and be killed after some entries."""
    write = NvmeTier.write
    left = iter(range(writes))

    def deadly(tier: NvmeTier, entry: object) -> object:
        if next(left, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)
        return write(tier, entry)  # type: ignore[arg-type]  # passed on

    NvmeTier.write = deadly  # type: ignore[assignment,method-assign]  # the same, deadly
    merge(shards, target)


def test_killed_and_repeated(shards: list[Path], tmp_path: Path) -> None:
    """A merge that was killed goes on with the entries that are missing."""
    process = processes().Process(target=die_while_merging, args=(shards, tmp_path / "all", 2))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    report = merge(shards, tmp_path / "all")
    assert (report.entries, report.already_stored) == (3, 3)
    with open_store(tmp_path / "all") as store:
        assert all(same(store.get(key), kv) for key, kv in PAIRS[:5])
        assert store.verify().ok


def test_into_a_store_that_is_there(shards: list[Path], tmp_path: Path) -> None:
    """What the target held stays; a document in another version is the last store's, and what it alone had goes."""
    target = make_store(tmp_path / "all", range(5, 6), a=("0", [5]), c=("1", [0]))
    report = merge(shards, target)
    assert (report.entries, report.dropped) == (5, 1)
    with open_store(target) as store:
        assert {id_: one.version for id_, one in documents_of(store).items()} == {"a": "1", "b": "1", "c": "1"}
        assert KEYS[5] not in store
        assert documents_of(store)["c"].stored_chunks == 1
        assert store.verify().ok


def test_a_damaged_entry_is_not_copied(shards: list[Path], tmp_path: Path) -> None:
    """An entry that fails its checksum is left out and counted; where another store has it whole, that one is copied."""
    with open_store(shards[0]) as store:
        for key in (KEYS[0], KEYS[2]):
            flip_last_byte(file_of(store, key))
    report = merge(shards, tmp_path / "all")
    assert (report.entries, report.already_stored, report.damaged) == (4, 0, 2)
    with open_store(tmp_path / "all") as store:
        assert store.get(KEYS[0]) is None
        assert same(store.get(KEYS[2]), PAIRS[2][1])


def test_of_another_format(shards: list[Path], tmp_path: Path) -> None:
    """Stores of another folder format or catalog schema are refused by name before anything is copied."""
    other, newer = tmp_path / "other", tmp_path / "newer"
    shutil.copytree(shards[1], other)
    (other / "store.json").write_text(json.dumps({"kind": "cacheblend-store", "format": 99}))
    shutil.copytree(shards[1], newer)
    database = sqlite3.connect(newer / "catalogue.sqlite")
    database.execute("PRAGMA user_version = 99")
    database.close()
    for refused, message in ((other, "other has format 99"), (newer, "schema 99")):
        with pytest.raises(StoreDirectoryError, match=message):
            merge([shards[0], refused], tmp_path / "all")
        with pytest.raises(StoreDirectoryError, match=message):
            merge([shards[0]], refused)
    assert not (tmp_path / "all").exists()


def test_no_stores(shards: list[Path], tmp_path: Path) -> None:
    """A folder without a store, no folder at all, and the target itself are refused, and nothing is made."""
    with pytest.raises(StoreDirectoryError, match="nowhere holds no store"):
        merge([shards[0], tmp_path / "nowhere"], tmp_path / "all")
    with pytest.raises(InputError, match="at least one"):
        merge([], tmp_path / "all")
    with pytest.raises(InputError, match="both merged and merged into"):
        merge(shards, tmp_path / "two" / ".." / "one")
    assert not (tmp_path / "nowhere").exists()
    assert not (tmp_path / "all").exists()


def test_full_disk(shards: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk ends the merge with an error; with room again it goes on."""

    def no_room(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("cacheblend.store.entry_file._write", no_room)
        with pytest.raises(StoreFullError):
            merge(shards, tmp_path / "all")
    assert merge(shards, tmp_path / "all").entries == 5
