"""RMS norms of a decoding step's few rows, each one call of C where the models' own modules are eight small operations.

The decoder takes them for decoding alone. A module stays as it is on other devices, and where the compiled file does not give
its outputs; which of the two ways of scaling a model has is found by comparing them.

Shapes: R rows, M hidden size.
"""

from __future__ import annotations

import copy
import ctypes
import functools
import logging
import subprocess
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .compiled_file import find_compiler, load_compiled

SOURCE = Path(__file__).with_name("rms_norm.c")
MAX_ROWS = 64  # that one thread norms; with more the module is faster
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

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Normed rows (..., M)."""
        size = hidden.shape[-1]
        rows = hidden.numel() // size
        if rows > MAX_ROWS or not hidden.is_contiguous():
            plain: torch.Tensor = self.plain(hidden)
            return plain
        out = torch.empty_like(hidden)
        weight = self._weight.data_ptr()
        self._call(hidden.data_ptr(), weight, out.data_ptr(), rows, size, self._epsilon, self._one_added)
        return out


def with_fused_norms(module: Any) -> Any:
    """A shallow copy of a module tree with its RMS norms fused where that is possible; the parameters stay shared."""
    twin = copy.copy(module)
    twin._modules = {
        name: child if child is None else _fused(child) if _is_rms_norm(child) else with_fused_norms(child)
        for name, child in module._modules.items()
    }
    return twin


def _is_rms_norm(module: nn.Module) -> bool:
    return type(module).__name__.endswith("RMSNorm") and isinstance(getattr(module, "weight", None), torch.Tensor)


def _epsilon(norm: Any) -> float:
    return float(norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps)


def _fused(plain: Any) -> nn.Module:
    weight_M: torch.Tensor = plain.weight
    if weight_M.device.type != "cpu" or weight_M.dtype not in (torch.float32, torch.bfloat16):
        return plain  # type: ignore[no-any-return]
    call = _load(weight_M.dtype)
    if call is None:
        return plain  # type: ignore[no-any-return]
    sample_RM = torch.randn(MAX_ROWS, len(weight_M), generator=torch.Generator().manual_seed(0)).to(weight_M.dtype)
    for one_added in (False, True):
        fused = FusedNorm(plain, call, one_added=one_added)
        if _agree(fused, plain, sample_RM):
            return fused
    logger.info("%s is no RMS norm that rms_norm.c knows", type(plain).__name__)
    return plain  # type: ignore[no-any-return]


@torch.no_grad()
def _agree(fused: nn.Module, plain: nn.Module, sample_RM: torch.Tensor) -> bool:
    """Whether two modules' outputs differ by no more than a sum in another order does: a last digit, in 16 bits a rare one."""
    mine_RM, own_RM = fused(sample_RM), plain(sample_RM)
    step = torch.finfo(sample_RM.dtype).eps
    if sample_RM.dtype == torch.float32:
        return torch.allclose(mine_RM, own_RM, rtol=10 * step, atol=10 * step)
    rare = bool((mine_RM != own_RM).float().mean() < 0.01)
    return rare and torch.allclose(mine_RM, own_RM, rtol=step, atol=step)


@functools.cache
def _load(dtype: torch.dtype) -> Any:
    """The compiled function; None where it cannot be had."""
    compiler = find_compiler()
    if compiler is None:
        return None
    try:
        call = load_compiled(compiler, SOURCE, ["-DBFLOAT16"] if dtype == torch.bfloat16 else []).rms_norm
    except (OSError, subprocess.SubprocessError, AttributeError) as error:
        logger.warning("rms_norm.c is not used, the models' own norms decode: %s", error)
        return None
    pointer, count = ctypes.c_void_p, ctypes.c_int64
    call.restype, call.argtypes = None, [pointer, pointer, pointer, count, count, ctypes.c_float, ctypes.c_int]
    return call
