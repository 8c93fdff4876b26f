"""Kills a server that ingests and answers, again and again, starts it on the same store, and checks what it was told.

    python scripts/crash_server.py                                     # 10 kills
    python scripts/crash_server.py --kills 200 --small-disk /mnt/small # on a disk of some 50 MiB that fills now and then
    python scripts/crash_server.py --kills 100 --replicas 3            # on one PostgreSQL and one Redis
    python scripts/crash_server.py --seconds 1200 --replicas 2 --survivor    # a soak: one of them is never killed

Each round, clients upload, replace and delete documents and ask questions over HTTP, until SIGKILL ends the server at a
random moment. Started again on the same folder, it must know every document whose upload or replacement was answered with
2xx: its text is whole, the KV of all its chunks is stored, and the next question about it finds it by retrieval and is served
from the store (`usage.prompt_tokens_details.cached_tokens` above 0, no chunk computed). What was deleted is gone. Of a change
that was under way at the kill the text is the one before or the one after, and nothing between; KV that was not yet stored is
computed when it is asked for. After the last round no entry may hold a text that was replaced or deleted since. The oldest
documents are deleted before each round. A fault ends the run with an error and keeps the folder.

With `--small-disk`, a folder on a file system of its own such as a small tmpfs, every second round is under way on a disk
that is filled to the last byte half of the time, and half of those rounds start on one. An upload may then be refused with
507, and leaves the text before or the new one; a deletion may not.

With `--replicas`, each round starts so many servers, each on a folder of its own, on one PostgreSQL and one Redis of the
script's own. Documents are uploaded at all of them, each writer's at one, and retired at any; each server is killed at a moment
of its own, and in every fourth round, from the second on, Redis too. All must then know the same documents, a document's own
server must have its KV, and the others must find it when they are asked. No folder may hold a text that was replaced or deleted
at another server.

With `--survivor` the first replica lives through all rounds, and what it holds is taken after each, with nobody asking.
`survivor` has of its open files, threads, objects of requests and MiB of memory (VmRSS) the most in the first third of the
rounds, and the median of the last third, which may be `SPARE` more: a median, since one quiet round would hide what has come
to stay, and one busy round is no drift. Memory may be 40 MiB more, which are of three kinds. 9 are the RAM tier's, a budget of
8 and an eighth: questions' own texts fill it, and it may be empty at first. 16 are the vectors of the 84 documents that a round
ends with at most (60, and 8 of each of 3 writers), each of 12 chunks of 16 KiB, should the first third have had few. The
others are what quiet rounds of a server that is warm differ by: 494 to 505 MiB in a soak of five minutes.
So a server that keeps the vectors of more than 200 documents that are gone is a fault.

`acknowledged`: changes that were answered before a kill. `asked`: documents that were asked about after one. `under_way`:
changes that a kill cut off, of which `made` were found made. `no_room`: uploads that got 507. After the last round, counted and
not taken from what the rounds checked: `lost`, documents that were acknowledged and that a server does not list; `damaged`,
what verification finds wrong with the KV and the index of each server; `remote_objects`, what the remote tier holds, and
`remote_damaged`, those of them that are not whole entries of this deployment when they are read. The last stdout line is one
JSON object.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any, Self

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "service"))

from acknowledged import Acknowledged, Writer, ask_until_gone, check_replicas, lost_documents, retire
from engines import CHUNK_TOKENS, make_model
from postgres import PostgresServer
from remote_servers import SECRET, RedisServer, remote_of
from server_process import ServedConfig, ServerProcess, free_port, resident_bytes
from transformers import PreTrainedTokenizerFast

from cacheblend.retriever import RetrieverConfig
from cacheblend.retriever.index_folder import IndexedDocuments
from cacheblend.store import KVStore, StoreConfig
from cacheblend.store.remote.transfer import list_entries

WRITERS, ASKERS = 3, 3
DOCUMENTS = 60  # that a round begins with at most: the others are deleted before it
NOTICED_S = 20.0
# What a round may have more than another: a pool or a connection its files and threads, documents their memory.
SPARE = {"open_files": 4, "threads": 4, "objects_of_requests": 0, "resident_mib": 40}
RAM_BYTES = 8 * 2**20  # soon full: a tier that fills through a whole run is no drift, and hides one
QUIET_LOOKS = 3
FULL_S = 0.4  # how long a disk stays full, and then has room again
FIRST_S = 20.0  # until a change is answered, at most
MARK = re.compile(r"This is ([\w-]+), (0\.\d+)")  # what a writer's text begins with, and no other text


class Ballast:
    """A file that takes all the room that a disk has left."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "ballast"

    def fill(self) -> None:
        """Take what room there is; what is freed later is free."""
        with contextlib.suppress(OSError), self._path.open("ab", buffering=0) as file:
            for size in (2**20, 2**12, 1):
                with contextlib.suppress(OSError):
                    while file.write(os.urandom(size)) == size:
                        pass

    def empty(self) -> None:
        """Give it all back."""
        self._path.unlink(missing_ok=True)


