"""Processes that change a store until they are killed, and what must hold of what they leave.

They are forked from a server that has imported the store, and torch with it, once.
"""

import fcntl
import itertools
import multiprocessing
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.context import ForkServerContext
from pathlib import Path

from chunks import FILE_BYTES, RAM_BYTES, documents_of, flip_last_byte, make_chunk, put_all, same

from cacheblend.base.errors import InputError, StoreError
from cacheblend.base.sqlite import Database
from cacheblend.store import KVStore, StoreConfig, VerifyReport

PAIRS = [make_chunk(seed) for seed in range(8)]
KEYS = [key for key, _ in PAIRS]
ENTRIES = 4  # that the budget has room for
WAL_INDEX_HEADER_BYTES = 96  # two copies of the header, which names the last frame that counts
WRONG_BYTES = 3  # exit code of a process that was given other bytes than were put


def processes() -> ForkServerContext:
    """Starts processes without importing everything in each: the front door `cacheblend.store` would import nothing."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["cacheblend.store.kv_store"])
    return context


def open_store(directory: Path) -> KVStore:
    """A store of `ENTRIES` entries on NVMe and two in RAM."""
    config = StoreConfig(directory=directory, nvme_budget_bytes=ENTRIES * FILE_BYTES, ram_budget_bytes=2 * RAM_BYTES)
    return KVStore(config)


def prepare(directory: Path) -> None:
    """Chunks 0 to 3 are stored, the oldest first; documents a and b have two each, of which they share one."""
    with put_all(open_store(directory), PAIRS[:ENTRIES]) as store:
        store.documents.put([("a", "1", KEYS[0:2]), ("b", "1", KEYS[1:3])])


def file_of(directory: Path, chunk: int) -> Path:
    """Where a chunk's file is."""
    return directory / "entries" / str(KEYS[chunk])[:2] / str(KEYS[chunk])


def damage_and_get(store: KVStore) -> None:
    flip_last_byte(file_of(Path(store.config.directory), 3))
    store.get(KEYS[3])


def put_in_background(store: KVStore) -> None:
    store.put(*PAIRS[4], flush=False)
    store.flush()


def put_together(store: KVStore) -> None:
    with store.exclusive():  # so that both wait when the background comes to them
        put_all(store, PAIRS[4:6], flush=False)
    store.flush()


OPERATIONS: dict[str, Callable[[KVStore], object]] = {
    "put, which evicts": lambda store: store.put(*PAIRS[4]),
    "put in the background": put_in_background,
    "put two in one commit": put_together,
    "delete": lambda store: store.delete(KEYS[1]),
    "new version of a document": lambda store: store.documents.put([("a", "2", [KEYS[1], KEYS[4]])]),
    "delete a document": lambda store: store.documents.delete("a"),
    "set a damaged entry aside": damage_and_get,
    "repair": lambda store: store.verify(repair=True),
    "open": KVStore.stats,
}


