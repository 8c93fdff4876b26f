"""Blocks of prompts' KV in RAM, found again by whoever's prompt begins with the same tokens.

Shapes: L layers of one window, H KV heads, T tokens that a layer keeps of a block, D head size.
"""

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch

from cacheblend.base.errors import StoreError
from cacheblend.base.memory import Bytes

from .chunk import PlainKV, check_shape, length_prefixed
from .codecs import LayerPair

BLOCK_TOKENS = 16
STATE = 0  # the window of layers that hold one state of all tokens before it: a prefix needs that after its last block


class BlockChain:
    """SHA-256 of each full block of a token sequence, over its parent's hash and its tokens; it can grow.

    Args:
        model: fingerprint of the model that computes the KV.
        namespace: whose KV it is. Chains of different models or namespaces have no block in common.
    """

    def __init__(self, model: str, namespace: str = "") -> None:
        self.model = model
        self._root = hashlib.sha256(length_prefixed((model.encode(), namespace.encode()))).digest()
        self._rest: list[int] = []
        self.digests: list[bytes] = []

    def extend(self, token_ids: Iterable[int]) -> None:
        """Append tokens; those that fill no block yet wait for more."""
        self._rest += token_ids
        full = len(self._rest) // BLOCK_TOKENS * BLOCK_TOKENS
        packed = np.array(self._rest[:full], dtype="<i8").tobytes()
        size = 8 * BLOCK_TOKENS
        for start in range(0, len(packed), size):
            parent = self.digests[-1] if self.digests else self._root
            self.digests.append(hashlib.sha256(parent + packed[start : start + size]).digest())
        del self._rest[:full]


