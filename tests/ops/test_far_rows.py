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
from mmod.ops.triton import rows, select
from mmod.ops.triton.attend import attend_rows, attend_rows_backward
from mmod.ops.triton.importance import column_sums
from tests.ops.kernels import INTERPRETED

STRIDE = 1 << 30
INDEX = torch.tensor([[0, 2]])
INVERSE = torch.tensor([[0, -1, 1]], dtype=torch.int32)

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="memory that is not there is read by the interpreter alone")


class Far:
    """Makes tensors one axis of which is 2**30 elements apart, in a file of holes: only what is touched takes room.

    Args:
        folder: Where the files go.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.made = 0

    def __call__(self, near: Tensor, axis: int) -> Tensor:
        """Return a tensor of the same values."""
        self.made += 1
        strides, step = [0] * near.ndim, 1
        for other in reversed([place for place in range(near.ndim) if place != axis]):
            strides[other], step = step, step * near.shape[other]
        strides[axis] = STRIDE
        elements = (near.shape[axis] - 1) * STRIDE + step
        storage = torch.from_file(str(self.folder / str(self.made)), shared=True, size=elements, dtype=near.dtype)
        return storage.as_strided(near.shape, strides).copy_(near)


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).half()


def gather(x: Tensor) -> tuple[Tensor, ...]:
    return (rows.gather(x, INDEX),)


def gather_norm(x: Tensor) -> tuple[Tensor, ...]:
    return rows.gather_norm(x, INDEX, None, None, 1e-6, True)


def merge(x: Tensor, z: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    return (rows.merge(x, INVERSE, z, y, normal(1, 2).float(), None, torch.empty(x.shape, dtype=x.dtype)),)


def merge_grad(grad: Tensor, z: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    return rows.merge_grad(grad, INDEX, z, y, normal(1, 2).float(), None)


def select_topk(score: Tensor) -> tuple[Tensor, ...]:
    half = Fraction(1, 2)
    found = select.select(score, 2, 0, None, None, half.numerator, half.denominator, "tanh", 0.2)
    return *found, select.gate_grad(found[0], score, found[3], "tanh", 0.2)


def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    start = torch.tensor([0, 3], dtype=torch.int32)
    rest = start, 3, None, False, 0.5
    found = attend_rows(q, k, v, *rest)
    return *found, *attend_rows_backward(normal(3, 3, 4), q, k, v, *found, *rest)


def columns(q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
    return (column_sums(q, k, torch.zeros(3, 3, 3), None, None, False, 0.5),)


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
def test_distance_makes_no_difference(function: Any, shapes: list[tuple[int, ...]], axis: int, tmp_path: Path) -> None:
    near, far = [normal(*shape) for shape in shapes], Far(tmp_path)
    for found, expected in zip(function(*(far(x, axis) for x in near)), function(*near), strict=True):
        assert torch.equal(found, expected)
