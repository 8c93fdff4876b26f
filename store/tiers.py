"""Tiers: the one in RAM, which holds copies, what it has in common with NVMe, `Placement`, a pinned entry's KV, and statistics.

NVMe (nvme_tier.py) holds every entry. A remote tier (remote.py) is read by `KVStore.fetch` only.

Shapes: H KV heads, T tokens, D head size, B bytes of a head's vector.
"""

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import ClassVar, Protocol, TypeVar

import torch

from cacheblend.base.errors import DamagedEntryError, StoreError
from cacheblend.base.memory import Bytes

from .chunk import EncodedLayer, PlainKV, check_shape
from .codecs import LayerPair
from .entry import EncodedEntry
from .entry_file import EntryFile
from .remote import RemoteStats

T = TypeVar("T")
RAM, NVME = "ram", "nvme"


class Pins:
    """Counts of pins by digest, and the digests that are being evicted; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pinned: Counter[str] = Counter()
        self._evicting: set[str] = set()

    @contextmanager
    def hold(self, digests: Sequence[str]) -> Iterator[None]:
        """Spare entries from eviction; look them up after this, since one that is being evicted already still goes."""
        with self._lock:
            self._pinned.update(digests)
        try:
            yield
        finally:
            with self._lock:
                self._pinned -= Counter(digests)

    def is_pinned(self, digest: str) -> bool:
        return digest in self._pinned

    def begin_evict(self, digest: str) -> bool:
        """Mark an entry for eviction; False where it is pinned."""
        with self._lock:
            if digest in self._pinned:
                return False
            self._evicting.add(digest)
            return True

    def is_evicting(self, digest: str) -> bool:
        """Whether the entry counts as gone although its row and file are still there."""
        return digest in self._evicting

    def end_evict(self, digests: Iterable[str]) -> None:
        """Unmark entries: their eviction is done, or it failed."""
        with self._lock:
            self._evicting.difference_update(digests)


class AdmissionFilter:
    """Second-hit filter: remembers the last names that it was asked about. Thread-safe.

    Args:
        limit: weight of all that is remembered together; what was asked about longest ago is forgotten first.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._weights: OrderedDict[str, int] = OrderedDict()
        self._total = 0

    def admits(self, name: str, weight: int = 1) -> bool:
        """Whether the name was asked about before, and not forgotten since; it is remembered from now on."""
        with self._lock:
            before = self._weights.pop(name, None)
            self._weights[name] = weight
            self._total += weight - (before or 0)
            while self._total > self._limit:
                self._total -= self._weights.popitem(last=False)[1]
            return before is not None


# Where a tier holds it, open for reading by several threads: in memory, or on a disk.
StoredEntry = EncodedEntry | EntryFile


class KVTier(Protocol):
    """RAM or NVMe: holds entries by digest, up to a budget, the least recently used evicted first. Thread-safe."""

    name: ClassVar[str]  # in placements, statistics and profiles
    in_memory: ClassVar[bool]  # whether reading a layer is no more than a copy: no device to wait for, nothing to decompress
    budget_bytes: int
    evictions: int

    def set_aside(self, digest: str, layers: Iterable[int] = ()) -> None:
        """Drop an entry of which these layers, or the header, were read damaged."""

    def size(self) -> tuple[int, int]:
        """Number of entries, and their bytes."""


class RamTier:
    """Copies in memory: entries by digest, the least recently used dropped first (paper §5.1)."""

    name: ClassVar[str] = RAM
    in_memory: ClassVar[bool] = True

    def __init__(self, budget_bytes: int, pins: Pins) -> None:
        self.budget_bytes, self._pins = budget_bytes, pins
        self.evictions = 0
        self._lock = threading.Lock()
        self._entries: OrderedDict[str, EncodedEntry] = OrderedDict()
        self._bytes = 0
        self._recent_reads = AdmissionFilter(budget_bytes)

    def __contains__(self, digest: str) -> bool:
        return digest in self._entries

    def size(self) -> tuple[int, int]:
        return len(self._entries), self._bytes

    def open(self, digest: str) -> EncodedEntry | None:
        """The entry, noted as used; None for a miss."""
        with self._lock:
            entry = self._entries.get(digest)
            if entry is not None:
                self._entries.move_to_end(digest)
            return entry

    def put(self, entry: EncodedEntry) -> bool:
        """Hold the entry itself; False, and nothing evicted, where the budget less what is pinned has no room for it."""
        digest = entry.info.key.digest
        with self._lock:
            if digest in self._entries:
                self._entries.move_to_end(digest)
                return True
            excess_bytes, victims = self._bytes + entry.nbytes - self.budget_bytes, list[str]()
            for old, held in self._entries.items():
                if excess_bytes <= 0:
                    break
                if not self._pins.is_pinned(old):
                    victims.append(old)
                    excess_bytes -= held.nbytes
            if excess_bytes > 0:
                return False
            for victim in victims:
                self._drop(victim)
            self.evictions += len(victims)
            self._entries[digest] = entry
            self._bytes += entry.nbytes
            return True

    def admits(self, digest: str, entry_bytes: int) -> bool:
        """Whether an entry that was read from NVMe is worth a copy.

        It is where there is room, or at most the budget in bytes was read since it was read before. So one pass over many
        entries that rarely come again copies and evicts nothing.
        """
        again = self._recent_reads.admits(digest, entry_bytes)
        return entry_bytes <= self.budget_bytes and (again or self._bytes + entry_bytes <= self.budget_bytes)

    def discard(self, digest: str) -> None:
        """Remove the entry, pinned or not; a reader still holds its memory."""
        with self._lock:
            if digest in self._entries:
                self._drop(digest)

    def set_aside(self, digest: str, layers: Iterable[int] = ()) -> None:
        self.discard(digest)

    def _drop(self, digest: str) -> None:
        self._bytes -= self._entries.pop(digest).nbytes


