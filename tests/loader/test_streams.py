"""Layers that come over a stream: many asked for ahead, bounded by the look-ahead, given up where they come too late."""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import pytest
import torch
from prompts import BOS, chunk, draw_ids, largest_difference
from spy_loader import LAYERS
from waiting import wait_until

from cacheblend.base.errors import DamagedEntryError, EvictedEntryError, RemoteError
from cacheblend.blend import WAITING, FusionConfig, Fusor, Prompt, Segment
from cacheblend.loader import LayerLoader, LoaderConfig
from cacheblend.loader.lane import Lane, LayerRead
from cacheblend.store import KVHandle
from cacheblend.store.chunk import LayerStream

RATIO = FusionConfig(recompute_ratio=0.3)


class FakeStream:
    """A `LayerStream` from memory: `may_come` says of each answer whether it comes yet."""

    def __init__(self, may_come: Callable[[int], bool]) -> None:
        self._may_come = may_come
        self._asked: deque[tuple[KVHandle, int]] = deque()
        self.asked: list[int] = []  # layers
        self.came, self.late, self.aborted, self.closed = 0, False, threading.Event(), threading.Event()

    def request(self, reads: Sequence[tuple[KVHandle, int]]) -> None:
        self._asked.extend(reads)
        self.asked += [layer for _, layer in reads]

    def receive(self) -> KVHandle:
        while not self._may_come(self.came):
            if self.aborted.wait(0.005):
                raise RemoteError("aborted")
        self.came += 1
        kv, _ = self._asked.popleft()
        assert isinstance(kv, StreamedKV)
        return kv.inner

    def abort(self, *, late: bool = False) -> None:
        self.late = late
        self.aborted.set()

    def close(self) -> None:
        self.closed.set()


class StreamedKV:
    """A chunk's KV in memory that says that it is remote."""

    tier, in_memory, rotated = "remote", False, False

    def __init__(self, inner: KVHandle, stream: Callable[[], LayerStream]) -> None:
        self.inner, self.stream = inner, stream

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)


def streamed(fusor: Fusor, may_come: Callable[[int], bool] = lambda _: True) -> tuple[list[Segment], list[Segment], FakeStream]:
    """A prompt whose chunks are remote, but for one in memory; the same in memory; and their stream."""
    stream = FakeStream(may_come)
    chunks = [chunk(fusor, tokens, seed) for tokens, seed in ((17, 1), (9, 2), (33, 3))]
    head, question = Segment([*BOS, *draw_ids(5, seed=0)]), Segment(draw_ids(7, seed=30))
    remote = [
        Segment(one.token_ids, one.kv if at == 1 else StreamedKV(one.kv, lambda: stream))  # type: ignore[arg-type]  # as one
        for at, one in enumerate(chunks)
    ]
    return [head, *remote, question], [head, *chunks, question], stream


def test_streamed_layers_blend_as_others_do(fusor: Fusor) -> None:
    """A blend over a stream, and over KV of another tier beside it, is the blend over KV in memory."""
    remote, resident, stream = streamed(fusor)
    with LayerLoader() as loader:
        fused = fusor.fuse(remote, RATIO, loader)
    expected = fusor.fuse(resident, RATIO)
    assert torch.equal(fused.logits, expected.logits)
    assert largest_difference(fused.cache, expected.cache) == 0
    assert set(loader.bytes_by_tier) == {"remote", "memory"}
    assert stream.asked == [layer for layer in range(LAYERS) for _ in range(2)]
    assert stream.closed.wait(60)
    assert not stream.aborted.is_set()


def test_no_more_is_asked_for_than_the_look_ahead_holds(fusor: Fusor) -> None:
    """With room for one layer ahead, a layer is asked for when the one before it is taken."""
    asked_when: list[int] = []
    remote, resident, stream = streamed(fusor)

    class Watching(LayerLoader):
        def synchronize(self, layer: int):  # type: ignore[no-untyped-def]  # as its parent
            wait_until(lambda: stream.came >= 2 * (layer + 1))
            asked_when.append(max(stream.asked))
            return super().synchronize(layer)

    with Watching(LoaderConfig(lookahead_bytes=1)) as loader:
        fused = fusor.fuse(remote, RATIO, loader)
    assert asked_when == list(range(LAYERS))
    assert torch.equal(fused.logits, fusor.fuse(resident, RATIO).logits)


