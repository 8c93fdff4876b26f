"""Prefixes of letters, 16 equal tokens a letter; KV whose values tell which prefix and layer they are of.

Shapes: H KV heads, T tokens, D head size.
"""

import torch

from cacheblend.store.prefix_blocks import BLOCK_TOKENS, BlockChain, PrefixBlocks, PrefixRun

HEADS, HEAD_DIM = 2, 3
FULL: tuple[int | None, ...] = (None, None)
HYBRID: tuple[int | None, ...] = (20, None, 20, None)  # after a prefix, 19 tokens, and so two blocks, are in the window
SLIDING: tuple[int | None, ...] = (20, 20)
SHORT: tuple[int | None, ...] = (12, None)  # a window below a block
MUCH = 2**30
LAYER_BYTES = 2 * 4 * HEADS * BLOCK_TOKENS * HEAD_DIM
BLOCK_BYTES = len(FULL) * LAYER_BYTES


def tokens_of(letters: str) -> list[int]:
    return [ord(letter) for letter in letters for _ in range(BLOCK_TOKENS)]


def chain(letters: str, namespace: str = "") -> BlockChain:
    made = BlockChain("model", namespace)
    made.extend(tokens_of(letters))
    return made


def layer_kv(letters: str, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """KV of a whole prompt: each position's values depend on the prefix up to its block, the layer and the position."""
    seeds = [hash((letters[: at // BLOCK_TOKENS + 1], layer, at)) % 2**20 for at in range(BLOCK_TOKENS * len(letters))]
    k_HTD = torch.tensor(seeds, dtype=torch.float32)[None, :, None].repeat(HEADS, 1, HEAD_DIM)
    return k_HTD, -k_HTD


def insert(blocks: PrefixBlocks, letters: str, first: int = 0, last: int | None = None) -> int:
    def read(layer: int, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        k_HTD, v_HTD = layer_kv(letters, layer)
        return k_HTD[:, start:stop], v_HTD[:, start:stop]

    return blocks.insert(chain(letters).digests[:last], first, read)


def matched(blocks: PrefixBlocks, letters: str, namespace: str = "") -> str:
    with blocks.match(tokens_of(letters), chain(letters, namespace)) as run:
        return "" if run is None else letters[: len(run.digests)]


def make(windows: tuple[int | None, ...] = FULL, budget_bytes: int = MUCH) -> PrefixBlocks:
    return PrefixBlocks(budget_bytes, windows)


def check_content(run: PrefixRun, letters: str, windows: tuple[int | None, ...]) -> None:
    for layer, window in enumerate(windows):
        for got_HTD, whole_HTD in zip(run.read_layer(layer), layer_kv(letters, layer), strict=True):
            seen = len(run.token_ids) if window is None else min(len(run.token_ids), window - 1)
            stop = len(run.token_ids)
            assert torch.equal(got_HTD[:, stop - seen :], whole_HTD[:, stop - seen : stop])
