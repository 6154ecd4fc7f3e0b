"""The trade-off between retrieval, zero-shot accuracy, FLOPs and latency of CLIP models, dense and routed."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from mmod import flops
from mmod.data.pairs import create_eval_pairs
from mmod.data.yaml_files import read_yaml
from mmod.measuring.latency import interleave, ratios
from mmod.measuring.plots import draw_tradeoff
from mmod.training.clip import fit_clip
from mmod.training.clip_build import create_clip_models, create_transforms
from mmod.training.clip_config import ClipConfig, RoutingParts
from mmod.training.clip_evaluation import ClipResult, evaluate_clip
from mmod.training.distributed import choose_device
from mmod.training.parse import train_config
from mmod.training.study import (
    BASE,
    Job,
    by_threshold,
    check_study,
    compared,
    deviation,
    evaluated_before,
    in_order,
    is_given,
    markdown_table,
    merged,
    write_outcome,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["ClipPoint", "ClipTradeoffConfig", "ClipTradeoffResult", "clip_jobs", "run_clip_tradeoff"]


@dataclass(frozen=True)
class ClipTradeoffConfig:
    """A study: one dense CLIP model, its routed forms, and what they cost and find.

    Args:
        output: Folder of the study: its runs, and at the end `tradeoff.{csv,json,md,png}`.
        dense: Config file of the dense training, as `tools/train_clip.py` takes it.
        routers: Name of each series to the routing of its towers: `{image: {...}, text: {...}}`, each as in the
            training config, without a capacity. Each is run at every capacity.
        kind: "pairs" says that this is a study of image-text models.
        changes: Fields of the training config to set differently in all runs, nested as in the file.
        finetune: Fields to set differently again when a model is fine-tuned from the dense one.
        capacities: Capacities of the routed blocks.
        train_dense: Train the dense model first; False takes it as `dense.model` gives it.
        tune_dense: Fine-tune the dense model like the routed ones, so that none is ahead by mere training.
        seeds: Number of seeds; everything is repeated for each.
        latency_batch: Images and captions in a batch whose latency is measured.
        latency_rounds: Interleaved rounds of the measurement.
    """

    output: str
    dense: str
    routers: dict[str, dict[str, Any]]
    kind: Literal["pairs"] = "pairs"
    changes: dict[str, Any] = field(default_factory=dict)
    finetune: dict[str, Any] = field(default_factory=dict)
    capacities: list[float] = field(default_factory=lambda: [0.5])
    train_dense: bool = True
    tune_dense: bool = True
    seeds: int = 1
    latency_batch: int = 32
    latency_rounds: int = 15

    def __post_init__(self) -> None:
        check_study(self, ("seeds", "latency_batch", "latency_rounds"))
        for name, towers in self.routers.items():
            unknown = sorted(set(towers) - {"image", "text"})
            if unknown:
                raise ValueError(f"routers.{name} names {', '.join(unknown)}; valid: image, text")


@dataclass(frozen=True)
class ClipPoint:
    """One point of the trade-off: a model, its cost, and what it finds, mean over the seeds.

    Args:
        name: Name of the model in the study.
        router: Its series: "dense" or a name of `ClipTradeoffConfig.routers`.
        capacity: Capacity of its routed blocks; 1 without any.
        image_gflops: FLOPs of one image, in 1e9.
        text_gflops: FLOPs of one caption, in 1e9.
        image_ms: Median latency of one image in a batch, in milliseconds.
        text_ms: The same of one caption.
        image_speedup: Dense latency of an image over this latency, median of interleaved rounds.
        text_speedup: The same of a caption.
        recall1: Recall at 1 in percent, mean of both directions.
        recall1_std: Its sample standard deviation over seeds; None for a single one.
        recall5: Recall at 5 in percent, mean of both directions.
        zero_shot: Zero-shot top-1 in percent; None without zero-shot classes.
        before: Recall at 1 in percent before fine-tuning; None where nothing was fine-tuned.
        kept: Share of tokens that routed blocks kept on the evaluation data.
        seeds: Number of seeds.
    """

    name: str
    router: str
    capacity: float
    image_gflops: float
    text_gflops: float
    image_ms: float
    text_ms: float
    image_speedup: float
    text_speedup: float
    recall1: float
    recall1_std: float | None
    recall5: float
    zero_shot: float | None
    before: float | None
    kept: float
    seeds: int


_COLUMNS = {
    "router": "model",
    "capacity": "capacity",
    "image_gflops": "GFLOPs / image",
    "text_gflops": "GFLOPs / caption",
    "image_ms": "ms / image",
    "text_ms": "ms / caption",
    "image_speedup": "image speed-up",
    "text_speedup": "text speed-up",
    "recall1": "R@1 %",
    "recall1_std": "std",
    "recall5": "R@5 %",
    "zero_shot": "zero-shot %",
    "before": "R@1 before tuning",
    "kept": "kept",
}
_DIGITS = {"image_gflops": 4, "text_gflops": 4, "image_ms": 3, "text_ms": 3, "kept": 3, "capacity": 2}


@dataclass(frozen=True)
class ClipTradeoffResult:
    """The outcome of a study.

    Args:
        folder: The study's folder with `tradeoff.{csv,json,md,png}`.
        points: Its points.
    """

    folder: str
    points: list[ClipPoint]

    def table(self) -> str:
        """Return the points as a Markdown table."""
        rows = []
        for point in self.points:
            values = {name: getattr(point, name) for name in _COLUMNS}
            cells = [
                value if isinstance(value, str) else "" if value is None else f"{value:.{_DIGITS.get(name, 2)}f}"
                for name, value in values.items()
            ]
            rows.append(cells)
        return markdown_table(list(_COLUMNS.values()), rows)


def run_clip_tradeoff(config: ClipTradeoffConfig, *, progress: bool = True) -> ClipTradeoffResult:
    """Run a study: train or load the dense model, route it, fine-tune, evaluate, time, and draw.

    Args:
        config: The study.
        progress: Show bars.

    Returns:
        The points; the same are written as CSV, JSON, Markdown and a picture.

    Raises:
        ValueError: The folder holds runs of another config, or a part of the config does not fit the model.
    """
    before: dict[str, list[float]] = {}
    results: dict[str, list[ClipResult]] = {}
    work = list(clip_jobs(config))
    for job in in_order(work, progress):
        if is_given(job.name, config.train_dense, config.tune_dense):
            results.setdefault(job.name, []).append(evaluated_before(job, _evaluate, ClipResult))
            continue
        if job.config.model.has_weights:
            before.setdefault(job.name, []).append(evaluated_before(job, _evaluate, ClipResult).recall1)
        results.setdefault(job.name, []).append(fit_clip(job.config, progress=progress).best)
    result = ClipTradeoffResult(config.output, _points(config, compared(work), results, before))
    write_outcome(config, result, _draw)
    return result


def clip_jobs(config: ClipTradeoffConfig) -> Iterator[Job[ClipConfig]]:
    """Yield the training runs of a study in the order they must be done.

    Args:
        config: The study.
    """
    recipe = merged(read_yaml(config.dense), config.changes)
    tuning = merged(recipe, config.finetune)
    for seed in range(config.seeds):
        root = Path(config.output) / f"seed{seed}"
        base = BASE if config.tune_dense else "dense"
        dense = train_config({**recipe, "output": str(root / base), "seed": seed}, ClipConfig)
        yield Job(base, base, 1.0, seed, dense)
        start = dense.model
        if config.train_dense:
            start = dataclasses.replace(dense.model, checkpoint=dense.output, pretrained=None)
        tuned = train_config({**tuning, "output": str(root / "dense"), "seed": seed}, ClipConfig)
        tuned = dataclasses.replace(tuned, model=start)
        if config.tune_dense:
            yield Job("dense", "dense", 1.0, seed, tuned)
        for router, towers in config.routers.items():
            for capacity in config.capacities:
                name = f"{router}-{capacity:g}"
                parts = RoutingParts(**{tower: {**fields, "capacity": capacity} for tower, fields in towers.items()})
                routed = dataclasses.replace(tuned, routing=parts, output=str(root / name))
                yield Job(name, router, capacity, seed, routed)


def _evaluate(config: ClipConfig) -> ClipResult:
    device = choose_device(config.device)
    model = create_clip_models(config)[0].to(device)
    _, transform, tokenizer = create_transforms(model, config.model.name, None)
    stream = create_eval_pairs(config.data, transform, tokenizer)
    options: dict[str, Any] = {"zero_shot": config.zero_shot, "transform": transform, "workers": config.data.workers}
    return evaluate_clip(model, stream, tokenizer, device, config.precision, **options)


def _trained(job: Job[ClipConfig]) -> Any:
    """Return the final model of a run, in evaluation mode on the device it was trained on."""
    config = job.config
    if (Path(config.output) / "model").is_dir():
        weights = dataclasses.replace(config.model, checkpoint=config.output, pretrained=None)
        config = dataclasses.replace(config, model=weights)
    return create_clip_models(config)[0].to(choose_device(config.device)).eval()


def _points(
    config: ClipTradeoffConfig,
    first: Mapping[str, Job[ClipConfig]],
    results: Mapping[str, list[ClipResult]],
    before: Mapping[str, list[float]],
) -> list[ClipPoint]:
    models = {name: _trained(job) for name, job in first.items()}
    run = first["dense"].config
    device = choose_device(run.device)
    _, transform, tokenizer = create_transforms(models["dense"], run.model.name, None)
    batches = create_eval_pairs(run.data, transform, tokenizer).batches(0)
    images, texts = (part[: config.latency_batch].to(device) for part in next(batches))
    times = {
        tower: _time(models, f"encode_{tower}", inputs, config, device)
        for tower, inputs in (("image", images), ("text", texts))
    }
    points = []
    for name, job in first.items():
        found = results[name]
        shares = {"kept": found[0].kept} if by_threshold(models[name]) else {}
        cost = {
            tower: flops(models[name], {tower: inputs[:1]}, **shares).routed / 1e9
            for tower, inputs in (("image", images), ("text", texts))
        }
        recalls = [result.recall1 for result in found]
        zero_shot = [result.zero_shot_top1 for result in found if result.zero_shot_top1 is not None]
        points.append(
            ClipPoint(
                name=name,
                router=job.router,
                capacity=job.capacity,
                image_gflops=cost["image"],
                text_gflops=cost["text"],
                image_ms=median(times["image"][name]) / len(images),
                text_ms=median(times["text"][name]) / len(texts),
                image_speedup=ratios(times["image"]["dense"], times["image"][name]).median,
                text_speedup=ratios(times["text"]["dense"], times["text"][name]).median,
                recall1=mean(recalls),
                recall1_std=deviation(recalls),
                recall5=mean(result.recall5 for result in found),
                zero_shot=mean(zero_shot) if zero_shot else None,
                before=mean(before[name]) if name in before else None,
                kept=mean(result.mean_kept for result in found),
                seeds=len(recalls),
            )
        )
    return points


def _time(
    models: Mapping[str, Any], method: str, inputs: Tensor, config: ClipTradeoffConfig, device: torch.device
) -> dict[str, list[float]]:
    with torch.inference_mode():
        return interleave(
            {name: partial(getattr(model, method), inputs) for name, model in models.items()},
            seconds=0,
            rounds=config.latency_rounds,
            device=device,
        )


def _draw(points: list[dict[str, Any]]) -> Figure:
    drawn = [
        {
            **row,
            "gflops": row["image_gflops"] + row["text_gflops"],
            "latency_ms": row["image_ms"] + row["text_ms"],
            "accuracy_mean": row["recall1"],
            "accuracy_std": row["recall1_std"],
        }
        for row in points
    ]
    figure = draw_tradeoff(drawn, "recall at 1, mean of both directions,")
    for axis, title in zip(figure.axes, ("GFLOPs per pair", "latency per pair in ms")):
        axis.set_xlabel(title)
    return figure
