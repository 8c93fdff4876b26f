"""Modules of a model that a CPU computes faster than the model's own: packed linear layers, and RMS norms in C.

A product of a few rows costs the time of reading its weight. In 16 bits oneDNN first copies the weight into the instructions'
order, at every call, which doubles the time of few rows (docs/adr/017). Here the copy is made once, in a second memory of the
weights' size; a model larger than `MEMORY_PART` of the memory is not packed.

An RMS norm is one call of C in place of the model's eight operations. Runners use it for decoding and for chosen rows;
contiguous rows of a prompt run the model's own modules, bit for bit. A norm is not replaced if the compiled file's outputs
differ. Models scale by the weight or by 1 + weight: comparing outputs finds which.

Shapes: S rows, I inputs, O outputs, M hidden size.
"""

import copy
import functools
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .attention import FEATURES
from .compiled_file import function, has_feature, load_or_warn

MEMORY_PART = 1 / 8
CGROUP_OF_PROCESS, CGROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
EXPECTED_ROWS = 16  # oneDNN packs for this number of rows; 512 changes no product's time
NORM_SOURCE = Path(__file__).with_name("rms_norm.c")
SAMPLE_ROWS = 64
MLP_ROWS_AT_ONCE = 1024  # of one call: their activations fit the processor's caches
logger = logging.getLogger(__name__)


def with_modules(module: Any, **replaced: nn.Module | None) -> Any:
    """A shallow copy of a module with some children replaced."""
    twin = copy.copy(module)
    twin._modules = {**module._modules, **replaced}
    return twin


def _with_children(module: Any, twin_of: Callable[[nn.Module], nn.Module]) -> Any:
    """A shallow copy of a module whose children are replaced; the module itself if none is. Parameters stay shared."""
    children = {name: None if child is None else twin_of(child) for name, child in module._modules.items()}
    if all(children[name] is child for name, child in module._modules.items()):
        return module
    return with_modules(module, **children)


class RowPieces(nn.Module):
    """An MLP that runs on at most `MLP_ROWS_AT_ONCE` rows at a time; its rows are independent."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.mlp = mlp

    def forward(self, hidden_RSM: torch.Tensor, *more: Any) -> Any:
        if hidden_RSM.shape[1] <= MLP_ROWS_AT_ONCE or more:
            return self.mlp(hidden_RSM, *more)
        outputs = [self.mlp(piece) for piece in hidden_RSM.split(MLP_ROWS_AT_ONCE, dim=1)]
        if isinstance(outputs[0], tuple):  # mixtures return what their router said beside
            return torch.cat([output[0] for output in outputs], dim=1), None
        return torch.cat(outputs, dim=1)


class PackedLinear(nn.Module):
    """One linear layer; its parameters are shared."""

    def __init__(self, plain: nn.Linear) -> None:
        super().__init__()
        self.plain = plain
        self._weight: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(plain.weight.detach(), EXPECTED_ROWS)

    def forward(self, inputs_SI: torch.Tensor) -> Any:
        return torch.ops.mkldnn._linear_pointwise.default(inputs_SI, self._weight, self.plain.bias, "none", [], "")


def is_worth_packing(model: nn.Module) -> bool:
    """Whether to pack a model's linear layers: bfloat16, a CPU with instructions for it, and memory for a copy."""
    linears = [module for module in model.modules() if type(module) is nn.Linear]
    is_half = all(linear.weight.dtype == torch.bfloat16 and linear.weight.device.type == "cpu" for linear in linears)
    is_served = is_half and torch.backends.mkldnn.is_available() and any(map(has_feature, FEATURES))
    return is_served and sum(linear.weight.nbytes for linear in linears) <= MEMORY_PART * memory_bytes()


def memory_bytes() -> int:
    """Bytes of memory that this process may use: the machine's, or a container's or service's lower limit."""
    return min((os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), *_cgroup_limits()))


