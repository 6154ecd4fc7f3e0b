"""Torch's own count of FLOPs, the same for every version of torch."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode, flop_registry

_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def flop_counter() -> FlopCounterMode:
    """Return torch's counter, which in torch 2.11 leaves out fused attention on a CPU and products with vectors."""
    formulas = {_FORWARD: _forward, _BACKWARD: _backward, torch.ops.aten.mv: _matrix_vector}
    lacking = {op: formula for op, formula in formulas.items() if op not in flop_registry}
    return FlopCounterMode(display=False, custom_mapping=lacking)


def _matrix_vector(matrix: Sequence[int], *_: Any, **__: Any) -> int:
    return 2 * prod(matrix)


# Torch's formulas for other devices refuse keys of fewer heads than queries.
def _forward(query: Sequence[int], key: Sequence[int], value: Sequence[int], *_: Any, **__: Any) -> int:
    return 2 * prod(query[:-1]) * key[-2] * (query[-1] + value[-1])


def _backward(
    out: Sequence[int], query: Sequence[int], key: Sequence[int], value: Sequence[int], *_: Any, **__: Any
) -> int:
    # Scores once more, their gradient, and those of values, queries and keys.
    return 2 * prod(query[:-1]) * key[-2] * (3 * query[-1] + 2 * value[-1])
