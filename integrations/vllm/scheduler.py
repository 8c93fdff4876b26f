"""The scheduler's half: which requests are blended, and what tells their blocks from exact ones.

It imports nothing of vLLM; a request is vLLM's `Request`.
"""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cacheblend.base.errors import InputError
from cacheblend.blend.question_pass import MAX_QUESTION_TOKENS
from cacheblend.service.engine.chunk_context import ChunkNaming
from cacheblend.service.engine.prompt import PromptChunk
from cacheblend.store import ChunkKey

from .marks import PARAMS_KEY, Marks, prompt_of

logger = logging.getLogger(__name__)
# A blend is worth it where it runs no more than this share of the rows that vLLM's own prefill would: beside rows it copies,
# rotates and writes KV, and a request that is left to vLLM shares its blocks with others.
LARGEST_SHARE = 0.75


@dataclass(frozen=True, slots=True)
class BlendJob:
    """A prompt that a worker is to blend.

    Args:
        request_id: vLLM's.
        token_ids: the prompt's. All but the last token's KV is handed over; vLLM runs that one itself.
        block_ids: the prompt's pages.
        start: first position whose KV is handed over; what stands before it is in vLLM's prefix cache.
        marks: where the chunks stand.
        ratio: recompute ratio.
        is_least: whether the loading controller may take more; not where the request names its ratio.
        cache_salt: the request's.
    """

    request_id: str
    token_ids: tuple[int, ...]
    block_ids: tuple[int, ...]
    start: int
    marks: Marks
    ratio: float
    is_least: bool
    cache_salt: str | None


@dataclass(slots=True)
class _Marked:
    """A request that is to be blended, until it has finished."""

    marks: Marks
    ratio: float
    tried: int = -1  # the preemption count of the last try: one that failed is left to vLLM
    report: dict[str, Any] = field(default_factory=dict)


