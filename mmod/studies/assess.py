"""The command that evaluates an image classifier as it is: `mmod evaluate CONFIG [--key value]`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from mmod.training.engine.parse import parse_config
from mmod.training.image.config import TrainConfig

if TYPE_CHECKING:
    from mmod.training.image.evaluate import EvalResult

__all__ = ["Assessment", "assess", "main"]

_BATCHES = (1, 8, 32)
_ROUNDS = 7


class Assessment(NamedTuple):
    """What a model scores and costs.

    Attributes:
        evaluation: What its evaluation found.
        gflops: GFLOPs of an image.
        parameters: Number of its parameters.
        ms: Milliseconds of an image by size of the batch, the median of some rounds.
    """

    evaluation: EvalResult
    gflops: float
    parameters: int
    ms: dict[int, float]

    def __str__(self) -> str:
        times = ", ".join(f"{own:.3g} at batch {size}" for size, own in self.ms.items())
        return (
            f"{self.evaluation}\n{self.gflops:.4g} GFLOPs an image, {self.parameters / 1e6:.4g} million parameters\n"
            f"ms an image: {times}"
        )


def assess(config: TrainConfig, *, progress: bool = True) -> Assessment:
    """Evaluate the model that a run would start from, routed or not, and measure what it costs. Nothing is written.

    Args:
        config: The run: its `model` with the weights, `data`, `routing` and `precision` are used.
        progress: Show a bar.

    Raises:
        ValueError: If the config starts from no weights, or they do not fit the model.
    """
    from functools import partial
    from statistics import median

    import torch

    from mmod.analysis.timing import interleave
    from mmod.data.loader import create_eval_stream
    from mmod.studies.image import image_flops, sample_images
    from mmod.training.engine.distributed import choose_device
    from mmod.training.engine.loop import seed_draws
    from mmod.training.image.evaluate import evaluate
    from mmod.training.image.model import create_models

    if not config.model.has_weights:
        raise ValueError(
            "nothing to evaluate: set model.checkpoint to a file or run folder, or model.pretrained to true"
        )
    device = choose_device(config.device)
    # As at the start of training, so that a study of the same config sees the same model.
    seed_draws(config.seed, 0, 0)
    model = create_models(config)[0].to(device).eval()
    found = evaluate(model, create_eval_stream(config.data), device, config.precision, progress=progress)
    images = sample_images(config, max(_BATCHES)).to(device)
    sizes = [size for size in _BATCHES if size <= len(images)]
    with torch.inference_mode():
        reads = {size: partial(model, images[:size]) for size in sizes}
        times = interleave(reads, seconds=0, rounds=_ROUNDS, device=device)
    return Assessment(
        evaluation=found,
        gflops=image_flops(model, config, found) / 1e9,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        ms={size: median(own) / size for size, own in times.items()},
    )


def main(arguments: Sequence[str]) -> None:
    """Evaluate as the command line `CONFIG [--key value]` says and print what came out."""
    print(assess(parse_config(arguments, TrainConfig)))
