"""Chunks' KV: the text that each is computed after, its name in the store, and its computation.

A chunk is computed after the prompt's prefix, filler passages fixed for the store, and its document's earlier text.

The filler is text of no importance that looks like retrieved passages. It comes with the package (`context.txt`), or from
a file of the user's. No request and no tenant's document is ever part of it.
"""

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Self

from cacheblend.base.errors import ConfigError, InputError, PromptTooLongError
from cacheblend.blend import ChunkContext, Fusor
from cacheblend.retriever import Chunk, PlainTokenizer
from cacheblend.retriever.config import SEPARATOR
from cacheblend.retriever.index import IndexedDocuments
from cacheblend.store import ChunkKey, ChunkKV, context_digest

from .config import EngineConfig

PACKAGED_FILLER = Path(__file__).parent / "context.txt"
FILLER_TOKENS = 384
POSITIONS_SHARE = 8  # filler and window take no more than so many parts of the model's positions: 1 and 4 of 8
REMEMBERED_DOCUMENTS = 64  # of 100,000 tokens each 4 MB
Earlier = tuple[tuple[int, ...], ...]


def chunk_context(fusor: Fusor, filler: str, document_tokens: int, prefix_tokens: int = 0) -> ChunkContext:
    """The context of a fusor's chunks; see `read_context`."""
    return read_context(fusor.tokenizer, fusor.rope_border or fusor.max_positions, filler, document_tokens, prefix_tokens)


