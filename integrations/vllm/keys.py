"""Names of chunks' KV inside vLLM's processes: those of the project's own engine, so that both share a store."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from transformers import AutoConfig, AutoModelForCausalLM

from cacheblend.base.errors import UnsupportedModelError
from cacheblend.blend.families import fingerprint_directory
from cacheblend.blend.loading import NO_CODE, load_tokenizer
from cacheblend.blend.precompute import DOCUMENT_TOKENS
from cacheblend.service.engine.chunk_context import ChunkNaming, read_context
from cacheblend.service.engine.prompt import PromptChunk, PromptRenderer, PromptTokens
from cacheblend.service.engine.request import namespace_of

from .config import ConnectorConfig
from .marks import Marks

Chunk = tuple[int, ...]


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
