"""A prompt's segments as they are prefilled, for the plan of its answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from cacheblend.blend import Segment, SegmentKV
from cacheblend.store import ChunkKey, Placement

from .answer import PlannedSegment
from .prefix_cache import PromptPrefix
from .prompt import PromptPieces


class Ends(NamedTuple):
    """A prompt but for its chunks: its exact beginning, and what is left of head and tail."""

    exact: list[Segment]
    planned: list[PlannedSegment]
    head: tuple[int, ...]
    tail: tuple[int, ...]
    exact_tokens: int


def planned_segments(
    pieces: PromptPieces, keys: Sequence[ChunkKey], kvs: Sequence[SegmentKV | None], ends: Ends | None
) -> tuple[PlannedSegment, ...]:
    """The prompt's segments, given each chunk's KV; without `ends` what is stored was not used: neither a hit nor a miss."""
    segments = list(as_fresh(pieces.head) if ends is None else (*ends.planned, *as_fresh(ends.head)))
    for index, (chunk, key, kv) in enumerate(zip(pieces.chunks, keys, kvs, strict=True)):
        earlier = pieces.earlier_of(index)
        if kv is None:
            segments.append(PlannedSegment(kind="fresh", token_ids=chunk, key=str(key), earlier=earlier))
        elif ends is not None:
            tier = kv.tier if isinstance(kv, Placement) else None
            segments.append(PlannedSegment(kind="reused", token_ids=chunk, key=str(key), tier=tier, earlier=earlier))
        else:
            segments += as_fresh(chunk)
    return (*segments, *as_fresh(pieces.tail if ends is None else ends.tail))


def as_fresh(*pieces: tuple[int, ...]) -> tuple[PlannedSegment, ...]:
    """Pieces that are recomputed whole."""
    return tuple(PlannedSegment(kind="fresh", token_ids=token_ids) for token_ids in pieces if token_ids)


def as_exact(prefix: PromptPrefix) -> list[Segment]:
    """The run that was found, as the fusor takes it."""
    return [] if prefix.run is None else [Segment(prefix.run.token_ids, prefix.run, exact=True)]


def behind(tokens: int, *pieces: tuple[int, ...]) -> tuple[PlannedSegment, ...]:
    """What is fresh of the pieces behind their first `tokens` tokens."""
    rest: list[tuple[int, ...]] = []
    for piece in pieces:
        rest.append(piece[tokens:])
        tokens = max(0, tokens - len(piece))
    return as_fresh(*rest)
