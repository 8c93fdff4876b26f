"""Room for layers, small and large."""

import gc

import pytest
import torch

from cacheblend.base.memory import HUGE_PAGE_BYTES, BufferPool
from cacheblend.blend import KVGeometry, LayerKV, interfaces


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 4099])
def test_room_is_whole_and_ones_own(dtype: torch.dtype, tokens: int) -> None:
    """Keys and values have the layer's shape, do not overlap, and stay after everything else over their memory is gone."""
    geometry = KVGeometry(1, 4, 64, dtype, torch.device("cpu"))
    assert geometry.layer_bytes(4099) > HUGE_PAGE_BYTES
    assert geometry.layer_bytes(1) < HUGE_PAGE_BYTES
    layer = LayerKV.empty(geometry, tokens)
    k_1HND, v_1HND = layer.k_1HND, layer.v_1HND
    del layer
    k_1HND.fill_(1)
    v_1HND.fill_(2)
    gc.collect()
    other = LayerKV.empty(geometry, tokens)
    other.k_1HND.fill_(3)
    other.v_1HND.fill_(3)
    for x_1HND, value in ((k_1HND, 1), (v_1HND, 2)):
        assert x_1HND.shape == (1, 4, tokens, 64)
        assert x_1HND.dtype == dtype
        assert bool((x_1HND == value).all())
    del v_1HND
    gc.collect()
    assert bool((k_1HND == 1).all())


def test_memory_is_used_again_once_nobody_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another prompt of about the same length takes what the last one left; a much shorter one does not, and a bound holds."""
    pool = BufferPool(256 * 2**20, slack=2)
    monkeypatch.setattr(interfaces, "LAYERS", pool)
    geometry = KVGeometry(1, 4, 64, torch.float32, torch.device("cpu"))
    layer = LayerKV.empty(geometry, 4000)
    address, values = layer.k_1HND.data_ptr(), layer.v_1HND
    del layer
    assert not pool.cached
    del values
    assert LayerKV.empty(geometry, 1200).k_1HND.data_ptr() != address
    assert LayerKV.empty(geometry, 3900).k_1HND.data_ptr() == address
    pool.max_cached_bytes = 20 * 2**20
    many = [LayerKV.empty(geometry, 4000) for _ in range(5)]
    del many
    assert sum(map(len, pool.cached)) == 2 * geometry.layer_bytes(4000 + interfaces.GROWTH_TOKENS)
