"""Compiled kernels that are wrong or cannot be compiled are not used, and without a compiler PyTorch serves."""

import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest
import torch
from tiny_models import tiny_model

from cacheblend.blend import Fusor, KVGeometry, SequenceKV, attention, compiled_file, cpu_modules, generation
from cacheblend.blend.attention import FEATURES, row_kernel
from cacheblend.blend.cpu_modules import FusedNorm, with_fused_norms
from cacheblend.blend.generation import decode_kernel

CPU = torch.device("cpu")
needs_compiler = pytest.mark.skipif(compiled_file.find_compiler() is None, reason="no C compiler")
needs_amx = pytest.mark.skipif(not compiled_file.has_feature(FEATURES[0]), reason=f"no {FEATURES[0]}")


class Kernel(NamedTuple):
    """Where a kernel's source is named, and whether it is used when it is asked for anew."""

    module: ModuleType
    source: str
    is_used: Callable[[], bool]


KERNELS = {
    "rows": Kernel(attention, "SOURCE", lambda: row_kernel(torch.float32, CPU, 64) is not None),
    "rows in bfloat16": Kernel(attention, "SOURCE", lambda: row_kernel(torch.bfloat16, CPU, 64) is not None),
    "decode": Kernel(generation, "SOURCE", lambda: decode_kernel(KVGeometry(1, 2, 16, torch.float32, CPU), 4) is not None),
    "norm": Kernel(
        cpu_modules,
        "NORM_SOURCE",
        lambda: any(isinstance(module, FusedNorm) for module in with_fused_norms(tiny_model("gemma3")).modules()),
    ),
}
ROW_FAULTS = [
    ("stop = positions[rows - 1] + 1;", "stop = positions[rows - 1];"),  # the last key is not packed
    ("position + 1 - window", "position - window"),
    ("position % -window", "position % (1 - window)"),  # chunks are a key longer
    ("2.0f * 1.44269504f * scaling", "1.44269504f * scaling"),
    ("part = 1.0f / work->total[x]", "part = 0.5f / work->total[x]"),
    ("#include <omp.h>", "#error"),
]
DECODE_FAULTS = [("#include <omp.h>", "#error")]  # what it computes is held against PyTorch in test_decode_attention.py
NORM_FAULTS = [("squares / size", "squares"), ("#include <math.h>", "#error")]


@needs_compiler
@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        *(("rows", *fault) for fault in ROW_FAULTS),
        *(pytest.param("rows in bfloat16", *fault, marks=needs_amx) for fault in ROW_FAULTS),
        *(("decode", *fault) for fault in DECODE_FAULTS),
        *(("norm", *fault) for fault in NORM_FAULTS),
    ],
)
@pytest.mark.usefixtures("fresh_cache")
def test_wrong_code_is_not_used(name: str, right: str, wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that does not compile, or gives something else than PyTorch, is not used."""
    kernel = KERNELS[name]
    text = getattr(kernel.module, kernel.source).read_text()
    assert right in text
    source = tmp_path / "wrong.c"
    source.write_text(text.replace(right, wrong))
    monkeypatch.setattr(kernel.module, kernel.source, source)
    assert not kernel.is_used()


@pytest.mark.usefixtures("fresh_cache")
def test_without_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a compiler the model's own norms and PyTorch's attention decode, and give the same logits."""
    usual, prompt = Fusor(tiny_model("gemma2")), list(range(1, 40))
    if compiled_file.find_compiler() is not None:
        assert KERNELS["decode"].is_used()
        assert KERNELS["norm"].is_used()
    for module in (attention, generation, cpu_modules):
        module._load.cache_clear()
    monkeypatch.setattr(shutil, "which", lambda _: None)
    assert not any(kernel.is_used() for kernel in KERNELS.values())
    without = Fusor(tiny_model("gemma2"))
    logits = [
        fusor.decoder.decode([7], [SequenceKV(fusor.prefill(prompt), fusor.decoder.windows)]) for fusor in (usual, without)
    ]
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)
