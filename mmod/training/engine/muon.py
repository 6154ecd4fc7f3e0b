"""timm's Muon without its half precision, which CPUs multiply in slowly."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from timm.optim import Muon
from timm.optim import muon as timm_muon

__all__ = ["single_precision"]


def single_precision(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Let timm's Muon on a CPU make updates orthogonal in fp32, in place; return any other optimiser as it is.

    timm does it in bf16. CPUs without instructions for bf16 take ten times as long for that as in fp32, which for
    small models is more than the rest of a training step.

    Args:
        optimizer: The optimiser.

    Example:
        >>> weight = torch.nn.Parameter(torch.eye(8))
        >>> type(single_precision(torch.optim.SGD([weight], lr=0.1))).__name__
        'SGD'
    """
    on_cpu = all(weight.device.type == "cpu" for group in optimizer.param_groups for weight in group["params"])
    if type(optimizer) is Muon and on_cpu:
        optimizer.__class__ = _SingleMuon
    return optimizer


class _SingleMuon(Muon):
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        with _orthogonal_in(torch.float32):
            return super().step(closure)


@contextmanager
def _orthogonal_in(dtype: torch.dtype) -> Iterator[None]:
    """Change the precision that timm's optimiser has no option for."""
    plain = timm_muon.zeropower_via_newtonschulz
    timm_muon.zeropower_via_newtonschulz = partial(plain, dtype=dtype)
    try:
        yield
    finally:
        timm_muon.zeropower_via_newtonschulz = plain
