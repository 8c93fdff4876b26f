"""Fused RMS norms are the models' own."""

import copy

import pytest
import torch
from tiny_models import CONFIGS, tiny_model

from cacheblend.blend.compiled_file import find_compiler
from cacheblend.blend.cpu_modules import FusedNorm, with_fused_norms

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="there is no C compiler")

ROWS = 200  # which threads share

FUSED = ("llama", "mistral-window", "mixtral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "phi3", "granite", "qwen3-moe")


def norms_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    """All RMS norms, their weights drawn anew, so that nothing is 1 or 0."""
    norms = [module for module in model.modules() if type(module).__name__.endswith("RMSNorm")]
    for norm in norms:
        torch.nn.init.uniform_(norm.get_parameter("weight"), -0.5, 2.0)
    return norms


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", CONFIGS)
def test_equals_the_model(family: str, dtype: torch.dtype) -> None:
    """A fused norm rounds as the model's own does."""
    model = copy.deepcopy(tiny_model(family)).to(dtype)
    norms = norms_of(model)
    fused = [module for module in with_fused_norms(model).modules() if isinstance(module, FusedNorm)]
    if family in FUSED:
        assert [module.plain for module in fused] == norms
        assert norms
    generator = torch.Generator().manual_seed(1)
    for module in fused:
        plain = module.plain
        rows = 5 * torch.randn(1, ROWS, plain.get_parameter("weight").numel(), generator=generator).to(dtype)
        with torch.no_grad():
            mine, own = module(rows), plain(rows)
        torch.testing.assert_close(mine, own, rtol=10 * torch.finfo(dtype).eps, atol=1e-5)
        assert (mine != own).float().mean() < (0.02 if dtype == torch.bfloat16 else 1)  # a sum in another order, rarely


class AddingRMSNorm(torch.nn.Module):
    """A norm as vLLM's, which takes a residual: it norms the sum as it is before it is rounded."""

    def __init__(self, size: int, dtype: torch.dtype, *, forgets: bool = False) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.rand(size, generator=torch.Generator().manual_seed(0)).to(dtype))
        self.eps, self.forgets = 1e-5, forgets

    def forward(self, hidden: torch.Tensor, residual: torch.Tensor | None = None) -> object:
        """Normed rows; with a residual also the sum."""
        total = hidden.float() + (0 if residual is None or self.forgets else residual.float())
        normed = (total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + self.eps)).to(hidden.dtype) * self.weight
        return normed if residual is None else (normed, total.to(hidden.dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_adds_a_residual(dtype: torch.dtype) -> None:
    """A residual is added and takes the sum; a norm that does something else with it stays as it is."""
    norm, generator = AddingRMSNorm(48, dtype), torch.Generator().manual_seed(1)
    fused = with_fused_norms(torch.nn.ModuleDict({"norm": norm}), residuals=True)["norm"]
    assert isinstance(fused, FusedNorm)
    hidden, residual = (torch.randn(ROWS, 48, generator=generator).to(dtype) for _ in range(2))
    with torch.no_grad():
        own, mine = norm(hidden, residual), fused(hidden, residual)
    for x, y in zip(mine, own, strict=True):
        torch.testing.assert_close(x, y, rtol=10 * torch.finfo(dtype).eps, atol=1e-5)
    other = torch.nn.ModuleDict({"norm": AddingRMSNorm(48, dtype, forgets=True)})
    assert with_fused_norms(other, residuals=True) is other


def test_strided_rows_are_the_modules() -> None:
    """Rows that are not in one piece go through the model's own module."""
    norm = norms_of(copy.deepcopy(tiny_model("llama")))[0]
    rows = torch.ones(1, 64, norm.get_parameter("weight").numel()).transpose(1, 2).contiguous().transpose(1, 2)
    (fused,) = with_fused_norms(torch.nn.ModuleList([norm]))
    with torch.no_grad():
        assert torch.equal(fused(rows), norm(rows))
