"""What a model of any kind scores and costs as it is: a comparison of one, which `mmod evaluate` prints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median

from torch import nn

from mmod.analysis.table import DENSE, Measured, Table, compare
from mmod.analysis.timing import Reading, ratios
from mmod.io.jobs import Callback, Runner
from mmod.io.store import OptionalStore, Store, key_of
from mmod.methods.base import methods_inside, undo_
from mmod.model import copy_of
from mmod.planning.candidate import Candidate
from mmod.studies.measure import Measurer, identity_of, rows_of, starting_weights, times_of
from mmod.studies.runs import Comparison, Run
from mmod.training.engine.config import RunConfig
from mmod.training.engine.evaluate import BatchStore
from mmod.training.engine.kind import Kind, cost, device_of, readings
from mmod.training.kinds import kind_of

_SAMPLES = (1, 8, 32)
_ROUNDS = 7
_PARAMETERS = "parameters"
_ANEW = "If it is interrupted, the evaluation will start anew"
# Behind the type of a sample: the model without its methods.
_DENSE = ", dense"


def assess(config: RunConfig, *, progress: bool = True) -> Table:
    """Evaluate the model that a run would start from, routed or not, and measure its costs: a comparison of one.

    While it runs, a hidden file in the config's output, or in the nearest folder above it that exists, keeps what is
    computed of each batch, from which an interrupted evaluation goes on. In the end nothing is left of it.

    The costs are the number of parameters, and FLOPs by the type of a sample: "image", "text", "window" or "prompt"; of
    a changed model, "image, dense" and the like are those of the model without its methods.
    """
    if not config.model.has_weights:
        raise ValueError("nothing to evaluate: the config starts from no weights; set model.checkpoint")
    runs = Comparison(candidates=[Candidate(DENSE)], dense=config).checked_runs()
    runner = Runner(progress=False)
    table = Table()
    with _batches_of(kind_of(config)) as batches:
        measurer = Measurer(partial(_evaluated, batches, progress), Store(), starting_weights(runs))
        for run in compare(table, [runs], measurer, runner):
            model = measurer.final(run)
            dense = _dense_of(model)
            kept = table.runs[run.name][run.seed].kept
            table.costs[run.name] = _costs(run.start, model, dense, kept)
            passes = partial(_full_batches, dense)
            table.times, table.waiting = times_of({run.name: run}, measurer, passes, _SAMPLES, range(_ROUNDS))
    return table


@contextmanager
def _batches_of(kind: Kind) -> Iterator[BatchStore]:
    """Context with the store of an evaluation's batches, which goes once the evaluation ends without an error."""
    identity = {"work": "evaluated batches", **identity_of(kind.config), "device": str(device_of(kind))}
    # Evaluations of one run on several sets may go on at once: each has a file of its own.
    name = key_of(identity)
    output = Path(kind.config.output).absolute()
    # In a folder that exists, so that none is left; hidden, so that it keeps no run out of the folder.
    folder = next(place for place in (output, *output.parents) if place.is_dir())
    file = OptionalStore(folder / f".evaluate-{name[:8]}.jsonl", _ANEW)
    yield BatchStore(file, identity)
    file.remove()


def _evaluated(batches: BatchStore, progress: bool, run: Run, callback: Callback, measurer: Measurer) -> Measured:
    """Evaluate the model that a run starts from."""
    return rows_of(run.start.score(measurer.load(run.start), progress, batches).result)


def _dense_of(model: nn.Module) -> nn.Module | None:
    """Return a model without its methods, with the same weights; None for a dense model."""
    if not methods_inside(model):
        return None
    return undo_(copy_of(model))


def _costs(kind: Kind, model: nn.Module, dense: nn.Module | None, kept: Mapping[str, float]) -> dict[str, float]:
    """Count the FLOPs of a sample by its type, and parameters."""
    parameters = sum(parameter.numel() for parameter in model.parameters())
    costs = {_PARAMETERS: parameters, **cost(kind, model, kept)}
    if dense is not None:
        costs |= {sample + _DENSE: flops for sample, flops in cost(kind, dense, {}).items()}
    return costs


def _full_batches(
    dense: nn.Module | None, kind: Kind, model: nn.Module, size: int, batches: int
) -> Mapping[str, Reading]:
    """Return the pass over one batch by type of sample; a set may have fewer samples than that."""
    timed = readings(kind, model, size)
    if dense is not None:
        timed |= {sample + _DENSE: reading for sample, reading in readings(kind, dense, size).items()}
    # A set may end within a batch, whose time is not that of a full one.
    return {name: reading for name, reading in timed.items() if reading.samples == size}


def described(table: Table) -> str:
    """Return the score and the costs of the model of an assessment, a line each."""
    # One candidate and seed: the table is that of a comparison.
    ((name, rows_by_seed),) = table.runs.items()
    costs = dict(table.costs[name])
    millions = costs.pop(_PARAMETERS) / 1e6
    lines = [rows_by_seed[0].text, f"{millions:.4g} million parameters"]
    for sample, flops in costs.items():
        times = {}
        for (of, size), ms in table.times.items():
            if of == sample:
                times[size] = median(ms[name])
        one = sample.removesuffix(_DENSE)
        lines.append(f"{sample}: {flops / 1e9:.4g} GFLOPs, ms per {one} {_by_size(times)}")
    for sample in [sample for sample in costs if sample + _DENSE in costs]:
        faster = {}
        for (of, size), ms in table.times.items():
            if of == sample:
                dense_ms = table.times[sample + _DENSE, size]
                # Round by round, as in studies.
                faster[size] = ratios(dense_ms[name], ms[name]).median
        fewer = costs[sample + _DENSE] / costs[sample]
        lines.append(f"{sample}: {fewer:.3g} times fewer FLOPs than dense, times as fast: {_by_size(faster)}")
    return "\n".join(lines)


def _by_size(values: Mapping[int, float]) -> str:
    return ", ".join(f"{value:.3g} at batch {size}" for size, value in values.items())
