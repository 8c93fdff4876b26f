import itertools

from cacheblend.store.prefix_blocks import BLOCK_TOKENS, BlockChain, chain_root

ROOT = chain_root(b"model", b"exact")


def digests(token_ids: list[int], root: bytes = ROOT, extra_keys: tuple[bytes, ...] = ()) -> list[bytes]:
    chain = BlockChain(root, extra_keys)
    chain.extend(token_ids)
    return chain.digests


def test_full_blocks_only() -> None:
    """Tokens that fill no block have no hash; a block's hash is 256 bits."""
    for tokens in (0, 15, 16, 31, 32):
        found = digests(list(range(tokens)))
        assert len(found) == tokens // BLOCK_TOKENS
        assert all(len(digest) == 32 for digest in found)


def test_growing_token_by_token() -> None:
    """A chain that grew a token at a time has the hashes of one made at once."""
    tokens = list(range(50))
    chain = BlockChain(ROOT, (b"salt",))
    for token in tokens:
        chain.extend([token])
    assert chain.digests == digests(tokens, extra_keys=(b"salt",))


def test_a_hash_depends_on_all_that_stands_before() -> None:
    """Changing any token changes the hash of its block and of every later one, and of none before."""
    tokens = list(range(48))
    whole = digests(tokens)
    for place in (0, 15, 16, 31, 32, 47):
        other = digests([token + 1000 * (at == place) for at, token in enumerate(tokens)])
        changed = place // BLOCK_TOKENS
        assert other[:changed] == whole[:changed]
        assert all(one != two for one, two in zip(other[changed:], whole[changed:], strict=True))


def test_roots_and_extra_keys_keep_chains_apart() -> None:
    """Another model, kind, salt, or split of the same bytes into keys shares no block."""
    tokens = list(range(32))
    roots = (ROOT, chain_root(b"model", b"blended"), chain_root(b"other", b"exact"), chain_root(b"modele", b"xact"))
    keys: tuple[tuple[bytes, ...], ...] = ((), (b"",), (b"a",), (b"ab",), (b"a", b"b"), (b"", b"ab"), (b"a\0",))
    chains = [digests(tokens, root, extra_keys) for root, extra_keys in itertools.product(roots, keys)]
    assert len({digest for chain in chains for digest in chain}) == 2 * len(roots) * len(keys)
