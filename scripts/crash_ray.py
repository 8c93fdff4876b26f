"""Kills the actors of an ingest on Ray, and its command, with SIGKILL, and checks that nothing is lost or there twice.

    python scripts/crash_ray.py                                  # 5,000 chunks, two actors, one of which is killed on the way
    python scripts/crash_ray.py --chunks 600 --kills 4 --driver-kills 1

The documents are help texts of Python, each with a line of its own, so that no two chunks are equal. Actors are processes of a
Ray cluster that the ingest starts on this machine; one is killed each time so many more documents are in the index. With
`--driver-kills` the whole command is killed instead that many times first, and run again, as a user would.

At the end index and store are verified and compared with what was to come of the documents: every document and chunk is in the
index once, the KV of every chunk is stored once under its key, and the keys are those that the local ingest makes. A last run
over the same documents must compute nothing.

Figures: `computed` are chunks that were computed by what was delivered; `found` are those that a process had stored before it
was killed, and which were not computed again. `processes` counts the actors' processes. The last stdout line is one JSON
object.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from make_random_model import ModelShape, make_random_model

from cacheblend.blend import Fusor
from cacheblend.retriever import Document, RetrieverConfig
from cacheblend.retriever.index_folder import IndexedDocuments
from cacheblend.retriever.splitter import Splitter
from cacheblend.service.engine.chunk_contexts import ChunkEncoder
from cacheblend.service.engine.config import EngineConfig
from cacheblend.service.engine.prompt import PromptRenderer
from cacheblend.store import KVStore, StoreConfig

SHAPE = ModelShape(hidden=128, layers=6, heads=4, kv_heads=2, intermediate=256, vocab=2048)
CHUNK_TOKENS = 64
DOCUMENT_CHARACTERS = 900
BATCH_DOCUMENTS = 16
ACTOR = b"MapWorker(Map(PrecomputeActor))"  # in the title that Ray gives an actor's process
LOOK_S = 0.2


def documents() -> Iterator[dict[str, str]]:
    """Documents without end, no two with an equal chunk."""
    names, number = sorted(topics), 0
    while True:
        text = topics[names[number % len(names)]]
        start = (number // len(names)) * 97 % max(1, len(text) - DOCUMENT_CHARACTERS)
        words = text[start : start + DOCUMENT_CHARACTERS].split()
        for place in range(0, len(words), 12):
            words.insert(place, f"[{number}.{place}]")
        yield {"id": f"document-{number}", "title": f"number {number}", "text": " ".join(words)}
        number += 1


@dataclass
class Expected:
    """Documents and chunks that are to come."""

    versions: dict[str, str] = field(default_factory=dict)
    chunks: dict[str, list[tuple[int, ...]]] = field(default_factory=dict)
    keys: set[str] = field(default_factory=set)


def write_corpus(folder: Path, model: Path, chunks: int) -> Expected:
    """Write documents of so many chunks into some JSONL files; gives what the local ingest would make of them."""
    config = EngineConfig(model=str(model), store_dir=folder / "store", retriever=RetrieverConfig(chunk_tokens=CHUNK_TOKENS))
    fusor = Fusor.from_pretrained(str(model))
    prefix = PromptRenderer(fusor.tokenizer, config.instruction, max_positions=fusor.max_positions).prefix
    encoder = ChunkEncoder.of(fusor, prefix, config)
    splitter, expected, lines, total = Splitter(fusor.tokenizer, config.retriever), Expected(), list[str](), 0
    for raw in documents():
        if total >= chunks:
            break
        document = Document.of(raw)
        own = [tuple(chunk.token_ids) for chunk in splitter.split(document)]
        expected.versions[document.id], expected.chunks[document.id] = document.version, own
        expected.keys |= {str(key) for key in map(encoder.key, own, encoder.context.earlier(own))}
        lines.append(json.dumps(raw) + "\n")
        total += len(own)
    assert len(expected.keys) == total, "two chunks are equal"
    (folder / "corpus").mkdir()
    for part in range(4):
        (folder / "corpus" / f"{part}.jsonl").write_text("".join(lines[part::4]), encoding="utf-8")
    return expected


def command(folder: Path, actors: int) -> list[str]:
    """The ingest as a user calls it."""
    options = ["--ray", "local", "--ray-actors", str(actors), "--ray-batch-documents", str(BATCH_DOCUMENTS)]
    options += ["--chunk-tokens", str(CHUNK_TOKENS), "--json"]
    store = ["--model", str(folder / "model"), "--store-dir", str(folder / "store")]
    return [sys.executable, "-m", "cacheblend.cli.main", "ingest", str(folder / "corpus"), *store, *options]


def indexed(folder: Path) -> int:
    """Documents in the index by now."""
    if not (folder / "store" / "index" / "catalogue.sqlite").is_file():
        return 0
    with IndexedDocuments.open(folder / "store" / "index") as index:
        return len(index.ids())


def actors_below(process: int) -> list[int]:
    """Processes of actors that descend from a process."""
    parents: dict[int, int] = {}
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit():
                stat = (entry / "stat").read_text()
                parents[int(entry.name)] = int(stat.rpartition(")")[2].split()[1])
                if b"PrecomputeActor" in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
        except (OSError, ValueError):  # it has ended
            continue

    def descends(one: int) -> bool:
        while one in parents and one > 1:
            if one == process:
                return True
            one = parents[one]
        return False

    return [one for one in found if descends(one)]


@dataclass
class Killer:
    """Kills something each time that so many documents more are in the index; see `run`."""

    folder: Path
    marks: list[int]
    choose: random.Random
    seen: set[int] = field(default_factory=set)
    kills: int = 0

    def run(self, ingest: subprocess.Popen[bytes]) -> None:
        """Kill an actor at each of the marks, until the ingest ends."""
        while ingest.poll() is None:
            actors = actors_below(ingest.pid)
            self.seen.update(actors)
            if self.marks and actors and indexed(self.folder) >= self.marks[0]:
                time.sleep(self.choose.uniform(0.0, 1.0))
                try:
                    os.kill(self.choose.choice(actors), signal.SIGKILL)
                except ProcessLookupError:
                    continue
                self.marks.pop(0)
                self.kills += 1
                print(f"an actor was killed, {indexed(self.folder)} documents are in the index", file=sys.stderr)
            time.sleep(LOOK_S)


def run_ingest(folder: Path, actors: int, killer: Killer) -> dict[str, Any]:
    """Run the ingest to its end; gives what it printed."""
    with (folder / "ingest.log").open("ab") as log:
        ingest = subprocess.Popen(command(folder, actors), stdout=subprocess.PIPE, stderr=log)
        watcher = threading.Thread(target=killer.run, args=(ingest,))
        watcher.start()
        out, _ = ingest.communicate()
        watcher.join()
    assert ingest.returncode == 0, f"exit code {ingest.returncode}; see {folder / 'ingest.log'}"
    report: dict[str, Any] = json.loads(out)
    return report


def kill_driver(folder: Path, actors: int, at: int) -> None:
    """Run the ingest, and kill its command when so many documents are in the index; Ray's processes end with it."""
    with (folder / "ingest.log").open("ab") as log:
        ingest = subprocess.Popen(command(folder, actors), stdout=subprocess.DEVNULL, stderr=log)
        while ingest.poll() is None and indexed(folder) < at:
            time.sleep(LOOK_S)
        below = actors_below(ingest.pid)
        ingest.kill()
        ingest.wait()
    while any(Path(f"/proc/{one}").exists() for one in below):
        time.sleep(LOOK_S)
    print(f"the command was killed, {indexed(folder)} documents are in the index", file=sys.stderr)


