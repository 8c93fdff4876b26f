"""Damages files of a store at random, and checks that nothing wrong comes out of it.

    python scripts/damage_store.py                 # 1,000 damages

A store folder as `cacheblend serve` keeps it (KV, index, a profile) is made once, with documents, KV of a text that a request
brought, and one copy of it taken while it is in use, with write-ahead logs. Each round copies it, picks a kind
of file, one file of it and a damage by a seeded choice: bits flipped, cut short, a run of zeros, overwritten with noise,
removed. Then the folder is opened. It may be refused, with an error of CacheBlend's own. Where it opens, every document is
shown, searched for and listed, every entry read, a question answered, a document ingested and one deleted, all of it verified
and repaired. Each of these gives what was stored, says that it is not there, or fails with an error of CacheBlend's own. At
last the repaired folder is opened again and must be found sound.

`wrong bytes`: KV, or an answer from it, that is not what was stored; what was computed anew meanwhile may differ by rounding.
`wrong texts`: a document's or a found chunk's text or token ids. `unforeseen`: any other exception. Each fault keeps its
folder. The last stdout line of `--json` is one JSON object.
"""

import argparse
import json
import logging
import random
import shutil
import sys
import tempfile
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "service"))

from engines import CHUNK_TOKENS, DOCUMENTS, QUESTION, TOP_K, make_model
from fakes import FakeEmbedder
from profiles import linear_profile

from cacheblend.base.errors import CacheBlendError, InputError
from cacheblend.blend import FusionConfig, Fusor
from cacheblend.loader import describe_device, write_profile
from cacheblend.loader.profile import Profile
from cacheblend.retriever import Document, RetrieverConfig
from cacheblend.retriever.index import IndexedDocuments
from cacheblend.service import Engine, EngineConfig
from cacheblend.store import ChunkKey, ChunkKV

BROUGHT = [{"text": "a text that a request brought along and nobody ingested"}]
NEW = {"id": "new", "title": "New", "text": "a document that comes after the damage"}
Result = TypeVar("Result")
FAULTS = ("wrong bytes", "wrong texts", "unforeseen")


@dataclass(slots=True)
class Truth:
    """Content of the sound store."""

    texts: dict[str, list[tuple[str, tuple[int, ...]]]] = field(default_factory=dict)
    kv: dict[ChunkKey, ChunkKV] = field(default_factory=dict)
    found: list[tuple[str, int]] = field(default_factory=list)
    logits: torch.Tensor = field(default_factory=lambda: torch.empty(0))


