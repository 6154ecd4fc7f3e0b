"""Roofline: the measured rates of this machine, and the lower bound that they set on the time of an op."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

# Far beyond any cache, so that a copy runs at the speed of memory.
COPIED_BYTES = {"cpu": 1 << 26, "cuda": 1 << 30}
# Large enough that a matrix product runs at the speed of the arithmetic units.
PRODUCT_SIDE = {"cpu": 1024, "cuda": 8192}
# Written before each timed call: more than the caches hold, and on a GPU longer than the launches of the call take.
FLUSHED_BYTES = {"cpu": 1 << 26, "cuda": 1 << 30}


@dataclass(frozen=True)
class Work:
    """Work that every implementation of a computation must do.

    Args:
        bytes: Bytes of its inputs that must be read and of its outputs that must be written.
        flops: FLOPs, two for each multiply-add.
    """

    bytes: int
    flops: int = 0

    def __add__(self, other: Work) -> Work:
        """Return the work of both."""
        return Work(self.bytes + other.bytes, self.flops + other.flops)


@dataclass(frozen=True)
class Rates:
    """Rates of a machine, per millisecond.

    Args:
        bytes: Bytes read and written by a large copy.
        flops: FLOPs of a large matrix product.
    """

    bytes: float
    flops: float

    def bound_ms(self, work: Work) -> float:
        """Return the least time that some work takes: memory and arithmetic in parallel, both at full rate.

        Example:
            >>> Rates(bytes=10.0, flops=100.0).bound_ms(Work(bytes=20, flops=100))
            2.0
        """
        return max(work.bytes / self.bytes, work.flops / self.flops)

    def limit(self, work: Work) -> str:
        """Return what sets the bound: "copy" or "matmul"."""
        return "copy" if work.bytes / self.bytes >= work.flops / self.flops else "matmul"


class Probes:
    """A large copy and a large matrix product, timed in turns with the implementations of a run."""

    COPY = "copy"
    PRODUCT = "matmul"

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        side = PRODUCT_SIDE[device.type]
        # Random bits: a GPU runs faster on constants, which cost it less power.
        self._source = torch.randint(256, (COPIED_BYTES[device.type],), dtype=torch.uint8, device=device)
        self._target = torch.empty_like(self._source)
        self._left = torch.randn(side, side, dtype=dtype, device=device)
        self._right = torch.randn(side, side, dtype=dtype, device=device)

    def functions(self) -> dict[str, Callable[[], Tensor]]:
        """Return the functions to time, by name."""
        return {
            self.COPY: lambda: self._target.copy_(self._source),
            self.PRODUCT: lambda: torch.mm(self._left, self._right),
        }

    def rates(self, copy_ms: float, product_ms: float) -> Rates:
        """Return the rates that follow from the times of both functions."""
        return Rates(2 * self._source.numel() / copy_ms, 2 * self._left.shape[0] ** 3 / product_ms)


def cache_flush(device: torch.device) -> Callable[[], Tensor]:
    """Return a function that empties the caches, so that a timed call reads its inputs from memory."""
    buffer = torch.empty(FLUSHED_BYTES[device.type], dtype=torch.uint8, device=device)
    return buffer.zero_
