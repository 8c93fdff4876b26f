"""Where a pinned entry is, and how its layers are read.

Shapes: H KV heads, T tokens, D head size, B bytes of a head's vector.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Literal

import numpy as np
import torch

from cacheblend.base.errors import DamagedEntryError, StoreError
from cacheblend.base.memory import Bytes, host_bytes

from .chunk import EncodedLayer, LayerPair, check_shape
from .entry import EncodedEntry
from .entry_file import EntryFile
from .key import ChunkKey

Tier = Literal["ram", "nvme"]


class Placement:
    """An entry that stays where it is until its pin is released; several threads may read from it.

    In RAM it holds the entry's memory, on NVMe an open file, so that nothing takes the bytes away under a reader.
    """

    def __init__(self, entry: EncodedEntry | EntryFile, on_damage: Callable[[str, int], None]) -> None:
        self._entry: EncodedEntry | EntryFile | None = entry
        self._info, self._on_damage = entry.info, on_damage
        self.tier: Tier = "ram" if isinstance(entry, EncodedEntry) else "nvme"

    @property
    def key(self) -> ChunkKey:
        """The entry's key."""
        return self._info.key

    @property
    def token_ids(self) -> Sequence[int]:
        """The T token ids of the chunk."""
        return self._info.token_ids

    @property
    def prefix_ids(self) -> Sequence[int]:
        """The token ids that stood before the chunk while its KV was computed."""
        return self._info.prefix_ids

    @property
    def model(self) -> str | None:
        """Fingerprint of the model that computed the KV; None where the `ChunkKV` that was put did not say."""
        return self._info.model

    @property
    def context(self) -> str:
        """Names what stood between the prefix and the chunk; empty for nothing."""
        return self._info.context

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the keys and values that `read_layer` gives."""
        return self._info.dtype

    @property
    def tokens(self) -> int:
        """Number of tokens of the chunk."""
        return len(self._info.token_ids)

    @property
    def num_layers(self) -> int:
        """See `KVHandle`."""
        return self._info.num_layers

    @property
    def rotated(self) -> bool:
        """See `KVHandle`."""
        return False

    @property
    def in_memory(self) -> bool:
        """See `KVHandle`."""
        return self.tier == "ram"

    def heads(self, layer: int) -> tuple[int, int]:
        """KV heads and head size of one layer."""
        return self._info.heads[layer]

    def layer_bytes(self, layer: int) -> int:
        """Stored bytes of one layer: what `read_layer` loads."""
        return self._info.layer_bytes(layer)

    @property
    def nbytes(self) -> int:
        """Stored bytes of all layers."""
        return self._info.nbytes

    def read_layer(self, layer: int) -> LayerPair:
        """`k_HTD` and `v_HTD` of one layer on the CPU: not to be written to, since those in RAM are the store's own memory.

        Raises:
            DamagedEntryError: the file's bytes are not the ones that were written; the entry is set aside.
            StoreError: the pin was released.

        """
        return self._info.decode(layer, self._read_encoded(layer))

    def read_layer_into(self, layer: int, to_2HTB: Bytes) -> None:
        """See `KVHandle`: raw bytes of a file go straight there, others are decoded and copied."""
        entry = self._held()
        kv_heads, head_dim = self._info.heads[layer]
        needed = (2, kv_heads, len(self._info.token_ids), head_dim * self._info.dtype.itemsize)
        check_shape(str(self.key), layer, needed, to_2HTB)
        if not self._is_raw:
            for to_HTB, x_HTD in zip(to_2HTB, self.read_layer(layer), strict=True):
                np.copyto(to_HTB, host_bytes(x_HTD.contiguous()))
        elif isinstance(entry, EntryFile):
            with self._reporting(layer):
                entry.read_layer_into(layer, to_2HTB)
        else:
            np.copyto(to_2HTB, entry.bytes[layer])

    def copy_layer(self, layer: int, to_2HTD: torch.Tensor) -> None:
        """See `KVHandle`."""
        if self._is_raw:
            to_2HTD.copy_(self._read_encoded(layer))
        else:
            for to_HTD, x_HTD in zip(to_2HTD, self.read_layer(layer), strict=True):
                to_HTD.copy_(x_HTD)

    def encoded_layer(self, layer: int) -> EncodedLayer | None:
        """See `KVHandle`."""
        return None if self._is_raw else EncodedLayer(self._read_encoded(layer), partial(self._info.decode, layer))

    @property
    def _is_raw(self) -> bool:
        return self._info.key.codec == "raw"

    def _read_encoded(self, layer: int) -> torch.Tensor:
        entry = self._held()
        with self._reporting(layer):
            return entry.read_layer(layer)

    def _held(self) -> EncodedEntry | EntryFile:
        entry = self._entry
        if entry is None:
            raise StoreError(f"the placement of {self.key} was read after its pin was released; read inside `with store.pin`")
        return entry

    @contextmanager
    def _reporting(self, layer: int) -> Iterator[None]:
        """Tell the store of damage, which makes the entry a miss."""
        try:
            yield
        except DamagedEntryError:
            self._on_damage(self.key.digest, layer)
            raise

    def release(self) -> None:
        """Let go of memory or file; a read that is under way ends well."""
        entry, self._entry = self._entry, None
        if isinstance(entry, EntryFile):
            entry.close()
