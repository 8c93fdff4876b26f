"""The scheduler's half: the marks of a request, which requests are blended, and what tells their blocks from exact ones.

It imports nothing of vLLM; a request is vLLM's `Request`.
"""

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Annotated, Any, NamedTuple, Self

from pydantic import BaseModel, Field, ValidationError

from cacheblend.base.errors import InputError
from cacheblend.blend.layer_passes import MAX_QUESTION_TOKENS
from cacheblend.service.engine.chunk_context import ChunkNaming
from cacheblend.service.engine.prompt import PromptChunk, PromptTokens
from cacheblend.service.engine.request import namespace_of
from cacheblend.store import PASSAGES, ChunkKey

logger = logging.getLogger(__name__)
PARAMS_KEY = "cacheblend"  # in vLLM's `kv_transfer_params`, of a request and of its answer
Whole = Annotated[int, Field(strict=True, ge=0)]
TITLE_TOKENS = 256  # that a stored text may have beside its chunk and the window: a short request brings no long text
TOKENS = ("hit_tokens", "missed_tokens", "recomputed_tokens")  # counts of a blend that are no requests


class StoredText(NamedTuple):
    """The text that a marked chunk is a part of, from its token `start` on.

    `earlier` are the chunks of its document that its KV is computed after. A passage that nobody ingested is evicted first.
    """

    token_ids: tuple[Whole, ...]
    start: Whole
    earlier: tuple[tuple[Whole, ...], ...]
    is_ingested: bool

    def row(self, naming: ChunkNaming, chunk: tuple[int, ...], namespace: str) -> PromptChunk:
        """The row of a prompt's chunk that is the part; InputError for one that is not, or of a text that is far longer."""
        if self.token_ids[self.start : self.start + len(chunk)] != chunk:
            raise InputError(f"stored: a chunk of {len(chunk)} tokens is no part of its text from {self.start} on")
        most = len(chunk) + naming.context.document_tokens + TITLE_TOKENS
        if (tokens := len(self.token_ids) + sum(map(len, self.earlier))) > most:
            raise InputError(f"stored: a text of {tokens} tokens, with what stands before it; its chunk may have {most}")
        key = naming.key(self.token_ids, self.earlier, namespace if self.is_ingested else PASSAGES + namespace)
        return PromptChunk(chunk, key, earlier=self.earlier, stored_ids=self.token_ids, start=self.start)


class Marks(BaseModel, frozen=True, extra="forbid"):
    """Marks of a request: `kv_transfer_params["cacheblend"]`, such as `{"chunks": [[start, stop], ...], "ratio": 0.14}`.

    Where chunks of one document stand in its order, a chunk's KV is computed after the ones before it. Without numbers every
    chunk is a document of its own. Where a chunk's KV is of more tokens than stand in the prompt, `stored` says of which.
    """

    chunks: tuple[tuple[Whole, Whole], ...] = ()  # (start, stop) token positions of each, in order, without overlap
    documents: tuple[Annotated[int, Field(strict=True)], ...] | None = None  # the number of each chunk's document
    ratio: Annotated[float, Field(strict=True, ge=0, le=1)] | None = None  # recompute ratio; None for the connector's
    stored: tuple[StoredText, ...] | None = None  # of each chunk

    @classmethod
    def read(cls, params: Any, prompt_tokens: int) -> Self:
        """The marks of a prompt.

        Raises:
            InputError: they are not of that form, or do not fit the prompt.
        """
        try:
            marks = cls.model_validate(params)
        except ValidationError as error:
            (wrong, *_), of = error.errors(), f'kv_transfer_params["{PARAMS_KEY}"]'
            raise InputError(f"{of}: {'.'.join(map(str, wrong['loc']))}: {wrong['msg']}; see docs/vllm.md") from None
        borders = [0, *(border for span in marks.chunks for border in span), prompt_tokens]
        if any(last < first for first, last in pairwise(borders)) or any(start == stop for start, stop in marks.chunks):
            raise InputError(f"chunks: give spans in order, without overlap, none empty, within the {prompt_tokens} tokens")
        if any(values and len(values) != len(marks.chunks) for values in (marks.documents, marks.stored)):
            raise InputError("documents, stored: give a value for each chunk")
        return marks

    def salt(self, ratio: float, context: str, token_ids: Sequence[int]) -> bytes:
        """Salt of blocks of a prompt blended with these marks at a ratio after a context: only the same prompt has their names.

        Its last tokens, the question, choose what is recomputed.
        """
        named = [ratio, self.ratio is None, self.chunks, self.documents, self.stored, context, list(token_ids)]
        return hashlib.sha256(json.dumps(named).encode()).digest()

    def prompt(self, naming: ChunkNaming, token_ids: Sequence[int], cache_salt: str | None, cached: int = 0) -> PromptTokens:
        """A prompt cut at the marks; text between two chunks has no key.

        The first `cached` tokens are in vLLM's prefix cache: a chunk of which that is the larger part is left to it.

        Raises:
            InputError: a chunk is no part of the text that is stored.
        """
        ids, namespace = tuple(token_ids), namespace_of(cache_salt or "")
        first = done = next((start for start, stop in self.chunks if start + stop > 2 * cached), len(ids))
        rows: list[PromptChunk] = []
        for (start, stop), text in zip(self.chunks, self.stored or self._texts(naming, ids), strict=True):
            if start < first:
                continue
            if between := ids[done:start]:
                rows.append(PromptChunk(between))
            rows.append(text.row(naming, ids[start:stop], namespace))
            done = stop
        return PromptTokens(ids[:first], ids[done:], tuple(rows))

    def _texts(self, naming: ChunkNaming, ids: tuple[int, ...]) -> Iterator[StoredText]:
        """The texts of chunks whose KV is of their own tokens."""
        numbers, chunks = self.documents or range(len(self.chunks)), [ids[start:stop] for start, stop in self.chunks]
        of_document: dict[int, list[tuple[int, ...]]] = {}
        for number, chunk in zip(numbers, chunks, strict=True):
            of_document.setdefault(number, []).append(chunk)
        earlier = {number: iter(naming.context.earlier(own)) for number, own in of_document.items()}
        for number, chunk in zip(numbers, chunks, strict=True):
            yield StoredText(chunk, 0, tuple(map(tuple, next(earlier[number]))), is_ingested=True)