class DamagedStores:
    """Makes a store, damages copies of it, and looks at what comes out.

    Args:
        folder: where it all lies; faults' folders stay there.
        seed: of the choices.
    """

    def __init__(self, folder: Path, seed: int) -> None:
        self._folder, self._choose = folder, random.Random(seed)
        make_model(folder / "model")
        self._fusor = Fusor.from_pretrained(str(folder / "model"))
        self.truth = Truth()
        self.counts: dict[str, Counter[str]] = defaultdict(Counter)
        self.faults: list[str] = []
        self._templates = [folder / "closed", folder / "in use"]
        self._make()

    def run(self, number: int) -> None:
        """One damage, and all that is looked at after it."""
        store = self._folder / f"damage-{number}"
        shutil.copytree(self._choose.choice(self._templates), store)
        kind, what = self._damage(store)
        count = self.counts[kind]
        count["damages"] += 1
        faults_before = len(self.faults)
        try:
            self._look(store, count, f"damage {number}: {what}")
        except CacheBlendError:
            count["refused"] += 1
        except Exception:
            self._fault(count, "unforeseen", f"damage {number}: {what}\n{traceback.format_exc()}")
        if len(self.faults) == faults_before:
            shutil.rmtree(store)

    def _open(self, store: Path) -> Engine:
        config = EngineConfig(
            model=str(self._folder / "model"),
            store_dir=store,
            max_tokens=1,
            retriever=RetrieverConfig(chunk_tokens=CHUNK_TOKENS),
            fusion=FusionConfig(recompute_ratio=0.15),
        )
        return Engine(config, fusor=self._fusor, embedder=FakeEmbedder())

    def _make(self) -> None:
        closed, in_use = self._templates
        with self._open(closed) as engine:
            engine.ingest(DOCUMENTS)
            engine.answer(QUESTION, documents=BROUGHT)
            engine.drain()
            write_profile(engine.config.profile_dir, self._profile())
            for document in DOCUMENTS:
                id_ = str(document["id"])
                self.truth.texts[id_] = [(chunk.text, chunk.token_ids) for chunk in engine.retriever.chunks(id_)]
            new = engine.retriever.splitter.split(Document.of(NEW))
            self.truth.texts[NEW["id"]] = [(chunk.text, chunk.token_ids) for chunk in new]
            for entry in engine.store.ls():
                kv = engine.store.get(entry.key)
                assert kv is not None
                self.truth.kv[entry.key] = kv
            answer = engine.answer(QUESTION, num_chunks=TOP_K, method="full_recompute")
            self.truth.found = [(one.chunk.document_id, one.chunk.position) for one in answer.chunks]
            self.truth.logits = answer.first_logits
            (closed / "kv" / "damaged" / ("ab" * 32)).write_bytes(b"set aside")
        with self._open(closed) as engine:
            engine.ingest([NEW])
            engine.documents.delete(NEW["id"])
            shutil.copytree(closed, in_use)

    def _profile(self) -> Profile:
        return linear_profile(
            layers=self._fusor.decoder.geometry.layers,
            model=self._fusor.fingerprint,
            device=describe_device(self._fusor.decoder.device),
        )

    def _damage(self, store: Path) -> tuple[str, str]:
        """Damage one file; gives its kind, and what was done."""
        files: dict[str, list[Path]] = defaultdict(list)
        for path in sorted(store.rglob("*")):
            if path.is_file():
                part = path.relative_to(store).parts
                name = "entry" if "entries" in part else part[-1] if "damaged" not in part else "file set aside"
                files["profile" if part[0] == "profiles" else f"{part[0]}: {name}"].append(path)
        kind = self._choose.choice(sorted(files))
        path = self._choose.choice(files[kind])
        damage = self._choose.choice(list(DAMAGES))
        at = DAMAGES[damage](path, self._choose)
        return kind, f"{path.relative_to(store)} of {store.name}, {damage} {at}"

    def _look(self, store: Path, count: Counter[str], what: str) -> None:
        with self._open(store) as engine:
            self._read(engine, count, what)
            self._allowed(lambda: engine.documents.delete("class"), count)
            if self._allowed(lambda: engine.ingest([NEW]), count) is not None:
                self._show(engine, NEW["id"], count, what)
            self._allowed(lambda: engine.store.verify(repair=True), count)

        def verify_index() -> None:
            with IndexedDocuments.open(store / "index") as documents:
                documents.verify(repair=True)

        self._allowed(verify_index, count)
        with self._open(store) as engine:  # what an error of CacheBlend's own refuses here is told by it
            if not engine.store.verify().ok:
                self._fault(count, "unforeseen", f"{what}: not sound after its repair: {engine.store.verify()}")
            again: Counter[str] = Counter()
            self._read(engine, again, what, most_off=1e-4)  # what was deleted is not there, which is no loss
            count.update({fault: again[fault] for fault in FAULTS})

    def _read(self, engine: Engine, count: Counter[str], what: str, most_off: float = 0.0) -> None:
        self._allowed(engine.documents.page, count)
        self._allowed(lambda: engine.documents.page(2), count)
        for key, kv in self.truth.kv.items():
            got = self._allowed(lambda key=key: engine.store.get(key), count)
            count["misses"] += got is None
            if got is not None and not _same(got, kv, most_off):
                self._fault(count, "wrong bytes", f"{what}: entry {key}")
        for id_ in [str(document["id"]) for document in DOCUMENTS]:
            self._show(engine, id_, count, what)
        answer = self._allowed(lambda: engine.answer(QUESTION, num_chunks=TOP_K, recompute_ratio=1.0), count)
        if answer is not None:
            for scored in answer.chunks:
                chunk = scored.chunk
                known = self.truth.texts.get(chunk.document_id, [])
                if chunk.position >= len(known) or known[chunk.position] != (chunk.text, chunk.token_ids):
                    self._fault(count, "wrong texts", f"{what}: found {chunk}")
            found = [(one.chunk.document_id, one.chunk.position) for one in answer.chunks]
            if found == self.truth.found and float((answer.first_logits - self.truth.logits).abs().max()) > 1e-3:
                self._fault(count, "wrong bytes", f"{what}: another answer")
        self._allowed(engine.drain, count)

    def _show(self, engine: Engine, id_: str, count: Counter[str], what: str) -> None:
        shown = self._allowed(lambda: engine.documents.show(id_), count)
        if shown is None or not shown[1]:
            count["documents not shown"] += 1
        elif [(chunk.text, chunk.token_ids) for chunk, _ in shown[1]] != self.truth.texts[id_]:
            self._fault(count, "wrong texts", f"{what}: document {id_}")

    def _allowed(self, act: Callable[[], Result], count: Counter[str]) -> Result | None:
        """What an action gives; None where it fails with an error of CacheBlend's own."""
        try:
            return act()
        except InputError:  # what the damage has lost is not there
            return None
        except CacheBlendError:
            count["errors told"] += 1
            return None

    def _fault(self, count: Counter[str], kind: str, what: str) -> None:
        count[kind] += 1
        self.faults.append(f"{kind}: {what}")
        print(self.faults[-1], file=sys.stderr)


