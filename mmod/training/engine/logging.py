"""Running means, the CSV files and TensorBoard logs of a run."""

from __future__ import annotations

import csv
import functools
import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmod.io.files import write_atomically
from mmod.training.engine.distributed import sum_over_processes


class Meters:
    """Running means over samples that stay on the device until they are read."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # Sum of the values, and their count, by name.
        self._sums: dict[str, Tensor] = {}

    def update(self, values: Mapping[str, Tensor], count: int) -> None:
        """Add the means, scalars by name, of a batch of `count` samples."""
        for name, value in values.items():
            value = value.detach().double()
            sums = torch.stack([value * count, torch.full_like(value, count)])
            self._sums[name] = self._sums[name] + sums if name in self._sums else sums

    def means(self) -> dict[str, float]:
        """Return the means so far."""
        return {name: total / count for name, (total, count) in self.state_dict().items()}

    def gather(self, keep: bool) -> None:
        """Replace the sums by those over all processes if `keep`, otherwise by zero, so that nothing counts twice."""
        for name, sums in self._sums.items():
            total = sum_over_processes(sums)
            self._sums[name] = total if keep else torch.zeros_like(total)

    def state_dict(self) -> dict[str, list[float]]:
        """Return sums and counts as plain numbers."""
        return {name: sums.tolist() for name, sums in self._sums.items()}

    def load_state_dict(self, state: Mapping[str, Sequence[float]]) -> None:
        """Restore sums and counts."""
        self._sums = {
            name: torch.tensor(sums, dtype=torch.float64, device=self._device) for name, sums in state.items()
        }


class TensorBoard:
    """TensorBoard's writer; a no-op without a folder.

    Args:
        folder: Folder of the logs.
        step: Optimiser steps done; later ones that an interrupted run wrote are hidden.
    """

    def __init__(self, folder: Path | None, step: int) -> None:
        self._writer: Any = None
        self._open: Callable[[], Any] | None = None
        if folder is not None:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ModuleNotFoundError as error:
                raise ModuleNotFoundError("`tensorboard: true` needs the package tensorboard") from error
            # Opened with the first figures: a start that fails leaves no file behind.
            self._open = functools.partial(SummaryWriter, str(folder), purge_step=step)

    def write(self, values: Mapping[str, float], step: int) -> None:
        """Write scalars by name."""
        if self._writer is None and self._open is not None:
            self._writer = self._open()
        if self._writer is not None:
            for name, value in values.items():
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Flush and close the files."""
        if self._writer is not None:
            self._writer.close()


def write_csv(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    """Write rows, which may lack columns, atomically."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_atomically(path, text.getvalue())
