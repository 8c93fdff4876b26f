"""A loader that is closed in the middle of its work stops it, and whoever waits for it hears of that."""

import threading
from pathlib import Path

import pytest
from prompts import chunk, draw_ids
from spy_loader import SpyLoader, prompts
from waiting import loading, wait_until

from cacheblend.base.errors import FusionCancelledError, StoreError
from cacheblend.blend import FusionConfig, Fusor, Prompt, Segment
from cacheblend.loader import LayerLoader, LoaderConfig
from cacheblend.store import KVStore, Placement


@pytest.mark.parametrize("selector", ["gradual", "question_attention"])
def test_closing_midway(fusor: Fusor, stores: dict[str, KVStore], selector: str) -> None:
    """A fusion closed after two layers, of the question's pass too, leaves no thread, no open entry, and no pin behind."""
    with prompts(fusor, stores, ["nvme", "ram", "nvme"]) as (spread, _), LayerLoader() as loader:
        steps = fusor.fuse_steps(spread, FusionConfig(selector=selector), loader)
        assert [next(steps).layer, next(steps).layer] == [0, 1]
        steps.close()
        loader.close()
        wait_until(lambda: not loading())
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


@pytest.mark.parametrize(
    ("kinds", "under_way", "wakes", "fetched"),
    [(["nvme", "nvme"], 1, True, 1), (["memory", "memory"], 1, False, 2), (["nvme", "ram"], 2, False, 2)],
)
def test_closing_while_loading(
    fusor: Fusor, stores: dict[str, KVStore], kinds: list[str], under_way: int, wakes: bool, fetched: int
) -> None:
    """Closing waits for a thread's read under way, and wakes a waiting fusor with FusionCancelledError.

    What is in memory the fusor copies itself, no layer ahead; closed meanwhile, it ends that copy and is cancelled.
    """
    gate, cancelled = threading.Event(), threading.Event()
    loader = SpyLoader(LoaderConfig(reads_in_flight=1), gate)

    def consume() -> None:
        with pytest.raises(FusionCancelledError):
            loader.synchronize(0)
        cancelled.set()

    consumer, closer = threading.Thread(target=consume), threading.Thread(target=loader.close)
    with prompts(fusor, stores, kinds) as ((_, *segments), _):
        loader.start(Prompt.of(segments), fusor.decoder.geometry, reuse_layer_0=True)
        consumer.start()
        wait_until(lambda: loader.fetched == [0] * under_way)
        closer.start()
        assert cancelled.wait(60 if wakes else 0.1) == wakes
        assert closer.is_alive()
        gate.set()
        for thread in (consumer, closer):
            thread.join(60)
            assert not thread.is_alive()
    wait_until(lambda: not loading())
    assert loader.fetched == [0] * fetched


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
