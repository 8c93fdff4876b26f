"""The cheapest device that adds no delay, from a price table."""

from pathlib import Path

import pytest
from profiles import LAYER_TOKEN_BYTES, linear_profile

from cacheblend.base.errors import ConfigError, InputError
from cacheblend.blend import FusionConfig
from cacheblend.loader import StorageDevice, compare_devices, read_price_table

LAYERS, ROW_S, TOKENS = 11, 1e-5, 1000


def device(name: str, bytes_per_s: float, price: float) -> StorageDevice:
    return StorageDevice(device=name, read_bytes_per_s=bytes_per_s, read_s=0.0, price_per_gb_month=price)


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
    choices = compare_devices(linear_profile(), devices, tokens=TOKENS, question_tokens=1, ratio=0.15, schedule=paper)
    assert [choice.device.device for choice in choices] == [
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
    assert enough.recompute_layer_s == pytest.approx(recompute_s, rel=0.05)  # the schedule falls, and the last layer is apart
    assert enough.full_s == pytest.approx(LAYERS * ROW_S * (TOKENS + 1))
    assert enough.price_per_month == pytest.approx(0.3 * LAYERS * TOKENS * LAYER_TOKEN_BYTES / 1e9)


def test_price_of_what_is_stored() -> None:
    """The price is that of all the tokens that are to be stored, whatever a request reuses."""
    (choice,) = compare_devices(linear_profile(), [device("disk", 1e9, 2.0)], tokens=10, stored_tokens=10**6)
    assert choice.price_per_month == pytest.approx(2.0 * LAYERS * LAYER_TOKEN_BYTES * 10**6 / 1e9)


def test_every_chunk_is_a_read() -> None:
    """A device with a slow first byte pays it for every chunk of a layer."""
    slow = StorageDevice(device="far", read_bytes_per_s=1e30, read_s=0.5, price_per_gb_month=0)
    (choice,) = compare_devices(linear_profile(), [slow], tokens=1001, chunk_tokens=500)
    assert choice.load_layer_s == pytest.approx(1.5)


@pytest.mark.parametrize(
    ("option", "value"), [("tokens", 0), ("chunk_tokens", 0), ("question_tokens", 0), ("stored_tokens", 0), ("ratio", 1.5)]
)
def test_bad_options(option: str, value: float) -> None:
    """A number outside its range is refused by name."""
    with pytest.raises(ConfigError, match=option):
        compare_devices(linear_profile(), [], **{"tokens": 10, option: value})


def test_the_example_table() -> None:
    """The table that comes with the package has devices from RAM to object storage."""
    devices = read_price_table()
    assert len(devices) >= 4
    assert devices[0].read_bytes_per_s > devices[-1].read_bytes_per_s
    assert devices[0].price_per_gb_month > devices[-1].price_per_gb_month


def test_a_table_of_ones_own(tmp_path: Path) -> None:
    """Columns may stand in any order, comments and empty lines anywhere, and read_s may be left out."""
    path = tmp_path / "prices.csv"
    path.write_text("# mine\nprice_per_gb_month,device,read_bytes_per_s,note\n\n0.1,disk,1e9,cheap\n# later\n2,ram,2e10,\n")
    disk, ram = read_price_table(path)
    assert disk == device("disk", 1e9, 0.1)
    assert ram == device("ram", 2e10, 2)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("device,read_bytes_per_s\ndisk,1e9\n", "lacks the columns price_per_gb_month"),
        ("", "lacks the columns"),
        ("device,read_bytes_per_s,price_per_gb_month\n", "no devices"),
        ("device,read_bytes_per_s,price_per_gb_month\n# none\n\ndisk,fast,1\n", "line 4 .*read_bytes_per_s='fast'"),
        ("device,read_bytes_per_s,price_per_gb_month\ndisk,0,1\n", "line 2 .*read_bytes_per_s='0'"),
        ("device,read_bytes_per_s,price_per_gb_month\ndisk,1e9,-1\n", "price_per_gb_month='-1'"),
        ("device,read_bytes_per_s,price_per_gb_month\ndisk,1e9\n", "price_per_gb_month=None"),
        ("device,read_bytes_per_s,price_per_gb_month\ndisk,1e9,inf\n", "price_per_gb_month='inf'"),
        ("device,read_bytes_per_s,price_per_gb_month\n,1e9,1\n", "has no device"),
    ],
)
def test_a_bad_table(tmp_path: Path, content: str, message: str) -> None:
    """A table with a missing column or a value that cannot be is refused by line and column."""
    path = tmp_path / "prices.csv"
    path.write_text(content)
    with pytest.raises(InputError, match=message):
        read_price_table(path)


def test_no_table(tmp_path: Path) -> None:
    """A table that is not there is refused by its path."""
    with pytest.raises(InputError, match=r"none\.csv"):
        read_price_table(tmp_path / "none.csv")
