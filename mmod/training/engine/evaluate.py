"""What evaluations share: whether samples can be read, their rows, and the shares of tokens that were kept."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from mmod.analysis import trace
from mmod.analysis.evaluations import joined
from mmod.analysis.modes import in_mode
from mmod.blocks import deciding_modules
from mmod.data.config import StreamConfig
from mmod.data.stream import BatchStream
from mmod.io.processes import gathered
from mmod.io.progress import progress_bar
from mmod.io.store import OptionalStore, Store, checksum
from mmod.names import prefixed
from mmod.routing import Routing
from mmod.training.engine.task import Batch, to_device

Result = TypeVar("Result")
KEPT = "kept/"
"""Prefix of the columns of kept shares; the name of a module follows."""
Columns = dict[str, Tensor]
"""Values of samples by column: "loss", "outcome" in [0, 1], kept shares, and a kind's own, (B, ...) each."""


class RoutedResult:
    """The result of an evaluation; subclasses are dataclasses of plain values, whose text is one line.

    Attributes:
        kept: Mean kept share of tokens, in [0, 1], by module that decides; for early exit, the share of images that
            each block runs on.
    """

    kept: dict[str, float]

    def columns(self) -> dict[str, float]:
        """Return the figures that were measured by name, as a run's history and studies show them; no counts."""
        figures = {name: value for name, value in vars(self).items() if isinstance(value, float)}
        return {**figures, "kept": self.mean_kept}

    @property
    def baseline(self) -> str:
        """A line on the score without a model, such as that of the most frequent answer; empty if it is not known."""
        return ""

    @property
    def mean_kept(self) -> float:
        """Mean kept share over the modules that decide; 1 for a dense model."""
        return mean_share(self.kept)

    @property
    def told_kept(self) -> str:
        """The kept share behind a comma; empty for a dense model, which has nothing to keep."""
        if not self.kept:
            return ""
        return f", kept {self.mean_kept:.3f}"


def mean_share(kept: Mapping[str, float]) -> float:
    """Return the mean kept share over the modules that decide; 1 for a dense model."""
    if not kept:
        return 1.0
    return sum(kept.values()) / len(kept)


class Evaluated(NamedTuple):
    """What a model does on the full evaluation set.

    Attributes:
        result: Its figures.
        outcomes: What they follow from, by column and sample (N, ...); models are paired by it. Where a column has the
            name of a figure, its mean is the figure as a share. None where figures of samples say nothing.
    """

    result: RoutedResult
    outcomes: Mapping[str, np.ndarray] = {}


@dataclasses.dataclass(frozen=True)
class BatchStore:
    """What was computed of each batch, in a file: an evaluation that was interrupted goes on behind these batches.

    Args:
        file: The file, of all passes over sets.
        identity: Stands for the model, and for what is computed.
    """

    file: OptionalStore
    identity: Mapping[str, object]

    def of(self, part: str) -> BatchStore:
        """Return the store of one of several passes over a set, in the same file."""
        return dataclasses.replace(self, identity={**self.identity, "part": part})

    def once(self, batch: object, compute: Callable[[], Result]) -> Result:
        """Return what the file holds of a batch, and compute it if there is nothing."""
        return self.file.once({**self.identity, "batch": checksum(batch)}, compute)


def store_of(store: BatchStore | None, part: str) -> BatchStore | None:
    """Return the store of one of several passes over a set, if there is one; see `BatchStore.of`."""
    if store is None:
        return None
    return store.of(part)


def read_rows(
    evaluate: Callable[[nn.Module, Batch], Columns],
    model: nn.Module,
    stream: BatchStream,
    *,
    progress: bool = False,
    store: BatchStore | None = None,
) -> Columns:
    """Return the rows of all samples of a stream, over all processes, on the CPU; a ValueError for an empty one.

    The model is in evaluation mode, without gradients; its mode is restored at the end.

    Args:
        evaluate: From the model and a batch on its device to the batch's rows.
        store: Keeps the rows of each batch; None keeps nothing.
    """
    device = next(model.parameters()).device

    def computed(batch: Batch) -> Columns:
        return evaluate(model, to_device(batch, device))

    def on_cpu(batch: Batch) -> Columns:
        return {name: value.cpu() for name, value in computed(batch).items()}

    parts: list[Columns] = []
    bar = progress_bar(stream.batches(0), total=stream.steps_per_epoch, desc="evaluate", shown=progress, leave=False)
    with in_mode(False, model), torch.no_grad():
        for batch in bar:
            if store is None:
                # Rows are moved at the end, because moving waits for the device.
                parts.append(computed(batch))
            else:
                parts.append(store.once(batch, partial(on_cpu, batch)))
    mine: Columns = {}
    # A process may have no batch.
    if parts:
        mine = {name: column.cpu() for name, column in joined(parts).items()}
    everyone = [rows for rows in gathered(mine) if rows]
    if not everyone:
        # Streams of a caller may have no report.
        faults = prefixed("; ", getattr(stream, "report", None))
        raise ValueError(f"the evaluation stream holds no sample that can be read{faults}")
    return joined(everyone)


def check_evaluation(stream: BatchStream, data: StreamConfig, store: Store | None = None, shown: bool = False) -> None:
    """Read the evaluation samples of all processes once: those that cannot be read are counted, or raise.

    The first evaluation would find them after hours of training. It takes as long as that needs to read its images.

    Args:
        data: The config of the data.
        store: Data whose samples could all be read are noted there, and not read again. Faults are not kept, so that
            files that were mended meanwhile are read.
        shown: Show a progress bar.
    """
    identity = {
        "work": "evaluation samples that can be read",
        "data": dataclasses.asdict(data),
        "process": [stream.rank, stream.world],
    }
    faults = []
    if store is None or identity not in store:
        faults = stream.faults(shown)
    if store is not None and not faults:
        store.put(identity, True)
    # Of all processes, so that all of them end.
    stream.report.add(chain.from_iterable(gathered(faults)))


@contextmanager
def decisions_of(model: nn.Module) -> Iterator[Mapping[str, Routing]]:
    """Context with the decisions of one forward pass by module, once it has run; none of a dense model."""
    if not deciding_modules(model):
        yield {}
        return
    with trace(model) as decisions:
        yield decisions


def kept_rows(decisions: Mapping[str, Routing], prefix: str = KEPT) -> Columns:
    """Return the share of tokens that each module kept of each sample, float64 (B,)."""
    return {f"{prefix}{name}": routing.keep_BN.double().mean(1) for name, routing in decisions.items()}


def kept_means(rows: Columns, prefix: str = KEPT) -> dict[str, float]:
    """Return the mean kept share by module over all samples."""
    means = {}
    for name, value in rows.items():
        if name.startswith(prefix):
            means[name.removeprefix(prefix)] = float(value.mean())
    return means
