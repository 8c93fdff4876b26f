"""The compiled attention of a decoding step is PyTorch's attention."""

from pathlib import Path

import pytest
import torch

from cacheblend.blend import KVGeometry, generation
from cacheblend.blend.compiled_file import find_compiler
from cacheblend.blend.generation import DecodeKernel, DecodePass, SequenceLayerKV, decode_kernel

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="there is no C compiler")
HEADS = 2


def kernel_of(groups: int, head_size: int, dtype: torch.dtype) -> DecodeKernel | None:
    """The kernel of a shape with two KV heads."""
    return decode_kernel(KVGeometry(1, HEADS, head_size, dtype, torch.device("cpu")), HEADS * groups)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("groups", "head_size"), [(1, 4), (3, 24), (4, 64), (2, 256)])
def test_equals_pytorch(groups: int, head_size: int, dtype: torch.dtype, softcap: float | None) -> None:
    """Sequences of any length, with and without a window, get PyTorch's attention, step after step, past a growth of the KV."""
    kernel = kernel_of(groups, head_size, dtype)
    assert kernel is not None
    generator = torch.Generator().manual_seed(groups)
    lengths, windows = [1, 17, 64, 130, 33], [None, 5, None, 40, 200]
    stored = [torch.randn(2, HEADS, length, head_size, generator=generator).to(dtype) for length in lengths]
    sides = [[SequenceLayerKV(kv[0], kv[1], window) for kv, window in zip(stored, windows, strict=True)] for _ in range(2)]
    for _ in range(131):
        q, k, v = (torch.randn(1, len(lengths), HEADS * n, head_size, generator=generator).to(dtype) for n in (groups, 1, 1))
        outputs = []
        for layers, own in zip(sides, (kernel, None), strict=True):
            layer_pass = DecodePass(layers, own)
            rows = [x.transpose(1, 2) for x in (q, k, v)]
            layer_pass.update(rows[1], rows[2], 0)
            outputs.append(layer_pass.attend(torch.nn.Identity(), *rows, None, scaling=0.3, softcap=softcap))
        tolerance = 2e-5 if dtype == torch.float32 else 3e-2
        torch.testing.assert_close(outputs[0], outputs[1], rtol=tolerance, atol=tolerance)
    for own, other in zip(*sides, strict=True):
        for mine, pytorch in zip(own.visible(), other.visible(), strict=True):
            assert torch.equal(mine, pytorch)


def test_compiled_once(fresh_cache: Path) -> None:
    """A shape is compiled at its first use on a machine, and another shape for itself."""
    assert kernel_of(2, 16, torch.float32) is not None
    made = list(fresh_cache.rglob("*.so"))
    generation._load.cache_clear()
    assert kernel_of(2, 16, torch.float32) is not None
    assert list(fresh_cache.rglob("*.so")) == made
    assert len(made) == 1
    assert kernel_of(1, 16, torch.float32) is not None
    left = [path for path in fresh_cache.rglob("*") if path.is_file()]
    assert len(left) == 2  # nothing is left of the compiling
