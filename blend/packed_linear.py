"""Linear layers with weights packed once for the CPU's matrix instructions, and one product for layers that share an input.

A product of a few rows costs the time of reading its weight. In 16 bits oneDNN first copies the weight into the instructions'
order, at every call, which doubles the time of few rows (docs/adr/017). Here the copy is made once, in a second memory of the
weights' size; a model larger than `MEMORY_PART` of the memory is not packed.

Shapes: S rows, I inputs, O outputs.
"""

from __future__ import annotations

import copy
import functools
import logging
import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

MEMORY_PART = 1 / 8
# Linear layers that a module calls one after the other with one input: one product computes all of them.
TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
CGROUP_OF_PROCESS, CGROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
EXPECTED_ROWS = 16  # oneDNN packs for this number of rows; 512 changes no product's time
logger = logging.getLogger(__name__)


class PackedLinear(nn.Module):
    """One linear layer.

    Args:
        plain: the layer; its parameters are shared.
    """

    def __init__(self, plain: nn.Linear) -> None:
        super().__init__()
        self.plain = plain
        self._weight = _pack(plain.weight)

    def forward(self, inputs_SI: torch.Tensor) -> torch.Tensor:
        """Outputs (S, O)."""
        return _product(inputs_SI, self._weight, self.plain.bias)


class _Product:
    """Outputs of several layers over one input, computed when the first of them is called.

    Args:
        layers: in the order of their calls.
    """

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        self._outputs = [layer.out_features for layer in layers]
        biases: list[torch.Tensor] = [layer.bias for layer in layers if layer.bias is not None]
        weights: list[torch.Tensor] = [layer.weight.detach() for layer in layers]
        self._weight = _pack(torch.cat(weights))
        self._bias = torch.cat(biases).detach() if biases else None
        self._of_thread = threading.local()

    def first(self, inputs_SI: torch.Tensor) -> torch.Tensor:
        """The first layer's outputs; the others' outputs wait for their calls."""
        outputs: tuple[torch.Tensor, ...] = _product(inputs_SI, self._weight, self._bias).split(self._outputs, dim=-1)
        self._of_thread.pending = inputs_SI, outputs
        return outputs[0]

    def next(self, index: int, inputs_SI: torch.Tensor) -> torch.Tensor | None:
        """Outputs of a later layer; None if the first was not called with this tensor."""
        nothing: tuple[None, tuple[torch.Tensor, ...]] = None, ()
        pending: tuple[torch.Tensor | None, tuple[torch.Tensor, ...]] = getattr(self._of_thread, "pending", nothing)
        pending_SI, outputs = pending
        if pending_SI is not inputs_SI:
            return None
        if index == len(outputs) - 1:
            del self._of_thread.pending
        return outputs[index]


class SharingLinear(nn.Module):
    """One of several layers over one input that share a product; without a call of the first, it computes its own.

    Args:
        plain: the layer.
        product: the shared product.
        index: the layer's index in the product.
    """

    def __init__(self, plain: nn.Linear, product: _Product, index: int) -> None:
        super().__init__()
        self.plain, self._product, self._index = plain, product, index

    def forward(self, inputs_SI: torch.Tensor) -> torch.Tensor:
        """Outputs (S, O)."""
        if self._index == 0:
            return self._product.first(inputs_SI)
        pending = self._product.next(self._index, inputs_SI)
        return self.plain(inputs_SI) if pending is None else pending


def is_worth_packing(model: nn.Module) -> bool:
    """Whether to pack a model's linear layers: bfloat16, a CPU with instructions for it, and memory for a copy."""
    linears = [module for module in model.modules() if type(module) is nn.Linear]
    if any(linear.weight.dtype != torch.bfloat16 or linear.weight.device.type != "cpu" for linear in linears):
        return False
    return sum(linear.weight.nbytes for linear in linears) <= MEMORY_PART * memory_bytes() and operators_serve()


@functools.cache
def operators_serve() -> bool:
    """Whether PyTorch has its undocumented packing operators, and they return a linear layer's outputs."""
    if not torch.backends.mkldnn.is_available():
        return False
    inputs_SI, weight_OI, bias_O = (
        torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
        for shape in ((3, 32), (48, 32), (48,))
    )
    try:
        if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return False
        outputs_SO = _product(inputs_SI, _pack(weight_OI), bias_O)
    except (AttributeError, RuntimeError, TypeError) as error:
        logger.info("PyTorch %s has other packing operators, weights stay as they are: %s", torch.__version__, error)
        return False
    return torch.allclose(outputs_SO, nn.functional.linear(inputs_SI, weight_OI, bias_O), rtol=2e-2, atol=2e-2)


def memory_bytes() -> int:
    """Bytes of memory that this process may use: the machine's, or a container's or service's lower limit."""
    return min((os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), *_cgroup_limits()))


def _cgroup_limits() -> Iterator[int]:
    try:
        lines = CGROUP_OF_PROCESS.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:  # version 2
            root, name = CGROUPS, "memory.max"
        elif "memory" in controllers.split(","):
            root, name = CGROUPS / "memory", "memory.limit_in_bytes"
        else:
            continue
        group = root / path.lstrip("/")  # a container sees its own group at the root, not at this path
        for folder in (group, *group.parents):
            if folder.is_relative_to(root) and (folder / name).is_file():
                text = (folder / name).read_text().strip()
                if text != "max":
                    yield int(text)


def packed(module: Any) -> Any:
    """A shallow copy of a module tree with its linear layers packed; the parameters stay shared with the original."""
    twin = copy.copy(module)
    twin._modules = {
        name: child if child is None else PackedLinear(child) if type(child) is nn.Linear else packed(child)
        for name, child in module._modules.items()
    }
    for names in TOGETHER:
        layers = [module._modules.get(name) for name in names]
        if all(type(layer) is nn.Linear for layer in layers) and len({layer.bias is None for layer in layers}) == 1:
            product = _Product(layers)
            twin._modules.update(
                {
                    name: SharingLinear(layer, product, index)
                    for index, (name, layer) in enumerate(zip(names, layers, strict=True))
                }
            )
    return twin


def _pack(weight_OI: torch.Tensor) -> torch.Tensor:
    packed_OI: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight_OI.detach(), EXPECTED_ROWS)
    return packed_OI


def _product(inputs_SI: torch.Tensor, weight: torch.Tensor, bias_O: torch.Tensor | None) -> torch.Tensor:
    outputs_SO: torch.Tensor = torch.ops.mkldnn._linear_pointwise.default(inputs_SI, weight, bias_O, "none", [], "")
    return outputs_SO
