"""Blocks of prompts' KV in RAM, found again by whoever's prompt begins with the same tokens.

Shapes: L layers of one window, H KV heads, T tokens that a layer keeps of a block, D head size.
"""

from __future__ import annotations

import dataclasses
import threading
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from cacheblend.base.errors import ConfigError

from .block_hash import BLOCK_TOKENS, BlockChain
from .block_reader import BlockReader, ReadLayer
from .eviction import Evictable, TierBudget
from .prefix_run import PrefixRun, blocks_needed, tokens_kept

_Name = tuple[bytes, int | None]  # a block's hash, and the window of the layers that a part of it is of


@dataclass(slots=True, eq=False)
class _Part:
    """A block's KV in all layers of one window."""

    kv_L2HTD: torch.Tensor
    namespace: str
    users: int = 0


@dataclass(frozen=True, slots=True)
class PrefixStats:
    """What is held now, and what happened since the start.

    Args:
        parts: blocks held, each counted once a kind of layer (full, or of one window).
        bytes: of their keys and values.
        budget_bytes: at most so many.
        lookups: prompts that were looked up.
        hits: those of which at least one block was found.
        evictions: parts that made room for others.
    """

    parts: int
    bytes: int
    budget_bytes: int
    lookups: int
    hits: int
    evictions: int

    def as_dict(self) -> dict[str, int]:
        """Plain numbers, for JSON."""
        return dataclasses.asdict(self)


