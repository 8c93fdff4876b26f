"""Keys of chunks' KV: the same in vLLM's processes and in the project's own engine, so that both share a store."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from huggingface_hub import snapshot_download
from transformers import AutoConfig, AutoModelForCausalLM

from cacheblend.base.errors import UnsupportedModelError
from cacheblend.blend import ChunkContext
from cacheblend.blend.families import fingerprint_directory
from cacheblend.blend.loading import NO_CODE, load_tokenizer
from cacheblend.blend.precompute import DOCUMENT_TOKENS
from cacheblend.service.engine.chunk_contexts import chunk_context
from cacheblend.service.engine.prompt import PromptRenderer
from cacheblend.service.engine.request import namespace_of
from cacheblend.store import ChunkKey, context_digest

from .config import ConnectorConfig

Chunk = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ChunkKeys:
    """Names chunks' KV.

    Args:
        head: token ids that every chunk's KV is computed after: the chat template's opening and the instruction.
        context: what stands between those and a chunk.
        model: fingerprint of the model.
        codec: how KV is stored.
    """

    head: Chunk
    context: ChunkContext
    model: str
    codec: str

    @classmethod
    def for_model(
        cls, config: ConnectorConfig, model: str, tokenizer: str, dtype: torch.dtype, quantization: str | None
    ) -> ChunkKeys:
        """The keys of a model that vLLM has loaded.

        Args:
            config: the connector's.
            model: its folder or hub id.
            tokenizer: its tokenizer's.
            dtype: that it computes in.
            quantization: how vLLM quantises its weights, which gives other numbers; None for not.

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
        head = PromptRenderer(tokens, config.instruction).prefix
        positions = getattr(named.config.get_text_config(decoder=True), "max_position_embeddings", None)
        seen = SimpleNamespace(tokenizer=tokens, max_positions=positions, model=SimpleNamespace(name_or_path=str(folder)))
        context = chunk_context(seen, config.context_filler, DOCUMENT_TOKENS, len(head))
        return cls(tuple(head), context, fingerprint, config.codec)

    @classmethod
    def for_engine(cls, config: ConnectorConfig, vllm_config: Any) -> ChunkKeys:
        """The keys of the model that a vLLM engine is configured with; raises as `for_model` does."""
        model = vllm_config.model_config
        return cls.for_model(config, model.model, model.tokenizer or model.model, model.dtype, model.quantization)

    @property
    def digest(self) -> str:
        """Names what chunks' KV is computed after, and by which model."""
        named = (self.model, self.codec, self.head, self.context)
        return hashlib.sha256(repr(named).encode()).hexdigest()

    def earlier(self, chunks: Sequence[Chunk], documents: Sequence[int] = ()) -> list[tuple[Chunk, ...]]:
        """The chunks of its document that each chunk of a prompt is computed after; see `Marks.documents`."""
        if not documents:
            return [()] * len(chunks)
        found: dict[int, tuple[Chunk, ...]] = {}
        for document in set(documents):
            own = [index for index, of in enumerate(documents) if of == document]
            before = self.context.earlier([chunks[index] for index in own])
            found |= {index: tuple(map(tuple, texts)) for index, texts in zip(own, before, strict=True)}
        return [found[index] for index in range(len(chunks))]

    def key(self, chunk: Sequence[int], earlier: Sequence[Sequence[int]], cache_salt: str | None) -> ChunkKey:
        """The store's key of a chunk that is computed after these chunks of its document."""
        return ChunkKey.of(
            chunk,
            prefix_ids=self.head,
            context=context_digest(self.context.filler_ids, earlier),
            model=self.model,
            codec=self.codec,
            namespace=namespace_of(cache_salt or ""),
        )
