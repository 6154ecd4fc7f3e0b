"""The ops as they are timed."""

from __future__ import annotations

from collections.abc import Callable

import torch

from mmod.benchmarks.ops import attention, rows
from mmod.benchmarks.ops.case import Maker, OpCase, OpSize

__all__ = ["CASES", "OpCase", "OpSize", "make_case"]

CASES: dict[str, Callable[[Maker], OpCase]] = {
    "gather_rows": rows.gather_rows_case,
    "scatter_rows": rows.scatter_rows_case,
    "gather_norm": rows.gather_norm_case,
    "merge_rows": rows.merge_rows_case,
    "select_topk": rows.select_topk_case,
    "attention_with_importance": attention.importance_case,
    "importance_block": attention.importance_block_case,
    "packed_attention": attention.packed_case,
}


def make_case(op: str, size: OpSize, dtype: torch.dtype, device: torch.device, seed: int = 0) -> OpCase:
    """Return an op with inputs of a size.

    Args:
        op: One of `CASES`.
        size: Sizes.
        dtype: Type of the inputs.
        device: Where they are.
        seed: Seed of their values.

    Raises:
        ValueError: Unknown op.

    Example:
        >>> case = make_case("gather_rows", OpSize(images=2, tokens=8), torch.float32, torch.device("cpu"))
        >>> case.op(**case.inputs).shape
        torch.Size([2, 4, 384])
    """
    if op not in CASES:
        raise ValueError(f"unknown op {op!r}; valid are {', '.join(CASES)}")
    return CASES[op](Maker(size, dtype, device, seed))
