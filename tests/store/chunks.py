"""Small chunks of KV, their keys, and what is done to their files."""

from collections.abc import Iterable
from operator import attrgetter
from pathlib import Path

import torch

from cacheblend.store import ChunkKey, ChunkKV, KVStore
from cacheblend.store.catalog import StoredDocument

MODEL = "model-of-the-tests"
TOKENS = 5
HEADS = ((2, 4), (1, 8), (2, 4))  # KV heads and head size of each layer
RAM_BYTES = 2 * 4 * TOKENS * sum(kv_heads * head_dim for kv_heads, head_dim in HEADS)  # of one chunk
FILE_BYTES = 4096 + RAM_BYTES


def make_chunk(
    seed: int, dtype: torch.dtype = torch.float32, heads: tuple[tuple[int, int], ...] = HEADS, prefix: tuple[int, ...] = (1,)
) -> tuple[ChunkKey, ChunkKV]:
    """A chunk whose values depend on the seed alone, and its key."""
    generator = torch.Generator().manual_seed(seed)
    ids = [seed * 100 + place for place in range(TOKENS)]
    layers = [
        tuple(torch.randn(kv_heads, TOKENS, head_dim, generator=generator).to(dtype) for _ in "kv")
        for kv_heads, head_dim in heads
    ]
    return ChunkKey.of(ids, prefix_ids=prefix, model=MODEL), ChunkKV(layers, ids, prefix, MODEL)


def put_all(store: KVStore, pairs: Iterable[tuple[ChunkKey, ChunkKV]], *, flush: bool = True) -> KVStore:
    """The store, with these chunks put."""
    for pair in pairs:
        store.put(*pair, flush=flush)
    return store


def same(one: ChunkKV | None, other: ChunkKV) -> bool:
    """Whether two chunks are equal bit for bit."""
    fields = attrgetter("token_ids", "prefix_ids", "model", "context", "dtype", "num_layers")
    return (
        one is not None
        and fields(one) == fields(other)
        and all(torch.equal(a, b) for pair in zip(one.layers, other.layers, strict=True) for a, b in zip(*pair, strict=True))
    )


def file_of(store: KVStore, key: ChunkKey) -> Path:
    """Where the entry's file is."""
    return Path(store.config.directory) / "entries" / str(key)[:2] / str(key)


def files_under(store: KVStore, folder: str) -> list[str]:
    """Names of all files in one of the store's folders."""
    return sorted(path.name for path in (Path(store.config.directory) / folder).rglob("*") if path.is_file())


def flip_last_byte(path: Path) -> None:
    """Alter one bit of a file."""
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)


def documents_of(store: KVStore) -> list[StoredDocument]:
    """Every document that the store knows."""
    found = map(store.documents.get, store.documents.ids())
    return [document for document in found if document is not None]