def test_what_comes_later_than_it_is_computed_is_given_up(fusor: Fusor) -> None:
    """A stream that stands still ends the fusion by `RemoteError` after a part of the recompute's time, and is told."""
    remote, _, stream = streamed(fusor, lambda came: came < 2)
    started = time.monotonic()
    with LayerLoader() as loader:
        loader.restart_s = 0.1
        with pytest.raises(RemoteError, match="later"):
            fusor.fuse(remote, RATIO, loader)
    assert time.monotonic() - started < 5
    assert stream.late
    assert stream.closed.wait(60)


def test_idle_seconds_are_no_seconds_of_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the look-ahead is full, or a front is computed with nothing asked for, a stream becomes no later."""
    now = [0.0]
    monkeypatch.setattr("cacheblend.loader.lane.time", SimpleNamespace(perf_counter=lambda: now[0]))
    kv = SimpleNamespace(stream=None, tier="remote", layer_bytes=lambda _: 100)
    lane = Lane([LayerRead(layer, 0, 4, kv) for layer in range(4)])  # type: ignore[arg-type]  # in its place
    for at in (0.0, 100.0):
        now[0] = at
        assert lane.take(int(at > 0) + 1)
        assert not lane.is_late(10.0, 0.0)
        now[0] = at + 1
        lane.came()
    now[0] = 1000.0
    assert not lane.is_late(10.0, 0.0)
    lane.take(3)
    now[0] = 1008.0  # 10 s for 200 bytes: the other 200 would take as long
    assert not lane.is_late(10.1, 0.0)
    assert lane.is_late(9.9, 0.0)


def test_a_slow_stream_that_is_worth_it_is_waited_for(fusor: Fusor) -> None:
    """Where a recompute takes longer than what is left, or nobody said how long, the loader waits."""
    for restart_s in (1000.0, None):
        began = time.monotonic()
        remote, resident, _ = streamed(fusor, lambda came, began=began: time.monotonic() - began > 0.05 * came)  # type: ignore[misc]
        with LayerLoader() as loader:
            loader.restart_s = restart_s
            assert torch.equal(fusor.fuse(remote, RATIO, loader).logits, fusor.fuse(resident, RATIO).logits)


def test_waits_for_a_stream_are_cut_into_turns(fusor: Fusor) -> None:
    """A loader that takes turns gives every wait back as a step without rows, and the blend is the same."""
    steps_taken = 0
    remote, resident, stream = streamed(fusor, lambda _: steps_taken >= 5)
    with LayerLoader() as loader:
        loader.takes_turns = True
        steps = fusor.fuse_steps(remote, RATIO, loader)
        while True:
            try:
                report = next(steps)
            except StopIteration as done:
                fused = done.value
                break
            assert (report is WAITING) == (steps_taken < 5) or stream.came < 2 * LAYERS
            steps_taken += 1
    assert torch.equal(fused.logits, fusor.fuse(resident, RATIO).logits)
    assert WAITING not in (*fused.selection, *fused.layers)


def test_closing_ends_a_stream_that_stands_still(fusor: Fusor) -> None:
    """Who closes the loader does not wait for the network."""
    remote, _, stream = streamed(fusor, lambda _: False)
    with LayerLoader() as loader:
        loader.start(Prompt.of(remote), fusor.decoder.geometry, reuse_layer_0=False)
        wait_until(lambda: bool(stream.asked))
        started = time.monotonic()
    assert time.monotonic() - started < 5
    assert stream.aborted.is_set()
    assert not stream.late
    assert stream.closed.wait(60)


def test_an_entry_that_went_is_told_as_damage_is(fusor: Fusor) -> None:
    """An error of the stream travels to the fusor as it is."""

    class Gone(FakeStream):
        def receive(self) -> KVHandle:
            raise EvictedEntryError("gone")

    stream = Gone(lambda _: True)
    one = chunk(fusor, 17, seed=1)
    assert one.kv is not None
    remote = Segment(one.token_ids, StreamedKV(one.kv, lambda: stream))  # type: ignore[arg-type]  # as one
    with LayerLoader() as loader, pytest.raises(DamagedEntryError):
        fusor.fuse([Segment([*BOS, 3]), remote, Segment([5, 6])], RATIO, loader)
    assert stream.closed.wait(60)