class PrefixBlocks:
    """Full blocks of 16 tokens by their chained hash, up to a byte budget. Thread-safe.

    The layers of one window, and those of full attention, are held and evicted apart: behind a prefix a full layer needs all of
    its blocks, a layer with a window those in the window. The least recently used goes first, and of a chain that was used at
    once its tail goes before its parents; what is in use, and within its namespace's reserve, stays.

    Args:
        budget: keys and values held at most, in all and by namespace.
        windows: each layer's sliding window; None for full attention.
        model: fingerprint of the model.

    Raises:
        ConfigError: a budget that is not above 0.
    """

    def __init__(self, budget: TierBudget, windows: Sequence[int | None], model: str) -> None:
        if budget.bytes <= 0:
            raise ConfigError("budget.bytes", budget.bytes, "give a number of bytes above 0")
        self._budget, self._windows, self._model = budget, tuple(windows), model
        self._layers = {window: [at for at, other in enumerate(windows) if other == window] for window in windows}
        self._lock = threading.Lock()
        self._parts: dict[_Name, _Part] = {}
        self._idle: OrderedDict[_Name, None] = OrderedDict()  # held and not in use; the first one goes first
        self._held: Counter[str] = Counter()  # bytes by namespace
        self._bytes = self._lookups = self._hits = self._evictions = 0

    @contextmanager
    def match(self, token_ids: Sequence[int], chains: Sequence[BlockChain], namespace: str = "") -> Iterator[PrefixRun | None]:
        """The longest run of blocks that `token_ids` begin with; None for none. Nothing of it is evicted inside the context.

        Args:
            token_ids: the tokens that may be matched: at most all but the prompt's last one, whose logits are wanted.
            chains: of the prompt; a block is taken from the first of them that has it.
            namespace: whose prompt it is: that names no block (the chains' extra keys must), but counts as its use.
        """
        with self._lock:
            self._budget.used(namespace)
            digests = self._longest(chains, len(token_ids) // BLOCK_TOKENS)
            self._lookups += 1
            self._hits += bool(digests)
            names = [(digest, window) for window in self._layers for digest in self._needed(digests, window)]
            self._take(names)
            held = {
                window: [self._parts[digest, window].kv_L2HTD for digest in self._needed(digests, window)]
                for window in self._layers
            }
        try:
            first = next((at for at, digest in enumerate(digests) if digest != chains[0].digests[at]), len(digests))
            tokens = tuple(token_ids[: len(digests) * BLOCK_TOKENS])
            yield PrefixRun(tokens, tuple(digests), first, self._model, self._windows, held) if digests else None
        finally:
            held.clear()
            with self._lock:
                self._release(names, digests)

    def insert(self, digests: Sequence[bytes], first: int, read: ReadLayer, namespace: str = "") -> int:
        """Hold a prompt's blocks from the `first` on, as far as there is room; those that are held already stay as they are.

        Args:
            digests: of the prompt's blocks, from its start.
            first: the blocks before it were found by `match`, and their KV is not at hand.
            read: gives `k_HTD`, rotated, and `v_HTD` of a layer's positions from a start to a stop; they are copied.
            namespace: whose blocks they are, and in whose share they count.

        Returns:
            How many of the prompt's blocks, from its start, are held now.
        """
        names: list[_Name] = []
        reader = BlockReader(read, len(digests))
        with self._lock:
            self._budget.used(namespace)
            done = 0
            # One walk for all blocks: who gives nothing to the first of them gives nothing to the others.
            oldest = self._oldest()
            for index, digest in enumerate(digests):
                if not self._hold(index, digest, reader if index >= first else None, namespace, oldest, names):
                    break
                done = index + 1
            self._release(names, digests)
            return done

    def clear(self) -> None:
        """Let go of all that is not in use."""
        with self._lock:
            while self._idle:
                self._drop(next(iter(self._idle)))

    def stats(self) -> PrefixStats:
        """What is held, and what happened."""
        with self._lock:
            parts, lookups, hits = len(self._parts), self._lookups, self._hits
            return PrefixStats(parts, self._bytes, self._budget.bytes, lookups, hits, self._evictions)

    def _longest(self, chains: Sequence[BlockChain], most: int) -> list[bytes]:
        """Hashes of the longest run that all kinds of layers have what they need of."""
        found: list[bytes] = []
        unbroken = dict.fromkeys(self._layers, 0)  # blocks in a row that end here
        longest = 0
        for candidates in zip(*(chain.digests[:most] for chain in chains), strict=True):
            held = [digest for digest in candidates if any((digest, window) in self._parts for window in self._layers)]
            digest = held[0] if held else candidates[0]
            found.append(digest)
            for window in self._layers:
                unbroken[window] = unbroken[window] + 1 if (digest, window) in self._parts else 0
            if None in unbroken and unbroken[None] < len(found):
                break  # a full layer needs every block
            if all(unbroken[window] >= blocks_needed(window, len(found)) for window in self._layers):
                longest = len(found)
        return found[:longest]

    @staticmethod
    def _needed(digests: Sequence[bytes], window: int | None) -> Sequence[bytes]:
        """The blocks of a run that layers of this window need."""
        return digests[len(digests) - blocks_needed(window, len(digests)) :]

    def _hold(
        self,
        index: int,
        digest: bytes,
        reader: BlockReader | None,
        namespace: str,
        oldest: Iterator[_Name],
        names: list[_Name],
    ) -> bool:
        """Have a block's parts held and in use, and note their names; False where one is missing and cannot be had."""
        for window, layers in self._layers.items():
            name = (digest, window)
            if name not in self._parts:
                if reader is None:
                    if window is None:
                        return False  # behind a missing parent no full layer would be found again
                    continue
                kv_L2HTD = reader.block(index, layers, tokens_kept(window))
                if not self._make_room(namespace, kv_L2HTD.nbytes, oldest):
                    return False
                self._parts[name] = _Part(kv_L2HTD, namespace)
                self._held[namespace] += kv_L2HTD.nbytes
                self._bytes += kv_L2HTD.nbytes
            self._take([name])
            names.append(name)
        return True

    def _make_room(self, namespace: str, nbytes: int, oldest: Iterator[_Name]) -> bool:
        """Drop what must go for a part; `oldest` gives what is idle, and goes on behind what it gave before."""
        victims: list[_Name] = []

        def by_use(*, only: str | None = None, spare: Iterable[str] = ()) -> Iterator[Evictable[_Name]]:
            spared = frozenset(spare)
            for name in oldest if only is None else list(self._idle):
                if name in self._idle:
                    part = self._parts[name]
                    if part.namespace == only or (only is None and part.namespace not in spared):
                        yield Evictable(name, part.namespace, part.kv_L2HTD.nbytes)

        def take(name: _Name) -> bool:
            victims.append(name)
            return True

        if not self._budget.choose(namespace, nbytes, self._bytes, self._held.__getitem__, by_use, take):
            return False
        for name in victims:
            self._drop(name)
        self._evictions += len(victims)
        return True

    def _oldest(self) -> Iterator[_Name]:
        """What is idle when it is first asked for, the least recently used first."""
        yield from list(self._idle)

    def _drop(self, name: _Name) -> None:
        del self._idle[name]
        part = self._parts.pop(name)
        self._bytes -= part.kv_L2HTD.nbytes
        self._held[part.namespace] -= part.kv_L2HTD.nbytes
        if not self._held[part.namespace]:
            del self._held[part.namespace]

    def _take(self, names: Sequence[_Name]) -> None:
        """Put parts in use."""
        for name in names:
            self._parts[name].users += 1
            self._idle.pop(name, None)

    def _release(self, names: Sequence[_Name], digests: Sequence[bytes]) -> None:
        """Put parts out of use, the last of the chain first, which then is the first to go."""
        depth = {digest: index for index, digest in enumerate(digests)}
        for name in sorted(names, key=lambda name: depth[name[0]], reverse=True):
            part = self._parts[name]
            part.users -= 1
            if not part.users:
                self._idle[name] = None
