"""Where a pinned entry is, and how its layers are read.

Shapes: H KV heads, T tokens, D head size, B bytes of a head's vector.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

import numpy as np
import torch

from cacheblend.base.errors import DamagedEntryError, InputError, StoreError
from cacheblend.base.memory import Bytes, host_bytes

from .chunk import LayerPair
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
    def raw(self) -> bool:
        """Whether what is stored is the keys and values themselves, in the model's dtype."""
        return self._info.key.codec == "raw"

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the keys and values that `read_layer` gives."""
        return self._info.dtype

    @property
    def tokens(self) -> int:
        """Number of tokens of the chunk."""
        return len(self._info.token_ids)

    @property
    def layers(self) -> int:
        """Number of layers."""
        return self._info.layers

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
        return self.decode(layer, self.read_encoded(layer))

    def read_encoded(self, layer: int) -> torch.Tensor:
        """The stored tensor of one layer on the CPU, which is not to be written to; raises as `read_layer` does."""
        entry = self._held()
        if isinstance(entry, EncodedEntry):
            return entry.read_layer(layer)
        with self._reporting(layer):
            return entry.read_layer(layer)

    def decode(self, layer: int, encoded: torch.Tensor) -> LayerPair:
        """`k_HTD` and `v_HTD` of one layer's stored tensor, on the device that it was brought to."""
        return self._info.decode(layer, encoded)

    def read_layer_into(self, layer: int, to_2HTB: Bytes) -> None:
        """Read one layer to where it is needed: raw bytes of a file go straight there, others are decoded and copied.

        Args:
            layer: its index.
            to_2HTB: the bytes of CPU memory for keys and values of the entry's dtype; each head's (T, B) is contiguous.

        Raises:
            InputError: the memory has another shape than the layer.
            DamagedEntryError, StoreError: see `read_layer`.

        """
        entry = self._held()
        kv_heads, head_dim = self._info.heads[layer]
        needed = (2, kv_heads, len(self._info.token_ids), head_dim * self._info.dtype.itemsize)
        if to_2HTB.shape != needed:
            raise InputError(f"layer {layer} of {self.key} has bytes {needed}, and the memory for it {to_2HTB.shape}")
        if not self.raw:
            for to_HTB, x_HTD in zip(to_2HTB, self.read_layer(layer), strict=True):
                np.copyto(to_HTB, host_bytes(x_HTD.contiguous()))
        elif isinstance(entry, EntryFile):
            with self._reporting(layer):
                entry.read_layer_into(layer, to_2HTB)
        else:
            np.copyto(to_2HTB, entry.bytes[layer])

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
