"""Exact reuse beside blending: what a prompt begins with, as an earlier request left it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from cacheblend.blend import Fusor, KVGeometry, LayerKV, LayerSource, Prompt
from cacheblend.store import BLOCK_TOKENS, BlockChain, LayerPair, PrefixBlocks, PrefixRun, chain_root

ReadLast = Callable[[int, int], LayerPair]  # (layer, tokens) -> keys and values (H, tokens, D) of the last positions


class PrefixCache:
    """The blocks of prompts and answers that an engine has served, in RAM. Thread-safe.

    KV that is full prefill's own stands in one chain. Blended KV is approximate, and so is all that is generated after it: it
    stands in a chain for each recompute ratio that was asked for, where only requests that ask for the same find it.

    Args:
        fusor: the model.
        budget_bytes: of keys and values.

    Raises:
        ConfigError: a budget that is not above 0.
    """

    def __init__(self, fusor: Fusor, budget_bytes: int) -> None:
        self._model = fusor.fingerprint
        self._budget_bytes, self._windows = budget_bytes, fusor.decoder.windows
        self.clear()

    def clear(self) -> None:
        """Forget every block, and what was counted; requests that are under way keep theirs."""
        self._blocks = PrefixBlocks(self._budget_bytes, self._windows, self._model)

    @contextmanager
    def find(self, token_ids: Sequence[int], limit: int, namespace: str, asked_ratio: str | None) -> Iterator[CachedPrefix]:
        """The blocks that a prompt begins with, which stay in the context, and what keeps the prompt's own afterwards.

        Args:
            token_ids: the prompt.
            limit: at most so many of its tokens may be reused.
            namespace: requests of another one find none of its blocks, and it none of theirs.
            asked_ratio: names the recompute ratio that a blended request asks for; None for one that is exact throughout.
        """
        roots = [(b"exact",)] if asked_ratio is None else [(b"exact",), (b"blended", asked_ratio.encode())]
        chains = [BlockChain(chain_root(self._model.encode(), *root), (namespace.encode(),)) for root in roots]
        for chain in chains:
            chain.extend(token_ids)
        with self._blocks.match(token_ids[:limit], chains) as run:
            yield CachedPrefix(self._blocks, chains, run)

    def stats(self) -> dict[str, int]:
        """Numbers of held parts and bytes, look-ups, hits and evictions."""
        return self._blocks.stats()


@dataclass(slots=True, eq=False)
class CachedPrefix:
    """One request's part of the prefix cache: the run that was found, and the blocks that the request leaves.

    Args:
        blocks: where they go.
        chains: of the prompt: the exact one, and for a blended request its own.
        run: what was found; its KV may be read inside `PrefixCache.find`.
        exact_tokens: so many of the prompt's first tokens get exact KV, provided that the run's is; None for all of them, and
            those that are generated.
        commit_blended: commit the others too; needless where no later prompt will begin with this one's chunks.
    """

    blocks: PrefixBlocks
    chains: Sequence[BlockChain]
    run: PrefixRun | None
    exact_tokens: int | None = None
    commit_blended: bool = True
    _layers: list[LayerKV] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """Tokens of the run; 0 where nothing was found."""
        return 0 if self.run is None else len(self.run.token_ids)

    @property
    def key(self) -> str | None:
        """Hex of the run's last block, or of the first block where none was found; None where the prompt has none."""
        digests = self.chains[0].digests[:1] if self.run is None else self.run.digests
        return digests[-1].hex() if digests else None

    def record(self, source: LayerSource) -> LayerSource:
        """Wrap a source so that its loaded layers are recorded; at the end of the fusion they hold the complete prompt."""
        return RecordingSource(source, self._layers)

    def commit_prompt(self) -> None:
        """Copy the prompt's blocks into the cache and drop its layers; once it is fused, best after its first token."""
        layers = tuple(self._layers)
        self._layers.clear()
        if not layers:
            return

        def read(layer: int, start: int, stop: int) -> LayerPair:
            return layers[layer].k_1HND[0, :, start:stop], layers[layer].v_1HND[0, :, start:stop]

        self.blocks.insert(self._digests, 0 if self.run is None else len(self.run.digests), read)

    def append(self, token_id: int, read_last: ReadLast) -> None:
        """A token was generated and has its KV now; copy a block into the cache when it is full.

        Args:
            token_id: the token.
            read_last: reads the last positions, up to this token's; they are copied.
        """
        self.commit_prompt()
        full = len(self.chains[0].digests)
        for chain in self.chains:
            chain.extend((token_id,))
        if len(self.chains[0].digests) > full:
            self.blocks.insert(self._digests, full, lambda layer, start, stop: read_last(layer, stop - start))

    @property
    def _digests(self) -> list[bytes]:
        """Each block to hold, in its chain."""
        found = () if self.run is None else self.run.digests
        exact = len(self.chains[0].digests) if self.exact_tokens is None else self.exact_tokens // BLOCK_TOKENS
        if self.run is not None and self.run.first_chain_blocks < len(found):
            exact = len(found)  # what is computed after blended KV is no better
        blended = self.chains[-1].digests[max(exact, len(found)) :] if self.commit_blended else ()
        return [*found, *self.chains[0].digests[len(found) : exact], *blended]


class RecordingSource:
    """A source whose layers are recorded."""

    def __init__(self, source: LayerSource, layers: list[LayerKV]) -> None:
        self._source, self._layers = source, layers

    def start(self, prompt: Prompt, geometry: KVGeometry, *, reuse_layer_0: bool) -> None:
        self._layers.clear()
        self._source.start(prompt, geometry, reuse_layer_0=reuse_layer_0)

    def synchronize(self, layer: int) -> LayerKV:
        whole = self._source.synchronize(layer)
        self._layers.append(whole)
        return whole
