"""The KV of one chunk of text as it is stored: its keys and values, position-free.

Shapes: H KV heads, T tokens of the chunk, D head size.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from cacheblend.base.errors import InputError

LayerPair = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class ChunkKV:
    """The KV cache of one chunk, computed after a prefix and a context (paper §4.2, where both are empty).

    Args:
        layers: one pair a layer, `k_HTD` and `v_HTD`, both of the model's dtype. Keys are as the key projection (and key
            norm) gives them, before the rotary embedding, so that a chunk can stand anywhere.
        token_ids: the T token ids of the chunk; the prefix is not among them.
        prefix_ids: the token ids that stood before the chunk while it was computed.
        model: fingerprint of the model that computed it; None where the caller does not know.
        context: names what stood between the prefix and the chunk, see `context_digest`; empty for nothing.

    Raises:
        InputError: no layers, or tensors whose shape does not fit the token ids.

    """

    layers: Sequence[LayerPair]
    token_ids: Sequence[int]
    prefix_ids: Sequence[int] = ()
    model: str | None = None
    context: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple((k_HTD, v_HTD) for k_HTD, v_HTD in self.layers))
        object.__setattr__(self, "token_ids", _ids(self.token_ids))
        object.__setattr__(self, "prefix_ids", _ids(self.prefix_ids))
        if not self.layers:
            raise InputError("a ChunkKV needs the keys and values of at least one layer; got none")
        for layer, (k_HTD, v_HTD) in enumerate(self.layers):
            if k_HTD.dim() != 3 or k_HTD.shape != v_HTD.shape or k_HTD.shape[1] != len(self.token_ids):
                raise InputError(
                    f"layer {layer} of a ChunkKV must be two tensors (kv_heads, {len(self.token_ids)} tokens, head_dim); "
                    f"got {tuple(k_HTD.shape)} and {tuple(v_HTD.shape)}"
                )
            if k_HTD.dtype != v_HTD.dtype or k_HTD.dtype != self.dtype:
                raise InputError(f"layer {layer} of a ChunkKV has dtypes {k_HTD.dtype} and {v_HTD.dtype}, not {self.dtype}")

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that all its tensors share."""
        return self.layers[0][0].dtype

    def heads(self, layer: int) -> tuple[int, int]:
        """KV heads and head size of one layer."""
        k_HTD = self.layers[layer][0]
        return k_HTD.shape[0], k_HTD.shape[2]

    @property
    def nbytes(self) -> int:
        """Bytes of all keys and values."""
        return sum(k_HTD.nbytes + v_HTD.nbytes for k_HTD, v_HTD in self.layers)


def _ids(ids: Iterable[int]) -> tuple[int, ...]:
    return tuple(int(token) for token in ids)
