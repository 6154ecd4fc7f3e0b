"""The command that evaluates a model as it is: `mmod evaluate CONFIG [--kind KIND] [--key value]`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from mmod.training.engine.config import RunConfig
from mmod.training.engine.parse import parse_config
from mmod.training.kinds import CONFIGS, recipe_of, split_kind

if TYPE_CHECKING:
    from mmod.training.engine.evaluate import RoutedResult

__all__ = ["Assessment", "assess", "main"]

_SAMPLES = (1, 8, 32)
_ROUNDS = 7


class Assessment(NamedTuple):
    """What a model scores and costs.

    Attributes:
        evaluation: What its evaluation found.
        gflops: GFLOPs of a sample, by what is read: "image", "text", "window" or "prompt".
        parameters: Number of its parameters.
        ms: Milliseconds of a sample by what is read and by size of the batch, the median of some rounds.
    """

    evaluation: RoutedResult
    gflops: dict[str, float]
    parameters: int
    ms: dict[str, dict[int, float]]

    def __str__(self) -> str:
        lines = [str(self.evaluation), f"{self.parameters / 1e6:.4g} million parameters"]
        for name, gflops in self.gflops.items():
            times = ", ".join(f"{own:.3g} at batch {size}" for size, own in self.ms[name].items())
            lines.append(f"{name}: {gflops:.4g} GFLOPs, ms {times}")
        return "\n".join(lines)


def assess(config: RunConfig, *, progress: bool = True) -> Assessment:
    """Evaluate the model that a run would start from, routed or not, and measure what it costs. Nothing is written.

    Args:
        config: The run: its model with the weights, evaluation data and routing are used.
        progress: Show a bar.

    Raises:
        ValueError: If the config starts from no weights, or they do not fit the model.
    """
    from statistics import median

    import torch

    from mmod.analysis.timing import interleave
    from mmod.training.engine.loop import seed_draws

    recipe = recipe_of(config)
    if not recipe.has_weights:
        raise ValueError("nothing to evaluate: the config starts from no weights; set model.checkpoint")
    # As at the start of training, so that a study of the same config sees the same model.
    seed_draws(config.seed, 0, 0)
    model = recipe.load()
    found = recipe.assess(model, progress)
    # A set may have fewer samples than a batch.
    readings = {
        (name, reading.samples): reading
        for size in _SAMPLES
        for name, reading in recipe.readings(model, size).items()
        if reading.samples == size
    }
    with torch.inference_mode():
        calls = {key: reading.call for key, reading in readings.items()}
        times = interleave(calls, seconds=0, rounds=_ROUNDS, device=recipe.device)
    ms: dict[str, dict[int, float]] = {}
    for (name, size), own in times.items():
        ms.setdefault(name, {})[size] = median(own) / size
    return Assessment(
        evaluation=found,
        gflops={name: cost / 1e9 for name, cost in recipe.cost(model, found).items()},
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        ms=ms,
    )


def main(arguments: Sequence[str]) -> None:
    """Evaluate as the command line `CONFIG [--kind KIND] [--key value]` says and print what came out."""
    kind, arguments = split_kind(arguments)
    config: Any = parse_config(arguments, CONFIGS[kind])
    print(assess(config))
