"""Prefix blocks hold what a plain model of them holds, whatever the requests, and several threads at once."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from letters import BLOCK_BYTES, FULL, HYBRID, LAYER_BYTES, SHORT, SLIDING, chain, check_content, insert, make, tokens_of

from cacheblend.store.prefix_blocks import BLOCK_TOKENS

pytestmark = pytest.mark.contract


@dataclass
class PlainBlocks:
    """What `PrefixBlocks` does, with a dict of last uses and a scan for each question."""

    windows: tuple[int | None, ...]
    budget_bytes: int
    held: dict[tuple[str, int | None], int] = field(default_factory=dict)  # (prefix, window) -> last use
    now: int = 0

    def run(self, letters: str) -> list[str]:
        prefixes = [letters[: at + 1] for at in range(len(letters))]
        for length in range(len(letters), 0, -1):
            names = prefixes[:length]
            if all((name, window) in self.held for window in set(self.windows) for name in self.needed(names, window)):
                return names
        return []

    @staticmethod
    def needed(names: list[str], window: int | None) -> list[str]:
        count = len(names) if window is None else min(len(names), -(-(window - 1) // BLOCK_TOKENS))
        return names[len(names) - count :]

    def match(self, letters: str) -> list[str]:
        self.now += 1
        names = self.run(letters)
        self.held |= {(name, window): self.now for window in set(self.windows) for name in self.needed(names, window)}
        return names

    def insert(self, names: list[str], first: int) -> None:
        self.now += 1
        in_use: set[tuple[str, int | None]] = set()
        for index, name in enumerate(names):
            for window in dict.fromkeys(self.windows):
                part = (name, window)
                if part not in self.held:
                    if index < first:
                        if window is None:
                            return
                        continue
                    order = list(dict.fromkeys(self.windows))
                    if sum(self.size(other[1]) for other in in_use) + self.size(window) > self.budget_bytes:
                        return
                    while self.bytes + self.size(window) > self.budget_bytes:
                        idle = [other for other in self.held if other not in in_use]
                        del self.held[min(idle, key=lambda one: (self.held[one], -len(one[0]), order.index(one[1])))]
                self.held[part] = self.now
                in_use.add(part)

    def size(self, window: int | None) -> int:
        kept = BLOCK_TOKENS if window is None else min(BLOCK_TOKENS, window - 1)
        return self.windows.count(window) * LAYER_BYTES // BLOCK_TOKENS * kept

    @property
    def bytes(self) -> int:
        return sum(self.size(window) for _, window in self.held)


LETTERS = st.text("ab", min_size=1, max_size=6)


@given(
    windows=st.sampled_from([FULL, HYBRID, SLIDING, SHORT]),
    budget_parts=st.integers(1, 14),
    steps=st.lists(st.tuples(LETTERS, st.integers(0, 6)), max_size=25),
)
@settings(max_examples=150, deadline=None)
def test_against_a_plain_model(windows: tuple[int | None, ...], budget_parts: int, steps: list[tuple[str, int]]) -> None:
    """Requests that match and then add the first of their blocks find and hold what a plain dict does, and never other KV."""
    budget_bytes = budget_parts * BLOCK_BYTES
    blocks, plain = make(windows, budget_bytes), PlainBlocks(windows, budget_bytes)
    for letters, more in steps:
        with blocks.match(tokens_of(letters), chain(letters)) as run:
            expected = plain.match(letters)
            found = 0 if run is None else len(run.digests)
            assert found == len(expected)
            if run is not None:
                check_content(run, letters, windows)
        plain.insert([letters[: at + 1] for at in range(len(letters))][: found + more], found)
        insert(blocks, letters, found, found + more)
        stats = blocks.stats()
        assert (stats["parts"], stats["bytes"]) == (len(plain.held), plain.bytes)
        assert stats["bytes"] <= budget_bytes
    assert not [part for part in blocks._parts.values() if part.users]


def test_threads() -> None:
    """Threads that match and insert at once see whole runs of their own prompts, and leave nothing in use."""
    blocks = make(HYBRID, budget_bytes=12 * LAYER_BYTES)

    def work(seed: int) -> None:
        for letters in ("abcd", "abxy", "ab", "xyz", "abca")[seed:] * 30:
            with blocks.match(tokens_of(letters), chain(letters)) as run:
                if run is not None:
                    check_content(run, letters, HYBRID)
            insert(blocks, letters, 0 if run is None else len(run.digests))

    with ThreadPoolExecutor(3) as threads:
        list(threads.map(work, range(3)))
    assert not [part for part in blocks._parts.values() if part.users]
    assert blocks.stats()["bytes"] <= 12 * LAYER_BYTES
