"""A key names a chunk's KV by everything that it depends on."""

import hashlib
import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cacheblend.base.errors import ConfigError, InputError
from cacheblend.store import ChunkKey, context_digest

IDS = st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=5)
FIELDS = st.fixed_dictionaries(
    {
        "token_ids": IDS,
        "prefix_ids": st.lists(st.integers(0, 3), max_size=3),
        "model": st.text(max_size=3),
        "namespace": st.text(max_size=3),
        "context": st.text(max_size=3),
    }
)


def test_golden() -> None:
    """The hash of a key never changes, since stores on disks are named by it."""
    key = ChunkKey.of([5, 6, 7], prefix_ids=(1,), model="m", namespace="tenant")
    fields = [struct.pack("<q", 1), b"m", b"raw", struct.pack("<q", 1), struct.pack("<3q", 5, 6, 7), b"tenant"]
    packed = b"".join(struct.pack("<q", len(field)) + field for field in fields)
    assert str(key) == hashlib.sha256(packed).hexdigest()
    assert str(key) == "ea06e461f0ae8dc95419057c970a7bf3f600736a015af32c30bff772a2fb6d69"


def test_golden_context() -> None:
    """A context counts after the other fields, and no context is none of them, so that older keys stay."""
    packed = [struct.pack("<q", 2) + struct.pack("<2q", 8, 9), struct.pack("<q", 3) + struct.pack("<3q", 5, 6, 7)]
    context = context_digest([8, 9], [[5, 6], [7]])
    assert context == hashlib.sha256(b"".join(packed)).hexdigest()[:32]
    fields = [struct.pack("<q", 1), b"m", b"raw", b"", struct.pack("<q", 5), b"", context.encode()]
    key = b"".join(struct.pack("<q", len(field)) + field for field in fields)
    assert str(ChunkKey.of([5], model="m", context=context)) == hashlib.sha256(key).hexdigest()
    assert ChunkKey.of([5], model="m", context=context_digest([], [])) == ChunkKey.of([5], model="m")


def test_contexts_differ() -> None:
    """Filler and earlier text do not pass for each other; how the earlier text is cut into chunks does not count."""
    assert context_digest([1, 2], []) != context_digest([], [[1, 2]]) != context_digest([1], [[2]])
    assert context_digest([1], [[2, 3]]) == context_digest([1], [[2], [3]])


@given(FIELDS, FIELDS)
def test_keys_differ_where_fields_differ(one: dict, other: dict) -> None:
    """Two keys are equal exactly where all their fields are."""
    assert (ChunkKey.of(**one) == ChunkKey.of(**other)) == (one == other)
    assert (str(ChunkKey.of(**one)) == str(ChunkKey.of(**other))) == (one == other)


def test_hashable_and_free_of_the_sequence_type() -> None:
    """Lists, tuples and tensors of the same ids give one key, usable in a set."""
    assert len({ChunkKey.of(ids, model="m") for ids in ([4, 5], (4, 5), torch.tensor([4, 5]))}) == 1


@pytest.mark.parametrize("ids", [[], [-1], [2**63]])
def test_ids_that_no_model_has(ids: list[int]) -> None:
    """No ids, negative ids and ids beyond 63 bits are refused."""
    with pytest.raises(InputError):
        ChunkKey.of(ids, model="m")
    if ids:
        with pytest.raises(InputError, match="prefix_ids"):
            ChunkKey.of([1], prefix_ids=ids, model="m")


def test_unknown_codec() -> None:
    """A codec that does not exist is refused with the ones that do."""
    with pytest.raises(ConfigError, match="raw"):
        ChunkKey.of([1], model="m", codec="gzip")
