"""The dtype that "auto" stands for."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import tiny_model

from cacheblend.blend import Fusor, compiled_file
from cacheblend.blend.loading import choose_dtype

HALF, BRAIN, FULL = torch.float16, torch.bfloat16, torch.float32


@pytest.fixture
def features(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that lists the processor's features."""
    monkeypatch.setattr(compiled_file, "CPUINFO", tmp_path / "cpuinfo")
    return tmp_path / "cpuinfo"


@pytest.mark.parametrize(
    ("checkpoint", "listed", "chosen"),
    [
        (BRAIN, "flags : avx512f avx512_bf16", BRAIN),
        (BRAIN, "Features : asimd bf16", BRAIN),
        (BRAIN, "flags : avx512f avx512_fp16", FULL),
        (HALF, "flags : avx512_fp16", HALF),
        (HALF, "flags : amx_bf16", FULL),
        (FULL, "flags : amx_bf16", FULL),
        (None, "flags : amx_bf16", FULL),
    ],
)
def test_on_a_cpu(checkpoint: torch.dtype | None, listed: str, chosen: torch.dtype, features: Path) -> None:
    """A 16-bit checkpoint has its dtype where the CPU has instructions for it; all else is float32."""
    features.write_text(f"{listed}\n")
    assert choose_dtype(checkpoint, "cpu") is chosen


@pytest.mark.parametrize(
    ("checkpoint", "native", "chosen"), [(BRAIN, True, BRAIN), (BRAIN, False, FULL), (HALF, False, HALF), (FULL, True, FULL)]
)
def test_on_a_gpu(checkpoint: torch.dtype, native: bool, chosen: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU computes in float16, and in bfloat16 where it has it."""
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: native or including_emulation)
    assert choose_dtype(checkpoint, "cuda") is chosen


@pytest.mark.parametrize("named", [FULL, BRAIN])
def test_a_checkpoint_that_is_loaded(
    named: torch.dtype, tmp_path: Path, features: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With "auto" a model computes in the dtype of its config where that is fast; with a dtype named, in that."""
    monkeypatch.setattr("cacheblend.blend.decoder.is_worth_packing", lambda _: False)  # the processor may not have the features
    features.write_text("flags : avx512_bf16\n")
    tiny_model("llama", dtype=named).save_pretrained(tmp_path / "model")
    assert Fusor.from_pretrained(str(tmp_path / "model"), dtype="auto").decoder.dtype is named
    assert Fusor.from_pretrained(str(tmp_path / "model")).decoder.dtype is FULL


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU computes in FP8")
def test_fp8_weights_without_a_gpu(tmp_path: Path) -> None:
    """A checkpoint of FP8 weights computes in the dtype that it is loaded in."""
    model, file = tiny_model("llama", dtype=BRAIN), tmp_path / "model.safetensors"
    model.config.quantization_config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    model.save_pretrained(tmp_path)
    weights = load_file(file)
    for name in [name for name in weights if name.endswith("proj.weight")]:
        weights[name], weights[f"{name}_scale_inv"] = weights[name].to(torch.float8_e4m3fn), torch.ones(1, 1)
    save_file(weights, file, metadata={"format": "pt"})
    assert {parameter.dtype for parameter in Fusor.from_pretrained(str(tmp_path)).model.parameters()} == {FULL}
