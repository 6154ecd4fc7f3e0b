"""Torch's own count of FLOPs, the same for every version of torch."""

from __future__ import annotations

import torch
from torch.utils.flop_counter import FlopCounterMode, flop_registry

_OPS = torch.ops.aten
_ON_CPU = {
    _OPS._scaled_dot_product_flash_attention_for_cpu: _OPS._scaled_dot_product_flash_attention,
    _OPS._scaled_dot_product_flash_attention_for_cpu_backward: _OPS._scaled_dot_product_flash_attention_backward,
}


def flop_counter() -> FlopCounterMode:
    """Return torch's counter, which in torch 2.11 leaves out fused attention on a CPU."""
    counter = FlopCounterMode(display=False)
    for on_cpu, on_gpu in _ON_CPU.items():
        counter.flop_registry.setdefault(on_cpu, flop_registry[on_gpu])
    return counter