def read_entry(entry: StoredEntry, tier: KVTier) -> EncodedEntry | None:
    """Read all layers of an entry, and close it; None for a damaged one, which is set aside."""
    try:
        return entry.load()
    except DamagedEntryError:
        tier.set_aside(entry.info.key.digest, range(entry.info.num_layers))
        return None
    finally:
        entry.close()


OpenedEntry = tuple[StoredEntry, KVTier]


class Placement(PlainKV):
    """The KV of an entry that stays where it is until its pin is released: a `KVHandle`.

    In RAM it holds the entry's memory, on NVMe an open file, so that the bytes remain while somebody reads them.
    """

    def __init__(self, entry: StoredEntry, tier: KVTier) -> None:
        info = entry.info
        self._entry: StoredEntry | None = entry
        self._info, self._tier = info, tier
        self.key, self.token_ids, self.prefix_ids, self.context = info.key, info.token_ids, info.prefix_ids, info.context
        self.model, self.dtype, self.num_layers, self.nbytes = info.model, info.dtype, info.num_layers, info.nbytes
        self.tier, self.in_memory, self._is_raw = tier.name, tier.in_memory, info.key.codec == "raw"

    @property
    def entry(self) -> StoredEntry:
        """The entry itself; a `StoreError` after the pin was released."""
        entry = self._entry
        if entry is None:
            raise StoreError(f"the placement of {self.key} was read after its pin was released; read inside `with store.pin`")
        return entry

    def heads(self, layer: int) -> tuple[int, int]:
        return self._info.heads[layer]

    def layer_bytes(self, layer: int) -> int:
        return self._info.sizes[layer]

    def read_layer(self, layer: int) -> LayerPair:
        """Read a layer. A damaged entry is set aside; after the pin was released this raises a `StoreError`."""
        return self._info.decode(layer, self._read_encoded(layer))

    def read_layer_into(self, layer: int, to_2HTB: Bytes) -> None:
        """Read raw bytes of a file straight into the memory; others are decoded and copied."""
        if self._is_raw:
            entry = self.entry
            check_shape(self, layer, to_2HTB)
            self._report(layer, entry.read_layer_into, to_2HTB)
        else:
            super().read_layer_into(layer, to_2HTB)

    def copy_layer(self, layer: int, to_2HTD: torch.Tensor) -> None:
        if self._is_raw:
            to_2HTD.copy_(self._read_encoded(layer))
        else:
            super().copy_layer(layer, to_2HTD)

    def encoded_layer(self, layer: int) -> EncodedLayer | None:
        return None if self._is_raw else EncodedLayer(self._read_encoded(layer), partial(self._info.decode, layer))

    def release(self) -> None:
        """Let go of memory or file; a read that is under way ends well."""
        entry, self._entry = self._entry, None
        if entry is not None:
            entry.close()

    def _read_encoded(self, layer: int) -> torch.Tensor:
        return self._report(layer, self.entry.read_layer)

    def _report(self, layer: int, read: Callable[..., T], *to: Bytes) -> T:
        try:
            return read(layer, *to)
        except DamagedEntryError:
            self._tier.set_aside(self.key.digest, [layer])
            raise


@dataclass(frozen=True, slots=True)
class TierStats:
    """One tier: what it holds now, and hits and evictions since the store was opened by this process."""

    entries: int
    bytes: int
    budget_bytes: int
    hits: int
    evictions: int


@dataclass(frozen=True, slots=True)
class StoreStats:
    """A store's tiers, and what happened since it was opened by this process."""

    ram: TierStats  # its hits include entries that wait to be written
    nvme: TierStats  # whichever process wrote the entries
    misses: int  # keys that `get` and `pin` did not find
    damaged: int  # entries that were set aside
    pending_writes: int  # entries that wait to be written in the background
    pending_bytes: int
    failed_writes: int  # entries that the background could not write
    remote: RemoteStats | None = None  # None if there is no remote tier

    def as_dict(self) -> dict[str, object]:
        """Plain numbers and dicts, for JSON: a tier by its name."""
        return {name: value for name, value in asdict(self).items() if value is not None}
