"""The command that evaluates a model without training: `mmod evaluate CONFIG_OR_RUN [--key value]`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from mmod.training.engine.config import RunConfig
from mmod.training.kinds import kind_of, parse_kind

if TYPE_CHECKING:
    from mmod.training.engine.evaluate import RoutedResult

_SAMPLES = (1, 8, 32)
_ROUNDS = 7


class Assessment(NamedTuple):
    """The score and the costs of a model; samples are of the type "image", "text", "window" or "prompt"."""

    evaluation: RoutedResult
    gflops: dict[str, float]  # Of a sample, by its type.
    parameters: int
    ms: dict[str, dict[int, float]]  # Of a sample, by its type and the batch size: the median of some rounds.

    def __str__(self) -> str:
        lines = [str(self.evaluation), f"{self.parameters / 1e6:.4g} million parameters"]
        for name, gflops in self.gflops.items():
            times = ", ".join(f"{ms:.3g} at batch {size}" for size, ms in self.ms[name].items())
            lines.append(f"{name}: {gflops:.4g} GFLOPs, ms {times}")
        return "\n".join(lines)


def assess(config: RunConfig, *, progress: bool = True) -> Assessment:
    """Evaluate the model that a run would start from, routed or not, and measure its costs. Nothing is written."""
    from mmod.compare.table import DENSE, Table
    from mmod.compare.times import sample_times
    from mmod.training.engine.kind import device_of

    kind = kind_of(config)
    if not config.model.has_weights:
        raise ValueError("nothing to evaluate: the config starts from no weights; set model.checkpoint")
    model = kind.load()
    evaluation = kind.evaluate(model, progress).result
    readings = {}
    for size in _SAMPLES:
        for name, reading in kind.readings(model, size).items():
            # A set may have fewer samples than a batch.
            if reading.samples == size:
                readings[name, size] = reading
    times = sample_times(Table(), {DENSE: readings}, rounds=_ROUNDS, device=device_of(kind), shown=progress)
    ms: dict[str, dict[int, float]] = {}
    for (name, size), by_model in times.items():
        ms.setdefault(name, {})[size] = by_model[DENSE][0]
    return Assessment(
        evaluation=evaluation,
        gflops={name: cost / 1e9 for name, cost in kind.cost(model, evaluation.kept).items()},
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        ms=ms,
    )


def main(arguments: Sequence[str]) -> None:
    """Evaluate as the command line `CONFIG_OR_RUN [--kind KIND] [--key value]` says and print the assessment."""
    config: Any = parse_kind(arguments)
    print(assess(config))
