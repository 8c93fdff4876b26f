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
from dataclasses import dataclass, field
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "service"))

import httpx
from engines import CHUNK_TOKENS, make_model
from server_process import MODEL, ServedConfig, ServerProcess, free_port
from transformers import PreTrainedTokenizerFast

from cacheblend.retriever.index import IndexedDocuments
from cacheblend.store import KVStore, StoreConfig

TEXT = " ".join(text for _, text in sorted(topics.items()))
IDS = 8  # of each writer's documents, so that some are replaced and some are deleted
CHARACTERS = 300
NO_ROOM = 507
WRITERS, ASKERS = 3, 3
DOCUMENTS = 60  # that a round begins with at most: the others are deleted before it
RAM_BYTES = 8 * 2**20  # soon full
FULL_S = 0.4  # how long a disk stays full, and then has room again
FIRST_S = 120.0  # until a change is answered, at most
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


@dataclass(slots=True)
class Acknowledged:
    """What was answered with 2xx.

    Args:
        texts: by id; None for what was deleted.
        doubtful: changes under way when the server was killed, by id: the text that may have come.
        changed: ids whose documents have not been asked about since they changed.
        unsettled: ids whose last change was not answered with 2xx.
        answered, asked, under_way, made, no_room: counts; see above.
    """

    texts: dict[str, str | None] = field(default_factory=dict)
    doubtful: dict[str, str | None] = field(default_factory=dict)
    changed: set[str] = field(default_factory=set)
    unsettled: set[str] = field(default_factory=set)
    answered: int = 0
    asked: int = 0
    under_way: int = 0
    made: int = 0
    no_room: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


class Writer:
    """Uploads, replaces and deletes documents of its own, whose ids begin with its name, until the server is gone."""

    def __init__(self, address: str, known: Acknowledged, name: str, ended: threading.Event) -> None:
        self._address, self._known, self._name, self._random = address, known, name, random.Random(name)
        self._ended = ended
        self.fault = ""

    def run(self) -> None:
        """Change one document after the other."""
        with httpx.Client(base_url=self._address, timeout=60) as client:
            while not self.fault and not self._ended.is_set():
                id_ = f"{self._name}-{self._random.randrange(IDS)}"
                text = None if self._known.texts.get(id_) and self._random.random() < 0.2 else self._text(id_)
                try:
                    response = self._change(client, id_, text)
                except httpx.TransportError:
                    with self._known.lock:
                        self._known.doubtful[id_] = text
                        self._known.unsettled.add(id_)
                        self._known.under_way += 1
                    return
                if response.status_code == NO_ROOM and text is not None:  # a deletion must find room
                    self._look(client, id_, text)
                    continue
                if not response.is_success:
                    self.fault = f"{id_}: {response.status_code} {response.text}"
                    return
                with self._known.lock:
                    self._known.texts[id_] = text
                    self._known.changed.add(id_)
                    self._known.unsettled.discard(id_)
                    self._known.answered += 1

    def _look(self, client: httpx.Client, id_: str, text: str) -> None:
        """Look at a document whose upload had no room: its text is the one before or the new one; KV of it may be missing."""
        before = self._known.texts.get(id_)
        try:
            now = _text_of(client, id_)
        except httpx.TransportError:
            with self._known.lock:
                self._known.doubtful[id_] = text
                self._known.unsettled.add(id_)
            return
        if now not in (before, text):
            self.fault = f"{id_}: half a change: {now!r} is neither {before!r} nor {text!r}"
        with self._known.lock:
            self._known.texts[id_] = now
            self._known.unsettled.add(id_)
            self._known.changed.discard(id_)
            self._known.no_room += 1

    def _change(self, client: httpx.Client, id_: str, text: str | None) -> httpx.Response:
        if text is None:
            return client.delete(f"/v1/documents/{id_}")
        return client.post("/v1/documents?wait=true", json={"documents": [{"id": id_, "text": text}]})

    def _text(self, id_: str) -> str:
        """A text that no other document has."""
        start = self._random.randrange(len(TEXT) - CHARACTERS)
        return f"This is {id_}, {self._random.random()}. {TEXT[start : start + CHARACTERS]}"


