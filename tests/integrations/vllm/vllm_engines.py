"""vLLM engines over tiny random models, and what tests ask of them; imports vLLM when it is used."""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parents[3] / "scripts"))
sys.path.insert(0, str(Path(__file__).parents[2]))

from make_random_model import CHAT_TEMPLATE, ModelShape, python_help, train_tokenizer
from tiny_models import CONFIGS

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # the engine in this process, so that one can look into it
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

VOCAB = 400
FAMILIES = ["llama", "qwen2", "qwen3", "mistral-window", "gemma2", "gemma3", "phi3", "mixtral"]
BLOCK = 32  # the smallest that the CPU build takes
# The requests that applications' libraries have written to the service, by recipe, and the texts in them.
RECIPES = json.loads((Path(__file__).parents[2] / "service" / "http" / "recipes.json").read_text(encoding="utf-8"))
POSITIONS = 1536  # that these need
MakeModel = Callable[..., Path]
OpenServed = Callable[..., Any]


class TinyModels:
    """Writes tiny random models of the families, of shapes that vLLM's CPU attention takes, once each.

    Args:
        folder: where they go.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tokenizer = train_tokenizer(python_help()[:20], ModelShape(vocab=VOCAB, max_positions=512))
        self._tokenizer.chat_template = CHAT_TEMPLATE

    def __call__(self, name: str, dtype: torch.dtype = torch.float32, positions: int | None = None) -> Path:
        """The model's folder."""
        folder = self._folder / f"{name}-{str(dtype).removeprefix('torch.')}-{positions}"
        if folder.exists():
            return folder
        torch.manual_seed(0)
        config = CONFIGS[name]()
        if positions is not None:
            config.max_position_embeddings = positions
        sizes = {"vocab_size": VOCAB, "hidden_size": 128, "head_dim": 32, "bos_token_id": 0, "eos_token_id": 1}
        for field, value in sizes.items():
            setattr(config, field, value)
        if hasattr(config, "query_pre_attn_scalar"):
            config.query_pre_attn_scalar = 32
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        with torch.no_grad():
            for parameter, weight in model.named_parameters():
                if any(part in parameter for part in ("q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj")):
                    weight.mul_(3.0)
        model.save_pretrained(folder)
        self._tokenizer.save_pretrained(folder)
        return folder


@contextmanager
def open_engine(
    folder: Path, store: Path | None, *, dtype: str = "float32", connector: dict[str, Any] | None = None, **options: Any
) -> Iterator[Served]:
    """Open an engine over a model's folder, closed afterwards.

    Args:
        folder: the model's.
        store: of chunks' KV; None for vLLM without the connector.
        dtype: vLLM's.
        connector: options of the connector beside its store.
        options: of vLLM's `LLM`.
    """
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown

    settings: dict[str, Any] = {
        "max_model_len": 448,
        "max_num_batched_tokens": 256,
        "max_logprobs": -1,
        "block_size": BLOCK,
        "enforce_eager": True,
        "disable_log_stats": True,
    }
    if store is not None:
        extra = {"store_dir": str(store), "recompute_ratio": 0.15, **(connector or {})}
        settings["kv_transfer_config"] = {
            "kv_connector": "CacheBlendConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": extra,
        }
    llm: Any = None
    try:
        llm = LLM(str(folder), dtype=dtype, **{**settings, **options})
        served = Served(llm, store or Path())
        if store is not None:
            served.scheduler.connector._scheduler.largest_share = 9.0  # the tests' short prompts are not worth a blend
        yield served
    finally:  # after one that is refused, too
        if llm is not None:
            llm.llm_engine.engine_core.shutdown()
        ensure_kv_transfer_shutdown()
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()


@dataclass
class Served:
    """vLLM's engine, and what it is asked by a test."""

    llm: Any
    store: Path

    def ask(
        self,
        tokens: Sequence[int],
        chunks: Sequence[Sequence[int]] | None = None,
        *,
        ratio: float | None = None,
        new_tokens: int = 6,
        documents: Sequence[int] = (),
    ) -> Any:
        """The engine's `RequestOutput` of a prompt, marked where chunks are given."""
        return self.ask_all([(tokens, chunks)], ratio=ratio, new_tokens=new_tokens, documents=documents)[0]

    def ask_all(
        self,
        prompts: Sequence[tuple[Sequence[int], Sequence[Sequence[int]] | None]],
        *,
        ratio: float | None = None,
        new_tokens: int = 6,
        documents: Sequence[int] = (),
    ) -> list[Any]:
        """The same of several at once."""
        from vllm import SamplingParams

        def params(chunks: Sequence[Sequence[int]] | None) -> Any:
            marks = {"chunks": chunks, "ratio": ratio, "documents": list(documents)}
            extra = {} if chunks is None else {"kv_transfer_params": {"cacheblend": marks}}
            return SamplingParams(max_tokens=new_tokens, temperature=0.0, logprobs=VOCAB, ignore_eos=True, extra_args=extra)

        every: list[Any] = self.llm.generate(
            [{"prompt_token_ids": list(tokens)} for tokens, _ in prompts],
            [params(chunks) for _, chunks in prompts],
            use_tqdm=False,
        )
        return every

    def precompute(self, chunks: Sequence[Sequence[int]]) -> None:
        """Store the KV of chunks that are documents of their own, through the running engine."""
        for chunk in chunks:
            args = ([[int(token) for token in chunk]], [0], None)
            ((_, left, _),) = self.llm.collective_rpc("cacheblend_precompute", args=args)
            assert not left
        self.connector._worker._store.flush()

    @property
    def connector(self) -> Any:
        """The worker's."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return get_kv_transfer_group()

    @property
    def scheduler(self) -> Any:
        """The engine's."""
        return self.llm.llm_engine.engine_core.engine_core.scheduler

    def free_blocks(self) -> int:
        """Pages that no request holds."""
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())


def first_logprobs(output: Any) -> torch.Tensor:
    """Log probabilities (V,) of the first generated token."""
    found = output.outputs[0].logprobs[0]
    return torch.tensor([found[token].logprob for token in range(VOCAB)])


def apart(one: Any, other: Any) -> float:
    """Largest difference of log probabilities of the first tokens of two answers."""
    return float((first_logprobs(one) - first_logprobs(other)).abs().max())