def check(folder: Path, expected: Expected) -> None:
    """Compare index and store with what was to come."""
    with (
        KVStore(StoreConfig(directory=folder / "store" / "kv")) as store,
        IndexedDocuments.open(folder / "store" / "index") as index,
    ):
        assert store.verify().ok, store.verify()
        assert index.verify().ok, index.verify()
        assert {one.id: one.version for one in index.documents()} == expected.versions
        for id_, own in expected.chunks.items():
            assert [tuple(chunk.token_ids) for chunk in index.chunks(id_)] == own, id_
        entries = [entry.key.digest for entry in store.ls()]
        assert len(entries) == len(set(entries)), "an entry is there twice"
        assert set(entries) == expected.keys, (len(entries), len(expected.keys))
        of_documents = {document.id: document for document in store.documents.ls()}
        assert of_documents.keys() == expected.versions.keys()
        assert all(document.stored_chunks == len(expected.chunks[id_]) for id_, document in of_documents.items())


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Run, kill, check, and print; gives the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chunks", type=int, default=5000)
    parser.add_argument("--actors", type=int, default=2)
    parser.add_argument("--kills", type=int, default=1, help="of actors")
    parser.add_argument("--driver-kills", type=int, default=0, help="of the command, before")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    choose = random.Random(options.seed)
    folder = Path(tempfile.mkdtemp())
    try:
        make_random_model(folder / "model", SHAPE)
        expected = write_corpus(folder, folder / "model", options.chunks)
        steps = options.kills + options.driver_kills + 1
        marks = [len(expected.versions) * step // steps for step in range(1, steps)]
        for _ in range(options.driver_kills):
            kill_driver(folder, options.actors, marks.pop(0))
        killer = Killer(folder, marks, choose)
        started = time.perf_counter()
        report = run_ingest(folder, options.actors, killer)
        seconds = time.perf_counter() - started
        assert killer.kills == options.kills, "the ingest ended before an actor was killed; give it more chunks"
        check(folder, expected)
        again = run_ingest(folder, options.actors, Killer(folder, [], choose))
        assert (again["computed"], again["unchanged"]) == (0, len(expected.versions)), again
        assert report["computed"] + report["already_stored"] == len(expected.keys), report
    except BaseException:
        print(f"the store, and the command's log, are in {folder}", file=sys.stderr)
        raise
    shutil.rmtree(folder)
    figures = {
        "documents": len(expected.versions),
        "chunks": len(expected.keys),
        "tokens": sum(len(chunk) for own in expected.chunks.values() for chunk in own),
        "actors": options.actors,
        "actors_killed": killer.kills,
        "commands_killed": options.driver_kills,
        "processes": len(killer.seen),
        "computed": report["computed"],
        "found": report["already_stored"],
        "lost": 0,
        "twice": 0,
        "seconds": round(seconds, 1),
    }
    print(json.dumps(figures))
    return figures


if __name__ == "__main__":
    main()
