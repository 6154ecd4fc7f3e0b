"""Kernels read what lies more than 2**31 elements away, which products of two 32-bit numbers do not reach."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from mmod.ops.importance import column_sums
from mmod.ops.packed import attend_rows, attend_rows_backward
from tests.kit.kernels import DEVICES

kernels = torch.ops.mmod

STRIDE = 1 << 30
# Elements for the tensors of a case along their other axes.
ROOM = 1024
INDEX = torch.tensor([[0, 2]])
INVERSE = torch.tensor([[0, -1, 1]], dtype=torch.int32)


class Far:
    """Makes tensors one axis of which is 2**30 elements apart, all in one memory; on a CPU a file of holes.

    Args:
        folder: Where the file goes.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.storage: Tensor | None = None
        self.used = 0

    def __call__(self, near: Tensor, axis: int) -> Tensor:
        """Return a tensor of the same values; none has more places along the axis than the first."""
        strides, step = [0] * near.ndim, 1
        for other in reversed([place for place in range(near.ndim) if place != axis]):
            strides[other], step = step, step * near.shape[other]
        strides[axis] = STRIDE
        if self.storage is None:
            size = (near.shape[axis] - 1) * STRIDE + ROOM
            options = {"dtype": near.dtype, "device": near.device}
            on_cpu = near.device.type == "cpu"
            file = str(self.folder / "holes")
            self.storage = torch.from_file(file, True, size, **options) if on_cpu else torch.empty(size, **options)
        start, self.used = self.used, self.used + step
        return self.storage.as_strided(near.shape, strides, start).copy_(near)


def normal(*shape: int, device: torch.device | str = "cpu") -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).half().to(device)


def gather(x: Tensor) -> tuple[Tensor, ...]:
    return (kernels.gather_rows(x, INDEX.to(x.device)),)


def gather_norm(x: Tensor) -> tuple[Tensor, ...]:
    return kernels.gather_norm(x, INDEX.to(x.device), None, None, 1e-6, True)


def merge(x: Tensor, z: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    weight = normal(1, 2, device=x.device).float()
    return (kernels.merge_rows(x, INDEX.to(x.device), z, y, weight, None, INVERSE.to(x.device)),)


def merge_grad(grad: Tensor, z: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    index, weight = INDEX.to(grad.device), normal(1, 2, device=grad.device).float()
    return kernels.merge_rows_grad(grad, index, z, y, weight, None)


def select_topk(score: Tensor) -> tuple[Tensor, ...]:
    half = Fraction(1, 2)
    selection = kernels.select_topk(score, 2, 0, None, None, half.numerator, half.denominator, "tanh", 0.2)
    return *selection, kernels.gate_grad(selection[0], score, selection[3], "tanh", 0.2)


def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    start = torch.tensor([0, 3], dtype=torch.int32, device=q.device)
    options = start, 3, None, False, 0.5
    out = attend_rows(q, k, v, *options)
    return *out, *attend_rows_backward(normal(3, 3, 4, device=q.device), q, k, v, *out, *options)


def columns(q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
    return (column_sums(q, k, torch.zeros(3, 3, 3, device=q.device), None, None, False, 0.5),)


# What is called, the shapes of its tensors, and the axes that may lie far apart.
CASES: list[tuple[Callable[..., tuple[Tensor, ...]], list[tuple[int, ...]], tuple[int, ...]]] = [
    (gather, [(1, 3, 3)], (1, 2)),
    (gather_norm, [(1, 3, 3)], (1, 2)),
    (merge, [(1, 3, 3), (1, 2, 3), (1, 2, 3)], (1, 2)),
    (merge_grad, [(1, 3, 3), (1, 2, 3), (1, 2, 3)], (1, 2)),
    (select_topk, [(3, 5)], (0, 1)),
    (attend, [(3, 3, 4)] * 3, (0, 1)),
    (columns, [(3, 3, 3, 4)] * 2, (0, 1, 2)),
]


@pytest.mark.parametrize(
    ("function", "shapes", "axis"),
    [(f, s, axis) for f, s, axes in CASES for axis in axes],
    ids=lambda v: getattr(v, "__name__", str(v)),
)
@pytest.mark.parametrize("device", DEVICES)
def test_distance_makes_no_difference(
    device: str, function: Any, shapes: list[tuple[int, ...]], axis: int, tmp_path: Path
) -> None:
    near, far = [normal(*shape, device=device) for shape in shapes], Far(tmp_path)
    for actual, expected in zip(function(*(far(x, axis) for x in near)), function(*near), strict=True):
        # A GPU gets other code for other strides, which may round otherwise.
        exact = {"rtol": 0.0, "atol": 0.0} if device == "cpu" else {}
        torch.testing.assert_close(actual, expected, **exact)
