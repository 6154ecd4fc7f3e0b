"""Torch's own count of FLOPs, the same for every version of torch."""

from __future__ import annotations

import torch
from torch.utils.flop_counter import FlopCounterMode, flop_registry

_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention
_ATTENTION_ON_CPU = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def flop_counter() -> FlopCounterMode:
    """Return torch's counter, which in torch 2.11 leaves out fused attention on a CPU."""
    counter = FlopCounterMode(display=False)
    counter.flop_registry.setdefault(_ATTENTION_ON_CPU, flop_registry[_ATTENTION])
    return counter
