"""A prompt's KV cut into blocks.

Shapes: L layers of one window, H KV heads, N tokens read at once, B blocks of them, T tokens kept of a block, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from .block_hash import BLOCK_TOKENS
from .chunk import LayerPair

ReadLayer = Callable[[int, int, int], LayerPair]
BLOCKS_AT_ONCE = 16


class BlockReader:
    """Copies blocks' KV to the CPU, a layer of several blocks at once: calls for each of them cost more than the bytes.

    Args:
        read: gives `k_HND`, rotated, and `v_HND` of a layer's positions from a start to a stop.
        blocks: of the prompt.
    """

    def __init__(self, read: ReadLayer, blocks: int) -> None:
        self._read, self._blocks = read, blocks
        self._ahead: dict[int, tuple[int, torch.Tensor]] = {}  # by a window's first layer: the first block, and the copies

    def block(self, index: int, layers: Sequence[int], kept: int) -> torch.Tensor:
        """`kv_L2HTD` of one block in memory of its own: a view would keep all blocks that were copied with it.

        Args:
            index: of the block; asked for in rising order.
            layers: those of one window.
            kept: how many of the block's last tokens.
        """
        first, kv_BL2HTD = self._ahead.get(layers[0], (index, None))
        if kv_BL2HTD is None or index >= first + len(kv_BL2HTD):
            first, kv_BL2HTD = index, self._copy(index, min(index + BLOCKS_AT_ONCE, self._blocks), layers, kept)
            self._ahead[layers[0]] = first, kv_BL2HTD
        return kv_BL2HTD[index - first].clone()

    def _copy(self, first: int, stop: int, layers: Sequence[int], kept: int) -> torch.Tensor:
        start = first * BLOCK_TOKENS + BLOCK_TOKENS - kept  # nothing before it need be there
        pairs = [self._read(layer, start, stop * BLOCK_TOKENS) for layer in layers]
        heads, _, size = pairs[0][0].shape
        kv_BL2HTD = pairs[0][0].new_empty((stop - first, len(layers), 2, heads, kept, size))
        for rank, pair in enumerate(pairs):
            for which, x_HND in enumerate(pair):
                kv_BL2HTD[:, rank, which] = x_HND.unfold(1, kept, BLOCK_TOKENS).permute(1, 0, 3, 2)
        return kv_BL2HTD.cpu()
