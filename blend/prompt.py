"""A prompt: segments of token ids, some with stored KV; and the blended prompt, with its KV cache and first logits.

Shapes: H KV heads, N tokens of the prompt, L layers, C room for keys, D head size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING

import torch

from cacheblend.base.errors import IncompatibleKVError, InputError

if TYPE_CHECKING:
    from transformers import DynamicCache

    from cacheblend.store import KVHandle

    from .interfaces import KVGeometry


BRIDGE_TOKENS = 3  # of a run that links chunks; two in a row are often grammar
TOKEN_BITS = 21  # of a token id, so that a run fits 64 bits


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """A run of the prompt's tokens.

    Args:
        token_ids: the segment's token ids. A chunk is tokenised once, by itself, its trailing separator included; the prompt
            is the concatenation of the segments' ids, never a re-tokenised string.
        kv: the chunk's KV, computed elsewhere. Without it the segment is fresh: all of it is computed in the prompt.
        exact: whether `kv` equals full prefill's at this place (a cached prefix). It is never recomputed and does not count in
            the ratio; allowed only as an unbroken run at the prompt's start.

    Raises:
        InputError: `exact` without `kv`, or rotated keys that are not `exact`.
        IncompatibleKVError: the KV belongs to other tokens.
    """

    token_ids: Sequence[int]
    kv: KVHandle | None = None
    exact: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "token_ids", tuple(int(token) for token in self.token_ids))
        if self.exact and self.kv is None:
            raise InputError("Segment(exact=True) needs its kv: exact says that the kv is full prefill's own")
        if self.kv is not None and self.kv.rotated and not self.exact:
            raise InputError("KV whose keys are rotated is right at the prompt's start alone: use Segment(exact=True)")
        if self.kv is not None and tuple(self.kv.token_ids) != self.token_ids:
            raise IncompatibleKVError(
                f"a segment of {len(self.token_ids)} tokens brings the KV of {len(self.kv.token_ids)} other tokens; "
                "precompute the KV from the segment's own token ids"
            )


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """Segments laid end to end, and the kind of every absolute position.

    `exact_tokens` positions at the start are exact; `reusable_N` and `fresh_N` are boolean masks of the others; `offset_N` is
    each token's index in its segment. The last position always runs, since the logits need its output.
    """

    segments: tuple[Segment, ...]
    token_ids: tuple[int, ...]
    exact_tokens: int
    reusable_N: torch.Tensor = field(repr=False)
    fresh_N: torch.Tensor = field(repr=False)
    offset_N: torch.Tensor = field(repr=False)

    @classmethod
    def of(cls, segments: Iterable[Segment]) -> Prompt:
        """Lay the segments end to end; empty segments vanish.

        Raises:
            InputError: there are no tokens, an exact segment follows another kind, or all segments are exact.
        """
        non_empty = tuple(segment for segment in segments if segment.token_ids)
        if not non_empty:
            raise InputError("the prompt is empty: give at least one segment with tokens")
        token_ids, exact_tokens = list[int](), 0
        for segment in non_empty:
            if segment.exact and exact_tokens != len(token_ids):
                raise InputError("exact segments must be an unbroken run at the start of the prompt")
            token_ids += segment.token_ids
            exact_tokens += len(segment.token_ids) if segment.exact else 0
        if exact_tokens == len(token_ids):
            raise InputError("every segment is exact, so no token is left to compute logits from; leave the last one fresh")
        lengths = torch.tensor([len(segment.token_ids) for segment in non_empty])
        fresh_N = torch.tensor([segment.kv is None for segment in non_empty]).repeat_interleave(lengths)
        reusable_N = ~fresh_N
        reusable_N[:exact_tokens] = False
        offset_N = torch.arange(len(token_ids)) - (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
        return cls(non_empty, tuple(token_ids), exact_tokens, reusable_N, fresh_N, offset_N)

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def reusable_tokens(self) -> int:
        """Number of tokens that the recompute ratio counts."""
        return int(self.reusable_N.sum())

    def bridges_N(self) -> torch.Tensor:
        """Boolean mask (N,) of the reusable tokens that link chunks: names, dates, terms that several chunks have.

        These are the tokens of `BRIDGE_TOKENS` in a row that occur in two segments with KV, and in at most half of them.
        """
        segment_N, start_R, segments_R = _shared_runs([segment.token_ids for segment in self.segments], self.reusable_N)
        most = max(2, len(segment_N[start_R].unique()) // 2)
        return _covered(start_R[(segments_R > 1) & (segments_R <= most)], len(self))

    def cached(self, *, exact_only: bool = False) -> list[tuple[int, int, KVHandle]]:
        """(start, stop, kv) of every segment whose KV is read, in order."""
        found, start = [], 0
        for segment in self.segments:
            stop = start + len(segment.token_ids)
            if segment.kv is not None and (segment.exact or not exact_only):
                found.append((start, stop, segment.kv))
            start = stop
        return found

    def runs_to_rotate(self, *, exact_only: bool = False) -> list[tuple[int, int]]:
        """(start, stop) of positions whose stored keys are not rotated yet, adjoining segments joined."""
        runs: list[tuple[int, int]] = []
        for start, stop, kv in self.cached(exact_only=exact_only):
            if kv.rotated:
                continue
            if runs and runs[-1][1] == start:
                start, _ = runs.pop()
            runs.append((start, stop))
        return runs

    def check_kv(self, model: str, geometry: KVGeometry, exact_model: str) -> None:
        """Refuse KV that is not this model's: loading copies bytes. `exact_model` is that of exact segments.

        Raises:
            IncompatibleKVError: KV of another model, shape, dtype or prefix.
        """
        needed = {(geometry.layers, *geometry.heads(layer), geometry.dtype) for layer in range(geometry.layers)}
        prefixes: set[tuple[int, ...]] = set()
        for start, _, kv in self.cached():
            shapes = {(kv.num_layers, *kv.heads(layer), kv.dtype) for layer in range(kv.num_layers)}
            if shapes != needed:
                raise IncompatibleKVError(
                    f"the KV at position {start} has (layers, heads, head size, dtype) {sorted(shapes, key=str)} and the model "
                    f"{sorted(needed, key=str)}; precompute it with this model"
                )
            if kv.model is None:
                continue
            wanted = model if start >= self.exact_tokens else exact_model
            if kv.model != wanted:
                raise IncompatibleKVError(
                    f"a segment's KV is of model {kv.model[:12]} and this model is {wanted[:12]}; precompute it "
                    "with this model, and what is exact under a longrope in a prompt that is as long"
                )
            prefix = tuple(kv.prefix_ids)
            if start >= self.exact_tokens:
                prefixes.add(prefix)
            elif prefix != self.token_ids[:start]:
                raise IncompatibleKVError(f"the exact segment at position {start} was not computed after the tokens before it")
        if len(prefixes) > 1:
            raise IncompatibleKVError(
                f"chunks computed after different prefixes ({' and '.join(map(str, sorted(map(len, prefixes))))} tokens) stand "
                "in one prompt; precompute all chunks after one prefix"
            )


@dataclass(frozen=True, slots=True, eq=False)
class LayerReport:
    """One finished layer of a fusion.

    Args:
        recomputed: number of rows that went through attention and MLP.
        wait_s: seconds that the fusor waited for the layer's stored KV, or copied it from RAM.
        compute_s: seconds of computing, on the host's clock (a GPU may still compute).
    """

    layer: int
    recomputed: int
    wait_s: float
    compute_s: float


@dataclass(frozen=True, slots=True, eq=False)
class FusionResult:
    """A prompt's KV cache and the logits after it.

    Args:
        logits: float32 (V,), for the token after the prompt.
        cache: `DynamicCache` of the prompt; sliding layers hold what Hugging Face's hold.
        token_ids: the N token ids.
        recomputed: per layer, a sorted LongTensor of the absolute positions that went through attention and MLP.
        projected: per layer, the positions whose K and V are fresh in `cache`; contains `recomputed`.
        deviation: float32 (N,), the KV deviation (paper §4.1) of each reusable token that was a candidate at the first layer
            that measured it; 0 elsewhere.
        reusable_tokens: number of tokens that the ratio counts; exact and fresh ones do not.
        exact_tokens: number of tokens in exact segments.
        layers: a report a layer.
        memory: per layer the buffer of the keys and values in `cache`, (2, 1, H, C, D) with room after the prompt for one
            sequence to grow; None if `cache` has a copy; empty if there is no room.
        selection: reports of what ran before `layers`: the selector's own pass, and the first round of a widened blend.
        moved_nats: how far the first token's distribution moved from full reuse to the first round; None where not measured.
        is_widened: a second round ran, whose ratio is `recomputed_ratio`.
    """

    logits: torch.Tensor
    cache: DynamicCache
    token_ids: tuple[int, ...]
    recomputed: tuple[torch.Tensor, ...]
    projected: tuple[torch.Tensor, ...]
    deviation: torch.Tensor
    reusable_tokens: int
    exact_tokens: int
    layers: tuple[LayerReport, ...] = ()
    memory: list[torch.Tensor | None] = field(default_factory=list, repr=False)
    selection: tuple[LayerReport, ...] = ()
    moved_nats: float | None = None
    is_widened: bool = False

    def take_memory(self) -> list[torch.Tensor | None]:
        """`memory` for the first caller, an empty list for others: two sequences after one prompt need separate room.

        Call it from one thread at a time.
        """
        taken = self.memory[:]
        self.memory.clear()
        return taken

    @property
    def wait_s(self) -> float:
        """Seconds that the fusion waited for stored KV, or copied it from RAM."""
        return sum(report.wait_s for report in (*self.selection, *self.layers))

    @property
    def recomputed_ratio(self) -> float:
        """Share of the reusable tokens that was recomputed, in the mean over layers 1 and up; 0 without reusable tokens."""
        fresh = len(self.token_ids) - self.exact_tokens - self.reusable_tokens
        later = self.recomputed[1:]
        if not self.reusable_tokens or not later:
            return 0.0
        return sum(max(0, len(positions) - fresh) for positions in later) / (len(later) * self.reusable_tokens)


def alike_chunks(chunks: Sequence[Sequence[int]]) -> list[bool]:
    """Whether each chunk looks like others: two thirds of its tokens are in runs that another one has.

    So do records, and a table's rows. What tells them apart is little beside what they share, and KV that is computed apart
    does not have it: a blend that recomputes half of the tokens still loses answers (docs/adr/031). Equal chunks, such as a
    passage that a conversation repeats, count once.
    """
    texts = list(dict.fromkeys(map(tuple, chunks)))
    segment_N, start_R, segments_R = _shared_runs(texts, torch.ones(sum(map(len, texts)), dtype=torch.bool))
    alike_N = _covered(start_R[segments_R > 1], len(segment_N))
    shared = dict(zip(texts, torch.bincount(segment_N[alike_N], minlength=len(texts)).tolist(), strict=True))
    return [2 * len(chunk) < 3 * shared[tuple(chunk)] for chunk in chunks]


def _shared_runs(segments: Sequence[Sequence[int]], among_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The segment of each token, where the runs of `BRIDGE_TOKENS` in a segment begin, and how many segments have each."""
    lengths = torch.tensor([len(token_ids) for token_ids in segments], dtype=torch.int64)
    segment_N = torch.arange(len(lengths)).repeat_interleave(lengths)
    start_R = torch.arange(max(0, len(segment_N) - BRIDGE_TOKENS + 1))
    start_R = start_R[among_N[start_R] & (segment_N[start_R] == segment_N[start_R + BRIDGE_TOKENS - 1])]
    ids_N, key_R = torch.tensor(list(chain(*segments)), dtype=torch.int64), torch.zeros_like(start_R)
    for place in range(BRIDGE_TOKENS):
        key_R = key_R << TOKEN_BITS | ids_N[start_R + place]
    _, run_R = key_R.unique(return_inverse=True)
    # A run counts once in each of its segments.
    once = (run_R * len(lengths) + segment_N[start_R]).unique()
    return segment_N, start_R, torch.bincount(once // len(lengths), minlength=1)[run_R]


def _covered(start_R: torch.Tensor, tokens: int) -> torch.Tensor:
    """Boolean mask (N,) of the tokens in the runs that begin at `start_R`."""
    covered_N = torch.zeros(tokens, dtype=torch.bool)
    for place in range(BRIDGE_TOKENS):
        covered_N[start_R + place] = True
    return covered_N
