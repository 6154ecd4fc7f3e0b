"""The trade-off between accuracy, FLOPs and latency: dense, routed, and the controls that a claim needs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from statistics import mean, median
from typing import Any, Literal

import torch
from torch import nn

from mmod.adapters import find_host
from mmod.convert import is_routed
from mmod.data.loader import create_eval_stream
from mmod.data.yaml_files import read_yaml
from mmod.measuring import flops, trace
from mmod.measuring.latency import interleave, ratios
from mmod.measuring.plots import draw_routing_maps, draw_tradeoff
from mmod.training.build import create_models
from mmod.training.classification import fit
from mmod.training.config import ModelConfig, TrainConfig
from mmod.training.distributed import choose_device
from mmod.training.evaluation import EvalResult, evaluate
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

__all__ = ["Point", "TradeoffConfig", "TradeoffResult", "run_tradeoff"]


@dataclass(frozen=True)
class TradeoffConfig:
    """One study: a dense model, how it is routed, and what it is compared with.

    Args:
        output: The study's folder; its runs, table and pictures go there. A study goes on where it stopped.
        dense: Training config of the dense model, a YAML file; the study sets its `output` and `seed`.
        changes: Fields of `TrainConfig` to set differently in all runs, nested as in the file.
        finetune: Fields to set differently again when a routed model is fine-tuned from the dense one.
        routers: Name of each series to its routing: fields of `RoutingConfig`, or `preset: NAME` with changes. Each
            is run at every capacity.
        capacities: Capacities of the routed blocks.
        train_dense: Train the dense model first; False takes it as `dense.model` gives it (pretrained or a
            checkpoint).
        tune_dense: Fine-tune the dense model like the routed ones, so that none is ahead by mere training.
        isoflop: "scratch" also trains dense models with fewer blocks, as near in FLOPs to the routed ones as can be,
            for as many epochs as training and fine-tuning have together; "none" leaves them out.
        seeds: Number of seeds; everything is repeated for each.
        latency_batch: Images in a batch whose latency is measured.
        latency_rounds: Interleaved rounds of the measurement.
        maps: Sample images over which routing is drawn.
    """

    output: str
    dense: str
    routers: dict[str, dict[str, Any]]
    changes: dict[str, Any] = field(default_factory=dict)
    finetune: dict[str, Any] = field(default_factory=dict)
    capacities: list[float] = field(default_factory=lambda: [0.5])
    train_dense: bool = True
    tune_dense: bool = True
    isoflop: Literal["scratch", "none"] = "scratch"
    seeds: int = 1
    latency_batch: int = 32
    latency_rounds: int = 15
    maps: int = 6

    def __post_init__(self) -> None:
        check_study(self, ("seeds", "latency_batch", "latency_rounds"))


@dataclass(frozen=True)
class Point:
    """One point of the trade-off: a model, its cost, and its accuracy over the seeds.

    Args:
        name: Name of the model in the study.
        router: Its series: "dense", "shallow" (fewer blocks) or a name of `TradeoffConfig.routers`.
        capacity: Capacity of its routed blocks; 1 without any.
        gflops: FLOPs of one image, in 1e9.
        latency_ms: Median latency of one image in a batch, in milliseconds.
        speedup: Dense latency over this latency, median of interleaved rounds.
        accuracy_mean: Top-1 in percent, mean over seeds.
        accuracy_std: Sample standard deviation over seeds; None for a single one.
        before: Top-1 in percent before fine-tuning, mean over seeds; None where nothing was fine-tuned.
        kept: Share of tokens its routed blocks kept on the evaluation data, mean over seeds.
        seeds: Number of seeds.
    """

    name: str
    router: str
    capacity: float
    gflops: float
    latency_ms: float
    speedup: float
    accuracy_mean: float
    accuracy_std: float | None
    before: float | None
    kept: float
    seeds: int


@dataclass(frozen=True)
class TradeoffResult:
    """The outcome of a study.

    Args:
        folder: The study's folder with `tradeoff.{csv,json,md,png}` and `maps-*.png`.
        points: Its points.
    """

    folder: str
    points: list[Point]

    def table(self) -> str:
        """Return the points as a Markdown table."""
        head = ["model", "capacity", "GFLOPs", "ms / image", "speed-up", "top-1 %", "std", "before tuning", "kept"]
        rows = []
        for p in self.points:
            std = "" if p.accuracy_std is None else f"{p.accuracy_std:.2f}"
            before = "" if p.before is None else f"{p.before:.2f}"
            cells = [p.router, f"{p.capacity:g}", f"{p.gflops:.4f}", f"{p.latency_ms:.3f}", f"{p.speedup:.2f}"]
            cells += [f"{p.accuracy_mean:.2f}", std, before, f"{p.kept:.3f}"]
            rows.append(cells)
        return markdown_table(head, rows)


def run_tradeoff(config: TradeoffConfig, *, progress: bool = True) -> TradeoffResult:
    """Run a study: train or load the dense model, route it, fine-tune, evaluate, time, and draw.

    Args:
        config: The study.
        progress: Show bars.

    Returns:
        The points; the same are written as CSV, JSON, Markdown and pictures.

    Raises:
        ValueError: The folder holds runs of another config, or a part of the config does not fit the model.
    """
    before: dict[str, list[float]] = {}
    results: dict[str, list[EvalResult]] = {}
    work = list(jobs(config))
    for job in in_order(work, progress):
        if is_given(job.name, config.train_dense, config.tune_dense):
            results.setdefault(job.name, []).append(evaluated_before(job, _evaluate, EvalResult))
            continue
        if job.config.model.has_weights:
            before.setdefault(job.name, []).append(evaluated_before(job, _evaluate, EvalResult).top1)
        found = fit(job.config, progress=progress)
        results.setdefault(job.name, []).append(found.average or found.evaluation)
    first = compared(work)
    models = {name: _trained(job, config) for name, job in first.items()}
    result = TradeoffResult(config.output, _points(config, first, models, results, before))
    write_outcome(config, result, draw_tradeoff)
    _draw_maps(config, first, models)
    return result


def jobs(config: TradeoffConfig) -> Iterator[Job[TrainConfig]]:
    """Yield the training runs of a study in the order they must be done.

    Args:
        config: The study.
    """
    recipe = merged(read_yaml(config.dense), config.changes)
    tuning = merged(recipe, config.finetune)
    plain = train_config({**recipe, "output": config.output})
    depths = _isoflop_depths(config, plain) if config.isoflop == "scratch" else []
    epochs = plain.epochs + train_config({**tuning, "output": config.output}).epochs
    for seed in range(config.seeds):
        root = Path(config.output) / f"seed{seed}"
        base = BASE if config.tune_dense else "dense"
        dense = train_config({**recipe, "output": str(root / base), "seed": seed})
        yield Job(base, base, 1.0, seed, dense)
        start = dense.model
        if config.train_dense:
            start = dataclasses.replace(dense.model, checkpoint=dense.output, pretrained=False)
        if config.tune_dense:
            tuned = train_config({**tuning, "output": str(root / "dense"), "seed": seed})
            yield Job("dense", "dense", 1.0, seed, dataclasses.replace(tuned, model=start))
        for router, routing in config.routers.items():
            for capacity in config.capacities:
                name = f"{router}-{capacity:g}"
                tuned = train_config({**tuning, "output": str(root / name), "seed": seed})
                tuned = dataclasses.replace(tuned, model=start, routing={**routing, "capacity": capacity})
                yield Job(name, router, capacity, seed, tuned)
        for depth in depths:
            name = f"isoflop-{depth}"
            model = ModelConfig(dense.model.name, {**dense.model.args, "depth": depth})
            shallow = dataclasses.replace(dense, model=model, output=str(root / name), epochs=epochs)
            yield Job(name, "shallow", 1.0, seed, shallow)


def _isoflop_depths(config: TradeoffConfig, dense: TrainConfig) -> list[int]:
    """Depths of the dense models nearest in FLOPs to the study's routed ones."""
    plain = _weightless(dense)
    model = create_models(plain)[0]
    depth, size = len(find_host(model).blocks), (dense.data.channels, dense.data.image_size, dense.data.image_size)
    report = flops(model, size)
    depths = set()
    for routing, capacity in product(config.routers.values(), config.capacities):
        routed = create_models(dataclasses.replace(plain, routing={**routing, "capacity": capacity}))[0]
        # What thresholds cost follows from the data.
        if not by_threshold(routed):
            cost = flops(routed, size).routed
            gap = {k: abs(report.rest.dense + k * report.blocks[0].dense - cost) for k in range(1, depth + 1)}
            depths.add(min(gap, key=gap.__getitem__))
    return sorted(depths - {depth})