def ask_until_gone(address: str, seed: int, ended: threading.Event) -> None:
    """Ask questions, streamed, until the server is gone, or that is ended."""
    choose = random.Random(seed)
    with httpx.Client(base_url=address, timeout=60) as client:
        while not ended.is_set():
            start = choose.randrange(len(TEXT) - CHARACTERS)
            body = {
                "model": MODEL,
                "messages": [{"role": "user", "content": "What is said?"}],
                "documents": [{"text": TEXT[start : start + CHARACTERS]}],
                "max_tokens": 50,
                "stream": True,
            }
            try:
                client.post("/v1/chat/completions", json=body)
            except httpx.TransportError:
                return


def check_server(address: str, known: Acknowledged) -> None:
    """Compare a started server with what was acknowledged; what was under way is one or the other, and known from then on."""
    _check_texts(address, known)
    with httpx.Client(base_url=address, timeout=60) as client:
        for id_ in sorted(known.changed):
            if known.texts[id_] is not None:
                _check_served(client, id_)
                known.asked += 1
    known.changed.clear()


def _check_texts(address: str, known: Acknowledged) -> None:
    with httpx.Client(base_url=address, timeout=60) as client:
        for id_, text in known.doubtful.items():
            before, now = known.texts.get(id_), _text_of(client, id_)
            assert now in (before, text), f"{id_}: half a change: {now!r} is neither {before!r} nor {text!r}"
            known.made += now == text
            known.texts[id_] = now
            kept = now == before and text is not None  # a replacement drops nothing before its text is in
            (known.changed.add if kept else known.changed.discard)(id_)  # else KV may be missing: a deletion drops it first
        known.doubtful.clear()
        for id_, text in known.texts.items():
            if text is not None:
                assert _text_of(client, id_) == text, f"{id_}: not what was acknowledged"
        here = {id_ for id_, text in known.texts.items() if text is not None}
        assert _listed(client) == here, f"listed and acknowledged differ in {_listed(client) ^ here}"


def lost_documents(address: str, known: Acknowledged) -> set[str]:
    """The documents that were acknowledged and that the server does not list; a deletion under way may have been made."""
    kept = {id_ for id_, text in known.texts.items() if text is not None and known.doubtful.get(id_, text) is not None}
    with httpx.Client(base_url=address, timeout=60) as client:
        return kept - _listed(client)


def retire(address: str, known: Acknowledged, keep: int) -> None:
    """Delete all but the last `keep` documents, so that a small disk has room for new ones; their ids must stay gone."""
    here = [id_ for id_, text in known.texts.items() if text is not None]
    with httpx.Client(base_url=address, timeout=60) as client:
        for id_ in here[: max(0, len(here) - keep)]:
            client.delete(f"/v1/documents/{id_}").raise_for_status()
            known.texts[id_] = None
            known.changed.discard(id_)
            known.answered += 1


def _listed(client: httpx.Client) -> set[str]:
    """The ids of all documents that the server lists."""
    ids: list[str] = []
    while True:
        page = (
            client.get("/v1/documents", params={"limit": 1000, **({"after": ids[-1]} if ids else {})}).raise_for_status().json()
        )
        ids += [document["id"] for document in page["data"]]
        if not page["has_more"]:
            return set(ids)


def _text_of(client: httpx.Client, id_: str) -> str | None:
    response = client.get(f"/v1/documents/{id_}")
    if response.status_code == 404:
        return None
    return "".join(part["text"] for part in response.raise_for_status().json()["content"])


def _check_served(client: httpx.Client, id_: str) -> None:
    """All of a document's KV is stored, and a question about it is answered from there."""
    shown = client.get(f"/v1/documents/{id_}").json()
    chunks = len(shown["content"])  # equal texts at two places of a document stand after different ones
    assert shown["stored_chunks"] == chunks, f"{id_}: {shown['stored_chunks']} of {chunks} chunks are stored"
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": shown["content"][0]["text"]}],  # the words of one chunk: it is the nearest
        "num_chunks": 1,
        "recompute_ratio": 0.15,  # or else so short a prompt is computed in full
        "max_tokens": 1,
        "return_chunks": True,
    }
    answer = client.post("/v1/chat/completions", json=body).raise_for_status().json()
    (chunk,) = answer["cacheblend"]["chunks"]
    assert chunk["document_id"] == id_, f"asked about {id_}, found {chunk['document_id']}"
    assert chunk["source"] in ("ram", "nvme"), f"{id_}: its chunk's KV was {chunk['source']}"
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


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
