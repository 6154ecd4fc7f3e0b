"""The figures of routers over batches: shares kept, means and deviations of gates.

Axes: B samples, N tokens, K slots per sample.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from mmod import Routing, is_routed, routed_blocks

__all__ = ["RoutingWatch", "watch_routing"]


class RoutingWatch:
    """What routers decided while they were watched, summed on their device.

    Args:
        names: Names of the routed blocks.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._sums: dict[str, Tensor | None] = dict.fromkeys(names)

    def add(self, name: str, routing: Routing) -> None:
        """Count one decision.

        Args:
            name: Name of the block.
            routing: Its decision.
        """
        with torch.no_grad():
            keep_BN = routing.keep_BN
            groups = routing.groups
            free_BN = torch.ones_like(keep_BN) if groups is None else groups.free_BN
            kept = (keep_BN & free_BN).sum().double()
            figures = [kept, free_BN.sum().double(), *[torch.zeros_like(kept)] * 3]
            if routing.gate_BK is not None:
                gated_BN = free_BN if groups is None else groups.gated_BN
                counts_BK = gated_BN.gather(1, routing.index_BK)
                counts_BK = counts_BK if routing.valid_BK is None else counts_BK & routing.valid_BK
                gate_BK = torch.where(counts_BK, routing.gate_BK, 0.0).double()
                figures[2:] = [gate_BK.sum(), gate_BK.square().sum(), counts_BK.sum().double()]
            sums, found = self._sums[name], torch.stack(figures)
            self._sums[name] = found if sums is None else sums + found

    def take(self) -> dict[str, dict[str, float]]:
        """Return the figures of each block since the last call and start again.

        Returns:
            Name of each block that decided to `kept`, the share kept of the tokens that could be skipped, and where
            a gate weighs them, `gate` and `gate_std`, mean and standard deviation over the kept ones.
        """
        figures = {}
        for name, sums in self._sums.items():
            if sums is None:
                continue
            kept, free, gate, square, gated = sums.tolist()
            figures[name] = {"kept": kept / free if free else 1.0}
            if gated:
                mean = gate / gated
                figures[name] |= {"gate": mean, "gate_std": max(0.0, square / gated - mean * mean) ** 0.5}
        self._sums = dict.fromkeys(self._sums)
        return figures


@contextmanager
def watch_routing(model: nn.Module) -> Iterator[RoutingWatch]:
    """Watch the routers of a model, in training and evaluation.

    Args:
        model: A model, routed or not.

    Yields:
        What they decide.
    """
    blocks = routed_blocks(model) if is_routed(model) else {}
    watch = RoutingWatch(list(blocks))

    def hook(name: str) -> Any:
        return lambda module, args, routing: watch.add(name, routing)

    handles = [block.router.register_forward_hook(hook(name)) for name, block in blocks.items()]
    try:
        yield watch
    finally:
        for handle in handles:
            handle.remove()
