"""The KV of a prompt's first blocks, as `PrefixBlocks` found it.

Shapes: L layers, H KV heads, T tokens of the run, D head size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from cacheblend.base.errors import InputError, StoreError
from cacheblend.base.host_bytes import Bytes, host_bytes

from .block_hash import BLOCK_TOKENS
from .chunk import LayerPair


def blocks_needed(window: int | None, blocks: int) -> int:
    """How many of a prompt's first `blocks` blocks, its last ones, the token after them needs in a layer of this window."""
    return blocks if window is None else min(blocks, -(-max(window - 1, 1) // BLOCK_TOKENS))


def tokens_kept(window: int | None) -> int:
    """How many of a block's last tokens a layer of this window holds: more are never seen from behind the block."""
    return BLOCK_TOKENS if window is None else min(BLOCK_TOKENS, max(window - 1, 1))


@dataclass(frozen=True, slots=True, eq=False)
class PrefixRun:
    """KV of the T tokens that a prompt begins with; it is valid inside `PrefixBlocks.match`.

    Its keys are rotated already: a prefix stands at the same positions in every prompt that begins with it. Layers with a
    sliding window hold what the tokens after the run can see, and zeros before that.

    Attributes:
        token_ids: the T token ids.
        digests: the hash of each block, in the chain that it was found in.
        first_chain_blocks: how many of the blocks, from the first on, were found in the first of the chains asked for.
        model: fingerprint of the model that computed it.
        windows: each layer's sliding window; None for full attention.
        held: per window, `kv_L2HTD` (L layers of that window, T tokens kept) of the blocks that are needed, in order.
    """

    token_ids: tuple[int, ...]
    digests: tuple[bytes, ...]
    first_chain_blocks: int
    model: str
    windows: tuple[int | None, ...]
    held: Mapping[int | None, Sequence[torch.Tensor]] = field(repr=False)

    @property
    def prefix_ids(self) -> tuple[int, ...]:
        """Nothing stands before a prefix."""
        return ()

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the keys and values."""
        return self._blocks(0)[-1].dtype

    @property
    def layers(self) -> int:
        """Number of layers."""
        return len(self.windows)

    def heads(self, layer: int) -> tuple[int, int]:
        """KV heads and head size of one layer."""
        _, heads, _, size = self._blocks(layer)[-1].shape
        return heads, size

    def read_layer(self, layer: int) -> LayerPair:
        """`k_HTD` and `v_HTD` of one layer on the CPU."""
        kv_heads, head_dim = self.heads(layer)
        pair_2HTD = torch.empty((2, kv_heads, len(self.token_ids), head_dim), dtype=self.dtype)
        self.read_layer_into(layer, host_bytes(pair_2HTD))
        return pair_2HTD[0], pair_2HTD[1]

    def read_layer_into(self, layer: int, to_2HTB: Bytes) -> None:
        """Copy one layer's keys and values to where they are needed.

        Args:
            layer: its index.
            to_2HTB: the bytes of CPU memory for keys and values of the run's dtype, B to a head's vector.

        Raises:
            InputError: the memory has another shape than the layer.
            StoreError: the run was released.
        """
        blocks = self._blocks(layer)
        kv_heads, head_dim = self.heads(layer)
        start = len(self.token_ids) - len(blocks) * blocks[0].shape[2]
        wanted = (2, kv_heads, len(self.token_ids), head_dim * self.dtype.itemsize)
        if to_2HTB.shape != wanted:
            raise InputError(f"layer {layer} of a prefix has bytes {wanted}, and the memory for it {to_2HTB.shape}")
        to_2HTB[:, :, :start] = 0
        torch.cat(blocks, dim=2, out=torch.from_numpy(to_2HTB).view(self.dtype)[:, :, start:])

    def _blocks(self, layer: int) -> list[torch.Tensor]:
        """The layer's keys and values (2, H, T, D) of the blocks that are needed, in order."""
        window = self.windows[layer]
        if window not in self.held:
            raise StoreError("a prefix's KV was read after it was released; read inside `with blocks.match`")
        rank = self.windows[:layer].count(window)
        return [block[rank] for block in self.held[window]]