def _flip(path: Path, choose: random.Random) -> str:
    raw = bytearray(path.read_bytes())
    places = [choose.randrange(len(raw)) for _ in range(choose.choice((1, 1, 8)))] if raw else []
    for place in places:
        raw[place] ^= 1 << choose.randrange(8)
    path.write_bytes(raw)
    return f"at {places}"


def _truncate(path: Path, choose: random.Random) -> str:
    size = choose.randrange(path.stat().st_size + 1)
    with path.open("r+b") as file:
        file.truncate(size)
    return f"to {size}"


def _overwrite(path: Path, choose: random.Random, content: Callable[[int], bytes]) -> str:
    size = path.stat().st_size
    start, length = choose.randrange(size + 1), choose.choice((1, 16, 512, 4096))
    length = min(length, size - start)
    with path.open("r+b") as file:
        file.seek(start)
        file.write(content(length))
    return f"{length} bytes at {start}"


def _remove(path: Path, _: random.Random) -> str:
    path.unlink()
    return ""


DAMAGES: dict[str, Callable[[Path, random.Random], str]] = {
    "bits flipped": _flip,
    "cut short": _truncate,
    "zeros": lambda path, choose: _overwrite(path, choose, bytes),
    "noise": lambda path, choose: _overwrite(path, choose, choose.randbytes),
    "removed": _remove,
}


def _same(one: ChunkKV, other: ChunkKV, most_off: float) -> bool:
    told = [(kv.token_ids, kv.prefix_ids, kv.model, kv.context, len(kv.layers)) for kv in (one, other)]
    tensors = [[x_HTD for pair in kv.layers for x_HTD in pair] for kv in (one, other)]
    return told[0] == told[1] and all(torch.allclose(a, b, rtol=0.0, atol=most_off) for a, b in zip(*tensors, strict=True))


def main() -> int:
    """Run the rounds; exits with 1 where something wrong came out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--damages", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="One JSON object on stdout instead of the table.")
    options = parser.parse_args()
    logging.getLogger("cacheblend").setLevel(logging.CRITICAL)  # warnings of damage are what is expected here
    folder = Path(tempfile.mkdtemp())
    stores = DamagedStores(folder, options.seed)
    for number in range(options.damages):
        stores.run(number)
        if (number + 1) % 50 == 0:
            print(f"{number + 1} damages, {len(stores.faults)} faults", file=sys.stderr)
    columns = ("damages", "refused", "errors told", "misses", "documents not shown", *FAULTS)
    if options.json:
        totals = {name: sum(count[name] for count in stores.counts.values()) for name in columns}
        by_kind = {kind: {name: count[name] for name in columns} for kind, count in sorted(stores.counts.items())}
        print(json.dumps({**totals, "seed": options.seed, "by_kind": by_kind}))
    else:
        print(f"{'file':32}", *(f"{name:>12.12}" for name in columns))
        for kind, count in sorted(stores.counts.items()):
            print(f"{kind:32.32}", *(f"{count[name]:12}" for name in columns))
    if stores.faults:
        print(f"{len(stores.faults)} faults; their stores are in {folder}", file=sys.stderr)
        return 1
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
