import threading
import time
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prompts import BOS, chunk, draw_ids, largest_difference
from spy_loader import LAYERS, SEEDS, TOKENS, SpyLoader, elsewhere, prompts
from waiting import loading, wait_until

from cacheblend.base.memory import Bytes
from cacheblend.blend import FusionConfig, FusionResult, Fusor, IncompatibleKVError, Prompt, Segment
from cacheblend.loader import LayerLoader, LoaderConfig
from cacheblend.loader.layer_loader import LayerBuffer
from cacheblend.store import ChunkKey, ChunkKV, KVHandle, KVStore, Placement


def assert_same(one: FusionResult, other: FusionResult) -> None:
    assert torch.equal(one.logits, other.logits)
    assert largest_difference(one.cache, other.cache) == 0
    assert torch.equal(one.deviation, other.deviation)
    assert all(torch.equal(a, b) for a, b in zip(one.recomputed, other.recomputed, strict=True))
    assert (one.exact_tokens, one.reusable_tokens) == (other.exact_tokens, other.reusable_tokens)


@given(
    kinds=st.lists(st.sampled_from(["nvme", "ram", "memory", "hole"]), max_size=6),
    ratio=st.sampled_from([0.0, 0.15, 0.6, 1.0]),
    lookahead=st.integers(1, 5),
    in_flight=st.integers(1, 4),
)
@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_mixed_tiers(
    fusor: Fusor, stores: dict[str, KVStore], kinds: list[str], ratio: float, lookahead: int, in_flight: int
) -> None:
    """Segments of either tier, in memory and without KV, in any order, give bit for bit what KV in memory gives."""
    config = FusionConfig(recompute_ratio=ratio)
    with prompts(fusor, stores, kinds) as (spread, resident):
        tokens = sum(len(segment.token_ids) for segment in spread)
        ahead = LoaderConfig(lookahead_bytes=lookahead * fusor.decoder.geometry.layer_bytes(tokens), reads_in_flight=in_flight)
        with LayerLoader(ahead) as loader:
            loaded = fusor.fuse(spread, config, loader)
        assert_same(loaded, fusor.fuse(resident, config))


@pytest.mark.parametrize(
    ("selector", "ratio", "layer_0_is_read"),
    [("gradual", 0.0, True), ("gradual", 0.15, False), ("gradual", 1.0, False), ("question_attention", 0.15, True)],
)
def test_each_layer_is_read_once(
    fusor: Fusor,
    stores: dict[str, KVStore],
    monkeypatch: pytest.MonkeyPatch,
    selector: str,
    ratio: float,
    layer_0_is_read: bool,
) -> None:
    """Layer 0 of the store is read where not all tokens run through it, and every other layer of every chunk exactly once."""
    reads: Counter[tuple[str, int]] = Counter()
    read_layer_into, copy_layer = Placement.read_layer_into, Placement.copy_layer

    def counted_into(placement: Placement, layer: int, to_2HTB: Bytes) -> None:
        reads[placement.key.digest, layer] += 1
        read_layer_into(placement, layer, to_2HTB)

    def counted(placement: Placement, layer: int, to_2HTD: torch.Tensor) -> None:
        reads[placement.key.digest, layer] += 1
        copy_layer(placement, layer, to_2HTD)

    monkeypatch.setattr(Placement, "read_layer_into", counted_into)  # from NVMe
    monkeypatch.setattr(Placement, "copy_layer", counted)  # from RAM
    with prompts(fusor, stores, ["nvme", "ram", "nvme", "ram"]) as (spread, _), LayerLoader() as loader:
        fusor.fuse(spread, FusionConfig(recompute_ratio=ratio, selector=selector), loader)
        keys = [segment.kv.key.digest for segment in spread if isinstance(segment.kv, Placement)]
    layers = range(0 if layer_0_is_read else 1, LAYERS)
    assert reads == Counter({(digest, layer): 1 for digest in keys for layer in layers})


def test_exact_segments_are_read_at_layer_0(fusor: Fusor, stores: dict[str, KVStore]) -> None:
    """An exact prefix in the store is read in every layer, and with misses alone after it nothing else is."""
    ids = [*BOS, *draw_ids(11, seed=40)]
    kv = fusor.precompute(ids)
    key = ChunkKey.of(ids, model=fusor.fingerprint)
    stores["nvme"].put(key, kv)
    question = Segment(draw_ids(6, seed=41))
    with stores["nvme"].pin([key]) as (placement,), SpyLoader() as loader:
        fused = fusor.fuse([Segment(ids, placement, exact=True), question], source=loader)
    assert loader.fetched == list(range(LAYERS))
    whole = fusor.prefill([*ids, *question.token_ids])
    assert (fused.logits - whole.logits).abs().max() <= 1e-4
    assert largest_difference(fused.cache, whole.cache) <= 1e-4


def test_counts_bytes_and_seconds(fusor: Fusor, stores: dict[str, KVStore]) -> None:
    """A loader tells, for each tier, the stored bytes that it read, and seconds for them."""
    with prompts(fusor, stores, ["nvme", "ram", "ram", "hole"]) as (spread, _), LayerLoader() as loader:
        fusor.fuse(spread, source=loader)
        head, *_ = spread
        token_bytes = fusor.decoder.geometry.layer_bytes(1)
    nvme, ram = TOKENS[SEEDS["nvme"][0]], sum(TOKENS[seed] for seed in SEEDS["ram"])
    expected = {"memory": LAYERS * len(head.token_ids), "nvme": LAYERS * nvme, "ram": LAYERS * ram}
    assert loader.bytes_by_tier == {tier: tokens * token_bytes for tier, tokens in expected.items()}
    assert loader.load_s > 0


