"""A tiny random model, in memory and in a folder; a data set of a few cases; an embedder."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from fakes import FakeEmbedder, tiny_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from cacheblend.blend import Fusor
from cacheblend.eval.data import FileSource, Preset

sys.path.insert(0, str(Path(__file__).parent))  # for `from example_files import ...`
from example_files import case, write

POSITIONS = 1536


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with sharpened attention; its configuration does not say that it is random, so that answers are marked."""
    folder = tmp_path_factory.mktemp("eval-model")
    tokenizer = tiny_tokenizer()
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=POSITIONS,
            initializer_range=0.05,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=None,
        )
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if any(part in name for part in ("q_proj", "k_proj", "v_proj", "o_proj")):
                parameter.mul_(4.0)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def fusor(model_dir: Path) -> Fusor:
    return Fusor.from_pretrained(str(model_dir))


@pytest.fixture(scope="session")
def embedder() -> FakeEmbedder:
    return FakeEmbedder()


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> FileSource:
    """Five cases over two documents each, of several chunks."""
    folder = tmp_path_factory.mktemp("data")
    write(folder, "musique", [case(index) for index in range(5)])
    return FileSource(name="musique", data=str(folder), cases=5, preset=Preset(chunk_tokens=64, top_k=4))
