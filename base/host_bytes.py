"""Keys and values in the CPU's memory as arrays of bytes, for several threads that read and copy at once.

A tensor's operation, a slice even, lets go of the interpreter and takes it back, and beside other threads that is 20 to 100 us
each time; slices of arrays do not, and copies of arrays let go of it once. `Tensor.copy_` also starts threads of its own, which
take the cores from those that compute.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Bytes = npt.NDArray[np.uint8]


def host_bytes(tensor: torch.Tensor) -> Bytes:
    """A view of the bytes; the last axis, which must be contiguous, counts bytes instead of numbers."""
    view: np.ndarray[Any, np.dtype[np.uint8]] = tensor.view(torch.uint8).numpy()
    return view
