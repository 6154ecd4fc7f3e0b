"""What evaluations share: the pass over a stream in evaluation mode, and the shares of tokens that were kept."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn

from mmod.analysis import Trace, trace
from mmod.analysis.modes import in_mode
from mmod.data.stream import BatchStream
from mmod.io.progress import progress_bar
from mmod.routing import Routing
from mmod.training.engine.distributed import sum_over_processes
from mmod.training.engine.task import Batch, to_device


class RoutedResult:
    """The result of an evaluation; subclasses are dataclasses of plain values, whose text is one line.

    Attributes:
        kept: Mean kept share of tokens, in [0, 1], by module that decides; for early exit, the share of images that
            each block runs on.
    """

    kept: dict[str, float]

    def columns(self) -> dict[str, float]:
        """Return the figures that were measured by name, as a run's history and studies show them; no counts."""
        values = {item.name: getattr(self, item.name) for item in dataclasses.fields(cast(Any, self))}
        return {name: value for name, value in values.items() if isinstance(value, float)} | {"kept": self.mean_kept}

    @property
    def baseline(self) -> str:
        """What the data gives without a model, for the report of a run; empty if that is not known."""
        return ""

    @property
    def mean_kept(self) -> float:
        """Mean kept share over the modules that decide; 1 for a dense model."""
        return sum(self.kept.values()) / len(self.kept) if self.kept else 1.0


@contextmanager
def evaluation_batches(
    model: nn.Module, stream: BatchStream, device: torch.device, *, progress: bool
) -> Iterator[Iterator[tuple[Batch, Batch]]]:
    """Context with an iterator over batches, each on the CPU and on the device; in evaluation mode without gradients.

    The mode of the model is restored at the end.
    """
    bar = progress_bar(stream.batches(0), total=stream.steps_per_epoch, desc="evaluate", shown=progress, leave=False)
    with in_mode(False, model), torch.no_grad():
        yield ((batch, to_device(batch, device)) for batch in bar)


class KeptShares:
    """The mean kept share of each module that decides, over the samples of all processes; none for a dense model."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._model = model
        self._names = Trace(model).names
        # Samples, then the sum of shares of each module.
        self._sums = torch.zeros(1 + len(self._names), dtype=torch.float64, device=device)

    @contextmanager
    def watch(self) -> Iterator[Mapping[str, Routing]]:
        """Context that adds the decisions of one forward pass, which it yields."""
        if not self._names:
            yield {}
            return
        with trace(self._model) as decisions:
            yield decisions
        keeps = [decisions[name].keep_BN.double() for name in self._names]
        self._sums += torch.stack([keeps[0].new_tensor(len(keeps[0])), *(keep_BN.mean(1).sum() for keep_BN in keeps)])

    def means(self) -> dict[str, float]:
        """Return the share by module; collective over processes."""
        count, *sums = sum_over_processes(self._sums).tolist()
        return {name: total / count for name, total in zip(self._names, sums, strict=True)}
