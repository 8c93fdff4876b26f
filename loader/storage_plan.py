"""A storage plan: the cheapest device of a price table that adds no delay at a given ratio (paper §5.1, figure 10b)."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from cacheblend.base.errors import ConfigError, InputError
from cacheblend.blend import FusionConfig, Schedule

from .estimators import LoadEstimator, Pipeline, RecomputeEstimator
from .layer_loader import LoaderConfig
from .profile import Profile, TierSpeed

NUMBERS = ("read_bytes_per_s", "read_s", "price_per_gb_month")
OPTIONAL = {"read_s": 0.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageDevice:
    """One row of a price table.

    Args:
        device: its name.
        read_bytes_per_s: throughput of reading.
        read_s: seconds before a read's first byte; 0 where the table does not say.
        price_per_gb_month: of 10^9 bytes, in whatever currency the table is in.
    """

    device: str
    read_bytes_per_s: float
    read_s: float
    price_per_gb_month: float

    @property
    def speed(self) -> TierSpeed:
        """The device as a tier."""
        return TierSpeed(read_s=self.read_s, bytes_per_s=self.read_bytes_per_s)


def read_price_table(path: Path | None = None) -> list[StorageDevice]:
    """The devices of a CSV file with the columns device, read_bytes_per_s, price_per_gb_month and, if known, read_s.

    Lines that begin with # are left out. Without a path it is the example that comes with the package.

    Raises:
        InputError: no file, a missing column, or a value that cannot be; the message names line and column.
    """
    name = str(path) if path is not None else "devices.csv"
    try:
        text = (path if path is not None else files("cacheblend.loader").joinpath("devices.csv")).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"the price table {name} cannot be read: {error}") from error
    lines = [(number, line) for number, line in enumerate(text.splitlines(), start=1) if line.strip() and line[0] != "#"]
    return list(_parse(name, lines))


def _parse(name: str, lines: list[tuple[int, str]]) -> Iterable[StorageDevice]:
    rows = csv.DictReader((line for _, line in lines), skipinitialspace=True)
    missing = {"device", *NUMBERS} - set(OPTIONAL) - set(rows.fieldnames or ())
    if missing:
        raise InputError(
            f"the price table {name} lacks the columns {', '.join(sorted(missing))}; "
            "it needs device, read_bytes_per_s and price_per_gb_month"
        )
    found = False
    for (number, _), row in zip(lines[1:], rows, strict=False):
        found = True
        values = {column: _number(row.get(column), column, f"line {number} of {name}") for column in NUMBERS}
        if not row["device"]:
            raise InputError(f"line {number} of {name} has no device; name it")
        yield StorageDevice(device=row["device"], **values)
    if not found:
        raise InputError(f"the price table {name} has no devices; give at least one line")


def _number(text: str | None, column: str, where: str) -> float:
    if not text and column in OPTIONAL:
        return OPTIONAL[column]
    try:
        value = float(text or "")
    except ValueError:
        value = math.nan
    lowest = "above 0" if column == "read_bytes_per_s" else "0 or above"
    if not math.isfinite(value) or value < 0 or (value == 0 and column == "read_bytes_per_s"):
        raise InputError(f"{where} has {column}={text!r}; give a number {lowest}")
    return value


NO_DELAY = 0.01  # of the prefill with all KV there already


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceChoice:
    """Time of a request with its KV on a device.

    Args:
        device: the device.
        load_layer_s: seconds to load one layer, the paper's T_load.
        recompute_layer_s: seconds to compute a later layer but the last in the mean, the paper's T_recompute.
        prefill_s: seconds to the first logits, loading beside computing.
        delay_s: the part of them that the device adds over KV that is there already.
        full_s: seconds of a full prefill.
        adds_no_delay: `delay_s` is within one per cent.
        price_per_month: of the KV that is to be stored.
    """

    device: StorageDevice
    load_layer_s: float
    recompute_layer_s: float
    prefill_s: float
    delay_s: float
    full_s: float
    adds_no_delay: bool
    price_per_month: float


def compare_devices(
    profile: Profile,
    devices: Iterable[StorageDevice],
    *,
    tokens: int,
    ratio: float = LoaderConfig().quality_ratio,
    chunk_tokens: int = 512,
    question_tokens: int = 32,
    stored_tokens: int | None = None,
    schedule: Schedule | None = None,
) -> list[DeviceChoice]:
    """Every device, the cheapest first; the first that adds no delay is the one to take.

    Args:
        profile: of the model on the device that computes.
        devices: to choose from.
        tokens: reused tokens of a request.
        ratio: recompute ratio.
        chunk_tokens: tokens of a chunk; each is a read a layer.
        question_tokens: fresh tokens of a request.
        stored_tokens: tokens whose KV is to be stored, for the price; by default those of one request.
        schedule: that the selector follows; left out, that of `FusionConfig()`.

    Raises:
        ConfigError: a number outside its range.
    """
    stored_tokens = tokens if stored_tokens is None else stored_tokens
    counts = {
        "tokens": tokens,
        "chunk_tokens": chunk_tokens,
        "question_tokens": question_tokens,
        "stored_tokens": stored_tokens,
    }
    for name, value in counts.items():
        if value < 1:
            raise ConfigError(name, value, "a whole number of at least 1")
    if not 0 <= ratio <= 1:
        raise ConfigError("ratio", ratio, "a number from 0 to 1")
    recompute = RecomputeEstimator(profile, schedule or FusionConfig().schedule)
    steps = recompute.steps(ratio, tokens, question_tokens)
    compute_s = [step_s for step_s, _ in steps]
    layer_s = recompute.layer_s(ratio, tokens, question_tokens)
    later_s = layer_s[1:-1] or layer_s[1:]  # the last one is much shorter
    whole, rest = divmod(tokens, chunk_tokens)
    sizes = [*[chunk_tokens] * whole, *([rest] if rest else [])]
    reads = [("", size * profile.layer_token_bytes) for size in sizes]
    lookahead = LoaderConfig().lookahead_layers((tokens + question_tokens) * profile.layer_token_bytes)
    choices = []
    for device in devices:
        load_s = sum(LoadEstimator({"": device.speed}).seconds(reads).values())
        loads_s = [load_s * is_read for _, is_read in steps]
        prefill_s = Pipeline.of(loads_s, compute_s, lookahead).total_s
        choices.append(
            DeviceChoice(
                device=device,
                load_layer_s=load_s,
                recompute_layer_s=sum(later_s) / max(1, len(later_s)),
                prefill_s=prefill_s,
                delay_s=prefill_s - sum(compute_s),
                full_s=recompute.prefill_s(tokens + question_tokens),
                adds_no_delay=prefill_s - sum(compute_s) <= NO_DELAY * sum(compute_s),
                price_per_month=stored_tokens * profile.layers * profile.layer_token_bytes / 1e9 * device.price_per_gb_month,
            )
        )
    return sorted(choices, key=lambda choice: (choice.price_per_month, choice.prefill_s))
