"""An entry in the remote tier, and one layer of it that came; the bytes are checked before they are used."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from cacheblend.base.errors import EvictedEntryError, StoreError
from cacheblend.base.memory import Bytes, host_bytes
from cacheblend.store.entry import EncodedEntry

from .object_format import ObjectFormat, ObjectLayout

if TYPE_CHECKING:
    from .backend import ObjectRange


class EntrySource(Protocol):
    """The tier as its entries see it."""

    format: ObjectFormat

    def read(self, ranges: Sequence[ObjectRange]) -> list[Bytes | None]:
        """The bytes of ranges; raises `RemoteError`."""

    def miss(self, digest: str) -> None:
        """Take an entry for missing for a while."""


class RemoteEntry:
    """An entry in the remote tier, a `StoredEntry`: nothing of it but the header is here before it is read."""

    def __init__(self, tier: EntrySource, layout: ObjectLayout) -> None:
        self.info, self.layout, self._tier = layout.info, layout, tier
        self._kept: dict[int, Bytes] | None = None
        self._closed = False

    def keep(self) -> None:
        """Hold on to the layers that are read from now on, for `load`."""
        self._kept = {}

    def receive(self, layer: int, data: Bytes | None) -> ReceivedLayer:
        """A layer's bytes that came, unchecked.

        Raises:
            EvictedEntryError: there is no object any more.
        """
        if data is None:
            self._tier.miss(self.info.key.digest)
            raise EvictedEntryError(f"object {self.layout.name} is not in the remote tier any more")
        if self._kept is not None:
            self._kept[layer] = data
        return ReceivedLayer(self, layer, data)

    def check(self, layer: int, data: Bytes) -> None:
        """Refuse bytes that are not the layer's, by `DamagedEntryError`."""
        self._tier.format.check(self.layout, layer, data)

    def read_layer(self, layer: int) -> torch.Tensor:
        """See `StoredEntry`.

        Raises:
            RemoteError: the remote does not answer.
        """
        return self._read(layer).read_layer(layer)

    def read_layer_into(self, layer: int, to_2HTB: Bytes) -> None:
        """See `StoredEntry`; raises as `read_layer` does."""
        self._read(layer).read_layer_into(layer, to_2HTB)

    def load(self) -> EncodedEntry:
        """See `StoredEntry`; what was kept is not read again. Raises as `read_layer` does."""
        kept = self._kept or {}
        if not kept:
            return self.assemble(*self._tier.read([self.layout.whole()]))
        missing = [layer for layer in range(self.info.num_layers) if layer not in kept]
        read = self._tier.read([self.layout.range_of(layer) for layer in missing])
        return self._filled({**kept, **dict(zip(missing, read, strict=True))})

    def assemble(self, data: Bytes | None) -> EncodedEntry:
        """The entry of the bytes of all its layers; raises as `receive` and `read_layer` do."""
        start = self.layout.offsets[0]
        if data is None:
            return self._filled({0: None})
        return self._filled(
            {
                layer: data[begin - start : end - start]
                for layer, (begin, end) in enumerate(itertools.pairwise(self.layout.offsets))
            }
        )

    def _filled(self, layers: Mapping[int, Bytes | None]) -> EncodedEntry:
        received = {layer: self.receive(layer, data).checked() for layer, data in layers.items()}
        entry = EncodedEntry.empty(self.info, self.layout.header.checksums)  # not before: a header may say any size
        for layer, data in received.items():
            np.copyto(entry.bytes[layer], data.reshape(entry.bytes[layer].shape))
        return entry

    def close(self) -> None:
        """See `StoredEntry`. What was kept stays for `load`."""
        self._closed = True

    def _read(self, layer: int) -> ReceivedLayer:
        if self._closed:
            raise StoreError(f"object {self.layout.name} was read after it was closed")
        (data,) = self._tier.read([self.layout.range_of(layer)])
        return self.receive(layer, data)


class ReceivedLayer:
    """One layer of a remote entry that came, a `StoredEntry` of that layer; checked when it is read."""

    def __init__(self, entry: RemoteEntry, layer: int, data: Bytes) -> None:
        self.info, self._entry, self._layer, self._data = entry.info, entry, layer, data

    def read_layer(self, layer: int) -> torch.Tensor:
        """See `StoredEntry`."""
        shape = self.info.encoded_shape(layer)
        encoded = torch.empty(shape.shape, dtype=shape.dtype, device="cpu")
        np.copyto(host_bytes(encoded).reshape(-1), self.checked(layer))
        return encoded

    def read_layer_into(self, layer: int, to_2HTB: Bytes) -> None:
        """See `StoredEntry`."""
        np.copyto(to_2HTB, self.checked(layer).reshape(to_2HTB.shape))

    def load(self) -> EncodedEntry:
        """Nothing: one layer is no entry."""
        raise StoreError("one layer of an entry was received; load the entry")

    def close(self) -> None:
        """Let go of the bytes."""

    def checked(self, layer: int | None = None) -> Bytes:
        """The layer's bytes; None for whichever it is.

        Raises:
            DamagedEntryError: they are not what was written.
        """
        if layer not in (None, self._layer):
            raise StoreError(f"layer {self._layer} was received, not {layer}")
        self._entry.check(self._layer, self._data)
        return self._data
