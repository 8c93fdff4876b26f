"""A worker's blends over a store with a remote tier; vLLM itself is not needed."""

import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from tiny_models import VOCAB, tiny_model

from cacheblend.base.errors import InputError, StoreFullError
from cacheblend.blend import ChunkContext, FusionConfig, Fusor
from cacheblend.integrations.vllm.scheduler import BlendJob, Marks, StoredText
from cacheblend.integrations.vllm.worker import BlendWorker
from cacheblend.service.engine.chunk_context import ChunkNaming
from cacheblend.service.engine.config import EngineConfig
from cacheblend.service.engine.prompt import PromptChunk
from cacheblend.store import ChunkKey, ChunkKV, KVStore, LayerPair, StoreConfig

PROMPT = tuple(torch.randint(2, VOCAB, (60,), generator=torch.Generator().manual_seed(3)).tolist())
SPANS = ((8, 30), (30, 52))
CHUNKS = [PROMPT[start:stop] for start, stop in SPANS]


class Ranks:
    """One of several processes that hold the model, which has read all heads; the others say what it says.

    `together` has the numbers of what was asked of all: flags agreed upon, and -1 for a layer.
    """

    rank = 0

    def __init__(self, ranks: int = 1) -> None:
        self.ranks, self.together = ranks, list[int]()
        self.pages: dict[int, torch.Tensor] = {}  # keys that were written, by layer

    def agree(self, flags: Sequence[bool]) -> list[bool]:
        self.together.append(len(flags))
        return list(flags)

    def own_heads(self, pair: LayerPair) -> LayerPair:
        return pair

    def all_heads(self, pair: LayerPair) -> LayerPair:
        self.together.append(-1)
        return pair

    def write_pages(self, layer: int, k_THD: torch.Tensor, v_THD: torch.Tensor, slots_T: torch.Tensor) -> None:
        self.pages[layer] = k_THD.clone()


class Machine:
    """A worker with a store of its own, on a remote tier."""

    def __init__(
        self, folder: Path, remote: str | None = None, ranks: int = 1, prefix_tokens: int = 0, nats: float | None = None
    ) -> None:
        fusor = Fusor(tiny_model("llama"))
        self.keys = ChunkNaming((1,), ChunkContext(), fusor.fingerprint, "raw")
        self.store = KVStore(StoreConfig(directory=folder, remote=remote, remote_timeout_s=5))
        self.ranks = Ranks(ranks)
        self.pages = self.ranks.pages
        engine = EngineConfig(model="any", store_dir=folder, fusion=FusionConfig(max_loss_nats=nats))
        self.worker = BlendWorker(fusor, self.keys, self.store, self.ranks, 128, prefix_tokens, engine)
        self.steps, self.stored = 0, list[StoredText]()  # of which the prompt's chunks are parts

    def blend(self, prefix: Sequence[int] = (), rows: int = 100, ratio: float | None = 0.15) -> dict[str, Any]:
        """The report of the prompt's blend, after a prefix, with so many rows a step; `steps` counts those."""
        self.worker.step([self.job(prefix, ratio)], [], rows, is_idle=False)
        self.steps, deadline = 1, time.monotonic() + 60
        while not (done := self.worker.take_done()):
            assert time.monotonic() < deadline
            self.worker.step([], [], rows, is_idle=False)
            self.steps += 1
        assert not self.worker.blending
        return done["one"]

    def job(self, prefix: Sequence[int] = (), ratio: float | None = 0.15) -> BlendJob:
        """The prompt's, after a prefix."""
        marks = Marks(chunks=[(start + len(prefix), stop + len(prefix)) for start, stop in SPANS], stored=self.stored)
        return BlendJob("one", marks.prompt(self.keys, (*prefix, *PROMPT), None), ratio, block_ids=(0, 1))

    def precompute(self) -> tuple[int, ...]:
        """Sums of what the worker says of the chunks, each a document of its own."""
        return tuple(map(sum, zip(*(self.worker.precompute([chunk], [0], "") for chunk in CHUNKS), strict=True)))


OpenMachine = Callable[..., Machine]


@pytest.fixture
def open_machine(tmp_path: Path) -> Iterator[OpenMachine]:
    """Opens a machine by its name; all are closed afterwards."""
    with ExitStack() as opened:

        def open_one(name: str, **options: Any) -> Machine:
            machine = Machine(tmp_path / name, **options)
            opened.callback(machine.worker.close)
            return machine

        yield open_one


