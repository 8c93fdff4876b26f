"""Engines of vLLM over tiny random models that have a tokenizer; skipped where vLLM cannot be imported."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[3] / "scripts"))

from make_random_model import CHAT_TEMPLATE, ModelShape, python_help, train_tokenizer
from tiny_models import CONFIGS
from transformers import AutoModelForCausalLM
from vllm_engines import BLOCK, VOCAB, MakeModel, OpenServed, Served

from cacheblend.integrations.vllm.plugin import vllm_version

WITHOUT = "vLLM is not installed here; scripts/check_vllm.sh makes an environment with its CPU build and runs these tests"

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # the engine in this process, so that a test can look into it
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "0")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if vllm_version():
        return
    for item in items:
        if Path(__file__).parent in Path(item.fspath).parents and "engine" in item.path.stem:
            item.add_marker(pytest.mark.skip(reason=WITHOUT))


@pytest.fixture(scope="session")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> MakeModel:
    """Writes a tiny random model of a family, of a shape that vLLM's CPU attention takes; gives its folder."""
    tokenizer = train_tokenizer(python_help()[:20], ModelShape(vocab=VOCAB, max_positions=512))
    tokenizer.chat_template = CHAT_TEMPLATE
    made: dict[tuple[str, torch.dtype], Path] = {}

    def make(name: str, dtype: torch.dtype = torch.float32) -> Path:
        if (name, dtype) not in made:
            torch.manual_seed(0)
            config = CONFIGS[name]()
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
            folder = tmp_path_factory.mktemp(name)
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
            made[name, dtype] = folder
        return made[name, dtype]

    return make


@pytest.fixture
def open_served(tmp_path: Path) -> OpenServed:
    """Opens an engine over a model's folder, with a store in the test's folder; keywords go to vLLM's `LLM`, those of
    `connector` to ours.
    """

    @contextmanager
    def open_one(
        folder: Path, *, dtype: str = "float32", connector: dict[str, Any] | None = None, **options: Any
    ) -> Iterator[Served]:
        from vllm import LLM
        from vllm.distributed import cleanup_dist_env_and_memory

        transfer = {
            "kv_connector": "CacheBlendConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"store_dir": str(tmp_path / "store"), "recompute_ratio": 0.15, **(connector or {})},
        }
        settings: dict[str, Any] = {
            "max_model_len": 448,
            "max_num_batched_tokens": 256,
            "max_logprobs": -1,
            "block_size": BLOCK,
            "enforce_eager": True,
            "disable_log_stats": True,
            "kv_transfer_config": transfer,
            **options,
        }
        llm = LLM(str(folder), dtype=dtype, **settings)
        try:
            yield Served(llm, tmp_path / "store")
        finally:
            llm.llm_engine.engine_core.shutdown()
            del llm
            gc.collect()
            cleanup_dist_env_and_memory()

    return open_one
