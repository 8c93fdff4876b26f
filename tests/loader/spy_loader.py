"""A loader that notes what it fetches, and prompts whose chunks come from every tier."""

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from prompts import BOS, chunk, draw_ids

from cacheblend.blend import Fusor, Segment
from cacheblend.loader import LayerLoader, LoaderConfig
from cacheblend.loader.layer_loader import LayerBuffer
from cacheblend.store import ChunkKey, ChunkKV, KVHandle, KVStore

SEEDS = {"nvme": (1, 2), "ram": (3, 4), "memory": (5, 6)}
TOKENS = {1: 17, 2: 1, 3: 33, 4: 8, 5: 5, 6: 21}
LAYERS = 4


class SpyLoader(LayerLoader):
    """Notes the layers that are fetched; with a gate, every fetch waits until it is open."""

    def __init__(self, config: LoaderConfig | None = None, gate: threading.Event | None = None) -> None:
        super().__init__(config)
        self.fetched: list[int] = []
        self.gate = gate

    def fetch_kv(self, kv: KVHandle, layer: int, buffer: LayerBuffer, start: int, stop: int) -> None:
        self.fetched.append(layer)
        if self.gate is not None:
            assert self.gate.wait(60)
        super().fetch_kv(kv, layer, buffer, start, stop)


class Elsewhere:
    """A chunk's KV on another machine, say."""

    tier, in_memory = "elsewhere", False

    def __init__(self, kv: ChunkKV) -> None:
        self._kv = kv

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kv, name)


def elsewhere(fusor: Fusor, tokens: int, seed: int) -> Segment:
    """A chunk whose KV threads load ahead."""
    kv = chunk(fusor, tokens, seed).kv
    assert isinstance(kv, ChunkKV)
    return Segment(kv.token_ids, Elsewhere(kv))


def key_of(segment: Segment) -> ChunkKey:
    kv = segment.kv
    assert kv is not None
    assert kv.model is not None
    return ChunkKey.of(kv.token_ids, prefix_ids=kv.prefix_ids, model=kv.model)


@contextmanager
def prompts(fusor: Fusor, stores: dict[str, KVStore], kinds: list[str]) -> Iterator[tuple[list[Segment], list[Segment]]]:
    """The same prompt twice: with the KV where `kinds` says, and with all of it in memory."""
    head = [*BOS, *draw_ids(5, seed=0)]
    spread, resident = ([Segment(head, fusor.precompute(head), exact=True)] for _ in range(2))
    used: Counter[str] = Counter()
    with ExitStack() as pins:
        for number, kind in enumerate(kinds):
            if kind == "hole":
                spread.append(Segment(draw_ids(9, seed=20 + number)))
                resident.append(spread[-1])
                continue
            seed = SEEDS[kind][used[kind] % 2]
            used[kind] += 1
            segment = chunk(fusor, TOKENS[seed], seed)
            resident.append(segment)
            if kind != "memory":
                (placement,) = pins.enter_context(stores[kind].pin([key_of(segment)]))
                assert placement is not None
                assert placement.tier == kind
                segment = Segment(segment.token_ids, placement)
            spread.append(segment)
        for segments in (spread, resident):
            segments.append(Segment(draw_ids(7, seed=30)))
        yield spread, resident
