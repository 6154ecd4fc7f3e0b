"""Helpers with which one source of a kernel runs compiled on a GPU and interpreted on a CPU."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

# Triton reads this when a function is decorated, hence once for all kernels of a process.
INTERPRET: bool = triton.knobs.runtime.interpret


def on_device(tensor: Tensor) -> Any:
    """Return a context in which launches go to a tensor's device, which need not be the current one.

    Args:
        tensor: An argument of the kernel.
    """
    return torch.cuda.device_of(tensor)


@triton.jit
def load_float(pointer, mask):  # type: ignore[no-untyped-def]
    """Load in fp32, zero where masked; converting at once is what the interpreter gets right in half precision."""
    return tl.load(pointer, mask=mask, other=0.0).to(tl.float32)
