"""RMS norms of rows, each one call of C in place of the model's eight operations.

Runners use them for decoding and for chosen rows; contiguous rows of a prompt run the model's own modules, bit for bit. A
module is not replaced on other devices, or if the compiled file's outputs differ. Models scale by the weight or by 1 + weight:
comparing outputs finds which.

Shapes: R rows, M hidden size.
"""

from __future__ import annotations

import copy
import functools
import logging
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .compiled_file import function, load_or_warn

SOURCE = Path(__file__).with_name("rms_norm.c")
SAMPLE_ROWS = 64
logger = logging.getLogger(__name__)


class FusedNorm(nn.Module):
    """One RMS norm.

    Args:
        plain: the model's own module.
        call: the compiled function.
        one_added: whether it scales by 1 + weight.
    """

    def __init__(self, plain: Any, call: Any, *, one_added: bool) -> None:
        super().__init__()
        self.plain, self._call, self._one_added = plain, call, one_added
        self._weight: torch.Tensor = plain.weight
        self._epsilon = _epsilon(plain)

    def forward(self, hidden: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        """Normed rows (..., M); with a residual, as in vLLM, the rows and the residual, which becomes the sum."""
        taken = [hidden] if residual is None else [hidden, residual]
        if not all(x.is_contiguous() and x.dtype == self._weight.dtype for x in taken):
            return self.plain(hidden) if residual is None else self.plain(hidden, residual)
        size, out = hidden.shape[-1], torch.empty_like(hidden)
        self._call(
            hidden.data_ptr(),
            None if residual is None else residual.data_ptr(),
            self._weight.data_ptr(),
            out.data_ptr(),
            hidden.numel() // size,
            size,
            self._epsilon,
            self._one_added,
            torch.get_num_threads(),
        )
        return out if residual is None else (out, residual)


def with_fused_norms(module: Any, *, residuals: bool = False) -> Any:
    """A shallow copy of a module tree with its RMS norms fused where possible; a tree without norms is returned itself.

    Args:
        module: the tree.
        residuals: whether its norms accept a residual, as vLLM's do.
    """
    children = {
        name: child
        if child is None
        else _fused(child, residuals)
        if _is_rms_norm(child)
        else with_fused_norms(child, residuals=residuals)
        for name, child in module._modules.items()
    }
    if all(children[name] is child for name, child in module._modules.items()):
        return module
    twin = copy.copy(module)
    twin._modules = children
    return twin


def _is_rms_norm(module: nn.Module) -> bool:
    return type(module).__name__.endswith("RMSNorm") and isinstance(getattr(module, "weight", None), torch.Tensor)


def _epsilon(norm: Any) -> float:
    return float(norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps)


def _fused(plain: Any, residuals: bool) -> Any:
    """The fused norm whose outputs are the module's; the module itself if there is none."""
    weight_M: torch.Tensor = plain.weight
    is_served = weight_M.device.type == "cpu" and weight_M.dtype in (torch.float32, torch.bfloat16)
    if not is_served or (call := _load(weight_M.dtype)) is None:
        return plain
    sample_RM = torch.randn(SAMPLE_ROWS, len(weight_M), generator=torch.Generator().manual_seed(0)).to(weight_M.dtype)
    for one_added in (False, True):
        fused = FusedNorm(plain, call, one_added=one_added)
        if _agree(fused, plain, sample_RM, residuals):
            return fused
    logger.info("%s is no RMS norm that rms_norm.c knows", type(plain).__name__)
    return plain


@torch.no_grad()
def _agree(fused: nn.Module, plain: nn.Module, sample_RM: torch.Tensor, residuals: bool) -> bool:
    """Whether two modules' outputs differ only by rounding: in the last digit, and in 16 bits rarely."""
    outputs = [(fused(sample_RM), plain(sample_RM))]
    if residuals:  # both modules may write into inputs and residual
        outputs += zip(*(norm(sample_RM.clone(), sample_RM.flip(0)) for norm in (fused, plain)), strict=True)
    step = torch.finfo(sample_RM.dtype).eps
    for mine_RM, own_RM in outputs:
        tolerance = 10 * step if sample_RM.dtype == torch.float32 else step
        rare = sample_RM.dtype == torch.float32 or bool((mine_RM != own_RM).float().mean() < 0.01)
        if not rare or not torch.allclose(mine_RM, own_RM, rtol=tolerance, atol=tolerance):
            return False
    return True


@functools.cache
def _load(dtype: torch.dtype) -> Any:
    """The compiled function; None if it cannot be compiled or loaded."""
    defines = ["-DBFLOAT16"] if dtype == torch.bfloat16 else []
    return load_or_warn(SOURCE, defines, lambda library: function(library, "rms_norm", "ppppllfii"), "slower norms run")
