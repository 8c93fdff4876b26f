"""Marks of a request, and names of its chunks' KV: those of the project's own engine, so that both share a store."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from transformers import AutoConfig, AutoModelForCausalLM

from cacheblend.base.errors import InputError, UnsupportedModelError
from cacheblend.blend.families import fingerprint_directory
from cacheblend.blend.loading import NO_CODE, load_tokenizer
from cacheblend.blend.precompute import DOCUMENT_TOKENS
from cacheblend.service.engine.chunk_context import ChunkNaming, read_context
from cacheblend.service.engine.prompt import PromptChunk, PromptRenderer, PromptTokens
from cacheblend.service.engine.request import namespace_of

from .config import ConnectorConfig

PARAMS_KEY = "cacheblend"  # in vLLM's `kv_transfer_params`, of a request and of its answer
Chunk = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Marks:
    """Places of a prompt's chunks.

    Args:
        chunks: (start, stop) token positions of each chunk, in order, without overlap.
        ratio: recompute ratio, 0..1; None for the connector's.
        documents: the number of the document that each chunk is of, where chunks of one document stand in its order; a chunk's
            KV is then computed after the ones before it. Empty: every chunk is a document of its own.
    """

    chunks: tuple[tuple[int, int], ...]
    ratio: float | None = None
    documents: tuple[int, ...] = ()

    @classmethod
    def read(cls, params: Any, prompt_tokens: int) -> Marks:
        """The marks in `kv_transfer_params["cacheblend"]`: `{"chunks": [[start, stop], ...], "ratio": 0.14}`.

        Raises:
            InputError: they are not of that form, or do not fit the prompt.
        """
        if not isinstance(params, Mapping) or (unknown := sorted(params.keys() - {"chunks", "ratio", "documents"})):
            named = f"unknown {', '.join(unknown)}" if isinstance(params, Mapping) else f"{type(params).__name__}"
            raise InputError(f'kv_transfer_params["{PARAMS_KEY}"]: {named}; give chunks, and ratio or documents if need be')
        chunks, ratio, documents = params.get("chunks"), params.get("ratio"), params.get("documents") or []
        if not isinstance(chunks, list | tuple) or not all(_is_span(chunk) for chunk in chunks):
            raise InputError("chunks: give a list of [start, stop] token positions")
        spans = tuple((int(start), int(stop)) for start, stop in chunks)
        borders = [border for span in spans for border in span]
        if any(last < first for first, last in pairwise(borders)) or any(start == stop for start, stop in spans):
            raise InputError("chunks: spans must be in order, without overlap, and none may be empty")
        if borders and (borders[0] < 0 or borders[-1] > prompt_tokens):
            raise InputError(f"chunks: spans must lie within the prompt's {prompt_tokens} tokens")
        if ratio is not None and (isinstance(ratio, bool) or not isinstance(ratio, int | float) or not 0 <= ratio <= 1):
            raise InputError(f"ratio={ratio!r}: give a number from 0 to 1")
        if documents and (len(documents) != len(spans) or not all(type(document) is int for document in documents)):
            raise InputError("documents: give a whole number for each chunk")
        return cls(spans, None if ratio is None else float(ratio), tuple(documents))

    def as_params(self) -> dict[str, Any]:
        """Result of `read`."""
        params: dict[str, Any] = {"chunks": [list(chunk) for chunk in self.chunks]}
        if self.ratio is not None:
            params["ratio"] = self.ratio
        if self.documents:
            params["documents"] = list(self.documents)
        return params

    def salt(self, ratio: float, context: str) -> bytes:
        """Salt of blocks blended with these marks, which separates them from exact ones and those of other marks.

        Args:
            ratio: the one that the prompt is blended with, or the least one where the marks name none.
            context: names what chunks' KV is computed after.
        """
        named = {
            "ratio": ratio,
            "is_least": self.ratio is None,
            "chunks": self.chunks,
            "documents": self.documents,
            "context": context,
        }
        return hashlib.sha256(json.dumps(named, sort_keys=True).encode()).digest()


def _is_span(span: Any) -> bool:
    return isinstance(span, list | tuple) and len(span) == 2 and all(type(border) is int for border in span)


def naming_of_model(
    config: ConnectorConfig, model: str, tokenizer: str, dtype: torch.dtype, quantization: str | None
) -> ChunkNaming:
    """The naming of a model that vLLM has loaded.

    Args:
        config: the connector's.
        model: its folder or hub id.
        tokenizer: its tokenizer's.
        dtype: that it computes in.
        quantization: vLLM's quantisation of the weights, which changes the KV; None for none.

    Raises:
        UnsupportedModelError: there is no tokenizer, or transformers knows no such model.
    """
    tokens = load_tokenizer(tokenizer)
    if tokens is None:
        raise UnsupportedModelError(f"{tokenizer!r} has no tokenizer, which chunks' context is made with")
    folder = Path(model) if Path(model).is_dir() else Path(snapshot_download(model, local_files_only=True))
    settings: Any = AutoConfig.from_pretrained(folder, **NO_CODE)
    try:
        with torch.device("meta"):
            named: Any = AutoModelForCausalLM.from_config(settings, dtype=dtype)
    except ValueError as error:
        raise UnsupportedModelError(f"transformers knows no causal LM for {model!r}: {error}") from error
    fingerprint = fingerprint_directory(folder, named, dtype)
    if quantization is not None:
        fingerprint = hashlib.sha256(f"{fingerprint}:vllm:{quantization}".encode()).hexdigest()
    prefix = tuple(PromptRenderer(tokens, config.instruction).prefix)
    positions = getattr(named.config.get_text_config(decoder=True), "max_position_embeddings", None)
    context = read_context(tokens, positions, str(folder), config.context_filler, DOCUMENT_TOKENS, len(prefix))
    return ChunkNaming(prefix, context, fingerprint, config.codec)


def naming_of_engine(config: ConnectorConfig, vllm_config: Any) -> ChunkNaming:
    """The naming of the model that a vLLM engine is configured with; raises as `naming_of_model` does."""
    model = vllm_config.model_config
    return naming_of_model(config, model.model, model.tokenizer or model.model, model.dtype, model.quantization)


def prompt_of(naming: ChunkNaming, token_ids: Sequence[int], marks: Marks, cache_salt: str | None) -> PromptTokens:
    """A marked prompt: what stands before its first chunk, its chunks with what stands between them, and the tokens after.

    Chunks of one document are computed after each other; see `Marks.documents`.
    """
    ids, namespace = tuple(token_ids), namespace_of(cache_salt or "")
    chunks = [ids[start:stop] for start, stop in marks.chunks]
    earlier = _earlier(naming, chunks, marks.documents)
    rows: list[PromptChunk] = []
    for at, ((start, _), chunk, before) in enumerate(zip(marks.chunks, chunks, earlier, strict=True)):
        if at and (between := ids[marks.chunks[at - 1][1] : start]):
            rows.append(PromptChunk(between))
        rows.append(PromptChunk(chunk, naming.key(chunk, before, namespace), earlier=before))
    first, last = marks.chunks[0][0], marks.chunks[-1][1]
    return PromptTokens(ids[:first], tuple(rows), ids[last:])


def _earlier(naming: ChunkNaming, chunks: Sequence[Chunk], documents: Sequence[int]) -> list[tuple[Chunk, ...]]:
    """The chunks of its document that each chunk of a prompt is computed after."""
    found: list[tuple[Chunk, ...]] = [()] * len(chunks)
    for document in set(documents):
        own = [index for index, number in enumerate(documents) if number == document]
        for index, before in zip(own, naming.context.earlier([chunks[index] for index in own]), strict=True):
            found[index] = tuple(map(tuple, before))
    return found