class Shared:
    """The servers that replicas share; a context manager. Redis loses all that it holds when it is killed."""

    def __init__(self, folder: Path) -> None:
        self._opened = ExitStack()
        self._redis = RedisServer(folder)
        self._opened.callback(self._redis.kill)
        self.options = {
            "index": self._opened.enter_context(PostgresServer()).new_database(),
            "remote": self._redis.url,
            "remote_secret": SECRET,
        }

    def lose_redis(self) -> None:
        """Kill it, and start it again, empty."""
        self._redis.kill()
        self._redis.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()


def kill_round(
    configs: Sequence[ServedConfig],
    folder: Path,
    known: Acknowledged,
    seed: int,
    ballast: Ballast | None,
    shared: Shared | None,
    survivor: ServerProcess | None = None,
) -> None:
    """Start all, check what was told before, load, kill one after the other, and then end what the survivor is asked."""
    choose, ended = random.Random(seed), threading.Event()
    with started(configs, folder) as servers:
        addresses = [server.address for server in (*([survivor] if survivor else []), *servers)]
        check_replicas(addresses, known)
        retire(choose.choice(addresses), known, DOCUMENTS)
        writers = [Writer(addresses[number % len(addresses)], known, f"{seed}-{number}", ended) for number in range(WRITERS)]
        threads = [threading.Thread(target=writer.run) for writer in writers]
        threads += [
            threading.Thread(target=ask_until_gone, args=(addresses[at % len(addresses)], seed + at, ended))
            for at in range(ASKERS)
        ]
        for thread in threads:
            thread.start()
        wait_for_answer(known)
        began, last = time.monotonic(), 0.0
        for server in choose.sample(servers, len(servers)):
            last = max(last, choose.uniform(0.5, 3.0))
            while (left_s := began + last - time.monotonic()) > 0:
                time.sleep(min(FULL_S, left_s))
                if ballast is not None:
                    choose.choice([ballast.fill, ballast.empty])()
            server.kill()
            if shared is not None and seed % 4 == 1 and (survivor is not None or server is not servers[-1]):
                shared.lose_redis()
        ended.set()
        for thread in threads:
            thread.join()
    for writer in writers:
        if writer.fault:
            raise AssertionError(writer.fault)


def wait_for_answer(known: Acknowledged) -> None:
    """Wait until a change was answered, for a while: on a slow machine a kill would come before there is anything to lose."""
    before, deadline = known.answered + known.no_room, time.monotonic() + FIRST_S
    while known.answered + known.no_room == before and time.monotonic() < deadline:
        time.sleep(FULL_S)


