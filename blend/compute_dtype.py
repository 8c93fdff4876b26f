"""The dtype that a model computes in where the user leaves it to "auto"."""

from __future__ import annotations

import functools
import time
from typing import Literal

import torch
from torch.nn.functional import linear

DTypeOption = torch.dtype | Literal["auto"]
_HALF = (torch.bfloat16, torch.float16)
_SIZE = 512  # of the measured matrices: a few milliseconds, and long enough to tell hardware from emulation
_REPEATS = 5
# With hardware for it the CPU takes a quarter to a half of float32's time, without it as long or far longer.
_FAST = 0.8


def choose_dtype(checkpoint: torch.dtype | None, device: str | torch.device) -> torch.dtype:
    """The dtype that "auto" stands for: the checkpoint's own, if it has 16 bits and the device computes it fast, else float32.

    So a float32 checkpoint stays float32 everywhere, and one 16-bit dtype never becomes the other, which would lose precision
    or range. What a GPU computes fast is known; what a CPU does is measured, once a process, for the dtype that is asked about.

    Args:
        checkpoint: the dtype that its config names; None where it names none, which counts as float32.
        device: where the model will run.

    """
    if checkpoint in _HALF and computes_fast(checkpoint, torch.device(device)):
        return checkpoint
    return torch.float32


def computes_fast(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether matrix products in a 16-bit dtype are faster than in float32 on this device."""
    if device.type == "cuda":
        return dtype is torch.float16 or torch.cuda.is_bf16_supported(including_emulation=False)
    return device.type == "cpu" and relative_time(dtype) < _FAST


@functools.cache
def relative_time(dtype: torch.dtype) -> float:
    """The CPU's time for a linear layer in `dtype`, over that in float32; measured in turns, and the fastest of each counts."""
    best_s = dict.fromkeys((torch.float32, dtype), float("inf"))
    operands = {each: torch.ones(_SIZE, _SIZE, dtype=each) for each in best_s}
    for repeat in range(_REPEATS + 1):
        for each, square in operands.items():
            start = time.perf_counter()
            linear(square, square)
            if repeat:  # the first one warms up
                best_s[each] = min(best_s[each], time.perf_counter() - start)
    return best_s[dtype] / best_s[torch.float32]
