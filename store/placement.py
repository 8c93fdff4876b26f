"""Where a pinned entry is, and how its layers are read.

Shapes: H KV heads, T tokens, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch

from .chunk import LayerPair
from .entry import EncodedEntry
from .entry_file import EntryFile
from .errors import DamagedEntryError, StoreError
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

    def layer_bytes(self, layer: int) -> int:
        """Stored bytes of one layer: what `read_layer` loads."""
        return self._info.layer_bytes(layer)

    def read_layer(self, layer: int) -> LayerPair:
        """`k_HTD` and `v_HTD` of one layer on the CPU: not to be written to, since those in RAM are the store's own memory.

        Raises:
            DamagedEntryError: the file's bytes are not the ones that were written; the entry is set aside.
            StoreError: the pin was released.

        """
        entry = self._entry
        if entry is None:
            raise StoreError(f"the placement of {self.key} was read after its pin was released; read inside `with store.pin`")
        try:
            encoded = entry.read_layer(layer)
        except DamagedEntryError:
            self._on_damage(self.key.digest, layer)
            raise
        return self._info.decode(layer, encoded)

    def release(self) -> None:
        """Let go of memory or file; a read that is under way ends well."""
        entry, self._entry = self._entry, None
        if isinstance(entry, EntryFile):
            entry.close()