class BlendScheduler:
    """Decides on arrival and at scheduling, and keeps what the answers tell.

    Args:
        naming: names chunks' KV.
        stored: whether the KV of each key is stored; reads none.
        ratio: where a request does not say.
        block_size: tokens of a block hash.
        prefix_tokens: of the longest prefix whose KV the workers hold.

    Attributes:
        counts: since the last `take_counts`, by name: "blended", "exact:REASON", ...
    """

    def __init__(
        self,
        naming: ChunkNaming,
        stored: Callable[[list[ChunkKey]], list[bool]],
        ratio: float,
        block_size: int,
        prefix_tokens: int,
    ) -> None:
        self._naming, self._stored, self._ratio, self._block_size = naming, stored, ratio, block_size
        self._prefix_tokens = prefix_tokens
        self._marked: dict[str, _Marked] = {}
        self._reports: dict[str, dict[str, Any]] = {}  # of requests that are left to vLLM
        self._jobs: list[BlendJob] = []
        self._missed: list[PromptChunk] = []
        self._waiting_misses = 0
        self.counts: Counter[str] = Counter()

    def arrive(self, request: Any) -> None:
        """Take a marked request, and salt the hashes of its blocks from the first approximate one on; before any lookup."""
        params = request.kv_transfer_params
        if not isinstance(params, Mapping) or PARAMS_KEY not in params:
            return
        reason = self._reason_to_refuse(request)
        try:
            reason = reason or self._take(request, Marks.read(params[PARAMS_KEY], request.num_prompt_tokens))
        except InputError as error:
            logger.warning("request %s is computed exactly: %s", request.request_id, error)
            reason = f"marks: {error}"
        except Exception as error:  # the store cannot be read, say; an error here would stop the engine
            logger.exception("request %s is computed exactly", request.request_id)
            reason = f"failed: {type(error).__name__}"
        if reason:
            self.counts[f"exact:{reason.partition(':')[0]}"] += 1
            self._reports[request.request_id] = {"blended": False, "reason": reason}

    def _reason_to_refuse(self, request: Any) -> str:
        """Why a request cannot be blended; empty if it can."""
        refused = {
            "lora": request.lora_request is not None,
            "multimodal": bool(request.mm_features),
            "prompt_embeds": request.prompt_embeds is not None or request.prompt_token_ids is None,
            "pooling": request.sampling_params is None,
            "prompt_logprobs": bool(request.skip_reading_prefix_cache),
            "streaming_input": bool(request.resumable),
        }
        return next((reason for reason, found in refused.items() if found), "")

    def _take(self, request: Any, marks: Marks) -> str:
        """Accept a request whose chunks are worth blending; otherwise return the reason."""
        ratio = self._ratio if marks.ratio is None else marks.ratio
        if not marks.chunks:
            return "no_chunks"
        prompt = prompt_of(self._naming, request.prompt_token_ids, marks, request.cache_salt)
        chunks = [(chunk, chunk.key) for chunk in prompt.chunks if chunk.key is not None]
        found = zip(chunks, self._stored([key for _, key in chunks]), strict=True)
        by_stored: dict[bool, list[PromptChunk]] = {True: [], False: []}
        for (chunk, _), is_stored in found:
            by_stored[is_stored].append(chunk)
        missed, reused = by_stored[False], sum(len(chunk.token_ids) for chunk in by_stored[True])
        tokens = request.num_prompt_tokens
        if not reused or _rows(tokens, marks, ratio, reused) > LARGEST_SHARE * tokens:
            self._missed += missed
            return "not_stored" if missed else "not_worth_it"
        first = marks.chunks[0][0] // self._block_size
        if request.block_hashes or request._block_hasher is not None:
            if first >= len(request.block_hashes):
                self._missed += missed
                return "short_prompt"  # the first chunk's block is not full, and would get an exact name when it is
            self._salt(request, first, marks.salt(ratio, self._naming.digest))
        self._marked[request.request_id] = _Marked(marks, ratio)
        return ""

    @staticmethod
    def _salt(request: Any, first: int, salt: bytes) -> None:
        """Rename the block `first`; all after it, those of generated tokens too, are hashed after that name."""
        exact = request.block_hashes[first]
        request.block_hashes[first:] = [type(exact)(hashlib.sha256(salt + exact).digest())]
        request.update_block_hashes()

    def matched(self, request: Any, computed: int) -> int:
        """How many tokens after the first `computed` a worker hands over; 0 where vLLM computes the prompt itself."""
        marked = self._marked.get(request.request_id)
        if marked is None or marked.tried == request.num_preemptions:
            return 0
        tokens, first = request.num_prompt_tokens, marked.marks.chunks[0][0]
        # What vLLM's prefix cache leaves to compute; a prefix that is not too long is in the workers' memory then, too.
        held = min(computed, first) if first <= self._prefix_tokens else 0
        if _rows(tokens, marked.marks, marked.ratio) - held > LARGEST_SHARE * (tokens - computed):
            if not marked.report:
                marked.report = {"blended": True, "reason": "prefix_cache", "cached_tokens": computed}
            return 0
        return max(0, int(tokens) - 1 - computed)

    def allocated(self, request: Any, block_ids: Sequence[int], handed_over: int) -> None:
        """Send a request to the workers, once its pages are allocated."""
        if handed_over <= 0:
            return
        marked = self._marked[request.request_id]
        marked.tried = request.num_preemptions
        start = request.num_prompt_tokens - 1 - handed_over
        ids = tuple(request.prompt_token_ids)
        job = BlendJob(
            request.request_id,
            ids,
            tuple(block_ids),
            start,
            marked.marks,
            marked.ratio,
            is_least=marked.marks.ratio is None,
            cache_salt=request.cache_salt,
        )
        self._jobs.append(job)

    def take_jobs(self) -> tuple[list[BlendJob], list[PromptChunk]]:
        """Work that the workers must begin, once each."""
        jobs, self._jobs = self._jobs, []
        missed, self._missed = self._missed, []
        self._waiting_misses += len(missed)
        return jobs, missed

    def observe(self, reports: Mapping[str, dict[str, Any]], waiting_misses: int) -> None:
        """Take in what the workers have done."""
        self._waiting_misses = waiting_misses
        for request_id, report in reports.items():
            self.counts["blended" if report["blended"] else f"exact:{report['reason'].partition(':')[0]}"] += 1
            for name in ("hit_tokens", "missed_tokens", "recomputed_tokens"):
                self.counts[name] += report.get(name, 0)
            if request_id in self._marked:
                self._marked[request_id].report = report

    @property
    def has_misses(self) -> bool:
        """Whether missed chunks wait to be computed, for which the engine must go on stepping."""
        return bool(self._missed or self._waiting_misses)

    def finish(self, request: Any) -> dict[str, Any] | None:
        """Forget a request; returns its answer's report, None for a request without marks."""
        marked = self._marked.pop(request.request_id, None)
        report = self._reports.pop(request.request_id, None) if marked is None else marked.report
        return None if report is None else {PARAMS_KEY: report}

    def take_counts(self) -> dict[str, int]:
        """The counts since the last call."""
        counts, self.counts = dict(self.counts), Counter()
        return counts


def _rows(tokens: int, marks: Marks, ratio: float, reused: int | None = None) -> float:
    """Rows that a blend runs in the mean of the layers; of the chunks `reused` tokens are stored, None for all."""
    if reused is None:
        reused = sum(stop - start for start, stop in marks.chunks)
    return tokens - reused * (1 - ratio) + min(MAX_QUESTION_TOKENS, tokens - marks.chunks[-1][1])