def die_at(directory: Path, operation: str, step: int) -> None:
    """Open the store and change it, and be killed at the step-th call to the system; a write is torn in the middle."""
    steps = itertools.count()

    def dies() -> bool:
        return next(steps) == step

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def deadly(call: Callable[..., object]) -> Callable[..., object]:
        def instead(*arguments: object, **options: object) -> object:
            if dies():
                if call is real_write:
                    write_torn(*arguments)  # type: ignore[arg-type]  # passed on
                die()
            return call(*arguments, **options)

        return instead

    @contextmanager
    def transaction(database: Database) -> Iterator[object]:
        with real_transaction(database) as connection:
            yield connection
            if dies():
                die()

    def write_torn(fd: int, data: memoryview) -> None:
        through_the_cache(fd)
        real_write(fd, data[: len(data) // 2])

    real_write, real_transaction = os.write, Database.transaction
    Database.transaction = transaction  # type: ignore[assignment,method-assign]  # the same, deadly
    for name in ("open", "write", "pwrite", "fsync", "replace", "unlink", "ftruncate", "mkdir"):
        setattr(os, name, deadly(getattr(os, name)))
    store = open_store(directory)
    OPERATIONS[operation](store)
    os._exit(0)


def through_the_cache(fd: int) -> None:
    """Have a descriptor take writes that are no whole blocks."""
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_DIRECT)


def die_in_commit(directory: Path, operation: str) -> None:
    """Change the store, and be killed when the commit is in the write-ahead log whole, and not announced to others yet.

    SQLite announces a commit in the header of the `-shm` file, after the sync of the log: most kills in a commit fall between.
    """
    transaction = Database.transaction

    @contextmanager
    def cut_off(database: Database) -> Iterator[object]:
        fd = os.open(directory / "catalogue.sqlite-shm", os.O_RDWR)
        with transaction(database) as connection:
            yield connection
            announced = os.pread(fd, WAL_INDEX_HEADER_BYTES, 0)
        os.pwrite(fd, announced, 0)
        os.kill(os.getpid(), signal.SIGKILL)

    with open_store(directory) as store:
        Database.transaction = cut_off  # type: ignore[assignment,method-assign]  # the same, cut off
        OPERATIONS[operation](store)


def work(directory: Path, seed: int, faults: bool) -> None:
    """Change a store at random until killed; with `faults`, some writes are torn or have a bit flipped, and say nothing."""
    choose = random.Random(seed)
    if faults:
        inject_faults(choose)
    while True:
        try:
            with open_store(directory) as store:
                for _ in range(choose.randrange(5, 40)):
                    act(store, choose)
        except (StoreError, InputError) as error:  # pins of the other process, a document it deleted; never a wrong answer
            print(f"{type(error).__name__}: {error}", file=sys.stderr)


def act(store: KVStore, choose: random.Random) -> None:
    """One change or look-up, picked at random."""
    (key, kv), document = choose.choice(PAIRS), choose.choice("ab")
    match choose.randrange(9):
        case 0 | 1 | 2:
            store.put(key, kv, flush=choose.random() < 0.7)
        case 3 | 4:
            got = store.get(key)
            if got is not None and not same(got, kv):
                os._exit(WRONG_BYTES)
        case 5:
            store.delete(key)
        case 6:
            store.documents.put([(document, str(choose.randrange(3)), choose.sample(KEYS, 2))])
        case 7:
            if store.documents.get(document) is not None:
                store.documents.delete(document)
        case 8:
            store.verify(repair=choose.random() < 0.5)


def inject_faults(choose: random.Random) -> None:
    """Have one write in ten lose its tail or flip a bit, as a disk does that lies."""
    write = os.write

    def faulty(fd: int, data: memoryview) -> int:
        fault = choose.randrange(20)
        if fault < 2:
            through_the_cache(fd)
        if fault == 0:
            write(fd, data[: len(data) // 2])
        elif fault == 1:
            altered = bytearray(data)
            altered[choose.randrange(len(altered))] ^= 1 << choose.randrange(8)
            write(fd, altered)
        else:
            return write(fd, data)
        return len(data)

    os.write = faulty  # type: ignore[assignment]  # narrower: the store writes memoryviews


def kill_writers(context: ForkServerContext, directory: Path, seed: int, *, writers: int, faults: bool) -> None:
    """Let processes change a store together for a moment, and kill them."""
    choose = random.Random(seed)
    started = [context.Process(target=work, args=(directory, choose.random(), faults), daemon=True) for _ in range(writers)]
    for process in started:
        process.start()
    marker = directory / "store.json"
    deadline = time.monotonic() + 30
    while not marker.exists() and time.monotonic() < deadline:
        time.sleep(0.002)
    time.sleep(choose.uniform(0.0, 0.25))
    for process in started:
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL, f"a writer ended with {process.exitcode}; {WRONG_BYTES} is for wrong bytes"


def check(directory: Path, *, faults: bool = False) -> VerifyReport:
    """Open what was left: whole entries or misses, right accounting, budgets kept, no orphan; gives the first report."""
    with open_store(directory) as store:
        report = store.verify(repair=True)
        left = (report.orphans, report.leftovers, report.missing, report.mismatched, report.miscounted)
        assert not any(left), report
        assert faults or not report.damaged, report
        for key, kv in PAIRS:
            got = store.get(key)
            assert (got is not None) == (key in store)
            assert got is None or same(got, kv)
        assert store.verify().ok
        stats = store.stats()
        files = [path for path in (directory / "entries").rglob("*") if path.is_file()]
        assert stats.nvme.bytes == sum(path.stat().st_size for path in files) <= ENTRIES * FILE_BYTES
        assert stats.nvme.entries == len(files)
        for document in documents_of(store):
            assert document.stored_chunks <= document.chunks
        return report
