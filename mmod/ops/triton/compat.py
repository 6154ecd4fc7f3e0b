"""Helpers with which one source of a kernel runs compiled on a GPU and interpreted on a CPU."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

# Triton reads this when a function is decorated, hence once for all kernels of a process.
INTERPRET: bool = triton.knobs.runtime.interpret


def launch(kernel: Any, grid: tuple[int, ...], *args: object, **options: object) -> None:
    """Launch a kernel on the device of its first argument, which need not be the current one; skip an empty grid."""
    if all(grid):
        with torch.cuda.device_of(args[0]):
            kernel[grid](*args, **options)


def side_by_side(x: Tensor) -> Tensor:
    """Return a tensor whose last axis is contiguous, as kernels read it."""
    return x if x.stride(-1) == 1 else x.contiguous()


@triton.jit
def load_float(pointer, mask):  # type: ignore[no-untyped-def]
    """Load in fp32, zero where masked; converting at once is what the interpreter gets right in half precision."""
    return tl.load(pointer, mask=mask, other=0.0).to(tl.float32)
