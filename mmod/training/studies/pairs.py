"""The trade-off between retrieval, zero-shot accuracy, FLOPs and latency of CLIP models, dense and routed."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mmod import flops
from mmod.analysis.plots import draw_tradeoff
from mmod.analysis.timing import interleave, ratios
from mmod.data.readers.pairs import create_eval_pairs
from mmod.io.yaml import read_yaml
from mmod.training.engine.distributed import choose_device
from mmod.training.engine.loop import run
from mmod.training.pairs.config import ClipConfig, RoutingParts
from mmod.training.pairs.evaluate import ClipResult, evaluate_clip
from mmod.training.pairs.model import create_clip_models, create_transforms
from mmod.training.pairs.recipe import ImageText
from mmod.training.studies.config import PairsStudyConfig
from mmod.training.studies.paired import Difference, compare, spread, verdict
from mmod.training.studies.runs import Crew, Job, Tick, counted
from mmod.training.studies.study import (
    BASE,
    by_threshold,
    compared,
    evaluated_before,
    markdown_table,
    merged,
    partners,
    write_outcome,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["ClipPoint", "PairsStudyConfig", "ClipTradeoffResult", "clip_jobs", "run_clip_tradeoff"]


@dataclass(frozen=True)
class ClipPoint:
    """One point of the trade-off: a model, its cost, and what it finds, mean over the seeds.

    Args:
        name: Name of the model in the study.
        router: Its series: "dense" or a name of `PairsStudyConfig.routers`.
        capacity: Capacity of its routed blocks; 1 without any.
        image_gflops: FLOPs of one image, in 1e9.
        text_gflops: FLOPs of one caption, in 1e9.
        image_ms: Median latency of one image in a batch, in milliseconds.
        text_ms: The same of one caption.
        image_speedup: Dense latency of an image over this latency, median of interleaved rounds.
        text_speedup: The same of a caption.
        recall1: Recall at 1 in percent, mean of both directions.
        recall1_std: Its sample standard deviation over seeds; None for a single one.
        recall1_of: Recall at 1 of each seed.
        to_dense: How much higher recall at 1 is than the dense model's, paired by seed; None for the dense model.
        to_control: The same to its control's; None where it has none.
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
    recall1_of: dict[int, float]
    to_dense: Difference | None
    to_control: Difference | None
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
    "to_dense": "to dense",
    "to_control": "to control",
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
        """Return the points as a Markdown table, and which of them the seeds do not tell apart."""
        rows = [[_cell(getattr(point, name), _DIGITS.get(name, 2)) for name in _COLUMNS] for point in self.points]
        table = markdown_table(list(_COLUMNS.values()), rows)
        return f"{table}\n\n{verdict({point.name: point.recall1_of for point in self.points})}"


def _cell(value: object, digits: int) -> str:
    if value is None:
        return ""
    return f"{value:.{digits}f}" if isinstance(value, float) else str(value)


@dataclass(frozen=True)
class _Found:
    """What came out of one run."""

    result: ClipResult
    before: ClipResult | None = None


def run_clip_tradeoff(config: PairsStudyConfig, *, progress: bool = True) -> ClipTradeoffResult:
    """Run a study: train or load the dense model, route it, fine-tune, evaluate, time, and draw.

    Args:
        config: The study.
        progress: Show bars.

    Returns:
        The points; the same are written as CSV, JSON, Markdown and a picture.

    Raises:
        ValueError: The folder holds runs of another config, or a part of the config does not fit the model.
    """
    work = list(clip_jobs(config))
    found: dict[str, dict[int, _Found]] = {}
    for job, outcome in Crew(config.processes, progress).run(work, _do):
        found.setdefault(job.name, {})[job.seed] = outcome
    result = ClipTradeoffResult(config.output, _points(config, work, found))
    write_outcome(config, result, _draw)
    return result


def _do(job: Job[ClipConfig], tick: Tick) -> _Found:
    """Do one run; the results of finished ones are read from their folders."""
    if job.given:
        return _Found(evaluated_before(job, _evaluate, ClipResult))
    before = evaluated_before(job, _evaluate, ClipResult) if job.config.model.has_weights else None
    return _Found(run(counted(ImageText(job.config), tick), progress=False).best, before)


def clip_jobs(config: PairsStudyConfig) -> Iterator[Job[ClipConfig]]:
    """Yield the training runs of a study in the order they must be done.

    Args:
        config: The study.
    """
    recipe = merged(read_yaml(config.dense), config.changes)
    tuning = merged(recipe, config.finetune)
    for seed in range(config.seeds):
        root = Path(config.output) / f"seed{seed}"
        base = BASE if config.tune_dense else "dense"
        dense = ClipConfig.from_dict({**recipe, "output": str(root / base), "seed": seed})
        yield Job(base, base, 1.0, seed, dense, not config.train_dense, dense.epochs)
        start = dense.model
        if config.train_dense:
            start = dataclasses.replace(dense.model, checkpoint=dense.output, pretrained=None)
        tuned = ClipConfig.from_dict({**tuning, "output": str(root / "dense"), "seed": seed})
        tuned = dataclasses.replace(tuned, model=start)
        if config.tune_dense:
            yield Job("dense", "dense", 1.0, seed, tuned, work=tuned.epochs)
        for router, towers in config.routers.items():
            for capacity in filter(None, config.capacities):
                name = f"{router}-{capacity:g}"
                parts = RoutingParts(**{tower: {**fields, "capacity": capacity} for tower, fields in towers.items()})
                routed = dataclasses.replace(tuned, routing=parts, output=str(root / name))
                yield Job(name, router, capacity, seed, routed, work=tuned.epochs)


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
    config: PairsStudyConfig,
    work: Sequence[Job[ClipConfig]],
    found: Mapping[str, Mapping[int, _Found]],
) -> list[ClipPoint]:
    first = compared(work)
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
    recall = {name: {seed: one.result.recall1 for seed, one in sorted(found[name].items())} for name in first}
    to_dense = compare(recall, dict.fromkeys(first, "dense"))
    to_control = compare(recall, partners(config, work))
    points = []
    for name, job in first.items():
        results = [found[name][seed].result for seed in sorted(found[name])]
        before = [one.before.recall1 for one in found[name].values() if one.before is not None]
        shares = {"kept": results[0].kept} if by_threshold(models[name]) else {}
        cost = {
            tower: flops(models[name], {tower: inputs[:1]}, **shares).routed / 1e9
            for tower, inputs in (("image", images), ("text", texts))
        }
        recalls = list(recall[name].values())
        zero_shot = [result.zero_shot_top1 for result in results if result.zero_shot_top1 is not None]
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
                recall1_std=spread(recalls),
                recall1_of=recall[name],
                to_dense=to_dense[name],
                to_control=to_control[name],
                recall5=mean(result.recall5 for result in results),
                zero_shot=mean(zero_shot) if zero_shot else None,
                before=mean(before) if before else None,
                kept=mean(result.mean_kept for result in results),
                seeds=len(recalls),
            )
        )
    return points


def _time(
    models: Mapping[str, Any], method: str, inputs: Tensor, config: PairsStudyConfig, device: torch.device
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