def blocks_needed(window: int | None, blocks: int) -> int:
    """How many of a prompt's first `blocks` blocks, its last ones, the token after them needs in a layer of this window."""
    return blocks if window is None else min(blocks, -(-max(window - 1, 1) // BLOCK_TOKENS))


def tokens_kept(window: int | None) -> int:
    """How many of a block's last tokens a layer of this window holds: no token after the block sees more."""
    return BLOCK_TOKENS if window is None else min(BLOCK_TOKENS, max(window - 1, 1))


@dataclass(frozen=True, slots=True, eq=False)
class PrefixRun(PlainKV):
    """KV of the T tokens that a prompt begins with; it is valid inside `PrefixBlocks.match`.

    Its keys are rotated already: a prefix stands at the same positions in every prompt that begins with it. Layers with a
    sliding window hold what the tokens after the run can see, and zeros before that.
    """

    token_ids: tuple[int, ...]  # T
    digests: tuple[bytes, ...]  # of each block
    model: str  # fingerprint of the model that computed it
    windows: tuple[int | None, ...]  # of each layer; None for full attention
    # Per window, `kv_L2HTD` (L layers of that window, T held tokens) of the blocks that are needed, in order.
    held: Mapping[int | None, Sequence[Any]] = field(repr=False)
    prefix_ids: ClassVar[tuple[int, ...]] = ()  # these two: see `KVHandle`
    rotated = True

    @property
    def dtype(self) -> torch.dtype:
        return self._blocks(0)[-1].dtype

    @property
    def num_layers(self) -> int:
        return len(self.windows)

    def heads(self, layer: int) -> tuple[int, int]:
        _, heads, _, size = self._blocks(layer)[-1].shape
        return heads, size

    def layer_bytes(self, layer: int) -> int:
        """Keys and values of all T tokens."""
        kv_heads, head_dim = self.heads(layer)
        return 2 * kv_heads * len(self.token_ids) * head_dim * self.dtype.itemsize

    def read_layer(self, layer: int) -> LayerPair:
        kv_heads, head_dim = self.heads(layer)
        pair_2HTD = torch.empty((2, kv_heads, len(self.token_ids), head_dim), dtype=self.dtype)
        self.copy_layer(layer, pair_2HTD)
        return pair_2HTD[0], pair_2HTD[1]

    def read_layer_into(self, layer: int, to_2HTB: Bytes) -> None:
        check_shape(self, layer, to_2HTB)
        self.copy_layer(layer, torch.from_numpy(to_2HTB).view(self.dtype))

    def copy_layer(self, layer: int, to_2HTD: torch.Tensor) -> None:
        blocks = self._blocks(layer)
        start = len(self.token_ids) - len(blocks) * blocks[0].shape[2]
        to_2HTD[:, :, :start] = 0
        if to_2HTD.is_cpu:
            torch.cat(blocks, dim=2, out=to_2HTD[:, :, start:])
        else:
            to_2HTD[:, :, start:].copy_(torch.cat(blocks, dim=2))

    def _blocks(self, layer: int) -> list[torch.Tensor]:
        """The layer's keys and values (2, H, T, D) of the blocks that are needed, in order."""
        window = self.windows[layer]
        if window not in self.held:
            raise StoreError("a prefix's KV was read after it was released; read inside `with blocks.match`")
        rank = self.windows[:layer].count(window)
        return [block[rank] for block in self.held[window]]


ReadLayer = Callable[[int, int, int], LayerPair]
BLOCKS_AT_ONCE = 16


class BlockReader:
    """Copies blocks' KV to the CPU, a layer of several blocks at once: calls for each of them cost more than the bytes.

    Args:
        read: returns `k_HND`, rotated, and `v_HND` of a layer's positions from a start to a stop.
        blocks: of the prompt.
    """

    def __init__(self, read: ReadLayer, blocks: int) -> None:
        self._read, self._blocks = read, blocks
        self._ahead: dict[int, tuple[int, torch.Tensor]] = {}  # by a window's first layer: the first block, and the copies

    def block(self, index: int, layers: Sequence[int], held_tokens: int) -> torch.Tensor:
        """Keys and values (L, 2, H, T, D) of one block in memory of its own: a view would keep all that were copied.

        Args:
            index: asked for in rising order.
            layers: those of one window.
            held_tokens: number of the block's last tokens to copy.
        """
        first, kv_BL2HTD = self._ahead.get(layers[0], (index, None))
        if kv_BL2HTD is None or index >= first + len(kv_BL2HTD):
            first, kv_BL2HTD = index, self._copy(index, min(index + BLOCKS_AT_ONCE, self._blocks), layers, held_tokens)
            self._ahead[layers[0]] = first, kv_BL2HTD
        return kv_BL2HTD[index - first].clone()

    def _copy(self, first: int, stop: int, layers: Sequence[int], held_tokens: int) -> torch.Tensor:
        start = first * BLOCK_TOKENS + BLOCK_TOKENS - held_tokens  # nothing before it need be there
        pairs = [self._read(layer, start, stop * BLOCK_TOKENS) for layer in layers]
        heads, _, size = pairs[0][0].shape
        kv_BL2HTD = pairs[0][0].new_empty((stop - first, len(layers), 2, heads, held_tokens, size))
        for rank, pair in enumerate(pairs):
            for which, x_HND in enumerate(pair):
                kv_BL2HTD[:, rank, which] = x_HND.unfold(1, held_tokens, BLOCK_TOKENS).permute(1, 0, 3, 2)
        return kv_BL2HTD.cpu()


_Name = tuple[bytes, int | None]  # a block's hash, and the window of the layers that a part of it is of


@dataclass(slots=True, eq=False)
class _Part:
    """A block's KV (L, 2, H, T, D) in all layers of one window, or the state after it."""

    held: Any
    users: int = 0


class PrefixBlocks:
    """Full blocks of 16 tokens by their chained hash, up to a byte budget. Thread-safe.

    The layers of one window, and those of full attention, are held and evicted apart: after a prefix a full layer needs all of
    its blocks, a layer with a window those in the window. The least recently used goes first, and of a chain that was used at
    once its tail goes before its parents; parts in use stay.

    Args:
        windows: each layer's sliding window; None for full attention.
    """

    def __init__(self, budget_bytes: int, windows: Sequence[int | None]) -> None:
        self.budget_bytes, self._windows = budget_bytes, tuple(windows)
        self._layers = {window: [at for at, other in enumerate(windows) if other == window] for window in windows}
        self._lock = threading.Lock()
        self._parts: dict[_Name, _Part] = {}
        self._idle: OrderedDict[_Name, None] = OrderedDict()  # held and not in use; the first one goes first
        self._bytes = self._bytes_in_use = 0
        self._lookups = self._hits = self._evictions = 0

    @contextmanager
    def match(self, token_ids: Sequence[int], chain: BlockChain) -> Iterator[PrefixRun | None]:
        """The longest run of blocks that `token_ids` begin with; None for none. Nothing of it is evicted inside the context.

        Args:
            token_ids: the tokens that may be matched: at most all but the prompt's last one, whose logits are wanted.
            chain: of the prompt.
        """
        with self._lock:
            digests = self._longest(chain.digests[: len(token_ids) // BLOCK_TOKENS])
            self._lookups += bool(token_ids)
            self._hits += bool(digests)
            names = [(digest, window) for window in self._layers for digest in self._needed(digests, window)]
            self._take(names)
            held = {window: [self._parts[one, window].held for one in self._needed(digests, window)] for window in self._layers}
        try:
            tokens = tuple(token_ids[: len(digests) * BLOCK_TOKENS])
            yield PrefixRun(tokens, tuple(digests), chain.model, self._windows, held) if digests else None
        finally:
            held.clear()
            with self._lock:
                self._release(names, digests)

    def insert(self, digests: Sequence[bytes], first: int, read: ReadLayer, state: Any = None) -> int:
        """Hold a prompt's blocks from the `first` on, as far as there is room; those that are held already stay as they are.

        Args:
            digests: of the prompt's blocks, from its start.
            first: the blocks before it were found by `match`, and their KV is not at hand.
            read: returns `k_HTD`, rotated, and `v_HTD` of a layer's positions from a start to a stop; they are copied.
            state: of the layers with window `STATE` after the last block, an object with `nbytes`; None if it is not at hand.

        Returns:
            How many of the prompt's blocks, from its start, are held now.
        """
        names: list[_Name] = []
        reader = BlockReader(read, len(digests))
        with self._lock, ExitStack() as ends:
            ends.callback(self._release, names, digests)
            done = 0
            for index, digest in enumerate(digests):
                after = state if index == len(digests) - 1 else None
                if not self._hold(index, digest, reader if index >= first else None, names, after):
                    break
                done = index + 1
            return done

    def stats(self) -> dict[str, int]:
        """Parts held (blocks, each counted once a kind of layer), their bytes and the budget; counts since the start.

        `lookups` counts prompts, `hits` those of which at least one block was found, `evictions` parts that made room.
        """
        with self._lock:
            held = {"parts": len(self._parts), "bytes": self._bytes, "budget_bytes": self.budget_bytes}
            return held | {"lookups": self._lookups, "hits": self._hits, "evictions": self._evictions}

    def _longest(self, digests: Sequence[bytes]) -> Sequence[bytes]:
        """The longest run of a chain's first blocks that all kinds of layers have what they need of."""
        unbroken = dict.fromkeys(self._layers, 0)  # blocks in a row that end here
        longest = 0
        for blocks, digest in enumerate(digests, start=1):
            for window in self._layers:
                unbroken[window] = unbroken[window] + 1 if (digest, window) in self._parts else 0
            if None in unbroken and unbroken[None] < blocks:
                break  # a full layer needs every block
            if all(unbroken[window] >= blocks_needed(window, blocks) for window in self._layers):
                longest = blocks
        return digests[:longest]

    @staticmethod
    def _needed(digests: Sequence[bytes], window: int | None) -> Sequence[bytes]:
        """The blocks of a run that layers of this window need."""
        return digests[len(digests) - blocks_needed(window, len(digests)) :]

    def _hold(self, index: int, digest: bytes, reader: BlockReader | None, names: list[_Name], state: Any) -> bool:
        """Have a block's parts held and in use, and note their names; False where one is missing and cannot be had."""
        for window, layers in self._layers.items():
            name = (digest, window)
            if name not in self._parts:
                held = state
                if window != STATE:
                    held = None if reader is None else reader.block(index, layers, tokens_kept(window))
                if held is None:
                    if window is None:
                        return False  # after a missing parent no full layer would be found again
                    continue
                if not self._make_room(held.nbytes):
                    return False
                self._parts[name] = _Part(held)
                self._bytes += held.nbytes
            self._take([name])
            names.append(name)
        return True

    def _make_room(self, nbytes: int) -> bool:
        """Drop the least recently used parts for a new one; False, and nothing dropped, if parts in use leave no room."""
        if self._bytes_in_use + nbytes > self.budget_bytes:
            return False
        while self._bytes + nbytes > self.budget_bytes:
            name, _ = self._idle.popitem(last=False)
            self._bytes -= self._parts.pop(name).held.nbytes
            self._evictions += 1
        return True

    def _take(self, names: Sequence[_Name]) -> None:
        for name in names:
            part = self._parts[name]
            if not part.users:
                self._bytes_in_use += part.held.nbytes
                self._idle.pop(name, None)
            part.users += 1

    def _release(self, names: Sequence[_Name], digests: Sequence[bytes]) -> None:
        """Put parts out of use, the last of the chain first, which then is the first to go."""
        depth = {digest: index for index, digest in enumerate(digests)}
        for name in sorted(names, key=lambda name: depth[name[0]], reverse=True):
            part = self._parts[name]
            part.users -= 1
            if not part.users:
                self._bytes_in_use -= part.held.nbytes
                self._idle[name] = None
