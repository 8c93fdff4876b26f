"""Kills a server that ingests and answers, again and again, starts it on the same store, and checks what it was told.

    python scripts/crash_server.py                                     # 10 kills
    python scripts/crash_server.py --kills 200 --small-disk /mnt/small # on a disk of some 50 MiB that fills now and then

Each round, clients upload, replace and delete documents and ask questions over HTTP, until SIGKILL ends the server at a
random moment. Started again on the same folder, it must know every document whose upload or replacement was answered with
2xx: its text is whole, the KV of all its chunks is stored, and the next question about it finds it by retrieval and is served
from the store (`usage.prompt_tokens_details.cached_tokens` above 0, no chunk computed). What was deleted is gone. Of a change
that was under way at the kill the text is the one before or the one after, and nothing between; KV that was not yet stored is
computed when it is asked for. After the last round KV and index are verified, and no entry may hold a text that was replaced
or deleted since. The oldest documents are deleted before each round. A fault ends the run with an error and keeps the folder.

With `--small-disk`, a folder on a file system of its own such as a small tmpfs, every second round is under way on a disk
that is filled to the last byte half of the time, and half of those rounds start on one. An upload may then be refused with
507, and leaves the text before or the new one; a deletion may not.

`acknowledged`: changes that were answered before a kill. `asked`: documents that were asked about after one. `under_way`:
changes that a kill cut off, of which `made` were found made. `no_room`: uploads that got 507. The last stdout line is one
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
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "service"))

from acknowledged import Acknowledged, Writer, ask_until_gone, check_documents, retire
from engines import CHUNK_TOKENS, make_model
from server_process import ServedConfig, ServerProcess, free_port
from transformers import PreTrainedTokenizerFast

from cacheblend.retriever.index_folder import IndexedDocuments
from cacheblend.store import KVStore, StoreConfig

WRITERS, ASKERS = 3, 3
DOCUMENTS = 60  # that a round begins with at most: the others are deleted before it
FULL_S = 0.4  # how long a disk stays full, and then has room again
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


def kill_round(config: ServedConfig, folder: Path, known: Acknowledged, seed: int, ballast: Ballast | None) -> None:
    """Start, check what was told before, load, kill."""
    choose = random.Random(seed)
    server = ServerProcess(config, folder / "server.log")
    with server:
        check_documents(server.address, known)
        retire(server.address, known, DOCUMENTS)
        writers = [Writer(server.address, known, f"{seed}-{number}") for number in range(WRITERS)]
        threads = [threading.Thread(target=writer.run) for writer in writers]
        threads += [threading.Thread(target=ask_until_gone, args=(server.address, seed + at)) for at in range(ASKERS)]
        for thread in threads:
            thread.start()
        end = time.monotonic() + choose.uniform(0.5, 3.0)
        while time.monotonic() < end:
            time.sleep(min(FULL_S, max(0.0, end - time.monotonic())))
            if ballast is not None:
                choose.choice([ballast.fill, ballast.empty])()
        server.kill()
        for thread in threads:
            thread.join()
    for writer in writers:
        if writer.fault:
            raise AssertionError(writer.fault)


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


def main() -> None:
    """Run the rounds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--small-disk", type=Path, help="An empty folder on a small file system, which is filled now and then.")
    options = parser.parse_args()
    if options.small_disk and any(options.small_disk.iterdir()):
        parser.error(f"{options.small_disk} is not empty: what an earlier run left would count as this one's")
    folder = Path(tempfile.mkdtemp())
    make_model(folder / "model")
    known = Acknowledged()
    store_dir = (options.small_disk or folder) / "store"
    ballast = options.small_disk and Ballast(options.small_disk)
    config = ServedConfig(model=str(folder / "model"), store_dir=str(store_dir), port=free_port(), chunk_tokens=CHUNK_TOKENS)
    try:
        for round_ in range(options.kills):
            if ballast is not None and round_ % 4 != 3:
                ballast.empty()
            kill_round(config, folder, known, options.seed + round_, ballast if round_ % 2 else None)
            print(f"{round_ + 1} killed, {known.answered} changes answered", file=sys.stderr)
        if ballast is not None:
            ballast.empty()
        with ServerProcess(config, folder / "server.log") as server:
            check_documents(server.address, known)
        with KVStore(StoreConfig(directory=store_dir / "kv")) as store, IndexedDocuments(store_dir / "index") as index:
            report, index_report = store.verify(), index.verify()
            assert report.ok, report
            assert index_report.ok, index_report
            check_nothing_stays(config, store, known)
    except BaseException:
        print(f"the store is in {store_dir}, the server's log in {folder}", file=sys.stderr)
        raise
    shutil.rmtree(store_dir)
    shutil.rmtree(folder)
    figures = {
        "kills": options.kills,
        "acknowledged": known.answered,
        "asked": known.asked,
        "under_way": known.under_way,
        "made": known.made,
        "no_room": known.no_room,
        "lost": 0,
        "damaged": 0,
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
