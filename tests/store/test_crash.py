"""A store survives its processes' death: every entry is whole or a miss, and nothing else is left."""

import os
import shutil
import signal
from collections.abc import Iterator
from multiprocessing.context import ForkServerContext
from pathlib import Path

import pytest
from chunks import documents_of
from crashes import KEYS, OPERATIONS, PAIRS, check, die_at, die_in_commit, file_of, kill_writers, open_store, prepare, processes

from cacheblend.base.errors import StoreDirectoryError

pytestmark = pytest.mark.contract

KILLS = 10


@pytest.fixture(scope="module")
def context() -> ForkServerContext:
    return processes()


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("prepared") / "store"
    prepare(directory)
    return directory


def deaths(context: ForkServerContext, prepared: Path, folder: Path, operation: str) -> Iterator[Path]:
    """A copy of the store for each step of an operation at which a process died."""
    for step in range(200):
        directory = shutil.copytree(prepared, folder / str(step))
        process = context.Process(target=die_at, args=(directory, operation, step))
        process.start()
        process.join()
        if process.exitcode == 0:
            assert step >= 3, "the operation makes no calls to die at"
            return
        assert process.exitcode == -signal.SIGKILL
        yield directory
    raise AssertionError("the operation never ends")


@pytest.mark.parametrize("operation", OPERATIONS)
def test_killed_at_every_step(context: ForkServerContext, prepared: Path, tmp_path: Path, operation: str) -> None:
    """Wherever a change is cut off, the next opening finds it made or not made, and nothing in between."""
    for directory in deaths(context, prepared, tmp_path, operation):
        check(directory, faults=operation == "set a damaged entry aside")
        with open_store(directory) as store:
            found = {chunk for chunk, key in enumerate(KEYS) if key in store}
            versions = {document.id: document.version for document in documents_of(store)}
        match operation:
            case "put, which evicts" | "put in the background":
                assert found in ({0, 1, 2, 3}, {1, 2, 3, 4})
            case "put two in one commit":
                assert found in ({0, 1, 2, 3}, {2, 3, 4, 5})
            case "delete":
                assert found in ({0, 1, 2, 3}, {0, 2, 3})
            case "new version of a document":
                assert (found, versions["a"]) in (({0, 1, 2, 3}, "1"), ({1, 2, 3}, "2"))
            case "delete a document":
                assert (found, "a" in versions) in (({0, 1, 2, 3}, True), ({1, 2, 3}, False))
            case "set a damaged entry aside":
                assert found in ({0, 1, 2, 3}, {0, 1, 2})
            case _:
                assert found == {0, 1, 2, 3}


def test_killed_while_a_catalog_is_made_again(context: ForkServerContext, prepared: Path, tmp_path: Path) -> None:
    """A store whose catalog is gone has every entry again, also where the first process to make it anew died."""
    without = shutil.copytree(prepared, tmp_path / "without")
    for path in without.glob("catalogue.sqlite*"):
        path.unlink()
    for directory in deaths(context, without, tmp_path, "open"):
        check(directory)
        with open_store(directory) as store:
            assert [key in store for key in KEYS[:5]] == [True] * 4 + [False]


def test_killed_while_a_store_is_made(context: ForkServerContext, tmp_path: Path) -> None:
    """A folder that was left half made becomes a store at the next opening."""
    nothing = tmp_path / "nothing"
    nothing.mkdir()
    for directory in deaths(context, nothing, tmp_path, "open"):
        check(directory)


@pytest.mark.parametrize("faults", [False, True])
def test_killed_at_random(context: ForkServerContext, tmp_path: Path, faults: bool) -> None:
    """Two processes on one store, killed again and again, never see or leave wrong bytes, on disks that lie too."""
    for seed in range(KILLS // 2):
        kill_writers(context, tmp_path / "store", seed, writers=2, faults=faults)
        check(tmp_path / "store", faults=faults)


def test_another_process_finishes_what_a_killed_one_left(
    context: ForkServerContext, prepared: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A process that has the store open removes, with its next change, the file that a killed one left without a row."""
    found = 0
    for step in range(200):
        directory = shutil.copytree(prepared, tmp_path / str(step))
        with open_store(directory) as store:
            process = context.Process(target=die_at, args=(directory, "put, which evicts", step))
            process.start()
            process.join()
            if process.exitcode == 0:
                break
            orphan = file_of(directory, 4).exists() and KEYS[4] not in store
            found += orphan
            store.put(*PAIRS[5])
            assert store.verify().ok
    assert found
    assert "a process died" in caplog.text


@pytest.mark.parametrize("operation", ["put, which evicts", "delete", "new version of a document", "delete a document"])
def test_killed_in_a_commit_that_others_do_not_see(
    context: ForkServerContext, prepared: Path, tmp_path: Path, operation: str
) -> None:
    """A commit that is in the log and was never announced is undone by who finishes the change, and stays undone."""
    directory, left = shutil.copytree(prepared, tmp_path / "store"), tmp_path / "left"
    with open_store(directory) as store:
        process = context.Process(target=die_in_commit, args=(directory, operation))
        process.start()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        shutil.copytree(directory, tmp_path / "both killed")
        store.delete(KEYS[7])  # there is none: no change but what the dead process left to finish
        shutil.copytree(directory, left)  # as if this process were killed now
    check(tmp_path / "both killed")
    check(left)
    with open_store(left) as store:
        assert [key in store for key in KEYS[:5]] == [True] * 4 + [False]
    check(directory)


def test_repair_of_a_row_whose_file_was_damaged_meanwhile(prepared: Path, tmp_path: Path) -> None:
    """What is to be entered into the catalog and turns out to be damaged leaves no row behind."""
    directory = shutil.copytree(prepared, tmp_path / "store")
    with open_store(directory) as store:
        path = file_of(directory, 3)
        path.write_bytes(b"torn")
        store._nvme.adopt(path)
        assert KEYS[3] not in store
        assert store.stats().damaged == 1
    check(directory)


def test_catalog_older_than_the_files(prepared: Path, tmp_path: Path) -> None:
    """With a catalog from a backup, what it lacks and what is gone are misses, and `repair` brings both in line."""
    directory = shutil.copytree(prepared, tmp_path / "store")
    with open_store(directory) as store:
        store.put(*PAIRS[4])
        store.put(*PAIRS[5])
    for path in directory.glob("catalogue.sqlite*"):
        path.unlink()
    for path in prepared.glob("catalogue.sqlite*"):
        shutil.copy(path, directory)
    with open_store(directory) as store:
        assert [store.get(key) is not None for key in KEYS[:6]] == [False, False, True, True, False, False]
        report = store.verify(repair=True)
        assert set(report.orphans) == {str(KEYS[4]), str(KEYS[5])}
        assert [store.get(key) is not None for key in KEYS[:6]] == [False, False, True, True, True, True]
    check(directory)


def test_catalog_taken_away_from_an_open_store(prepared: Path, tmp_path: Path) -> None:
    """A store whose catalog is replaced under it refuses to change anything, instead of losing what it writes."""
    directory = shutil.copytree(prepared, tmp_path / "store")
    with open_store(directory) as store:
        for path in directory.glob("catalogue.sqlite*"):
            os.rename(path, tmp_path / path.name)
        with pytest.raises(StoreDirectoryError, match="open it again"):
            store.put(*PAIRS[4])
        check(directory)
        with pytest.raises(StoreDirectoryError, match="open it again"):
            store.delete(KEYS[1])
    check(directory)
