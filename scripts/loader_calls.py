"""A model, a store with chunks of it, and the calls of `bench_loader.py` that are timed."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from bench_fusor import make_prompts

from cacheblend.blend import FusionConfig, Fusor, Prompt, Segment
from cacheblend.loader import LayerLoader, LoaderConfig
from cacheblend.store import ChunkKey, ChunkKV, KVStore

CHUNK_TOKENS = 512


class Bench:
    """A model, a store with chunks of it, and prompts over them."""

    def __init__(self, fusor: Fusor, store: KVStore, config: LoaderConfig, chunks: int) -> None:
        self.fusor, self.store, self.config = fusor, store, config
        head, *stored, question = make_prompts(fusor, chunks, CHUNK_TOKENS, 32, 1)[0]
        self.head, self.question = head, question
        self.keys = []
        for segment in stored:
            assert isinstance(segment.kv, ChunkKV)
            kv = segment.kv
            key = ChunkKey.of(kv.token_ids, prefix_ids=kv.prefix_ids, context=kv.context, model=fusor.fingerprint)
            store.put(key, segment.kv)
            self.keys.append(key)
        self.resident = stored

    @contextmanager
    def placed(self, chunks: int) -> Iterator[list[Segment]]:
        """Segments of a prompt whose chunks are in the store."""
        with self.store.pin(self.keys[:chunks]) as placements:
            found = [placement for placement in placements if placement is not None]
            yield [self.head, *(Segment(placement.token_ids, placement) for placement in found), self.question]

    def load_alone_s(self, segments: Sequence[Segment], loader: LayerLoader, *, layer_0: bool = False) -> float:
        """Seconds until every layer is there, nothing computed beside."""
        geometry, prompt = self.fusor.decoder.geometry, Prompt.of(segments)
        with loader:
            started = time.perf_counter()
            loader.start(prompt, geometry, reuse_layer_0=layer_0)
            cache = [loader.synchronize(layer) for layer in range(geometry.layers)]
            took_s = time.perf_counter() - started
            del cache  # held so long, as a request does: the first touch of new memory is a part of both sides
            return took_s

    def fuse_s(self, segments: Sequence[Segment], ratio: float, loader: LayerLoader | None = None) -> float:
        """Seconds of a fuse to the first logits."""
        started = time.perf_counter()
        if loader is None:
            self.fusor.fuse(segments, FusionConfig(recompute_ratio=ratio))
        else:
            with loader:
                self.fusor.fuse(segments, FusionConfig(recompute_ratio=ratio), loader)
        return time.perf_counter() - started

    def full_s(self, chunks: int) -> float:
        """Seconds of a full prefill."""
        token_ids = [token for segment in (self.head, *self.resident[:chunks], self.question) for token in segment.token_ids]
        started = time.perf_counter()
        self.fusor.prefill(token_ids)
        return time.perf_counter() - started


def medians(calls: dict[str, Callable[[], float]], repeats: int, in_a_row: int = 1) -> dict[str, float]:
    """Median of every call, in turns, after a warm-up each; with `in_a_row` so many of a turn count, after two that do not."""
    results: dict[str, list[float]] = {name: [] for name in calls}
    for repeat in range(repeats + 1):
        for name, call in calls.items():
            turn = [call() for _ in range(1 if in_a_row == 1 else 2 + in_a_row)][-in_a_row:]
            if repeat or not repeats:
                results[name] += turn
    return {name: statistics.median(found) for name, found in results.items()}
