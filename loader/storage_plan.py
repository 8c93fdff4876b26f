"""A storage plan: the cheapest device of a price table that adds no delay at a given ratio (paper §5.1, figure 10b)."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from cacheblend.blend import FusionConfig, Schedule

from .config import LoaderConfig
from .estimators import Pipeline, RecomputeEstimator, load_seconds
from .profile import Profile, TierSpeed

QUESTION_TOKENS = 32  # fresh ones of a request
NO_DELAY = 0.01  # of the prefill whose KV is in place already


@dataclass(frozen=True, slots=True)
class StorageDevice:
    """A device to read KV from. `read_s` is of a read's first byte; a price is of 10^9 bytes for a month, in any currency."""

    device: str
    read_bytes_per_s: float
    read_s: float
    price_per_gb_month: float


# Not quotes: orders of magnitude of what large clouds listed in late 2025, and of what one server reads from them.
EXAMPLE_DEVICES = (
    StorageDevice("RAM of the server", 20e9, 0, 4.00),
    StorageDevice("local NVMe (PCIe 4)", 6e9, 0.0001, 0.30),
    StorageDevice("network SSD at high throughput", 2e9, 0.0005, 0.125),
    StorageDevice("network SSD", 500e6, 0.001, 0.08),
    StorageDevice("network hard disks", 250e6, 0.01, 0.045),
    StorageDevice("object storage", 100e6, 0.05, 0.023),
)


class DeviceChoice(NamedTuple):
    """Time and price of a request whose KV is on a device."""

    device: str
    price_per_month: float  # of the stored KV
    load_layer_s: float  # the paper's T_load
    prefill_s: float  # to the first logits, loading beside computing
    delay_s: float  # the part of `prefill_s` that the device adds over KV that is in place already
    adds_no_delay: bool  # `delay_s` is within one per cent


def compare_devices(
    profile: Profile,
    devices: Iterable[StorageDevice] = EXAMPLE_DEVICES,
    *,
    tokens: int,
    ratio: float = LoaderConfig().quality_ratio,
    chunk_tokens: int = 512,
    stored_tokens: int,
    schedule: Schedule | None = None,
) -> list[DeviceChoice]:
    """Every device, the cheapest first; the first that adds no delay is the paper's choice.

    Args:
        profile: of the model on the device that computes.
        devices: to choose from.
        tokens: reused tokens of a request.
        ratio: recompute ratio, 0 to 1.
        chunk_tokens: tokens of a chunk; each chunk is a read a layer.
        stored_tokens: tokens whose KV is stored, for the price.
        schedule: of the selector; None for that of `FusionConfig()`.
    """
    steps = RecomputeEstimator(profile, schedule or FusionConfig().schedule).steps(ratio, tokens, QUESTION_TOKENS)
    compute_s = [step_s for step_s, _ in steps]
    chunks, last = divmod(tokens, chunk_tokens)
    reads = [("", size * profile.layer_token_bytes) for size in (*[chunk_tokens] * chunks, last) if size]
    lookahead = LoaderConfig().lookahead_layers((tokens + QUESTION_TOKENS) * profile.layer_token_bytes)
    stored_gb = stored_tokens * profile.layers * profile.layer_token_bytes / 1e9
    choices = []
    for device in devices:
        speed = TierSpeed(read_s=device.read_s, bytes_per_s=device.read_bytes_per_s)
        load_s = sum(load_seconds(reads, {"": speed}).values())
        prefill_s = Pipeline.from_layers([load_s * is_read for _, is_read in steps], compute_s, lookahead).total_s
        delay_s = prefill_s - sum(compute_s)
        no_delay = delay_s <= NO_DELAY * sum(compute_s)
        choices.append(DeviceChoice(device.device, stored_gb * device.price_per_gb_month, load_s, prefill_s, delay_s, no_delay))
    return sorted(choices, key=lambda choice: (choice.price_per_month, choice.prefill_s))