def _weightless(config: TrainConfig) -> TrainConfig:
    return dataclasses.replace(config, model=ModelConfig(config.model.name, config.model.args))


def _evaluate(config: TrainConfig) -> EvalResult:
    model, device = create_models(config)[0], choose_device(config.device)
    return evaluate(model.to(device), create_eval_stream(config.data), device, config.precision)


def _trained(job: Job[TrainConfig], config: TradeoffConfig) -> nn.Module:
    """Return the final model of a run, in evaluation mode on the device it was trained on."""
    if is_given(job.name, config.train_dense, config.tune_dense):
        model, _ = create_models(job.config)
    else:
        weights = dataclasses.replace(job.config.model, checkpoint=job.config.output, pretrained=False)
        model, _ = create_models(dataclasses.replace(job.config, model=weights))
    return model.to(choose_device(job.config.device)).eval()


def _points(
    config: TradeoffConfig,
    first: Mapping[str, Job[TrainConfig]],
    models: Mapping[str, nn.Module],
    results: Mapping[str, list[EvalResult]],
    before: Mapping[str, list[float]],
) -> list[Point]:
    data = first["dense"].config.data
    size = (data.channels, data.image_size, data.image_size)
    device = choose_device(first["dense"].config.device)
    images = next(iter(create_eval_stream(data).batches(0)))[0][: config.latency_batch].to(device)
    with torch.inference_mode():
        times = interleave(
            {name: partial(model, images) for name, model in models.items()},
            seconds=0,
            rounds=config.latency_rounds,
            device=device,
        )
    points = []
    for name, job in first.items():
        accuracy = [result.top1 for result in results[name]]
        shares = results[name][0].kept
        report = flops(models[name], size, **({"kept": shares} if by_threshold(models[name]) else {}))
        points.append(
            Point(
                name=name,
                router=job.router,
                capacity=job.capacity,
                gflops=report.routed / 1e9,
                latency_ms=median(times[name]) / len(images),
                speedup=ratios(times["dense"], times[name]).median,
                accuracy_mean=mean(accuracy),
                accuracy_std=deviation(accuracy),
                before=mean(before[name]) if name in before else None,
                kept=mean(result.mean_kept for result in results[name]),
                seeds=len(accuracy),
            )
        )
    return points


def _draw_maps(config: TradeoffConfig, first: Mapping[str, Job[TrainConfig]], models: Mapping[str, nn.Module]) -> None:
    """Draw what each routed model kept on the first evaluation images."""
    if not config.maps:
        return
    data = first["dense"].config.data
    images = next(iter(create_eval_stream(data).batches(0)))[0][: config.maps]
    for name, model in models.items():
        if not is_routed(model):
            continue
        host = find_host(model)
        with torch.inference_mode(), trace(model) as decisions:
            model(images.to(choose_device(first[name].config.device)))
        patches = next(iter(decisions.values())).score_BN.shape[1] - host.prefix
        side = round(patches**0.5)
        low, high = images.amin(), images.amax()
        figure = draw_routing_maps((images - low) / (high - low), decisions, host.prefix, (side, patches // side))
        figure.savefig(Path(config.output) / f"maps-{name}.png", dpi=150, bbox_inches="tight")