@pytest.fixture
def remote(tmp_path: Path) -> str:
    """An empty remote tier in a folder."""
    pytest.importorskip("obstore", reason="obstore is not installed; the extra [objects] brings it")
    return f"file://{tmp_path}/objects"


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_others_stored(open_machine: OpenMachine, remote: str, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks' KV that one worker has computed comes through the remote tier to another's disk, for all of its ranks."""
    first, second = open_machine("a", remote=remote, ranks=ranks), open_machine("b", remote=remote, ranks=ranks)
    assert first.precompute() == (2, 0, 0)
    assert first.store.flush_remote(30)
    assert first.blend()["hits"] == 2
    keys = [second.keys.key(chunk, ()) for chunk in CHUNKS]
    assert [key in second.store for key in keys] == [False, False]
    assert second.store.find(keys) == [True, True]
    assert second.precompute() == (0, 0, 0)
    if ranks > 1:
        monkeypatch.setattr(second.store, "pin", open_machine("b").store.pin)
    assert second.blend()["hits"] == 2
    assert [key in second.store for key in keys] == [True, True]
    assert all(torch.equal(first.pages[layer], second.pages[layer]) for layer in first.pages)


def test_a_remote_tier_that_goes_makes_misses(open_machine: OpenMachine, remote: str, tmp_path: Path) -> None:
    """Where the remote tier has lost what the scheduler found there, the prompt is computed, and its chunks are misses."""
    first, second = open_machine("a", remote=remote), open_machine("b", remote=remote)
    first.precompute()
    assert first.store.flush_remote(30)
    shutil.rmtree(tmp_path / "objects")
    assert second.blend() == {"blended": False, "reason": "not_stored"}
    assert second.worker.waiting_misses == 2


def test_a_part_of_a_text_is_blended(open_machine: OpenMachine) -> None:
    """Of a text that the prompt has a part of, all is computed and stored, and the part's KV is a hit."""
    machine = open_machine("a")
    machine.stored = [StoredText((3, *chunk, 4), 1, ((5, 6),), is_ingested=True) for chunk in CHUNKS]
    assert machine.blend()["reason"] == "not_stored"
    for _ in CHUNKS:
        machine.worker.step([], [], 0, is_idle=True)
    assert machine.store.find(machine.job().prompt.keys) == [True, True]
    report = machine.blend()
    assert (report["hits"], report["hit_tokens"], report["missed_tokens"]) == (2, sum(map(len, CHUNKS)), 0)


def test_a_cancelled_request_waits_for_nothing(open_machine: OpenMachine, remote: str) -> None:
    """A request that ends while its chunks' KV is on its way is done at once, and nothing of it is left."""
    machine = open_machine("a", remote=remote)
    machine.worker.step([machine.job()], [], 0, is_idle=False)
    assert machine.worker.blending
    machine.worker.cancel({"one"})
    assert machine.worker.take_done() == {"one": None}
    assert not machine.worker.blending


def test_a_request_that_names_no_ratio_is_widened(open_machine: OpenMachine) -> None:
    """Its first token moves further than the engine allows; a request that names a ratio has that one."""
    machine = open_machine("a", nats=1e-9)
    machine.precompute()
    assert [machine.blend(ratio=ratio)["widened"] for ratio in (None, 0.15)] == [True, False]


def prefix(seed: int, tokens: int = 70) -> tuple[int, ...]:
    return tuple(torch.randint(2, VOCAB, (tokens,), generator=torch.Generator().manual_seed(seed)).tolist())


def test_a_prefix_is_computed_a_layer_a_step(open_machine: OpenMachine) -> None:
    """A new prefix is computed in steps that yield as a blend's do, and once: later prompts spare its steps, and are equal."""
    machine = open_machine("a", prefix_tokens=100)
    machine.precompute()
    layers = machine.worker._fusor.runner.geometry.layers
    machine.blend(prefix(1), rows=1)
    steps, pages = machine.steps, dict(machine.pages)
    machine.blend(prefix(1), rows=1)
    assert machine.steps == steps - layers
    assert all(torch.equal(pages[layer], machine.pages[layer]) for layer in pages)
    whole = open_machine("b")
    whole.precompute()
    whole.blend(prefix(1))
    assert max(float((whole.pages[layer] - pages[layer]).abs().max()) for layer in pages) < 1e-4


def test_held_prefixes_are_bounded(open_machine: OpenMachine) -> None:
    """The prefixes that were used longest ago make room for a new one; one that is longer than all room is not kept."""
    machine = open_machine("a", prefix_tokens=150)

    def kept(*prefixes: tuple[int, ...]) -> bool:
        return list(machine.worker._prefixes) == [("", (*one, *PROMPT[: SPANS[0][0]])) for one in prefixes]

    machine.precompute()
    for seed, tokens in ((1, 64), (2, 64), (1, 64), (3, 64), (4, 143)):
        machine.blend(prefix(seed, tokens))
    assert kept(prefix(1, 64), prefix(3, 64))
    machine.blend(prefix(5, 100))
    assert kept(prefix(5, 100))


@pytest.mark.parametrize("error", [InputError("planted"), StoreFullError("planted"), RuntimeError("planted")])
def test_a_chunk_that_one_rank_cannot_store_keeps_no_other_waiting(
    open_machine: OpenMachine, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """What the first rank's store raises leaves a miss; of each chunk all ranks still gather each layer."""
    seen = []
    for refused in (0, 1):
        machine = open_machine(f"refuses {refused}", ranks=2)
        own = machine.store.put

        def put(key: ChunkKey, kv: ChunkKV, *, refused: int = refused, own: Any = own, **options: Any) -> Any:
            if refused and tuple(kv.token_ids) == CHUNKS[0]:
                raise error
            return own(key, kv, **options)

        monkeypatch.setattr(machine.store, "put", put)
        assert machine.precompute() == (2 - refused, 0, refused)
        assert machine.precompute() == (0, 0, refused)
        seen.append(machine.ranks.together[: 2 * (2 + machine.worker._fusor.runner.geometry.layers)])
    assert seen[0] == seen[1]


def test_a_step_computes_one_missed_chunk_on_every_rank(open_machine: OpenMachine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank that cannot store a missed chunk does not go on to the next one, which the others compute a step later."""
    machine = open_machine("a", ranks=2)
    monkeypatch.setattr(machine.store, "put", Mock(side_effect=InputError("planted")))
    machine.worker.step([], [PromptChunk(chunk, machine.keys.key(chunk, ())) for chunk in CHUNKS], 100, is_idle=True)
    assert machine.worker.waiting_misses == 1


def test_a_store_that_cannot_be_read_keeps_no_rank_waiting(open_machine: OpenMachine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that cannot look chunks up says that it has none, instead of saying nothing."""
    machine, broken = open_machine("a", ranks=2), Mock(side_effect=StoreFullError("planted"))
    monkeypatch.setattr(machine.store, "find", broken)
    assert machine.worker.precompute(CHUNKS, [0, 1], "") == (2, 0, 0)
    assert machine.ranks.together[0] == 2
    monkeypatch.setattr(machine.store, "pin", broken)
    assert machine.blend() == {"blended": False, "reason": "not_stored"}
    monkeypatch.setattr(KVStore, "__contains__", broken)
    machine.worker.step([], [], 100, is_idle=True)
    assert machine.worker.waiting_misses == 1


def test_a_disk_that_is_behind_does_not_stop_the_engine(open_machine: OpenMachine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where much waits to be written, nothing is computed: misses are dropped, and the caller hears how many chunks are left,
    also when its own call fills the queue; the next call computes those.
    """
    machine = open_machine("a")
    store, waiting = machine.store, [True]
    stats, own, limit_bytes = store.stats, store.put, store.config.write_queue_bytes

    def put(key: ChunkKey, kv: ChunkKV, **options: Any) -> Any:
        waiting.append(True)
        return own(key, kv, **options)

    monkeypatch.setattr(store, "put", put)
    monkeypatch.setattr(store, "stats", lambda: replace(stats(), pending_bytes=limit_bytes * len(waiting)))
    assert machine.precompute() == (0, 2, 0)
    machine.worker.step([], [PromptChunk(CHUNKS[0], machine.keys.key(CHUNKS[0], ()))], 100, is_idle=True)
    assert (machine.worker.waiting_misses, len(waiting)) == (0, 1)
    waiting.clear()
    assert machine.worker.precompute(CHUNKS, [0, 1], "") == (1, 1, 0)
    monkeypatch.undo()
    assert machine.worker.precompute(CHUNKS, [0, 1], "", ("deleted meanwhile", "a version")) == (1, 0, 0)
    store.flush()
    assert len(store.ls()) == 1
