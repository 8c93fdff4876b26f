"""The engine: a question over documents, answered from blended KV (paper figure 11)."""

import logging
import math
import threading
import time
import warnings
from collections import deque
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from cacheblend.base.errors import InputError, RetrieverError
from cacheblend.base.threads import Check, Progress, in_groups
from cacheblend.blend import Fusor
from cacheblend.blend.loading import load_tokenizer
from cacheblend.loader import LoadingController
from cacheblend.retriever import Chunk, Document, Embedder, Retriever, ScoredChunk, checked_between_batches, in_reading_order
from cacheblend.retriever.document import CatalogedDocument
from cacheblend.retriever.index import INDEX_FILE, IndexedDocuments
from cacheblend.retriever.splitter import Splitter
from cacheblend.store import KVStore

from .background_precompute import BackgroundPrecompute, Foreground
from .chunk_context import ChunkContexts, ChunkEncoder
from .config import INDEX_FOLDER, EngineConfig, load_fusor, model_name, remember_new_settings, remembered_settings
from .decoding import Piece
from .documents import Documents
from .ingest import BATCH_DOCUMENTS, DocumentEncoder, IngestReport, batches
from .passages import FoundPassage, PassageReuse, passages_of
from .prefill import Prefiller, PrefillSteps, PrefixCache
from .profiles import calibrated, find_controller
from .prompt import PromptChunk, PromptRenderer, PromptTokens, check_characters
from .request import Answer, Done, Request, RequestOptions, namespace_of

logger = logging.getLogger(__name__)
REINDEXED_CHUNKS = 256  # of a batch
NOT_SEARCHED = "nothing was searched: there are no documents, the messages have passages of their own, or num_chunks is 0"


def check_index(config: EngineConfig) -> None:
    """Refuse, before its weights are loaded, a model whose tokenizer is not the index's; warn of another one that has it.

    Raises:
        RetrieverError: it names the model that the documents were ingested for.
    """
    folder, name = Path(config.store_dir), model_name(config)
    found = remembered_settings(folder).get("model", name)
    if found == name or not (folder / INDEX_FOLDER / INDEX_FILE).is_file() or not (tokenizer := load_tokenizer(config.model)):
        return
    with IndexedDocuments.open(folder / INDEX_FOLDER) as index:
        is_other = index.count() and index.setting("tokenizer") != Splitter(tokenizer, config.retriever).fingerprint
    remedy = f"name that one, or have `cacheblend reindex --model {name}` compute their KV for this one"
    why = f"the documents in {folder} were ingested for {found}, not for {name}; {remedy}"
    if is_other:
        raise RetrieverError(why)
    logger.warning(why)


