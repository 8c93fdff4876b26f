"""The cheapest device that adds no delay, from a price table."""

import pytest
from profiles import LAYER_TOKEN_BYTES, linear_profile

from cacheblend.blend import FusionConfig
from cacheblend.loader import compare_devices
from cacheblend.loader.storage_plan import StorageDevice

LAYERS, ROW_S, TOKENS = 11, 1e-5, 1000


def device(name: str, bytes_per_s: float, price: float) -> StorageDevice:
    return StorageDevice(name, bytes_per_s, 0.0, price)


def test_the_papers_figure() -> None:
    """Of the devices whose loading hides behind recompute at 15 %, the cheapest comes first; slower ones add delay."""
    layer_bytes = TOKENS * LAYER_TOKEN_BYTES
    recompute_s = 0.15 * TOKENS * ROW_S
    devices = [
        device("fast and dear", layer_bytes / (recompute_s / 10), 4.0),
        device("just fast enough", layer_bytes / recompute_s, 0.3),
        device("slow and cheap", layer_bytes / (4 * recompute_s), 0.1),
        device("fast enough, dearer", layer_bytes / recompute_s, 0.5),
    ]
    paper = FusionConfig(selector="gradual").schedule
    choices = compare_devices(linear_profile(), devices, tokens=TOKENS, stored_tokens=TOKENS, ratio=0.15, schedule=paper)
    assert [choice.device for choice in choices] == [
        "slow and cheap",
        "just fast enough",
        "fast enough, dearer",
        "fast and dear",
    ]
    assert [choice.adds_no_delay for choice in choices] == [False, True, True, True]
    slow, enough, *_ = choices
    assert slow.delay_s > 5 * recompute_s
    assert enough.delay_s == pytest.approx(0, abs=1e-9)
    assert enough.load_layer_s == pytest.approx(recompute_s)
    assert enough.price_per_month == pytest.approx(0.3 * LAYERS * TOKENS * LAYER_TOKEN_BYTES / 1e9)


def test_price_of_what_is_stored() -> None:
    """The price is that of all the tokens that are to be stored, whatever a request reuses."""
    (choice,) = compare_devices(linear_profile(), [device("disk", 1e9, 2.0)], tokens=10, stored_tokens=10**6)
    assert choice.price_per_month == pytest.approx(2.0 * LAYERS * LAYER_TOKEN_BYTES * 10**6 / 1e9)


def test_every_chunk_is_a_read() -> None:
    """A device with a slow first byte pays it for every chunk of a layer."""
    slow = StorageDevice("far", 1e30, 0.5, 0)
    (choice,) = compare_devices(linear_profile(), [slow], tokens=1001, chunk_tokens=500, stored_tokens=1)
    assert choice.load_layer_s == pytest.approx(1.5)


def test_the_example_table() -> None:
    """The example devices go from object storage to RAM: the dearer a device, the faster."""
    choices = compare_devices(linear_profile(), tokens=1000, stored_tokens=1000)
    assert len(choices) >= 4
    load_s = [choice.load_layer_s for choice in choices]
    assert load_s == sorted(load_s, reverse=True)
