"""Room for layers, small and large."""

import gc

import pytest
import torch

from cacheblend.blend import KVGeometry
from cacheblend.loader.layer_memory import HUGE_PAGE_BYTES, new_layer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 4099])
def test_room_is_whole_and_ones_own(dtype: torch.dtype, tokens: int) -> None:
    """Keys and values have the layer's shape, do not overlap, and stay after everything else over their memory is gone."""
    geometry = KVGeometry(1, 4, 64, dtype, torch.device("cpu"))
    assert geometry.layer_bytes(4099) > HUGE_PAGE_BYTES
    assert geometry.layer_bytes(1) < HUGE_PAGE_BYTES
    layer = new_layer(geometry, tokens)
    k_1HND, v_1HND = layer.k_1HND, layer.v_1HND
    del layer
    k_1HND.fill_(1)
    v_1HND.fill_(2)
    gc.collect()
    other = new_layer(geometry, tokens)
    other.k_1HND.fill_(3)
    other.v_1HND.fill_(3)
    for x_1HND, value in ((k_1HND, 1), (v_1HND, 2)):
        assert x_1HND.shape == (1, 4, tokens, 64)
        assert x_1HND.dtype == dtype
        assert bool((x_1HND == value).all())
    del v_1HND
    gc.collect()
    assert bool((k_1HND == 1).all())
