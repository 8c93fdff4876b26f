"""Kills a server that ingests and answers, again and again, starts it on the same store, and checks what it was told.

    python scripts/crash_server.py                                     # 10 kills
    python scripts/crash_server.py --kills 200 --small-disk /mnt/small # on a disk of some 50 MiB that fills now and then

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

`acknowledged`: changes that were answered before a kill. `asked`: documents that were asked about after one. `under_way`:
changes that a kill cut off, of which `made` were found made. `no_room`: uploads that got 507. After the last round:
`lost`, documents that were acknowledged and that the server does not list; `damaged`, what verification finds wrong with KV and
index. The last stdout line is one JSON object.
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
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "service"))

from acknowledged import Acknowledged, Writer, ask_until_gone, check_server, lost_documents, retire
from engines import CHUNK_TOKENS, make_model
from server_process import ServedConfig, ServerProcess, free_port
from transformers import PreTrainedTokenizerFast

from cacheblend.retriever.index import IndexedDocuments
from cacheblend.store import KVStore, StoreConfig

WRITERS, ASKERS = 3, 3
DOCUMENTS = 60  # that a round begins with at most: the others are deleted before it
RAM_BYTES = 8 * 2**20  # soon full
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


def kill_round(config: ServedConfig, log: Path, known: Acknowledged, seed: int, ballast: Ballast | None) -> None:
    """Start the server, check what was acknowledged before, load it, and kill it."""
    choose, ended = random.Random(seed), threading.Event()
    with ServerProcess(config, log) as server:
        check_server(server.address, known)
        retire(server.address, known, DOCUMENTS)
        writers = [Writer(server.address, known, f"{seed}-{number}", ended) for number in range(WRITERS)]
        threads = [threading.Thread(target=writer.run) for writer in writers]
        threads += [
            threading.Thread(target=ask_until_gone, args=(server.address, seed + number, ended)) for number in range(ASKERS)
        ]
        for thread in threads:
            thread.start()
        wait_for_answer(known)
        ends = time.monotonic() + choose.uniform(0.5, 3.0)
        while (left_s := ends - time.monotonic()) > 0:
            time.sleep(min(FULL_S, left_s))
            if ballast is not None:
                choose.choice([ballast.fill, ballast.empty])()
        server.kill()
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


def faults_of(figures: dict[str, Any]) -> list[str]:
    """The figures that are not as they must be, by name."""
    return [name for name in ("lost", "damaged") if figures[name]]


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
        IndexedDocuments.open(folder / "index") as index,
    ):
        kv, rows = store.verify(), index.verify()
        if kv.ok and rows.ok:
            check_nothing_stays(config, store, known)
        else:
            print(f"{folder}: {kv} {rows}", file=sys.stderr)
    entries = len(kv.damaged + kv.missing + kv.mismatched + kv.orphans)
    return entries + kv.leftovers + kv.miscounted + len(rows.damaged) + rows.strays + rows.broken


def main() -> None:
    """Run the rounds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--small-disk", type=Path, help="An empty folder on a small file system, which is filled now and then.")
    parser.add_argument("--seconds", type=float, default=0.0, help="Go on with rounds for so long, if --kills are done sooner.")
    options = parser.parse_args()
    if options.small_disk and any(options.small_disk.iterdir()):
        parser.error(f"{options.small_disk} is not empty: what an earlier run left would count as this one's")
    folder = Path(tempfile.mkdtemp())
    make_model(folder / "model")
    known, rounds = Acknowledged(), 0
    root = options.small_disk or folder
    ballast = options.small_disk and Ballast(options.small_disk)
    config = ServedConfig(
        model=str(folder / "model"),
        store_dir=str(root / "store"),
        port=free_port(),
        chunk_tokens=CHUNK_TOKENS,
        ram_budget_bytes=RAM_BYTES,
    )
    began = time.monotonic()
    try:
        while rounds < options.kills or time.monotonic() - began < options.seconds:
            if ballast is not None and rounds % 4 != 3:
                ballast.empty()
            kill_round(config, folder / "server.log", known, options.seed + rounds, ballast if rounds % 2 else None)
            rounds += 1
            print(f"{rounds} killed, {known.answered} changes answered", file=sys.stderr)
        if ballast is not None:
            ballast.empty()
        with ServerProcess(config, folder / "server.log") as server:
            lost = lost_documents(server.address, known)
            if not lost:
                check_server(server.address, known)
        figures = {
            "kills": rounds,
            "acknowledged": known.answered,
            "asked": known.asked,
            "under_way": known.under_way,
            "made": known.made,
            "no_room": known.no_room,
            "lost": len(lost),
            "damaged": count_damaged(config, known),
        }
        print(json.dumps(figures))
        assert not (faults := faults_of(figures)), faults
    except BaseException:
        print(f"the store is in {root}, the server's log in {folder}", file=sys.stderr)
        raise
    shutil.rmtree(config.store_dir)
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
