"""The dtype that "auto" stands for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_models import tiny_model

from cacheblend.blend import Fusor, loading
from cacheblend.blend.loading import choose_dtype, relative_time

CPU, GPU = torch.device("cpu"), torch.device("cuda")
HALF, BRAIN, FULL = torch.float16, torch.bfloat16, torch.float32


@pytest.mark.parametrize(
    ("checkpoint", "relative", "chosen"),
    [(BRAIN, 0.25, BRAIN), (BRAIN, 1.0, FULL), (HALF, 0.5, HALF), (HALF, 9.0, FULL), (FULL, 0.25, FULL), (None, 0.25, FULL)],
)
def test_on_a_cpu(
    checkpoint: torch.dtype | None, relative: float, chosen: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A 16-bit checkpoint keeps its dtype where the CPU was measured to be faster in it; all else is float32."""
    monkeypatch.setattr(loading, "relative_time", lambda _: relative)
    assert choose_dtype(checkpoint, CPU) is chosen


@pytest.mark.parametrize(
    ("checkpoint", "native", "chosen"),
    [(BRAIN, True, BRAIN), (BRAIN, False, FULL), (HALF, False, HALF), (FULL, True, FULL)],
)
def test_on_a_gpu(checkpoint: torch.dtype, native: bool, chosen: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU takes float16, and bfloat16 where it has it."""
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: native or including_emulation)
    assert choose_dtype(checkpoint, GPU) is chosen


def test_the_cpu_is_measured_once() -> None:
    """The measurement gives a ratio, and the same one when asked again."""
    relative_time.cache_clear()
    assert 0 < relative_time(BRAIN) == relative_time(BRAIN)
    assert relative_time.cache_info().misses == 1


@pytest.mark.parametrize("named", [FULL, BRAIN])
def test_a_checkpoint_that_is_loaded(named: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With "auto" a model computes in what its config names where that is fast; with a dtype named, in that."""
    monkeypatch.setattr(loading, "relative_time", lambda _: 0.3)
    tiny_model("llama", dtype=named).save_pretrained(tmp_path)
    assert Fusor.from_pretrained(str(tmp_path), dtype="auto").decoder.dtype is named
    assert Fusor.from_pretrained(str(tmp_path)).decoder.dtype is FULL
