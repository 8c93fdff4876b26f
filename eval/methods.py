"""The methods side by side: full recompute, prefix caching, full reuse and blending, over the same token ids.

`StoredContexts` and `ResidentRequest` say what a method finds in the cache, `CacheHistory` what earlier requests left there.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean
from typing import Protocol

import torch

from cacheblend.blend import ChunkContext, FusionConfig, FusionResult, Fusor, Segment, SequenceKV
from cacheblend.blend.config import DOCUMENT_TOKENS
from cacheblend.blend.fusor import NO_CONTEXT
from cacheblend.blend.prompt import alike_chunks
from cacheblend.blend.widening import FIRST_RATIO
from cacheblend.eval.data import Request
from cacheblend.service.engine.chunk_context import chunk_context
from cacheblend.service.engine.config import PRESETS
from cacheblend.service.engine.decoding import Decoding, Sampling
from cacheblend.service.engine.prompt import PromptTokens
from cacheblend.store import ChunkKV
from cacheblend.store.codecs import CODECS, LayerShape

from .method_plan import CONTEXTS, FULL_REUSE, SELECTOR_OF_METHOD, WIDENED, PlannedMethod


class StoredContexts:
    """Contexts that chunks' KV is computed after, by name.

    "default": the prompt's head, filler passages, and the document's earlier text, as the service does it; "filler" and
    "document": the head and one of both; "neighbour": the head and the chunk that stands before it in the prompt (the last one
    for the first); "head": only the head; "bos": only the beginning-of-sequence token, the paper's way.

    Args:
        fusor: the model.
        head: token ids that the prompts begin with.
        filler: see `chunk_context`.
    """

    def __init__(self, fusor: Fusor, head: Sequence[int], filler: str = "auto") -> None:
        context, bos = chunk_context(fusor, filler, DOCUMENT_TOKENS, len(head)), fusor.tokenizer.bos_token_id
        self._known: dict[str, tuple[tuple[int, ...], ChunkContext]] = {
            "default": (tuple(head), context),
            "filler": (tuple(head), replace(context, document_tokens=0)),
            "document": (tuple(head), replace(context, filler_ids=())),
            "neighbour": (tuple(head), replace(context, filler_ids=())),
            "head": (tuple(head), NO_CONTEXT),
            "bos": (() if bos is None else (int(bos),), NO_CONTEXT),
        }

    def __getitem__(self, name: str) -> tuple[tuple[int, ...], ChunkContext]:
        return self._known[name]


class ResidentRequest:
    """KV for one request, computed when a method first asks for it and dropped with the request.

    Args:
        fusor: the model.
        request: the request.
        contexts: what chunks' KV is computed after.
        cached_chunks: per chunk whether its KV was there before the request came.
        cached_prefix_chunks: how many leading chunks a prefix cache has, as some other request left them.
        codec: that chunks' KV was stored with.
    """

    def __init__(
        self,
        fusor: Fusor,
        request: Request,
        contexts: StoredContexts,
        cached_chunks: Sequence[bool],
        cached_prefix_chunks: int,
        codec: str = "raw",
    ) -> None:
        self.request = request
        self._fusor, self._contexts = fusor, contexts
        self._cached_chunks, self._cached_prefix_chunks = tuple(cached_chunks), cached_prefix_chunks
        self._codec, self._chunk_kv = codec, dict[str, tuple[ChunkKV | None, ...]]()

    @property
    def prompt(self) -> PromptTokens:
        """The prompt's token ids."""
        return self.request.prompt

    def chunk_kv(self, context: str = CONTEXTS[0]) -> tuple[ChunkKV | None, ...]:
        """Each chunk's KV, computed after a context; None where not cached."""
        if context not in self._chunk_kv:
            self._chunk_kv[context] = self._compute(context)
        return self._chunk_kv[context]

    def _compute(self, name: str) -> tuple[ChunkKV | None, ...]:
        prefix_ids, context = self._contexts[name]
        prompt, found = self.prompt, list[ChunkKV | None]([None] * len(self.prompt.chunks))
        documents: dict[str, dict[int, int]] = {}  # place in its document of each cached chunk, by document
        texts: dict[str, list[tuple[int, ...]]] = {}
        for index, chunk in enumerate(prompt.chunks):
            if not self._cached_chunks[index]:
                continue
            document, earlier = str(index), list(chunk.earlier)
            if name == "neighbour":
                earlier = [prompt.chunks[index - 1].token_ids]
            elif chunk.document is not None and any(one.earlier for one in prompt.chunks):
                document = chunk.document[0]
            documents.setdefault(document, {})[index] = len(earlier)
            if len(texts.get(document, ())) <= len(earlier):
                texts[document] = [*earlier, chunk.token_ids]
        for document, places in documents.items():
            which = sorted(set(places.values()))
            kvs = dict(zip(which, self._fusor.precompute_document(texts[document], prefix_ids, which, context), strict=True))
            for index, place in places.items():
                found[index] = self._after_storing(kvs[place])
        return tuple(found)

    def _after_storing(self, kv: ChunkKV) -> ChunkKV:
        """Encode a chunk's KV as the store does, and decode it."""
        if self._codec == "raw":
            return kv
        codec, layers = CODECS[self._codec], []
        for k_HTD, v_HTD in kv.layers:
            layer = _layer_shape(k_HTD)
            stored = codec.encoded_shape(layer)
            encoded = torch.empty((1, *stored.shape), dtype=stored.dtype)
            codec.encode([(k_HTD, v_HTD)], encoded)
            layers.append(codec.decode(encoded[0].to(k_HTD.device), layer))
        return replace(kv, layers=layers)

    def stored_bytes(self, kv: ChunkKV, first_layer: int = 0) -> int:
        """Bytes of KV in the store, from a layer up."""
        codec = CODECS[self._codec]
        return sum(codec.encoded_shape(_layer_shape(k_HTD)).nbytes for k_HTD, _ in kv.layers[first_layer:])

    @cached_property
    def head_kv(self) -> ChunkKV | None:
        """KV of what every prompt begins with; see `_exact`."""
        return self._exact(self.prompt.prefix)

    @cached_property
    def prefix_kv(self) -> ChunkKV | None:
        """KV of the head and the cached leading chunks together, as full prefill computes it."""
        return self._exact(self._prefix(self._cached_prefix_chunks))

    def blend_segments(self, context: str = CONTEXTS[0]) -> list[Segment]:
        """List the segments of a blend: head exact, every cached chunk with its own KV, everything else fresh."""
        head = Segment(self.prompt.prefix, self.head_kv, exact=self.head_kv is not None)
        chunks = [Segment(chunk, kv) for chunk, kv in zip(self.prompt.chunk_ids, self.chunk_kv(context), strict=True)]
        return [head, *chunks, Segment(self.prompt.suffix)]

    def prefix_segments(self) -> list[Segment]:
        """List the segments of prefix caching: the cached prefix exact, everything else fresh."""
        prefix = self._prefix(self._cached_prefix_chunks)
        cached = Segment(prefix, self.prefix_kv, exact=self.prefix_kv is not None)
        return [cached, Segment(self.prompt.token_ids[len(prefix) :])]

    def _exact(self, prefix: tuple[int, ...]) -> ChunkKV | None:
        """The KV of the prompt's first tokens; None for no tokens, or where a longrope turns them by its long factors."""
        is_exact = self._fusor.exact_fingerprint(len(self.prompt)) == self._fusor.fingerprint
        return self._fusor.precompute(prefix) if prefix and is_exact else None

    def _prefix(self, chunks: int) -> tuple[int, ...]:
        return (*self.prompt.prefix, *(token for ids in self.prompt.chunk_ids[:chunks] for token in ids))


