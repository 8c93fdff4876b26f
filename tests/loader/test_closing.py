"""A loader that is closed in the middle of its work stops it, and whoever waits for it hears of that."""

import gc
import threading
from pathlib import Path

import pytest
from prompts import chunk, draw_ids
from spy_loader import SEEDS, TOKENS, SpyLoader, elsewhere, key_of, prompts
from waiting import wait_until

from cacheblend.base.errors import FusionCancelledError, StoreError
from cacheblend.blend import FusionConfig, Fusor, Prompt, Segment
from cacheblend.loader import LayerLoader, LoaderConfig
from cacheblend.loader.layer_loader import THREADS
from cacheblend.store import KVStore, Placement


@pytest.mark.parametrize("selector", ["gradual", "question_attention"])
def test_closing_midway(fusor: Fusor, stores: dict[str, KVStore], selector: str) -> None:
    """A fusion closed after two layers, of the question's pass too, leaves no thread, no open entry, and no pin behind."""
    with prompts(fusor, stores, ["nvme", "ram", "nvme"]) as (spread, _), LayerLoader() as loader:
        steps = fusor.fuse_steps(spread, FusionConfig(selector=selector), loader)
        assert [next(steps).layer, next(steps).layer] == [0, 1]
        steps.close()
        loader.close()
        assert not THREADS.busy
        placements = [segment.kv for segment in spread if isinstance(segment.kv, Placement)]
    assert open_entries(stores["nvme"]) == 0
    for placement in placements:
        with pytest.raises(StoreError, match="released"):
            placement.read_layer(1)


def open_entries(store: KVStore) -> int:
    """Open descriptors of the store's entries, where the system tells; those of copying to RAM are waited for."""
    store.flush()
    root = str(Path(store.config.directory).resolve() / "entries")
    return sum(str(link.resolve()).startswith(root) for link in Path("/proc/self/fd").glob("*"))


def close_while_reading(
    fusor: Fusor, loader: SpyLoader, gate: threading.Event, segments: list[Segment], patience_s: float, under_way: int = 1
) -> bool:
    """Close a loader whose first reads wait at the gate, and open that; whether the fusor ended before it, or in that time."""
    cancelled = threading.Event()
    loader.start(Prompt.of(segments), fusor.decoder.geometry, reuse_layer_0=True)

    def consume() -> None:
        with pytest.raises(FusionCancelledError):
            loader.synchronize(0)
        cancelled.set()

    consumer, closer = threading.Thread(target=consume), threading.Thread(target=loader.close)
    consumer.start()
    wait_until(lambda: loader.fetched == [0] * under_way)
    closer.start()
    before = cancelled.wait(patience_s)
    assert closer.is_alive()
    gate.set()
    consumer.join(60)
    closer.join(60)
    assert not consumer.is_alive()
    assert not closer.is_alive()
    assert not THREADS.busy
    return before


def test_closing_waits_for_a_read(fusor: Fusor, stores: dict[str, KVStore]) -> None:
    """Closing wakes a waiting fusor with FusionCancelledError, and returns when the read under way has ended."""
    gate = threading.Event()
    loader = SpyLoader(LoaderConfig(reads_in_flight=1), gate)
    chunks = [chunk(fusor, TOKENS[seed], seed) for seed in SEEDS["nvme"]]
    with stores["nvme"].pin(map(key_of, chunks)) as placements:
        segments = [Segment(one.token_ids, kv) for one, kv in zip(chunks, placements, strict=True)]
        assert close_while_reading(fusor, loader, gate, [*segments, Segment(draw_ids(3, seed=3))], 10)
    assert loader.fetched == [0]


def test_closing_waits_for_a_copy_of_the_fusor(fusor: Fusor) -> None:
    """What is in memory the fusor copies itself, no layer ahead; closed meanwhile, it ends that copy and is cancelled."""
    gate = threading.Event()
    loader = SpyLoader(LoaderConfig(reads_in_flight=1), gate)
    chunks = [chunk(fusor, 8, seed=1), chunk(fusor, 9, seed=2), Segment(draw_ids(3, seed=3))]
    assert not close_while_reading(fusor, loader, gate, chunks, 0.1)
    assert loader.fetched == [0, 0]


def test_closing_while_a_thread_reads_and_the_fusor_copies(fusor: Fusor, stores: dict[str, KVStore]) -> None:
    """Of a layer from both, closing waits for the read and the copy under way, and then the fusor is cancelled."""
    gate = threading.Event()
    loader = SpyLoader(LoaderConfig(reads_in_flight=1), gate)
    with prompts(fusor, stores, ["nvme", "ram"]) as (spread, _):
        assert not close_while_reading(fusor, loader, gate, spread, 0.1, under_way=2)


def test_closed_before_synchronize(fusor: Fusor) -> None:
    """A loader closed before a layer is asked for, or before it starts, cancels the fusion; closing again does nothing."""
    prompt = Prompt.of([chunk(fusor, 8, seed=1), Segment(draw_ids(3, seed=2))])
    loader = LayerLoader()
    loader.start(prompt, fusor.decoder.geometry, reuse_layer_0=False)
    loader.close()
    loader.close()
    with pytest.raises(FusionCancelledError, match="layer 0"):
        loader.synchronize(0)
    never_started = LayerLoader()
    never_started.close()
    with pytest.raises(FusionCancelledError, match="closed before"):
        fusor.fuse(prompt.segments, source=never_started)


@pytest.mark.filterwarnings("always::ResourceWarning")
def test_unclosed(fusor: Fusor) -> None:
    """A loader that is dropped in the middle of a fusion warns, and its thread ends."""
    prompt = Prompt.of([elsewhere(fusor, 8, seed=1), Segment(draw_ids(3, seed=2))])
    loader = LayerLoader(LoaderConfig(lookahead_bytes=1))
    loader.start(prompt, fusor.decoder.geometry, reuse_layer_0=True)
    loader.synchronize(0)
    held = [loader]
    del loader

    def drop() -> None:
        held.clear()
        gc.collect()
        wait_until(lambda: not THREADS.busy)

    with pytest.warns(ResourceWarning, match="LayerLoader was not closed"):
        drop()
