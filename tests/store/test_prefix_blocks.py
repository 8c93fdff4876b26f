"""Prefix blocks: what a run holds, what goes first, and whose budget it is."""

from contextlib import ExitStack

import pytest
import torch
from letters import BLOCK_BYTES, FULL, HEAD_DIM, HEADS, HYBRID, SHORT, chain, insert, layer_kv, make, matched, tokens_of

from cacheblend.base.errors import InputError, StoreError
from cacheblend.store.chunk import host_bytes
from cacheblend.store.prefix_blocks import BLOCK_TOKENS, BlockChain


@pytest.mark.parametrize(("windows", "seen"), [(FULL, (None, None)), (HYBRID, (32, None, 32, None)), (SHORT, (11, None))])
def test_a_run_holds_what_was_inserted(windows: tuple[int | None, ...], seen: tuple[int | None, ...]) -> None:
    """A run gives each layer's KV, bit for bit where tokens after it can see it, and zeros before."""
    blocks = make(windows)
    assert insert(blocks, "abcd") == 4
    with blocks.match(tokens_of("abcx"), chain("abcx")) as run:
        assert run.token_ids == tuple(tokens_of("abc"))
        assert (run.model, run.num_layers, run.dtype) == ("model", len(windows), torch.float32)
        for layer, last in enumerate(seen):
            start = 0 if last is None else 3 * BLOCK_TOKENS - last
            for got_HTD, whole_HTD in zip(run.read_layer(layer), layer_kv("abcd", layer), strict=True):
                assert torch.equal(got_HTD[:, start:], whole_HTD[:, start : 3 * BLOCK_TOKENS])
                assert not got_HTD[:, :start].any()
    with pytest.raises(StoreError, match="after it was released"):
        run.read_layer(0)


def test_only_a_common_prefix_is_found() -> None:
    """A prompt finds the blocks that it begins with and no others, of its own namespace alone."""
    blocks = make()
    insert(blocks, "abc")
    found = {"abcd": "abc", "abc": "abc", "abx": "ab", "ab": "ab", "xbc": "", "bc": "", "": ""}
    assert {letters: matched(blocks, letters) for letters in found} == found
    assert matched(blocks, "abc", namespace="salt") == ""
    stats = blocks.stats()
    assert [stats[name] for name in ("parts", "bytes", "lookups", "hits")] == [
        3,
        3 * BLOCK_BYTES,
        7,
        4,
    ]  # nothing is looked up for no token


def test_a_part_of_a_block_is_not_matched() -> None:
    """A block whose last token may not be matched, since its logits are wanted, is not."""
    blocks = make()
    insert(blocks, "ab")
    with blocks.match(tokens_of("ab")[:-1], chain("ab")) as run:
        assert len(run.token_ids) == BLOCK_TOKENS


def test_the_tail_goes_first() -> None:
    """Of a chain used at once the last block is evicted first; of two chains the one used longer ago."""
    blocks = make(budget_bytes=6 * BLOCK_BYTES)
    insert(blocks, "abc")
    insert(blocks, "xyz")
    assert matched(blocks, "abc") == "abc"
    insert(blocks, "m")
    assert (matched(blocks, "abc"), matched(blocks, "xyz")) == ("abc", "xy")
    insert(blocks, "mn")
    insert(blocks, "mno")
    assert (matched(blocks, "abc"), matched(blocks, "xyz"), matched(blocks, "mno")) == ("a", "xy", "mno")
    assert blocks.stats()["evictions"] == 3


def test_what_is_in_use_stays() -> None:
    """Blocks of a run that is in use are not evicted, by however many it is used; room that cannot be had is not taken."""
    blocks = make(budget_bytes=3 * BLOCK_BYTES)
    insert(blocks, "abc")
    with ExitStack() as first, blocks.match(tokens_of("ab"), chain("ab")):
        first.enter_context(blocks.match(tokens_of("ab"), chain("ab")))
        assert insert(blocks, "xyz") == 1
        first.close()
        assert insert(blocks, "xyz") == 1
        assert matched(blocks, "ab") == "ab"
    assert insert(blocks, "xyz") == 3
    assert blocks.stats()["bytes"] == 3 * BLOCK_BYTES


def test_no_block_without_its_parents() -> None:
    """Blocks after ones that were evicted meanwhile are not taken in: nobody would find them."""
    blocks = make(budget_bytes=2 * BLOCK_BYTES)
    insert(blocks, "ab")
    insert(blocks, "xy")
    assert insert(blocks, "abc", first=2) == 0
    assert matched(blocks, "xy") == "xy"


def test_views_are_not_kept() -> None:
    """A block is a copy: changing the prompt's memory afterwards does not change it."""
    blocks, k_HTD = make(), torch.ones(HEADS, BLOCK_TOKENS, HEAD_DIM)
    blocks.insert(chain("a").digests, 0, lambda _, start, stop: (k_HTD[:, start:stop], k_HTD[:, start:stop]))
    k_HTD.zero_()
    with blocks.match(tokens_of("a"), chain("a")) as run:
        assert all(x_HTD.all() for x_HTD in run.read_layer(1))
        with pytest.raises(InputError, match="the memory for it"):
            run.read_layer_into(0, host_bytes(torch.empty(2, HEADS, BLOCK_TOKENS + 1, HEAD_DIM)))


def digests(*token_ids: list[int], model: str = "model", namespace: str = "") -> list[bytes]:
    """Hashes of a chain that tokens are appended to."""
    chain = BlockChain(model, namespace)
    for appended in token_ids:
        chain.extend(appended)
    return chain.digests


def test_a_hash_depends_on_all_that_stands_before() -> None:
    """Changing any token changes the hash of its block and of every later one, and of none before."""
    tokens = list(range(48))
    whole = digests(tokens)
    for place in (0, 15, 16, 31, 32, 47):
        other = digests([token + 1000 * (at == place) for at, token in enumerate(tokens)])
        changed = place // BLOCK_TOKENS
        assert other[:changed] == whole[:changed]
        assert all(one != two for one, two in zip(other[changed:], whole[changed:], strict=True))


def test_models_and_namespaces_keep_chains_apart() -> None:
    """Another model or namespace, or another split of the same letters into the two, shares no block."""
    names = [("model", ""), ("model", "a"), ("model", "ab"), ("modela", "b"), ("modelab", ""), ("other", ""), ("model", "a\0")]
    chains = [digests(list(range(32)), model=model, namespace=namespace) for model, namespace in names]
    assert len({digest for chain in chains for digest in chain}) == 2 * len(names)
