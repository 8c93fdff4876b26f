"""Kills a server that ingests and answers, again and again, starts it on the same store, and checks what it was told.

    python scripts/crash_server.py                 # 10 kills

Each round, clients upload, replace and delete documents and ask questions over HTTP, until SIGKILL ends the server at a random
moment. Started again on the same folder, it must know every document whose upload or replacement was answered with 2xx: its
text is whole, the KV of all its chunks is stored, and the next question about it finds it by retrieval and is served from the
store (`usage.prompt_tokens_details.cached_tokens` above 0, no chunk computed). What was deleted is gone. Of a change that was
under way at the kill the text is the one before or the one after, and nothing between; KV that was not yet stored is computed
when it is asked for. After the last round the store is verified. A fault ends the run with an error and keeps the folder.

`acknowledged`: changes that were answered before a kill. `asked`: documents that were asked about after one. `under_way`:
changes that a kill cut off, of which `made` were found made. The last stdout line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "service"))

from acknowledged import Acknowledged, Writer, ask_until_gone, check_documents
from engines import CHUNK_TOKENS, make_model
from server_process import ServedConfig, ServerProcess, free_port

from cacheblend.store import KVStore, StoreConfig

WRITERS, ASKERS = 3, 3


def kill_round(config: ServedConfig, folder: Path, known: Acknowledged, seed: int) -> None:
    """Start, check what was told before, load, kill."""
    choose = random.Random(seed)
    server = ServerProcess(config, folder / "server.log")
    with server:
        check_documents(server.address, known)
        writers = [Writer(server.address, known, f"{seed}-{number}") for number in range(WRITERS)]
        threads = [threading.Thread(target=writer.run) for writer in writers]
        threads += [threading.Thread(target=ask_until_gone, args=(server.address, seed + at)) for at in range(ASKERS)]
        for thread in threads:
            thread.start()
        time.sleep(choose.uniform(0.5, 3.0))
        server.kill()
        for thread in threads:
            thread.join()
    for writer in writers:
        if writer.fault:
            raise AssertionError(writer.fault)


def main() -> None:
    """Run the rounds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    make_model(folder / "model")
    known = Acknowledged()
    config = ServedConfig(
        model=str(folder / "model"), store_dir=str(folder / "store"), port=free_port(), chunk_tokens=CHUNK_TOKENS
    )
    try:
        for round_ in range(options.kills):
            kill_round(config, folder, known, options.seed + round_)
            print(f"{round_ + 1} killed, {known.answered} changes answered", file=sys.stderr)
        with ServerProcess(config, folder / "server.log") as server:
            check_documents(server.address, known)
        with KVStore(StoreConfig(directory=folder / "store" / "kv")) as store:
            report = store.verify()
        assert not report.damaged, report
    except BaseException:
        print(f"the store and the server's log are in {folder}", file=sys.stderr)
        raise
    shutil.rmtree(folder)
    figures = {
        "kills": options.kills,
        "acknowledged": known.answered,
        "asked": known.asked,
        "under_way": known.under_way,
        "made": known.made,
        "lost": 0,
        "damaged": 0,
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