def test_what_is_in_memory_is_copied_when_it_is_asked_for(fusor: Fusor) -> None:
    """On a CPU no thread copies ahead: it would take a processor from those that compute."""
    prompt = Prompt.of([chunk(fusor, 8, seed=1), Segment(draw_ids(3, seed=2))])
    with SpyLoader() as loader:
        loader.start(prompt, fusor.decoder.geometry, reuse_layer_0=True)
        for layer in range(LAYERS):
            assert loader.fetched == list(range(layer))
            loader.synchronize(layer)
        assert not loading()


@pytest.mark.parametrize("room", [0, 1, 2, 3])
def test_lookahead_is_bounded(fusor: Fusor, room: int) -> None:
    """A fusor that is slower than the loading finds exactly the whole layers that fit the look-ahead, at least one."""
    prompt = Prompt.of([elsewhere(fusor, 8, seed=1), Segment(draw_ids(3, seed=2))])
    layer_bytes = fusor.decoder.geometry.layer_bytes(11)
    with SpyLoader(LoaderConfig(lookahead_bytes=(room + 1) * layer_bytes - 1)) as loader:
        loader.start(prompt, fusor.decoder.geometry, reuse_layer_0=True)
        for layer in range(LAYERS):
            ahead = min(layer + max(room, 1), LAYERS)
            wait_until(lambda ahead=ahead: len(loader.fetched) >= ahead)
            time.sleep(0.02)  # time for a layer too many
            assert loader.fetched == list(range(ahead))
            loader.synchronize(layer)


@pytest.mark.parametrize("most", [1, 3])
def test_reads_in_flight(fusor: Fusor, stores: dict[str, KVStore], most: int) -> None:
    """As many reads of files are under way at once as the config says, of several layers where one has not that many."""
    gate = threading.Event()
    loading = SpyLoader(LoaderConfig(reads_in_flight=most), gate)
    with prompts(fusor, stores, ["nvme"] * 3) as (spread, _), loading as loader:
        prompt = Prompt.of(spread)
        loader.start(prompt, fusor.decoder.geometry, reuse_layer_0=True)
        wait_until(lambda: len(loader.fetched) == most)
        time.sleep(0.02)  # time for a read too many
        assert len(loader.fetched) == most
        gate.set()
        for layer in range(LAYERS):
            loader.synchronize(layer)
    assert Counter(loader.fetched) == Counter(dict.fromkeys(range(LAYERS), len(prompt.cached())))


def test_one_fusion_each(fusor: Fusor) -> None:
    """A loader refuses a second fusion."""
    segments = [chunk(fusor, 8, seed=1), Segment(draw_ids(3, seed=2))]
    with LayerLoader() as loader:
        fusor.fuse(segments, source=loader)
        with pytest.raises(RuntimeError, match="one fusion"):
            fusor.fuse(segments, source=loader)


@pytest.mark.parametrize("make", [chunk, elsewhere])
def test_failure_while_loading(fusor: Fusor, make: Callable[..., Segment]) -> None:
    """Whatever goes wrong in a thread, or in the fusor's own copy, is raised by the fusion as it is."""

    class BrokenLoader(LayerLoader):
        def fetch_kv(self, kv: KVHandle, layer: int, buffer: LayerBuffer, start: int, stop: int) -> None:
            raise MemoryError(f"layer {layer}")

    with BrokenLoader() as loader, pytest.raises(MemoryError, match="layer 0"):
        fusor.fuse([make(fusor, 8, seed=1), Segment(draw_ids(3, seed=2))], source=loader)


@pytest.mark.parametrize(("heads", "head_dim", "layers"), [(1, 16, 4), (2, 8, 4), (2, 16, 3), (2, 16, 5)])
def test_kv_of_another_shape(fusor: Fusor, heads: int, head_dim: int, layers: int) -> None:
    """KV of unknown origin whose heads, head size or layers are not the model's is refused, not spread over the heads."""
    ids = draw_ids(6, seed=1)
    kv = ChunkKV([(torch.ones(heads, 6, head_dim),) * 2] * layers, ids)
    with LayerLoader() as loader, pytest.raises(IncompatibleKVError, match="precompute it with this model"):
        fusor.fuse([Segment(ids, kv), Segment(draw_ids(3, seed=2))], source=loader)


def test_other_kinds_of_kv(fusor: Fusor) -> None:
    """KV of a kind that the loader has not heard of is loaded by threads as its handle says, and counted by its tier."""
    here, question = chunk(fusor, 6, seed=1), Segment(draw_ids(3, seed=2))
    assert isinstance(here.kv, ChunkKV)
    with LayerLoader() as loader:
        fused = fusor.fuse([elsewhere(fusor, 6, seed=1), question], source=loader)
        assert loader.bytes_by_tier == {"elsewhere": here.kv.nbytes}
    assert torch.equal(fused.logits, fusor.fuse([here, question]).logits)