def _layer_shape(k_HTD: torch.Tensor) -> LayerShape:
    kv_heads, tokens, head_dim = k_HTD.shape
    return LayerShape(kv_heads, tokens, head_dim, k_HTD.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodAnswer:
    """Answer of a method to one request.

    Args:
        token_ids: the generated token ids.
        ttft_s: question and stored KV in RAM -> first token id of the answer on the host. Retrieval
            and tokenising, which all methods share, are not in it.
        recomputed_tokens: tokens that ran through a layer before the first token, in the mean over layers 1 and up.
        loaded_bytes: stored KV that was read.
        fused: the prompt's cache.
    """

    token_ids: list[int]
    ttft_s: float
    recomputed_tokens: float
    loaded_bytes: int
    fused: FusionResult


class Method(ABC):
    """One way to answer a request: a prefill of its own, then greedy decoding; all methods share the token ids.

    Two calls, so that KV which is computed before a question comes is not timed.
    """

    def __init__(self, fusor: Fusor) -> None:
        self._fusor = fusor

    def prepare(self, resident: ResidentRequest) -> None:  # noqa: B027  # full recompute finds nothing in the cache
        """Have the KV computed that this method finds in the cache; by default none."""

    @abstractmethod
    def prefill(self, resident: ResidentRequest) -> FusionResult:
        """The prompt's cache and first logits."""

    def answer(self, resident: ResidentRequest, max_new_tokens: int) -> MethodAnswer:
        """Prefill, then decode greedily."""
        started = time.perf_counter()
        fused = self.prefill(resident)
        token_ids, first_token = generate(self._fusor, fused, max_new_tokens)
        return MethodAnswer(
            token_ids=token_ids,
            ttft_s=first_token - started,
            recomputed_tokens=rows_run(fused),
            loaded_bytes=self.loaded_bytes(resident, fused),
            fused=fused,
        )

    def loaded_bytes(self, resident: ResidentRequest, fused: FusionResult) -> int:
        """Bytes of stored KV that the prefill read; none, unless a method says otherwise."""
        return 0


def generate(fusor: Fusor, fused: FusionResult, max_new_tokens: int) -> tuple[list[int], float]:
    """Greedy token ids, and when the first was on the host, on `time.perf_counter`'s clock."""
    decoding = Decoding(fusor, fused, Sampling(), max_new_tokens)
    decoding.draw(fused.logits)
    kv = SequenceKV(fused, fusor.decoder.windows)
    while decoding.finish_reason is None:
        (logits_V,) = fusor.decoder.decode(decoding.token_ids[-1:], [kv])
        decoding.draw(logits_V)
    return decoding.token_ids, decoding.first_token


def rows_run(fused: FusionResult) -> float:
    """Tokens that ran through a layer, in the mean over layers 1 and up."""
    return fmean(len(positions) for positions in fused.recomputed[1:] or fused.recomputed)


class Blend(Method):
    """Chunks reused anywhere, some of their tokens recomputed.

    Args:
        fusor: the model.
        config: ratio and selector.
        context: what the chunks' KV was computed after; one of `CONTEXTS`.
    """

    def __init__(self, fusor: Fusor, config: FusionConfig, context: str) -> None:
        super().__init__(fusor)
        self._config, self._context = config, context

    def prepare(self, resident: ResidentRequest) -> None:
        """The chunks' KV and the head's."""
        _ = resident.head_kv, resident.chunk_kv(self._context)

    def prefill(self, resident: ResidentRequest) -> FusionResult:
        """Fuse; what may be widened computes chunks that look alike, as a service does."""
        segments = resident.blend_segments(self._context)
        if self._config.max_loss_nats is not None:
            alike = [False, *alike_chunks(resident.prompt.chunk_ids), False]  # head and suffix are no chunks
            segments = [Segment(one.token_ids) if is_alike else one for one, is_alike in zip(segments, alike, strict=True)]
        return self._fusor.fuse(segments, self._config)

    def loaded_bytes(self, resident: ResidentRequest, fused: FusionResult) -> int:
        """The chunks' KV from layer 1 up, layer 0 too where not all of its tokens ran, and the head's."""
        ran_layer_0 = len(fused.recomputed[0]) == len(fused.token_ids) - fused.exact_tokens
        first_layer = 1 if ran_layer_0 else 0
        loaded = sum(resident.stored_bytes(kv, first_layer) for kv in resident.chunk_kv(self._context) if kv is not None)
        return loaded + (0 if resident.head_kv is None else resident.stored_bytes(resident.head_kv))


class FullRecompute(Method):
    """Nothing is reused."""

    def prefill(self, resident: ResidentRequest) -> FusionResult:
        """The Hugging Face model's own forward."""
        return self._fusor.prefill(resident.prompt.token_ids)


class PrefixCache(Method):
    """The paper's ideal form: the prefix lies in RAM, and its loading is not waited for.

    Only other prompts warm the cache: see `CacheHistory`.
    """

    def prepare(self, resident: ResidentRequest) -> None:
        """The prefix's KV."""
        _ = resident.prefix_kv

    def prefill(self, resident: ResidentRequest) -> FusionResult:
        """Run what stands after the prefix."""
        return self._fusor.fuse(resident.prefix_segments())

    def loaded_bytes(self, resident: ResidentRequest, fused: FusionResult) -> int:
        """The prefix's KV."""
        return 0 if resident.prefix_kv is None else resident.prefix_kv.nbytes


def make_methods(planned: Sequence[PlannedMethod], fusor: Fusor) -> Mapping[str, Method]:
    """Make the planned methods, by label."""
    return {method.label: _make(method, fusor) for method in planned}


def _make(planned: PlannedMethod, fusor: Fusor) -> Method:
    if planned.name == FULL_REUSE:
        return Blend(fusor, FusionConfig(recompute_ratio=0.0), planned.context)
    if planned.name in WIDENED:
        config = FusionConfig(recompute_ratio=FIRST_RATIO, max_loss_nats=PRESETS[planned.name][1])
        return Blend(fusor, config, planned.context)
    if planned.ratio is None:
        return PrefixCache(fusor) if planned.name == "prefix_cache" else FullRecompute(fusor)
    config = FusionConfig(recompute_ratio=planned.ratio, selector=SELECTOR_OF_METHOD[planned.name])
    return Blend(fusor, config, planned.context)


Chunk = tuple[int, ...]


class CacheHistory(Protocol):
    """Says which chunks and which prefixes earlier requests left in the cache."""

    def cached(self, chunks: Sequence[Chunk]) -> tuple[tuple[bool, ...], int]:
        """Per chunk whether its KV is there, and how many leading chunks a prefix cache has."""

    def remember(self, chunks: Sequence[Chunk]) -> None:
        """A request over these chunks is done."""


class EverythingCached:
    """Every chunk was computed before, and some other request began with the first chunk: the paper's set-up.

    That flatters prefix caching, as the paper does: its first chunk always hits. What stands after the first chunk never
    does, since no other request has these two chunks in this order.
    """

    def cached(self, chunks: Sequence[Chunk]) -> tuple[tuple[bool, ...], int]:
        """All of them, and the first."""
        return (True,) * len(chunks), min(1, len(chunks))

    def remember(self, chunks: Sequence[Chunk]) -> None:
        """Nothing to add."""


class SeenBefore:
    """Chunks of the run's earlier requests, in a cache without bounds; only token ids are stored here."""

    def __init__(self) -> None:
        self._chunks: set[Chunk] = set()
        self._prefixes: set[tuple[Chunk, ...]] = set()

    def cached(self, chunks: Sequence[Chunk]) -> tuple[tuple[bool, ...], int]:
        """Chunks seen anywhere, and the longest run of leading chunks that a request began with."""
        prefix = 0
        while prefix < len(chunks) and tuple(chunks[: prefix + 1]) in self._prefixes:
            prefix += 1
        return tuple(chunk in self._chunks for chunk in chunks), prefix

    def remember(self, chunks: Sequence[Chunk]) -> None:
        """Add a request's chunks and prefixes."""
        self._chunks.update(chunks)
        self._prefixes.update(tuple(chunks[:length]) for length in range(1, len(chunks) + 1))