def _cgroup_limits() -> Iterator[int]:
    """Limits of the process's control group, version 2, and of the groups around it."""
    try:
        lines = CGROUP_OF_PROCESS.read_text().splitlines()
    except OSError:
        return
    for path in (line.removeprefix("0::/") for line in lines if line.startswith("0::/")):
        group = CGROUPS / path  # a container sees its own group at the root, not at this path
        for file in (folder / "memory.max" for folder in (group, *group.parents) if folder.is_relative_to(CGROUPS)):
            if file.is_file() and (text := file.read_text().strip()) != "max":
                yield int(text)


def packed(module: Any) -> Any:
    """A shallow copy of a module tree with its linear layers packed; the parameters stay shared with the original."""
    return _with_children(module, lambda child: PackedLinear(child) if type(child) is nn.Linear else packed(child))


class FusedNorm(nn.Module):
    """One RMS norm by the compiled function `call`; with `one_added` it scales by 1 + weight."""

    def __init__(self, plain: Any, call: Any, *, one_added: bool) -> None:
        super().__init__()
        self.plain, self._call, self._one_added = plain, call, one_added
        self._weight: torch.Tensor = plain.weight
        self._epsilon = float(plain.variance_epsilon if hasattr(plain, "variance_epsilon") else plain.eps)

    def forward(self, hidden: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        """Normed rows (..., M); with a residual, as in vLLM, the rows and the residual, which becomes the sum."""
        inputs = [hidden] if residual is None else [hidden, residual]
        if not all(x.is_contiguous() and x.dtype == self._weight.dtype for x in inputs):
            return self.plain(*inputs)
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

    With `residuals` its norms accept a residual, as vLLM's do.
    """

    def twin_of(child: nn.Module) -> Any:
        is_norm = type(child).__name__.endswith("RMSNorm") and isinstance(getattr(child, "weight", None), torch.Tensor)
        return _fused(child, residuals) if is_norm else with_fused_norms(child, residuals=residuals)

    return _with_children(module, twin_of)


def _fused(plain: Any, residuals: bool) -> Any:
    """The fused norm whose outputs are the module's; the module itself if there is none."""
    weight_M: torch.Tensor = plain.weight
    is_served = weight_M.device.type == "cpu" and weight_M.dtype in (torch.float32, torch.bfloat16)
    if not is_served or (call := _load(weight_M.dtype)) is None:
        return plain
    sample_SM = torch.randn(SAMPLE_ROWS, len(weight_M), generator=torch.Generator().manual_seed(0)).to(weight_M.dtype)
    for one_added in (False, True):
        fused = FusedNorm(plain, call, one_added=one_added)
        if _agree(fused, plain, sample_SM, residuals):
            return fused
    logger.info("%s is no RMS norm that rms_norm.c knows", type(plain).__name__)
    return plain


@torch.no_grad()
def _agree(fused: nn.Module, plain: nn.Module, sample_SM: torch.Tensor, residuals: bool) -> bool:
    """Whether two modules' outputs differ only by rounding: in the last digit, and in 16 bits rarely."""
    outputs = [(fused(sample_SM), plain(sample_SM))]
    if residuals:  # both modules may write into inputs and residual
        outputs += zip(*(norm(sample_SM.clone(), sample_SM.flip(0)) for norm in (fused, plain)), strict=True)
    is_half = sample_SM.dtype != torch.float32
    tolerance = torch.finfo(sample_SM.dtype).eps * (1 if is_half else 10)
    return all(
        torch.allclose(mine_SM, own_SM, rtol=tolerance, atol=tolerance)
        and (not is_half or bool((mine_SM != own_SM).float().mean() < 0.01))
        for mine_SM, own_SM in outputs
    )


@functools.cache
def _load(dtype: torch.dtype) -> Any:
    """The compiled function; None if it cannot be compiled or loaded."""
    defines = ["-DBFLOAT16"] if dtype == torch.bfloat16 else []
    return load_or_warn(NORM_SOURCE, defines, lambda library: function(library, "rms_norm", "ppppllfii"), "slower norms run")
