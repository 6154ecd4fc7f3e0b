"""How good a model is on a stream of images, and how many tokens it kept."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from mmod.data.loader import BatchStream
from mmod.training.engine.distributed import sum_over_processes
from mmod.training.engine.evaluate import KeptShares, RoutedResult, evaluating
from mmod.training.engine.task import autocast
from mmod.training.image.task import check_targets

__all__ = ["EvalResult", "evaluate"]


@dataclass(frozen=True)
class EvalResult(RoutedResult):
    """The outcome of an evaluation.

    Args:
        top1: Share of images whose class is the first guess, in percent.
        top5: Share of images whose class is among the first five guesses, in percent.
        loss: Mean cross entropy.
        samples: Images seen.
        kept: Name of each routed block to its mean kept share of tokens, in [0, 1].
    """

    top1: float
    top5: float
    loss: float
    samples: int
    kept: dict[str, float]

    def columns(self) -> dict[str, float]:
        """Return the figures as columns of the run's history."""
        return {"loss": self.loss, "top1": self.top1, "top5": self.top5, **self.kept_columns()}

    def __str__(self) -> str:
        return (
            f"top-1 {self.top1:.2f} %, top-5 {self.top5:.2f} %, loss {self.loss:.4f}, kept {self.mean_kept:.3f} "
            f"({self.samples} images)"
        )


@torch.no_grad()
def evaluate(
    model: nn.Module,
    stream: BatchStream,
    device: torch.device | str = "cpu",
    precision: str = "fp32",
    *,
    progress: bool = False,
) -> EvalResult:
    """Measure accuracy, loss and kept share over one pass of a stream.

    With several processes each passes its own part of the data and all get the result of the whole.

    Args:
        model: The model, on `device`; its mode is restored at the end.
        stream: The batches.
        device: Where the model is.
        precision: "fp32", "bf16" or "fp16".
        progress: Show a bar.

    Returns:
        The figures.

    Raises:
        ValueError: If the stream is empty, or a label is not a class of the model.

    Example:
        >>> import tempfile, timm
        >>> from mmod.data.config import DataConfig
        >>> from mmod.data.loader import create_eval_stream
        >>> stream = create_eval_stream(DataConfig("digits:tiny", root=tempfile.mkdtemp()))
        >>> model = timm.create_model("test_vit", img_size=32, in_chans=1, num_classes=10)
        >>> evaluate(model, stream).samples
        64
    """
    device = torch.device(device)
    kept = KeptShares(model, device)
    # First guesses, first five guesses, loss, images.
    sums = torch.zeros(4, dtype=torch.float64, device=device)
    batches: Iterable[tuple[Tensor, Tensor]] = stream.batches(0)
    bar = tqdm(batches, total=stream.steps_per_epoch, desc="evaluate", disable=not progress, leave=False)
    with evaluating(model):
        for images, targets in bar:
            check_targets(targets, model)
            images, targets = images.to(device, non_blocking=True), targets.to(device, non_blocking=True)
            with autocast(device, precision), kept.watch():
                logits = model(images).float()
            sums += _batch_sums(logits, targets)
    first, five, loss, samples = sum_over_processes(sums).tolist()
    if samples == 0:
        raise ValueError("the evaluation stream holds no images")
    return EvalResult(
        top1=100 * first / samples,
        top5=100 * five / samples,
        loss=loss / samples,
        samples=int(samples),
        kept=kept.means(),
    )


def _batch_sums(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the sums of one batch in the order of `evaluate`."""
    guesses = logits.topk(min(5, logits.shape[1]), dim=1).indices == targets[:, None]
    figures = [
        guesses[:, 0].sum().double(),
        guesses.sum().double(),
        F.cross_entropy(logits, targets, reduction="sum").double(),
        torch.tensor(len(targets), device=logits.device).double(),
    ]
    return torch.stack(figures)
