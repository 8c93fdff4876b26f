"""The engine: a question over documents, answered from blended KV (paper figure 11)."""

from __future__ import annotations

import logging
import math
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self

from cacheblend.blend import Fusor
from cacheblend.loader import LoadEstimator, LoadingController, RecomputeEstimator, measure_prefill
from cacheblend.retriever import Document, Embedder, Retriever, ScoredChunk
from cacheblend.store import KVStore
from cacheblend.store.errors import ConfigError, InputError, PromptTooLongError

from .answer import Answer, AnswerPlan, IngestReport, Timings
from .config import DTYPES, EngineConfig, check_max_tokens
from .first_token import FirstTokenClock
from .hole_filler import HoleFiller
from .prefiller import Prefilled, Prefiller
from .prompt import PromptBuilder, PromptPieces

logger = logging.getLogger(__name__)
Progress = Callable[[str, int, int], None]
FLUSH_EVERY = 64  # chunks; the writer keeps up meanwhile


class Engine:
    """Ingests documents and answers questions over them. Thread-safe; a context manager.

    Args:
        config: model, directory, settings.
        fusor: in place of the model that the config names.
        embedder: in place of the embedder that the config names.

    Raises:
        InputError: no model there.
        UnsupportedModelError: blending is not right on the model.
        StoreDirectoryError, RetrieverError: the directory cannot be used.
    """

    def __init__(self, config: EngineConfig, *, fusor: Fusor | None = None, embedder: Embedder | None = None) -> None:
        self._closed = True  # until there is something to close
        self.config = config
        self.fusor = fusor or Fusor.from_pretrained(
            config.model, config.resolve_device(), DTYPES[config.dtype], allow_unverified=config.allow_unverified
        )
        if self.fusor.tokenizer is None:
            raise InputError(f"the model at {config.model!r} has no tokenizer; save one beside it")
        self._prompts = PromptBuilder(self.fusor.tokenizer, config.instruction, config.chunk_prefix)
        with ExitStack() as opened:
            self.store = opened.enter_context(KVStore(config.store_config()))
            self.retriever = opened.enter_context(Retriever(config.retriever_config(), self.fusor.tokenizer, embedder))
            self._holes = HoleFiller(self.fusor, self.store)
            opened.callback(self._holes.close)
            recompute = RecomputeEstimator(measure_prefill(self.fusor.decoder))
            self.controller = LoadingController(config.loader, LoadEstimator(config.loader), recompute)
            self._prefiller = Prefiller(
                self.fusor,
                self.store,
                self.controller,
                self._holes,
                config,
                self._prompts.head,
                self._prompts.chunk_prefix_ids,
            )
            self._opened = opened.pop_all()
        self._closed = False

    @property
    def methods(self) -> tuple[str, ...]:
        """The methods that `answer` knows."""
        return self._prefiller.methods

    def ingest(self, documents: Iterable[Mapping[str, object]], on_progress: Progress | None = None) -> IngestReport:
        """Split, index and precompute documents; returns when their KV is durable. What is stored already is skipped.

        Args:
            documents: `{"id": str, "title": str, "text": str}` each; a known id with another text replaces the document.
            on_progress: called with the stage ("index" or "precompute"), chunks or documents done, and how many in all.

        Raises:
            InputError: a document cannot be used, or its chunks are longer than the model's positions; none is ingested then.
            StoreFullError: the disk is full, or a chunk's KV is larger than the whole budget. A budget below the corpus is no
                error: the report counts what was evicted, and a warning is logged.
        """
        self._check_open()
        started = time.perf_counter()
        given = [Document.of(document) for document in documents]
        if not given:
            raise InputError("no documents to ingest; give at least one")
        self._check_chunks(given)
        report = on_progress or (lambda *_: None)
        added = self.retriever.add(given, lambda done, total: report("index", done, total))
        chunks = {
            self._prefiller.key(chunk.token_ids): chunk.token_ids
            for document_id in dict.fromkeys(document.id for document in given)
            for chunk in self.retriever.chunks(document_id)
        }
        missing = [key for key in chunks if key not in self.store]
        for done, key in enumerate(missing, start=1):
            kv = self.fusor.precompute(chunks[key], self._prompts.chunk_prefix_ids)
            self.store.put(key, kv, flush=False)
            if done % FLUSH_EVERY == 0:
                self.store.flush()  # a full disk ends the run here, not hours later
            report("precompute", done, len(missing))
        self.store.flush()
        evicted = sum(key not in self.store for key in chunks)
        if evicted:
            logger.warning(
                "the KV of %d of %d chunks did not stay within nvme_budget_bytes=%d; raise it to keep all",
                evicted,
                len(chunks),
                self.config.nvme_budget_bytes,
            )
        return IngestReport(
            documents=len(given),
            added=added.added,
            replaced=added.replaced,
            unchanged=added.unchanged,
            chunks=len(chunks),
            computed=len(missing),
            already_stored=len(chunks) - len(missing),
            evicted=evicted,
            tokens=sum(len(chunks[key]) for key in missing),
            seconds=time.perf_counter() - started,
        )

    def answer(
        self,
        question: str,
        *,
        top_k: int = 6,
        method: str = "blend",
        documents: Sequence[Mapping[str, object]] | None = None,
        recompute_ratio: float | None = None,
        max_tokens: int | None = None,
        temperature: float = 0.0,
        top_p: float = 1.0,
    ) -> Answer:
        """Answer a question over the `top_k` nearest chunks, or over the documents given, in their order.

        Args:
            question: in words.
            top_k: chunks to retrieve; the nearest stands first.
            method: "blend", "full_recompute", "prefix_cache" or "full_reuse"; all run the very same token ids.
            documents: bring your own retriever: these are split and used whole, and nothing is searched.
            recompute_ratio: for "blend", 0..1; None takes the config's, or else the loading controller's choice.
            max_tokens: most tokens to generate; None takes the config's.
            temperature: 0 is greedy; above, tokens are sampled.
            top_p: sample from the most likely tokens of this total probability.

        Raises:
            InputError: an empty question or document, or top_k outside 1..the chunks there are.
            PromptTooLongError: prompt and answer are longer than the model's positions.
            ConfigError: an unknown method, or a number outside its range.
        """
        self._check_open()
        started = time.perf_counter()
        self._prefiller.check_method(method)
        max_tokens = self.config.max_tokens if max_tokens is None else max_tokens
        check_max_tokens(max_tokens)
        sampling = _sampling(temperature, top_p)
        if recompute_ratio is None:
            recompute_ratio = self.config.recompute_ratio
        self.config.fusion_config(recompute_ratio)
        with self._holes:
            chunks = self._retrieve(question, top_k, documents)
            retrieved = time.perf_counter()
            pieces = self._prompts.build([scored.chunk for scored in chunks], question)
            self._check_length(pieces, max_tokens)
            prefilled = self._prefiller.run(pieces, method, recompute_ratio)
            prefill_done = time.perf_counter()
            clock = FirstTokenClock()
            token_ids = self.fusor.generate(
                prefilled.fused, max_tokens, streamer=clock, pad_token_id=self._pad_token_id(), **sampling
            )
        ended = time.perf_counter()
        timings = Timings(
            retrieve_s=retrieved - started,
            ttft_s=clock.first_token - retrieved,
            lookup_s=prefilled.lookup_s,
            prefill_s=prefill_done - retrieved,
            load_s=prefilled.load_s,
            wait_s=prefilled.fused.wait_s,
            decode_s=ended - clock.first_token,
            total_s=ended - started,
        )
        text = self.fusor.tokenizer.decode(token_ids, skip_special_tokens=True)
        return Answer(
            text=text,
            token_ids=token_ids,
            chunks=chunks,
            plan=_plan(method, prefilled),
            timings=timings,
            first_logits=prefilled.fused.logits,
        )

    def drain(self) -> None:
        """Wait until the KV of every chunk that a request missed is computed and stored."""
        self._holes.drain()

    def close(self) -> None:
        """Write what waits, and close store and index; a second call does nothing."""
        self._closed = True
        self._opened.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._closed = True
        self._opened.__exit__(kind, error, traceback)  # not `close`: the block's own error is the one to see, not the store's

    def __del__(self) -> None:
        if not self._closed:
            self._holes.stop()  # its thread holds the store, which closes itself, and warns, when nobody does
            warnings.warn(f"the engine on {self.config.store_dir} was not closed; use `with`", ResourceWarning, stacklevel=2)

    def _retrieve(self, question: str, top_k: int, documents: Sequence[Mapping[str, object]] | None) -> list[ScoredChunk]:
        if documents is None:
            return self.retriever.search(question, top_k)
        if not documents:
            raise InputError("documents is empty; give at least one, or leave it out to search the ingested ones")
        split = self.retriever.splitter.split
        return [ScoredChunk(chunk, math.nan) for document in documents for chunk in split(Document.of(document))]

    def _check_open(self) -> None:
        if self._closed:
            raise InputError(f"the engine on {self.config.store_dir} is closed; open a new one")

    def _check_chunks(self, documents: Iterable[Document]) -> None:
        """Refuse documents that the model cannot read chunk by chunk, before any of them is indexed."""
        positions, prefix = self.fusor.max_positions, len(self._prompts.chunk_prefix_ids)
        if positions is None or prefix + 2 * self.config.chunk_tokens <= positions:  # a chunk is a little over chunk_tokens
            return
        for document in documents:
            longest = max(len(chunk.token_ids) for chunk in self.retriever.splitter.split(document))
            if prefix + longest > positions:
                raise PromptTooLongError(
                    f"document {document.id!r} has a chunk of {longest} tokens, and the model {positions} positions, of which "
                    f"{prefix} are for what stands before it; lower chunk_tokens={self.config.chunk_tokens}"
                )

    def _check_length(self, pieces: PromptPieces, max_tokens: int) -> None:
        positions, tokens = self.fusor.max_positions, len(pieces.token_ids)
        if positions is not None and tokens + max_tokens > positions:
            raise PromptTooLongError(
                f"{tokens} prompt tokens and {max_tokens} to generate are more than the model's {positions} positions; "
                "lower top_k or max_tokens, or ingest smaller chunks"
            )

    def _pad_token_id(self) -> int:
        tokenizer = self.fusor.tokenizer
        return int(next((token for token in (tokenizer.pad_token_id, tokenizer.eos_token_id) if token is not None), 0))


def _sampling(temperature: float, top_p: float) -> dict[str, Any]:
    if not isinstance(temperature, int | float) or not math.isfinite(temperature) or temperature < 0:
        raise ConfigError("temperature", temperature, "0 (greedy) or above")
    if not isinstance(top_p, int | float) or not 0 < top_p <= 1:
        raise ConfigError("top_p", top_p, "above 0, at most 1")
    if temperature == 0:
        return {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    return {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": 0}


def _plan(method: str, prefilled: Prefilled) -> AnswerPlan:
    fused = prefilled.fused
    looked_up = [segment for segment in prefilled.segments if segment.key is not None]
    hits = sum(segment.tier is not None for segment in looked_up)
    return AnswerPlan(
        method=method,
        segments=prefilled.segments,
        hits=hits,
        misses=len(looked_up) - hits,
        recompute_ratio=prefilled.recompute_ratio,
        recomputed=fused.recomputed,
        prompt_tokens=len(fused.token_ids),
        reusable_tokens=fused.reusable_tokens,
        recomputed_tokens=fused.recomputed_ratio * fused.reusable_tokens,
        loaded_bytes=prefilled.loaded_bytes,
        loading=prefilled.loading,
    )
