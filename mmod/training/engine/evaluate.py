"""What evaluations share: a model in evaluation mode, and the tokens that its blocks kept."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from mmod.analysis import Trace, trace
from mmod.training.engine.distributed import sum_over_processes

__all__ = ["KeptShares", "RoutedResult"]


class RoutedResult:
    """What an evaluation found; subclasses are dataclasses of plain values, whose text is one line.

    Attributes:
        kept: Name of each place that decides to its mean kept share of tokens, in [0, 1]; where images leave a model
            early, of each block to the share of images that it runs on.
    """

    kept: dict[str, float]

    def columns(self) -> dict[str, float]:
        """Return the figures as columns of the run's history."""
        raise NotImplementedError

    @property
    def mean_kept(self) -> float:
        """Mean kept share over the places that decide; 1 for a dense model."""
        return sum(self.kept.values()) / len(self.kept) if self.kept else 1.0

    def kept_columns(self) -> dict[str, float]:
        """Return the mean share as a column of a run's history; none for a dense model."""
        return {"kept": self.mean_kept} if self.kept else {}


class KeptShares:
    """The mean share that each place of a model keeps: of tokens, or of images where these leave early.

    Shares are means over the samples of all processes.

    Args:
        model: Any model; a dense one keeps no shares.
        device: Where it is.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._model = model
        self._names = Trace(model).names
        # Samples, then the sum of shares of each place.
        self._sums = torch.zeros(1 + len(self._names), dtype=torch.float64, device=device)

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Count what is kept in the forward pass of a batch."""
        if not self._names:
            yield
            return
        with trace(self._model) as decisions:
            yield
        keeps = [decisions[name].keep_BN.double() for name in self._names]
        self._sums += torch.stack([keeps[0].new_tensor(len(keeps[0])), *(keep_BN.mean(1).sum() for keep_BN in keeps)])

    def means(self) -> dict[str, float]:
        """Return each block's share; all processes must ask."""
        count, *sums = sum_over_processes(self._sums).tolist()
        return {name: total / count for name, total in zip(self._names, sums, strict=True)}
