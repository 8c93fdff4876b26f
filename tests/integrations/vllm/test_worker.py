"""A worker's blends over a store with a remote tier; vLLM itself is not needed."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch
from tiny_models import VOCAB, tiny_model

from cacheblend.blend import ChunkContext, Fusor
from cacheblend.integrations.vllm.keys import ChunkKeys, find_stored
from cacheblend.integrations.vllm.marks import Marks
from cacheblend.integrations.vllm.scheduler import BlendJob
from cacheblend.integrations.vllm.worker import BlendWorker
from cacheblend.store import KVStore, LayerPair, StoreConfig

PROMPT = tuple(torch.randint(2, VOCAB, (60,), generator=torch.Generator().manual_seed(3)).tolist())
SPANS = ((8, 30), (30, 52))
CHUNKS = [PROMPT[start:stop] for start, stop in SPANS]


class OneRank:
    """The only process that holds the model."""

    ranks, rank = 1, 0

    def agree(self, flags: Sequence[bool]) -> list[bool]:
        return list(flags)

    def own_heads(self, pair: LayerPair, kv_heads: int) -> LayerPair:
        return pair

    def all_heads(self, pair: LayerPair, kv_heads: int) -> LayerPair:
        return pair


class ManyRanks(OneRank):
    """One of several processes, which has read all heads; the others say what it says."""

    ranks = 2


class WrittenPages(dict[int, torch.Tensor]):
    """Keys that were written, by layer."""

    def write(self, layer: int, k_THD: torch.Tensor, v_THD: torch.Tensor, block_ids: Sequence[int], start: int) -> None:
        self[layer] = k_THD.clone()


class Machine:
    """A worker with a store of its own, on a remote tier.

    Args:
        folder: of its store.
        remote: URL; None for none.
        ranks: see `BlendWorker`.
    """

    def __init__(self, folder: Path, remote: str | None, ranks: OneRank) -> None:
        fusor = Fusor(tiny_model("llama"))
        self.keys = ChunkKeys((1,), ChunkContext(), fusor.fingerprint, "raw")
        self.store = KVStore(StoreConfig(directory=folder, remote=remote, remote_timeout_s=5))
        self.pages = WrittenPages()
        self.worker = BlendWorker(fusor, self.keys, self.store, self.pages, ranks, kv_heads=2)

    def blend(self) -> dict[str, Any]:
        """The report of the prompt's blend."""
        job = BlendJob("one", PROMPT, (0, 1), 0, Marks(SPANS), 0.15, is_least=False, cache_salt=None)
        self.worker.step([job], [], 100, is_idle=False)
        deadline = time.monotonic() + 60
        while not (progress := self.worker.take_progress()).done:
            assert time.monotonic() < deadline
            self.worker.step([], [], 100, is_idle=False)
        assert not self.worker.blending
        return progress.reports["one"]


class OpenMachine(Protocol):
    """Opens machines."""

    def __call__(self, name: str, remote: str | None, ranks: OneRank | None = None) -> Machine: ...


@pytest.fixture
def open_machine(tmp_path: Path) -> Iterator[OpenMachine]:
    """Opens a machine by its name; all are closed afterwards."""
    with ExitStack() as opened:

        def open_one(name: str, remote: str | None, ranks: OneRank | None = None) -> Machine:
            machine = Machine(tmp_path / name, remote, ranks or OneRank())
            opened.callback(machine.worker.close)
            return machine

        yield open_one


@pytest.fixture
def remote(tmp_path: Path) -> str:
    """An empty remote tier in a folder."""
    pytest.importorskip("obstore", reason="obstore is not installed; the extra [objects] brings it")
    return f"file://{tmp_path}/objects"


@pytest.mark.parametrize("ranks", [OneRank(), ManyRanks()], ids=["one rank", "ranks"])
def test_what_another_machine_stored_is_blended(open_machine: OpenMachine, remote: str, ranks: OneRank) -> None:
    """Chunks' KV that one worker has computed comes through the remote tier to another's disk; the blends are equal."""
    first, second = open_machine("a", remote, ranks), open_machine("b", remote, ranks)
    assert first.worker.precompute([[chunk] for chunk in CHUNKS], None, None) == 2
    assert first.store.flush_remote(30)
    assert first.blend()["hits"] == 2
    keys = [second.keys.key(chunk, (), None) for chunk in CHUNKS]
    assert [key in second.store for key in keys] == [False, False]
    assert find_stored(second.store, keys) == [True, True]
    assert second.worker.precompute([[chunk] for chunk in CHUNKS], None, None) == 0
    assert second.blend()["hits"] == 2
    assert [key in second.store for key in keys] == [True, True]
    assert all(torch.equal(first.pages[layer], second.pages[layer]) for layer in first.pages)


def test_a_remote_tier_that_goes_makes_misses(open_machine: OpenMachine, remote: str, tmp_path: Path) -> None:
    """Where the remote tier has lost what the scheduler found there, the prompt is computed, and its chunks are misses."""
    first, second = open_machine("a", remote), open_machine("b", remote)
    first.worker.precompute([[chunk] for chunk in CHUNKS], None, None)
    assert first.store.flush_remote(30)
    shutil.rmtree(tmp_path / "objects")
    report = second.blend()
    assert (report["blended"], report["hits"], report["missed_tokens"]) == (True, 0, 44)
    assert second.worker.waiting_misses == 2


def test_a_cancelled_request_waits_for_nothing(open_machine: OpenMachine, remote: str) -> None:
    """A request that ends while its chunks' KV is on its way is done at once, and nothing of it is left."""
    machine = open_machine("a", remote)
    job = BlendJob("gone", PROMPT, (0, 1), 0, Marks(SPANS), 0.15, is_least=False, cache_salt=None)
    machine.worker._fetch(job)
    machine.worker.cancel({"gone"})
    assert machine.worker.take_progress().done == {"gone"}
    assert not machine.worker.blending