def read_context(
    tokenizer: Any, max_positions: int | None, filler: str, document_tokens: int, prefix_tokens: int = 0
) -> ChunkContext:
    """The context of a model's chunks.

    Args:
        tokenizer: the model's fast tokenizer.
        max_positions: the model's positions; None for any number.
        filler: "auto" for the package's, "none", or the path of a UTF-8 text file whose
            passages stand apart by empty lines. Passages are read in order, up to `FILLER_TOKENS`.
        document_tokens: see `ChunkContext`; cut to half of the model's positions, and to those that prefix and filler leave.
        prefix_tokens: tokens of the prompt's prefix, which chunks are computed after as well.

    Raises:
        ConfigError: the file cannot be read, has no text, or a first passage that is too long.
    """
    limit = FILLER_TOKENS if max_positions is None else min(FILLER_TOKENS, max_positions // POSITIONS_SHARE)
    filler_ids = _filler_ids(tokenizer, filler, limit)
    window = document_tokens
    if max_positions is not None:
        left = max(1, max_positions - prefix_tokens - len(filler_ids))
        window = min(document_tokens, max_positions // 2, left)
    return ChunkContext(filler_ids=filler_ids, document_tokens=window)


def _filler_ids(tokenizer: Any, filler: str, limit: int) -> tuple[int, ...]:
    if filler == "none":
        return ()
    plain = PlainTokenizer(tokenizer)
    taken: list[int] = []
    for passage in _filler_text(filler).split(SEPARATOR):
        ids = plain.ids(passage.strip() + SEPARATOR) if passage.strip() else []
        if len(taken) + len(ids) > limit:
            break
        taken += ids
    if not taken and filler != "auto":
        raise ConfigError(
            "context_filler", filler, f"a file whose first passage, up to an empty line, has {limit} tokens at most"
        )
    return tuple(taken)


def _filler_text(filler: str) -> str:
    path = PACKAGED_FILLER if filler == "auto" else Path(filler).expanduser()
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("context_filler", filler, f'"auto", "none", or a UTF-8 text file ({error})') from error
    if not text.strip():
        raise ConfigError("context_filler", filler, 'a file with text; "none" for no filler')
    return text


@dataclass(frozen=True, slots=True)
class ChunkNaming:
    """Names of chunks' KV: equal in the engine and inside vLLM, so that both share a store.

    Args:
        prefix_ids: token ids that every prompt begins with.
        context: what stands between those and a chunk.
        model: fingerprint of the model.
        codec: how the KV is stored.
    """

    prefix_ids: tuple[int, ...]
    context: ChunkContext
    model: str
    codec: str

    @property
    def digest(self) -> str:
        """Names what chunks' KV is computed after, and by which model."""
        return hashlib.sha256(repr((self.model, self.codec, self.prefix_ids, self.context)).encode()).hexdigest()

    def key(self, token_ids: Sequence[int], earlier: Sequence[Sequence[int]], namespace: str = "") -> ChunkKey:
        """The store's key of a chunk that is computed after these chunks of its document."""
        return ChunkKey.of(
            token_ids,
            prefix_ids=self.prefix_ids,
            context=context_digest(self.context.filler_ids, earlier),
            model=self.model,
            codec=self.codec,
            namespace=namespace,
        )

    def check_lengths(self, id_: str, chunks: Sequence[Sequence[int]], max_positions: int | None) -> None:
        """Raise PromptTooLongError if a document's chunk, and what it is computed after, are longer than the positions."""
        longest, before = max(map(len, chunks), default=0), len(self.prefix_ids) + len(self.context.filler_ids)
        if max_positions is not None and before + longest > max_positions:
            why = f"a chunk of {longest} tokens, {before} before it, and the model {max_positions} positions"
            raise PromptTooLongError(f"document {id_!r} has {why}; lower chunk_tokens, in another folder")

    def keys_of_document(self, chunks: Sequence[Sequence[int]]) -> list[ChunkKey]:
        """The store's keys of all chunks of a document, in its order."""
        return list(map(self.key, chunks, self.context.earlier(chunks)))


@dataclass(frozen=True, slots=True)
class ChunkEncoder(ChunkNaming):
    """Computes the chunks' KV that it names.

    Args:
        fusor: the model.
    """

    fusor: Fusor

    @classmethod
    def of(cls, fusor: Fusor, prefix_ids: tuple[int, ...], config: EngineConfig) -> Self:
        """Of an engine's settings; raises as `read_context` does."""
        context = chunk_context(fusor, config.context_filler, config.context_document_tokens, len(prefix_ids))
        return cls(prefix_ids, context, fusor.fingerprint, config.kv_cache_dtype, fusor)

    def keys_of_document(self, chunks: Sequence[Sequence[int]]) -> list[ChunkKey]:
        """The store's keys of all chunks of a document; none for a hybrid, which has no KV of a chunk."""
        return [] if self.fusor.exact_reason is not None else ChunkNaming.keys_of_document(self, chunks)

    def compute(self, token_ids: Sequence[int], earlier: Sequence[Sequence[int]]) -> ChunkKV:
        """The KV of one chunk after these chunks of its document."""
        (kv,) = self.fusor.precompute_document([*earlier, token_ids], self.prefix_ids, [len(earlier)], self.context)
        return kv


class ChunkContexts:
    """The earlier text of chunks in their documents, remembered by document.

    Args:
        context: how documents are read.
        retriever: has the ingested documents' chunks.
    """

    def __init__(self, context: ChunkContext, retriever: IndexedDocuments) -> None:
        self._context, self._retriever = context, retriever
        self._ingested = lru_cache(REMEMBERED_DOCUMENTS)(self._of_index)

    def of_prompt(self, chunks: Sequence[Chunk]) -> tuple[Earlier, ...]:
        """The earlier chunks that each chunk of a prompt is computed after.

        A document that is not ingested is known by those of its chunks that stand in the prompt.
        """
        own: dict[tuple[str, str], list[Chunk]] = {}
        for chunk in chunks:
            own.setdefault((chunk.document_id, chunk.version), []).append(chunk)
        known = {document: self._of(document, given) for document, given in own.items()}
        return tuple(known[chunk.document_id, chunk.version].get(chunk.position, ()) for chunk in chunks)

    def _of(self, document: tuple[str, str], given: Sequence[Chunk]) -> dict[int, Earlier]:
        with suppress(InputError):  # a text that a request brings need not be in the index
            ingested, earlier = self._ingested(*document)
            if all(ingested.get(chunk.position) == chunk.token_ids for chunk in given):
                return earlier
        return self._earlier(dict(sorted({chunk.position: chunk.token_ids for chunk in given}.items())))

    def _of_index(self, id_: str, version: str) -> tuple[dict[int, tuple[int, ...]], dict[int, Earlier]]:
        """The chunks of an ingested document and their earlier ones; InputError, which is not remembered, if there is none."""
        found = {chunk.position: chunk.token_ids for chunk in self._retriever.chunks(id_) if chunk.version == version}
        if not found:
            raise InputError(f"document {id_!r} has another version")
        return found, self._earlier(found)

    def _earlier(self, chunks: Mapping[int, Sequence[int]]) -> dict[int, Earlier]:
        """The earlier chunks that each chunk of a document, by its position and in their order, is computed after."""
        earlier = self._context.earlier(list(chunks.values()))
        return {position: tuple(map(tuple, before)) for position, before in zip(chunks, earlier, strict=True)}