@dataclass(frozen=True, slots=True)
class BlendJob:
    """A prompt that a worker is to blend, under vLLM's id."""

    request_id: str
    prompt: PromptTokens  # all but its last token's KV is handed over; vLLM runs that one itself
    ratio: float | None = None  # that the request asks for; None leaves it to the worker
    block_ids: tuple[int, ...] = ()  # the prompt's pages
    start: int = 0  # first position whose KV is handed over; what stands before it is in vLLM's prefix cache


class BlendScheduler:
    """Decides on arrival and at scheduling, and keeps what the answers tell.

    `stored` looks keys up and reads no KV; `cached` says how many of a request's first tokens are in vLLM's prefix cache under
    exact names, when it arrives; `ratio` is for requests that name none, `block_size` the tokens of a block hash,
    `prefix_tokens` those of the longest prefix whose KV the workers hold, `refusal` why no request is
    blended, if so. A blend is worth it where it runs no more than `largest_share` of the rows that vLLM's own prefill would:
    beside rows it copies, rotates and writes KV, and a request that is left to vLLM shares its blocks with others.
    """

    largest_share = 0.75

    def __init__(
        self,
        naming: ChunkNaming,
        stored: Callable[[list[ChunkKey]], list[bool]],
        cached: Callable[[Any], int],
        ratio: float,
        block_size: int,
        prefix_tokens: int,
        refusal: str = "",
    ) -> None:
        self._naming, self._stored, self._cached, self._ratio = naming, stored, cached, ratio
        self._block_size, self._prefix_tokens, self._refusal = block_size, prefix_tokens, refusal
        self._marked: dict[str, tuple[Any, BlendJob]] = {}  # requests that are to be blended, until they have finished
        self._reports: dict[str, dict[str, Any]] = {}  # of requests, until then
        self._jobs: list[BlendJob] = []
        self._under_way: dict[str, BlendJob] = {}  # by request, until the workers report
        self._missed: list[PromptChunk] = []
        self._waiting_misses = 0
        self._counts: Counter[str] = Counter()

    def arrive(self, request: Any) -> None:
        """Take a marked request, and salt the hashes of its blocks from the first approximate one on; before any lookup."""
        params = request.kv_transfer_params
        if not isinstance(params, Mapping) or PARAMS_KEY not in params:
            return
        try:
            reason = self._refusal or _reason_to_refuse(request)
            reason = reason or self._take(request, Marks.read(params[PARAMS_KEY], request.num_prompt_tokens))
        except InputError as error:
            logger.warning("request %s is computed exactly: %s", request.request_id, error)
            reason = f"marks: {error}"
        except Exception as error:  # the store cannot be read, say; an error here would stop the engine
            logger.exception("request %s is computed exactly", request.request_id)
            reason = f"failed: {type(error).__name__}"
        if reason:
            self._reports[request.request_id] = report = {"blended": False, "reason": reason}
            self._count(report)

    def _take(self, request: Any, marks: Marks) -> str:
        """Accept a request whose chunks are worth blending; otherwise return the reason."""
        ratio = self._ratio if marks.ratio is None else marks.ratio
        if not marks.chunks:
            return "no_chunks"
        prompt = marks.prompt(self._naming, request.prompt_token_ids, request.cache_salt, self._cached(request))
        if not prompt.chunks:
            return "prefix_cache"
        found = prompt.by_chunk(self._stored(prompt.keys))
        missed = [chunk for chunk, is_stored in zip(prompt.chunks, found, strict=True) if is_stored is False]
        reused = sum(len(chunk.token_ids) for chunk, is_stored in zip(prompt.chunks, found, strict=True) if is_stored)
        if not reused or _rows(prompt, ratio, reused) > self.largest_share * len(prompt):
            self._missed += missed
            return "not_stored" if missed else "not_worth_it"
        first = len(prompt.prefix) // self._block_size
        if request.block_hashes or request._block_hasher is not None:
            if first >= len(request.block_hashes):
                self._missed += missed
                return "short_prompt"  # the first chunk's block is not full, and would get an exact name when it is
            # Rename that block; all after it, those of generated tokens too, are hashed after its name.
            exact, salt = request.block_hashes[first], marks.salt(ratio, self._naming.digest, request.prompt_token_ids)
            request.block_hashes[first:] = [type(exact)(hashlib.sha256(salt + exact).digest())]
            request.update_block_hashes()
        self._marked[request.request_id] = request, BlendJob(request.request_id, prompt, marks.ratio)
        return ""

    def matched(self, request: Any, computed: int) -> int | None:
        """Count the tokens after the first `computed` that a worker hands over; 0 where vLLM computes the prompt itself.

        The count is None while another request's blend of the same prompt is under way, whose blocks vLLM has at its end.
        """
        if request.request_id not in self._marked:
            return 0
        _, job = self._marked[request.request_id]
        prompt, others = job.prompt, (other for id_, other in self._under_way.items() if id_ != request.request_id)
        if request.block_hashes and any((other.prompt, other.ratio) == (prompt, job.ratio) for other in others):
            return None
        # What vLLM's prefix cache leaves to compute; a prefix that is not too long is in the workers' memory then, too, but for
        # one that ends in chunks.
        first = request.kv_transfer_params[PARAMS_KEY]["chunks"][0][0]
        held = min(computed, len(prompt.prefix)) if len(prompt.prefix) <= min(first, self._prefix_tokens) else 0
        reused = sum(len(chunk.token_ids) for chunk in prompt.chunks if chunk.key is not None)
        ratio = self._ratio if job.ratio is None else job.ratio
        if _rows(prompt, ratio, reused) - held > self.largest_share * (len(prompt) - computed):
            is_blended = computed > len(prompt.prefix)
            self._note(request.request_id, {"blended": is_blended, "reason": "prefix_cache", "cached_tokens": computed})
            return 0
        return max(0, len(prompt) - 1 - computed)

    def allocated(self, request: Any, block_ids: Sequence[int], handed_over: int) -> None:
        """Send a request to the workers, once its pages are allocated."""
        _, job = self._marked[request.request_id]
        self._jobs.append(replace(job, block_ids=tuple(block_ids), start=len(job.prompt) - 1 - handed_over))
        self._under_way[request.request_id] = job

    def take_jobs(self) -> tuple[list[BlendJob], list[PromptChunk]]:
        """Work that the workers must begin, once each."""
        jobs, missed = self._jobs, self._missed
        self._jobs, self._missed = [], []
        self._waiting_misses += len(missed)
        return jobs, missed

    def observe(self, reports: Mapping[str, dict[str, Any]], waiting_misses: int) -> None:
        """Take in what the workers have done."""
        self._waiting_misses = waiting_misses
        for request_id, report in reports.items():
            self._under_way.pop(request_id, None)
            self._note(request_id, report)

    @property
    def has_misses(self) -> bool:
        """Whether missed chunks wait to be computed, for which the engine must go on stepping."""
        return bool(self._missed or self._waiting_misses)

    def finish(self, request: Any) -> dict[str, Any] | None:
        """Forget a request; returns its answer's report, None for a request without marks."""
        self._marked.pop(request.request_id, None)
        self._under_way.pop(request.request_id, None)
        report = self._reports.pop(request.request_id, None)
        return None if report is None else {PARAMS_KEY: report}

    def take_counts(self) -> dict[str, int]:
        """The counts since the last call, by name: "blended", "exact:REASON", and those of `TOKENS`."""
        counts, self._counts = dict(self._counts), Counter()
        return counts

    def _note(self, request_id: str, report: dict[str, Any]) -> None:
        """Count and keep a request's first report; one that vLLM computes is blended no more, and has blocks of exact names."""
        if request_id not in self._reports:
            self._count(report)
        if request_id not in self._marked:
            return  # it has ended
        request, job = self._marked[request_id]
        self._reports.setdefault(request_id, report)
        if not report["blended"]:
            del self._marked[request_id], request.block_hashes[len(job.prompt.prefix) // self._block_size :]
            request.update_block_hashes()

    def _count(self, report: Mapping[str, Any]) -> None:
        self._counts["blended" if report["blended"] else f"exact:{report['reason'].partition(':')[0]}"] += 1
        self._counts.update({name: report[name] for name in TOKENS if name in report})


def _reason_to_refuse(request: Any) -> str:
    """Why a request cannot be blended; empty if it can."""
    refused = {
        "multimodal": bool(request.mm_features),
        "prompt_embeds": request.prompt_embeds is not None or request.prompt_token_ids is None,
        "prompt_logprobs": bool(request.skip_reading_prefix_cache),
        "streaming_input": bool(request.resumable),
    }
    return next((reason for reason, found in refused.items() if found), "")


def _rows(prompt: PromptTokens, ratio: float, reused: int) -> float:
    """Rows that a blend runs in the mean of the layers; of the chunks `reused` tokens are stored."""
    return len(prompt) - reused * (1 - ratio) + min(MAX_QUESTION_TOKENS, len(prompt.suffix))