def held_by(survivor: ServerProcess) -> dict[str, int]:
    """Give what it holds when nothing has been asked for a while: the least of several looks."""
    looks = []
    for _ in range(QUIET_LOOKS):
        time.sleep(1.0)
        looks.append(survivor.held() | {"resident_mib": resident_bytes(survivor.pid) // 2**20})
    return {name: min(look[name] for look in looks) for name in SPARE}


def drift_of(rounds: Sequence[dict[str, int]]) -> dict[str, dict[str, float]]:
    """Give the most of the first third of the rounds, and the median of the last."""
    third = max(1, len(rounds) // 3)
    return {
        name: {
            "first_most": max(one[name] for one in rounds[:third]),
            "last_median": median(one[name] for one in rounds[-third:]),
        }
        for name in SPARE
    }


def faults_of(figures: dict[str, Any]) -> list[str]:
    """Give the figures that are not as they must be, by name."""
    faults = [name for name in ("lost", "damaged", "remote_damaged") if figures[name]]
    if figures["replicas"] > 1 and not figures["remote_objects"]:
        faults.append("remote_objects")  # none was looked at
    for name, held in (figures["survivor"] or {}).items():
        if held["last_median"] > held["first_most"] + SPARE[name]:
            faults.append(name)
    return faults


@contextlib.contextmanager
def started(configs: Sequence[ServedConfig], folder: Path) -> Iterator[list[ServerProcess]]:
    """A server of each config; they start side by side."""
    servers = [ServerProcess(config, folder / f"server-{number}.log") for number, config in enumerate(configs)]
    with ExitStack() as opened:
        for server in servers:
            opened.enter_context(server)
        yield servers


def wait_until_nothing_stays(configs: Sequence[ServedConfig], known: Acknowledged) -> None:
    """Replicas drop what others have deleted when they notice; give them as long as `NOTICED_S`."""
    deadline = time.monotonic() + NOTICED_S
    for config in configs:
        while True:
            try:
                with KVStore(StoreConfig(directory=Path(config.store_dir) / "kv")) as store:
                    check_nothing_stays(config, store, known)
                break
            except AssertionError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)


def check_nothing_stays(config: ServedConfig, store: KVStore, known: Acknowledged) -> None:
    """No entry holds a text that was replaced or deleted by a change that was answered."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(config.model)
    for entry in store.ls():
        kv = store.get(entry.key)
        assert kv is not None, entry
        for id_, number in MARK.findall(tokenizer.decode(kv.token_ids)):
            if id_ not in known.unsettled:
                assert f"This is {id_}, {number}" in (known.texts.get(id_) or ""), (
                    f"{id_}: a text that is gone is in {entry.key}"
                )


def count_damaged(config: ServedConfig, known: Acknowledged) -> int:
    """Verify KV and index of a server that is stopped; gives how much is wrong."""
    folder = Path(config.store_dir)
    with (
        KVStore(StoreConfig(directory=folder / "kv")) as store,
        IndexedDocuments(folder / "index", config.index, RetrieverConfig().index_schema) as index,
    ):
        kv, rows = store.verify(), index.verify()
        if kv.ok and rows.ok:
            check_nothing_stays(config, store, known)
        else:
            print(f"{folder}: {kv} {rows}", file=sys.stderr)
    entries = len(kv.damaged + kv.missing + kv.mismatched + kv.orphans)
    return entries + kv.leftovers + kv.miscounted + len(rows.damaged) + rows.strays + rows.broken


def count_remote(config: ServedConfig) -> tuple[int, int]:
    """Read every object of the remote tier; gives how many there are, and how many are not whole entries of this deployment."""
    with (
        tempfile.TemporaryDirectory() as scratch,
        KVStore(StoreConfig(directory=scratch, remote=config.remote, remote_secret=config.remote_secret)) as store,
    ):
        remote = remote_of(store)
        entries = [entry for _, _, entry in list_entries(remote)]
        whole = sum(1 for _ in remote.load_each([entry for entry in entries if entry is not None]))
    return len(entries), len(entries) - whole


def main() -> None:
    """Run the rounds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--small-disk", type=Path, help="An empty folder on a small file system, which is filled now and then.")
    parser.add_argument("--seconds", type=float, default=0.0, help="Go on with rounds for so long, if --kills are done sooner.")
    parser.add_argument("--survivor", action="store_true", help="The first replica is not killed, and what it holds is taken.")
    parser.add_argument("--replicas", type=int, default=1, help="Servers on one PostgreSQL and one Redis.")
    options = parser.parse_args()
    if options.survivor and options.replicas < 2:
        parser.error("--survivor takes --replicas 2 or more")
    if options.small_disk and any(options.small_disk.iterdir()):
        parser.error(f"{options.small_disk} is not empty: what an earlier run left would count as this one's")
    folder = Path(tempfile.mkdtemp())
    make_model(folder / "model")
    known, rounds = Acknowledged(), 0
    root = options.small_disk or folder
    ballast = options.small_disk and Ballast(options.small_disk)
    try:
        with Shared(folder) if options.replicas > 1 else contextlib.nullcontext() as shared, ExitStack() as opened:
            configs = [
                ServedConfig(
                    model=str(folder / "model"),
                    store_dir=str(root / f"store-{number}"),
                    port=free_port(),
                    chunk_tokens=CHUNK_TOKENS,
                    ram_budget_bytes=RAM_BYTES,
                    **({} if shared is None else shared.options),
                )
                for number in range(options.replicas)
            ]
            survivor, held = None, list[dict[str, int]]()
            if options.survivor:
                survivor = opened.enter_context(ServerProcess(configs[0], folder / "survivor.log"))
            killed = configs[1:] if survivor else configs
            began = time.monotonic()
            while rounds < options.kills or time.monotonic() - began < options.seconds:
                if ballast is not None and rounds % 4 != 3:
                    ballast.empty()
                kill_round(killed, folder, known, options.seed + rounds, ballast if rounds % 2 else None, shared, survivor)
                rounds += 1
                if survivor is not None:
                    held.append(held_by(survivor))
                print(f"{rounds * len(killed)} killed, {known.answered} changes answered {held[-1:]}", file=sys.stderr)
            opened.close()
            if ballast is not None:
                ballast.empty()
            with started(configs, folder) as servers:
                addresses = [server.address for server in servers]
                lost = lost_documents(addresses, known)
                if not lost:
                    check_replicas(addresses, known)
                    wait_until_nothing_stays(configs, known)
            remote_objects, remote_damaged = count_remote(configs[0]) if shared is not None else (0, 0)
            figures = {
                "kills": rounds * len(killed),
                "replicas": options.replicas,
                "survivor": drift_of(held) if held else None,
                "acknowledged": known.answered,
                "asked": known.asked,
                "under_way": known.under_way,
                "made": known.made,
                "no_room": known.no_room,
                "lost": len(lost),
                "damaged": sum(count_damaged(config, known) for config in configs),
                "remote_objects": remote_objects,
                "remote_damaged": remote_damaged,
            }
        print(json.dumps(figures))
        assert not (faults := faults_of(figures)), (faults, held)
    except BaseException:
        print(f"the stores are in {root}, the servers' logs in {folder}", file=sys.stderr)
        raise
    for config in configs:
        shutil.rmtree(config.store_dir)
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
