"""Storage devices that KV may live on, and what they cost: a price table in CSV."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from cacheblend.base.errors import InputError

from .profile import TierSpeed

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
