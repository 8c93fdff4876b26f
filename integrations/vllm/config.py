"""The connector's options, from vLLM's `kv_connector_extra_config`, and the names of chunks' KV that follow from them."""

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch
from huggingface_hub import snapshot_download
from transformers import AutoConfig

from cacheblend.base.errors import ConfigError, UnsupportedModelError
from cacheblend.base.options import from_options, options_of
from cacheblend.blend import KVGeometry
from cacheblend.blend.families import fingerprint_directory, max_positions_of, weight_files
from cacheblend.blend.loading import NO_CODE, class_for, load_tokenizer
from cacheblend.loader import LoaderConfig
from cacheblend.service.engine.chunk_context import ChunkNaming, read_context
from cacheblend.service.engine.config import EngineConfig, remembered_settings
from cacheblend.service.engine.prompt import PromptRenderer
from cacheblend.store import StoreConfig

# Options that the environment may have instead, as it may for the other commands: vLLM logs the ones that it is given.
VARIABLES = ("remote", "remote_secret")
OPTIONS = (
    *("store_dir", "recompute_ratio", "ram_budget_bytes", "nvme_budget_bytes", "instruction", "context_filler"),
    *("preset", "max_loss_nats", "chunk_tokens", "find_passages", "index_budget_bytes"),
    *(*VARIABLES, "remote_timeout_s", "codec"),
)
# What prompts begin with (a system message) has so large a part of the RAM budget, one over this.
PREFIX_PART = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectorConfig:
    """Options of the connector: the store of chunks' KV, and the blending of prompts.

    Args:
        engine: of the project's own engine over the same store, with the options of `OPTIONS`. Chunks that it has ingested
            with the same model, dtype and instruction are hits here. `codec` is its `kv_cache_dtype`, `recompute_ratio` its
            `quality_ratio`; the workers of one vLLM share `ram_budget_bytes`.
    """

    engine: EngineConfig

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> Self:
        """The configuration that vLLM's `kv_connector_extra_config` names, with the settings of the folder's KV as defaults.

        Raises:
            ConfigError: an unknown option, none for `store_dir`, or a value that is not allowed.
        """
        if unknown := sorted(options.keys() - set(OPTIONS)):
            raise ConfigError("kv_connector_extra_config", unknown, f"options are {', '.join(sorted(OPTIONS))}")
        if "store_dir" not in options:
            raise ConfigError("kv_connector_extra_config", dict(options), 'give "store_dir", the folder of the chunks\' KV')
        known, given = options_of(StoreConfig), dict[str, Any](remembered_settings(Path(str(options["store_dir"]))))
        given.pop("embedder", None)  # documents are not searched here
        given |= {name: os.environ.get(known[name].variable) or None for name in VARIABLES}
        given |= {"kv_cache_dtype" if name == "codec" else name: options[name] for name in OPTIONS if name in options}
        engine = from_options(EngineConfig, {**given, "model": "any"})
        if (ratio := engine.recompute_ratio) is not None:
            engine = replace(engine, loader=LoaderConfig(quality_ratio=ratio))
        return cls(engine=engine)

    def prefix_tokens(self, geometry: KVGeometry, workers: int) -> int:
        """Tokens of prompts' prefixes whose KV, of this shape, a worker holds in memory: a part of the RAM budget."""
        token_bytes = geometry.layers * geometry.layer_bytes(1)
        return self.engine.store.ram_budget_bytes // PREFIX_PART // workers // token_bytes

    def store_config(self, workers: int = 1) -> StoreConfig:
        """The store of one worker; the remaining RAM budget is for `prefix_tokens`."""
        all_bytes = self.engine.store.ram_budget_bytes
        return replace(self.engine.store_config(), ram_budget_bytes=max(1, (all_bytes - all_bytes // PREFIX_PART) // workers))

    def naming(self, model: Any) -> ChunkNaming:
        """Names of chunks' KV: those of the project's own engine, so that both share a store.

        Args:
            model: vLLM's configuration of it. Its quantisation of the weights changes the KV, and the names.

        Raises:
            UnsupportedModelError: there is no tokenizer, transformers knows no such model, or its folder has no weights.
        """
        tokenizer = load_tokenizer(model.tokenizer or model.model, revision=model.tokenizer_revision)
        if tokenizer is None:
            raise UnsupportedModelError(f"{model.tokenizer!r} has no tokenizer, which chunks' context is made with")
        name, is_local = model.model, Path(model.model).is_dir()
        folder = Path(name if is_local else snapshot_download(name, revision=model.revision, local_files_only=True))
        commit = "" if weight_files(folder) else folder.name  # of the hub, where its weights are in another folder
        if commit and is_local:
            raise UnsupportedModelError(f"{folder} has no weights, which name chunks' KV; put them there, or give a hub id")
        try:
            with torch.device("meta"):
                config = AutoConfig.from_pretrained(folder, **NO_CODE)
                named: Any = class_for("", {"config": config}).from_config(config, dtype=model.dtype)
        except ValueError as error:
            raise UnsupportedModelError(f"transformers knows no causal LM for {name!r}: {error}") from error
        if callable(model.hf_overrides):
            raise UnsupportedModelError("hf_overrides: a function names no KV; give a dict")
        fingerprint = fingerprint_directory(folder, named, model.dtype)
        # A latent's keys have another order.
        given = (model.hf_overrides, model.quantization_config, model.hf_config_path)
        overrides = "".join(f":{one}" for one in given if one)
        if model.quantization is not None or model.use_mla or overrides or commit:
            fingerprint = hashlib.sha256(f"{fingerprint}:vllm:{model.quantization}{overrides}{commit}".encode()).hexdigest()
        engine, prefix = self.engine, tuple(PromptRenderer(tokenizer, self.engine.instruction).prefix)
        positions = max_positions_of(named.config.get_text_config(decoder=True))
        filler, tokens = engine.context_filler, engine.context_document_tokens
        context = read_context(tokenizer, positions, filler, tokens, len(prefix))
        return ChunkNaming(prefix, context, fingerprint, engine.kv_cache_dtype)