class Engine:
    """Ingests documents and answers questions over them. Thread-safe; a context manager.

    Args:
        config: model, directory, settings; what it leaves open its preset and the store's calibration settle, see `calibrated`.
        fusor: in place of the model that the config names.
        embedder: in place of the embedder that the config names.
        rewriting: has an index of another tokenizer or embedder made this engine's before it is opened, and follows that; the
            documents stay. `reindex` then computes their KV.
        foreground: of another engine, where both share `fusor`: the background work of both gives way to the requests of both.

    Raises:
        InputError: no model there.
        UnsupportedModelError: blending is not right on the model.
        StoreDirectoryError, RetrieverError: the directory cannot be used.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        fusor: Fusor | None = None,
        embedder: Embedder | None = None,
        rewriting: Progress | None = None,
        foreground: Foreground | None = None,
    ) -> None:
        self._closed = True  # until there is something to close
        if fusor is None and rewriting is None:
            check_index(config)
        self.fusor = fusor or load_fusor(config)
        tokenizer = self.fusor.tokenizer
        if tokenizer is None:
            raise InputError(f"the model at {config.model!r} has no tokenizer; save one beside it")
        self.prompts = PromptRenderer(tokenizer, config.instruction, max_positions=self.fusor.max_positions)
        self._selector = config.fusion.selector  # the user's own
        config = calibrated(config, self.fusor, self.prompts.prefix)
        self.config = config = replace(config, fusion=replace(config.fusion, recompute_ratio=config.recompute_ratio))
        self._encoder = encoder = ChunkEncoder.of(self.fusor, self.prompts.prefix, config)
        logger.info("opening the store %s", config.store_dir, extra={"stage": "opening the store"})
        with ExitStack() as opened:
            self.store = opened.enter_context(KVStore(config.store_config()))
            if rewriting is not None:
                check = partial(encoder.check_lengths, max_positions=self.fusor.max_positions)
                # The lock has deletions wait, and say so: the index is written for longer than SQLite waits.
                with self.store.exclusive(), Retriever(config.retriever, tokenizer, embedder) as of_none:
                    of_none.rewrite_index(Path(config.store_dir) / INDEX_FOLDER, check, rewriting)
            self.retriever = opened.enter_context(Retriever(config.retriever_config(), tokenizer, embedder))
            self._contexts = ChunkContexts(encoder.context, self.retriever)
            self.foreground = foreground or Foreground()
            self.background = BackgroundPrecompute(encoder, self.store, self.retriever, self.foreground)
            opened.callback(self.background.close)
            self.prefixes = PrefixCache(self.fusor, config.prefix_budget_bytes)
            controller = find_controller(config, self.fusor) if self.fusor.exact_reason is None else None
            self._prefiller = Prefiller(self.fusor, self.store, self.prefixes, encoder, self.background, config, controller)
            self._passages = PassageReuse(self, encoder)
            self._to_add = DocumentEncoder(encoder, self.retriever, self.store)
            self._indexes, self._opening = list[IndexedDocuments]([self.retriever]), threading.Lock()
            remember_new_settings(config)
            self._opened = opened.pop_all()
        self._closed = False

    @property
    def documents(self) -> Documents:
        """The ingested documents: list, show and delete. So are a vLLM's, which may come to the store at any time."""
        self._check_open()
        with self._opening:
            if len(self._indexes) == 1 and (self.config.vllm_dir / INDEX_FILE).is_file():
                self._indexes.append(self._opened.enter_context(IndexedDocuments.open(self.config.vllm_dir)))
        return Documents(self.store, *self._indexes, encoder=self._to_add)

    @property
    def controller(self) -> LoadingController | None:
        """Picks the ratio where a question does not; None, and so r*, until there is a profile of this model and device."""
        return self._prefiller.controller

    def ingest(self, documents: Iterable[Document | Mapping[str, object]], progress: Progress | None = None) -> IngestReport:
        """Split, index and precompute documents; returns when their KV is durable. What is stored already is skipped.

        The documents come, and take the place of known ones, all at once at the end. After an error, or a kill, nothing of them
        is in the index.

        Args:
            documents: `{"id": str, "title": str, "text": str}` each; a known id with another text replaces the document.
            progress: follows the ingest, and may end it.

        Raises:
            InputError: a document cannot be used, or its chunks are longer than the model's positions.
            StoreFullError: the disk or the index's budget is full, or the documents' KV does not fit its budget at once.
            DocumentChangedError: one of the documents was deleted or replaced meanwhile.
        """
        if not (batch := [Document.of(document) for document in documents]):
            raise InputError("no documents to ingest; give at least one")
        return self.documents.add(batch, progress or Progress(), must_stay=True)

    def ingest_stream(
        self,
        documents: Iterable[Document | Mapping[str, object]],
        progress: Progress | None = None,
        *,
        batch_documents: int = BATCH_DOCUMENTS,
    ) -> IngestReport:
        """`ingest` for any number of documents, a batch after the other: memory holds one batch, and the ids.

        If it ends early, by an error or a kill, the batches before are durable, after Ctrl-C with the documents of the last one
        whose KV is complete, and the same call goes on from there.

        Args:
            documents: see `ingest`; an empty stream is no error.
            progress: see `ingest`.
            batch_documents: documents of a batch.

        Raises:
            InputError, DocumentChangedError: see `ingest`; the batches before are ingested.
            StoreFullError: the disk or the index's budget is full, or a chunk's KV is larger than the KV's budget. A KV budget
                below the corpus is no error: the report counts what was evicted, and a warning is logged.
        """
        self._check_open()
        return self._add(batches(map(Document.of, documents), batch_documents), progress)

    def reindex(self, progress: Progress | None = None) -> IngestReport:
        """Compute the KV of all documents, from the texts in the index, where it is not stored; others' is removed first.

        Others' is KV of another model or codec than this engine's, also of texts that requests brought; the remote tier keeps
        it, which other stores may use. If it ends early, the same call goes on from there. See `ingest_stream` for progress
        and errors.
        """
        self._check_open()
        self.store.documents.drop_others(self.fusor.fingerprint, self.config.kv_cache_dtype)
        groups = in_groups(self.retriever.documents(), lambda group: sum(one.chunks for one in group) >= REINDEXED_CHUNKS)
        return self._add(groups, progress)

    def _add(self, groups: Iterable[Sequence[Document | CatalogedDocument]], progress: Progress | None) -> IngestReport:
        """Add documents, a batch after the other, or compute those of the index; see `ingest_stream`."""
        progress, total = progress or Progress(), IngestReport()
        started, evictions = time.perf_counter(), self.store.stats().nvme.evictions
        for batch in groups:
            total += self.documents.add(batch, progress)
            progress.note_batch()
        if evicted := self.store.stats().nvme.evictions - evictions:
            budget_bytes = self.store.config.nvme_budget_bytes
            logger.warning("the KV of %d chunks exceeded nvme_budget_bytes=%d; raise it to keep all", evicted, budget_bytes)
        return replace(total, evicted=evicted, seconds=time.perf_counter() - started)

    def search(self, question: str, num_chunks: int, filter: Mapping[str, Any] | None = None) -> list[ScoredChunk]:
        """The nearest chunks, or as many as there are; the log says why there are none.

        Raises:
            InputError: an empty question, num_chunks below 1, or no documents to search.
            RetrieverError: the embedder or the directory cannot be used.
        """
        self._check_open()
        if not (found := self.retriever.search(question, num_chunks, filter)):
            logger.warning(self.retriever.why_none(filter))
        return found

    def find_passages(self, messages: Iterable[tuple[str, str]]) -> tuple[FoundPassage, ...]:
        """The passages in a chat's messages, a role and a text each, for `RequestOptions.passages`; none if it is switched off.

        Raises:
            PromptTooLongError: the texts cannot be within the model's positions.
            RetrieverError: the directory cannot be used.
        """
        self._check_open()
        texts = list(messages)
        check_characters(sum(len(text) for _, text in texts), self.fusor.max_positions)
        return passages_of(texts, self.retriever.passages) if self.config.find_passages else ()

    def prompt_chunks(self, chunks: Sequence[Chunk], namespace: str, *, brought: bool = False) -> tuple[PromptChunk, ...]:
        """The rows of a prompt's chunks."""
        rows: list[PromptChunk] = []
        for chunk, earlier in zip(chunks, self._contexts.of_prompt(chunks), strict=True):
            version = chunk.document_id, chunk.version
            # A text that was brought is an ingested document's only as long as it is ingested as it is.
            is_ingested = not brought or self.retriever.version(chunk.document_id) == chunk.version
            key = self._encoder.key(chunk.token_ids, earlier, namespace)
            rows.append(PromptChunk(chunk.token_ids, key, version if is_ingested else None, earlier))
        return tuple(rows)

    def explain(self, layout: PromptTokens, passages: Sequence[FoundPassage], cache_salt: str = "") -> dict[str, Any]:
        """The passages of a prompt without chunks, and how many of its tokens a blend would reuse; notes nothing."""
        return self._passages.explain(layout, passages, namespace_of(cache_salt))

    def answer(self, question: str, **options: Any) -> Answer:
        """Answer a question over the nearest chunks, or over the documents given, in their order.

        Args:
            question: in words.
            options: see `RequestOptions`.

        Raises:
            InputError: an empty question or document, a num_chunks below 1, or no documents to search.
            PromptTooLongError: prompt and answer are longer than the model's positions.
            ConfigError: an unknown method or option, or a number outside its range.
        """
        with self.foreground:
            return self.complete(self.prepare(question, **options))

    def prepare(self, question: str, *, check: Check = lambda: None, **options: Any) -> Request:
        """Check a request, retrieve its chunks and lay out its prompt: all of `answer` that comes before the model.

        A prompt that is too long without its chunks is refused before anything is embedded.

        Args:
            question: in words.
            check: called between batches of embedding; what it raises ends the work.
            options: see `RequestOptions`.
        """
        # 1. Check what is asked.
        self._check_open()
        check()
        started, config, asked = time.perf_counter(), self.config, RequestOptions.read(options)
        positions, fusion = self.fusor.max_positions, config.fusion
        if asked.recompute_ratio is not None or asked.max_loss_nats is not None:
            ratio = fusion.recompute_ratio if asked.recompute_ratio is None else asked.recompute_ratio
            selector = fusion.selector if asked.max_loss_nats is None else self._selector  # a calibrated one may not widen
            fusion = replace(fusion, recompute_ratio=ratio, selector=selector, max_loss_nats=asked.max_loss_nats)
        searches = asked.documents is not None or asked.layout is None or asked.num_chunks != 0
        if (layout := asked.layout) is None:
            layout = self.prompts.question(question)
            asked = replace(asked, thoughts=self.prompts.thoughts(layout))
        layout.check_length(asked.max_tokens, positions)
        # 2. Find the chunks.
        scored = self._retrieve(question, asked, check) if searches else []
        why_none = NOT_SEARCHED if asked.filter and not searches else None
        if searches and not scored:
            why_none = self.retriever.why_none(asked.filter)
        check()
        retrieved, chunks = time.perf_counter(), [one.chunk for one in scored]
        # 3. Lay out the prompt.
        namespace = namespace_of(asked.cache_salt)
        prompt = replace(layout, chunks=self.prompt_chunks(chunks, namespace, brought=asked.documents is not None))
        blends = asked.method in ("blend", "full_reuse")
        if asked.passages and blends and self.fusor.exact_reason is None:
            prompt = self._passages.cut(prompt, asked.passages, namespace)
        # 4. Copy to this machine what only the remote tier has.
        if blends:
            self._prefiller.fetch(prompt)
        return Request(
            engine=self,
            asked=asked,
            method=asked.method,
            fusion=fusion,
            max_tokens=prompt.check_length(asked.max_tokens, positions, config.max_tokens),
            chunks=scored,
            prompt=prompt,
            started=started,
            retrieved=retrieved,
            no_chunks_reason=why_none,
        )

    def complete(self, request: Request) -> Answer:
        """Answer a prepared request, which holds its prompt's KV from then on."""
        request.holds_kv = True
        *_, done = self.stream(request)
        assert isinstance(done, Done)
        return done.answer

    def stream(self, request: Request) -> Generator[Piece | Done, None, None]:
        """Answer a prepared request in the caller's thread, token by token; closing the iterator frees what it holds."""
        pieces = deque[Any]()
        request.deliver = pieces.append
        try:
            # 5. Prefill: look the chunks' KV up, load it layer by layer, blend it.
            request.begin()
            is_complete = False
            while request.decoding is None:
                is_complete = request.prefill_layer()
            # 6. Decode.
            while not is_complete:
                yield pieces.popleft()
                (logits_V,) = self.fusor.decoder.decode([request.last_token], [request.kv])
                is_complete = request.decode(logits_V)
            yield pieces.popleft()
            # 7. Put the answer together: text, plan, timings.
            yield request.finish()
        finally:
            request.end()

    def prefill_steps(self, request: Request) -> PrefillSteps:
        """Prefill a prepared request, one layer a step; see `Prefiller.steps`."""
        return self._prefiller.steps(request)

    def drain(self) -> None:
        """Wait until the KV of every chunk that a request missed is computed and stored."""
        self.background.drain()

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
            self.background.stop()  # its thread holds the store, which closes itself, and warns, when nobody does
            warnings.warn(f"the engine on {self.config.store_dir} was not closed; use `with`", ResourceWarning, stacklevel=2)

    def _retrieve(self, question: str, asked: RequestOptions, check: Check) -> list[ScoredChunk]:
        if asked.documents is None:
            with checked_between_batches(check):
                found = self.retriever.search(question, asked.num_chunks, asked.filter, asked.earlier_question)
            return in_reading_order(found)
        if not asked.documents:
            raise InputError("documents is empty; give at least one, or leave it out to search the ingested ones")
        positions, chunks = self.fusor.max_positions, list[ScoredChunk]()
        # Metadata say nothing here, and may be of any form.
        plain = ({**given, "metadata": None} if isinstance(given, Mapping) else given for given in asked.documents)
        brought = [given if isinstance(given, Chunk) else Document.of(given) for given in plain]
        check_characters(sum(len(given.text) for given in brought), positions)
        for given in brought:
            check()
            split = [given] if isinstance(given, Chunk) else self.retriever.splitter.split(given, check)
            chunks += [ScoredChunk(chunk, math.nan) for chunk in split]
        return chunks

    def _check_open(self) -> None:
        if self._closed:
            raise InputError(f"the engine on {self.config.store_dir} is closed; open a new one")
