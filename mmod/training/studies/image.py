"""The trade-off between accuracy, FLOPs and latency: dense, routed, and the controls that a claim needs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from statistics import mean, median

import torch
from torch import nn

from mmod.adapters import find_stack
from mmod.analysis import flops, trace
from mmod.analysis.plots import draw_routing_maps, draw_tradeoff
from mmod.analysis.timing import interleave, ratios
from mmod.data.loader import create_eval_stream
from mmod.io.yaml import read_yaml
from mmod.model import is_routed
from mmod.training.engine.distributed import choose_device
from mmod.training.engine.loop import run
from mmod.training.image.config import ModelConfig, TrainConfig
from mmod.training.image.evaluate import EvalResult, evaluate
from mmod.training.image.model import create_models
from mmod.training.image.recipe import Classification
from mmod.training.studies.config import ImageStudyConfig
from mmod.training.studies.paired import Difference, compare, spread, verdict
from mmod.training.studies.runs import Crew, Job, Tick, counted
from mmod.training.studies.study import (
    BASE,
    by_threshold,
    evaluated_before,
    markdown_table,
    merged,
    partners,
    write_outcome,
)

__all__ = ["Point", "ImageStudyConfig", "TradeoffResult", "run_tradeoff"]


@dataclass(frozen=True)
class Point:
    """One point of the trade-off: a model, its cost, and its accuracy over the seeds.

    Args:
        name: Name of the model in the study.
        router: Its series: "dense", "shallow" (fewer blocks) or a name of `ImageStudyConfig.routers`.
        capacity: Capacity of its routed blocks; 1 without any.
        gflops: FLOPs of one image, in 1e9.
        latency_ms: Median latency of one image in a batch, in milliseconds; None until all models are there.
        speedup: Dense latency over this latency, median of interleaved rounds; None likewise.
        accuracy_mean: Top-1 in percent, mean over seeds.
        accuracy_std: Sample standard deviation over seeds; None for a single one.
        accuracy: Top-1 in percent of each seed.
        to_dense: How much higher it is than the dense model's, paired by seed; None for the dense model.
        to_control: The same to its control's; None where it has none.
        before: Top-1 in percent before fine-tuning, mean over seeds; None where nothing was fine-tuned.
        kept: Share of tokens its routed blocks kept on the evaluation data, mean over seeds.
        seeds: Number of seeds.
    """

    name: str
    router: str
    capacity: float
    gflops: float
    latency_ms: float | None
    speedup: float | None
    accuracy_mean: float
    accuracy_std: float | None
    accuracy: dict[int, float]
    to_dense: Difference | None
    to_control: Difference | None
    before: float | None
    kept: float
    seeds: int


@dataclass(frozen=True)
class TradeoffResult:
    """The outcome of a study.

    Args:
        folder: The study's folder with `tradeoff.{csv,json,md,png}` and `maps-*.png`.
        points: Its points.
        cpu_seconds: CPU time of all processes since the study was last started.
    """

    folder: str
    points: list[Point]
    cpu_seconds: float

    def table(self) -> str:
        """Return the points as a Markdown table, and which of them the seeds do not tell apart."""
        head = ["model", "capacity", "GFLOPs", "ms / image", "speed-up", "top-1 %", "std", "to dense", "to control"]
        rows = []
        for p in self.points:
            cells = [p.router, f"{p.capacity:g}", f"{p.gflops:.4f}", _cell(p.latency_ms, 3), _cell(p.speedup, 2)]
            cells += [f"{p.accuracy_mean:.2f}", _cell(p.accuracy_std, 2)]
            cells += ["" if gap is None else str(gap) for gap in (p.to_dense, p.to_control)]
            rows.append([*cells, _cell(p.before, 2), f"{p.kept:.3f}"])
        table = markdown_table([*head, "before tuning", "kept"], rows)
        return f"{table}\n\n{verdict({p.name: p.accuracy for p in self.points})}"


def _cell(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


@dataclass(frozen=True)
class _Found:
    """What came out of one run."""

    result: EvalResult
    before: EvalResult | None = None


@dataclass(frozen=True)
class _Model:
    """What holds for all seeds of a model: the first run of it, and its FLOPs."""

    job: Job[TrainConfig]
    gflops: float


def run_tradeoff(config: ImageStudyConfig, *, progress: bool = True) -> TradeoffResult:
    """Run a study: train or load the dense model, route it, fine-tune, evaluate, time, and draw.

    Table and pictures are written as soon as there is a routed model to compare with the dense one, and again with each
    further model of the first seed and each further seed. Latency joins them at the end, when nothing else runs.

    Args:
        config: The study.
        progress: Show a bar.

    Returns:
        The points; the same are written as CSV, JSON, Markdown and pictures.

    Raises:
        ValueError: The folder holds runs of another config, or a part of the config does not fit the model.
    """
    work = list(jobs(config))
    order = {job.name: None for job in work if job.router != BASE}
    found: dict[str, dict[int, _Found]] = {}
    models: dict[str, _Model] = {}
    crew = Crew(config.processes, progress)
    for job, outcome in crew.run(work, _do):
        if job.name not in order:
            continue
        found.setdefault(job.name, {})[job.seed] = outcome
        if job.name not in models:
            models[job.name] = _examine(job, config, outcome.result)
        complete = sum(job.seed in seeds for seeds in found.values()) == len(order)
        if len(found) > 1 and "dense" in found and (job.seed == 0 or complete):
            shown = [name for name in order if name in found]
            _write(config, crew, _points(config, work, {name: models[name] for name in shown}, found))
    times = _time({name: models[name].job for name in order}, config)
    return _write(config, crew, _points(config, work, {name: models[name] for name in order}, found, times))


def _write(config: ImageStudyConfig, crew: Crew, points: list[Point]) -> TradeoffResult:
    result = TradeoffResult(config.output, points, crew.cpu_seconds)
    write_outcome(config, result, draw_tradeoff, cpu_seconds=result.cpu_seconds)
    crew.say(f"{len(points)} models after {result.cpu_seconds:.0f} CPU seconds: {config.output}/tradeoff.{{md,png}}")
    return result


def _do(job: Job[TrainConfig], tick: Tick) -> _Found:
    """Do one run; the results of finished ones are read from their folders."""
    if job.given:
        return _Found(evaluated_before(job, _evaluate, EvalResult))
    before = evaluated_before(job, _evaluate, EvalResult) if job.config.model.has_weights else None
    return _Found(run(counted(Classification(job.config), tick), progress=False).best, before)


def jobs(config: ImageStudyConfig) -> Iterator[Job[TrainConfig]]:
    """Yield the training runs of a study in the order they must be done.

    Args:
        config: The study.
    """
    recipe = merged(read_yaml(config.dense), config.changes)
    tuning = merged(recipe, config.finetune)
    plain = TrainConfig.from_dict({**recipe, "output": config.output})
    depths = _isoflop_depths(config, plain) if config.isoflop == "scratch" else {}
    tuned_epochs = TrainConfig.from_dict({**tuning, "output": config.output}).epochs if config.tune else 0
    for seed in range(config.seeds):
        root = Path(config.output) / f"seed{seed}"
        base = BASE if config.tune_dense else "dense"
        place = Path(config.bases) / f"seed{seed}" / BASE if config.bases else root / base
        dense = TrainConfig.from_dict({**recipe, "output": str(place), "seed": seed})
        yield Job(base, base, 1.0, seed, dense, not config.train_dense, plain.epochs)
        start = dense.model
        if config.train_dense:
            start = dataclasses.replace(dense.model, checkpoint=dense.output, pretrained=False)
        tuned = TrainConfig.from_dict({**tuning, "output": str(root / "dense"), "seed": seed})
        tuned = dataclasses.replace(tuned, model=start)
        if config.tune_dense:
            yield Job("dense", "dense", 1.0, seed, tuned, work=tuned_epochs)
        for router, routing in config.routers.items():
            for capacity in filter(None, config.capacities):
                name = f"{router}-{capacity:g}"
                fields = {"output": str(root / name), "routing": {**routing, "capacity": capacity}}
                routed = dataclasses.replace(tuned, **fields)  # type: ignore[arg-type]
                # Evaluating alone takes about as long as a twentieth of an epoch.
                yield Job(name, router, capacity, seed, routed, not config.tune, tuned_epochs or 0.05)
        for depth, share in depths.items():
            name = f"isoflop-{depth}"
            model = ModelConfig(dense.model.name, {**dense.model.args, "depth": depth})
            epochs = plain.epochs + tuned_epochs
            shallow = dataclasses.replace(dense, model=model, output=str(root / name), epochs=epochs)
            yield Job(name, "shallow", 1.0, seed, shallow, work=share * epochs)


def _isoflop_depths(config: ImageStudyConfig, dense: TrainConfig) -> dict[int, float]:
    """Depths of the dense models nearest in FLOPs to the routed ones, each with its share of the dense depth."""
    plain = _weightless(dense)
    model = create_models(plain)[0]
    depth, size = len(find_stack(model).blocks), (dense.data.channels, dense.data.image_size, dense.data.image_size)
    report = flops(model, size)
    depths = set()
    for routing, capacity in product(config.routers.values(), filter(None, config.capacities)):
        routed = create_models(dataclasses.replace(plain, routing={**routing, "capacity": capacity}))[0]
        # What thresholds cost follows from the data.
        if not by_threshold(routed):
            cost = flops(routed, size).routed
            gap = {k: abs(report.rest.dense + k * report.blocks[0].dense - cost) for k in range(1, depth + 1)}
            depths.add(min(gap, key=gap.__getitem__))
    return {fewer: fewer / depth for fewer in sorted(depths - {depth})}


def _weightless(config: TrainConfig) -> TrainConfig:
    return dataclasses.replace(config, model=ModelConfig(config.model.name, config.model.args))


def _evaluate(config: TrainConfig) -> EvalResult:
    model, device = create_models(config)[0], choose_device(config.device)
    return evaluate(model.to(device), create_eval_stream(config.data), device, config.precision)


def _trained(job: Job[TrainConfig]) -> nn.Module:
    """Return the final model of a run, in evaluation mode on the device it was trained on."""
    config = job.config
    if not job.given:
        config = dataclasses.replace(
            config, model=dataclasses.replace(config.model, checkpoint=config.output, pretrained=False)
        )
    return create_models(config)[0].to(choose_device(config.device)).eval()


def _examine(job: Job[TrainConfig], config: ImageStudyConfig, result: EvalResult) -> _Model:
    """Count the FLOPs of a finished model and draw what it keeps."""
    model, data = _trained(job), job.config.data
    cost = flops(
        model,
        (data.channels, data.image_size, data.image_size),
        **({"kept": result.kept} if by_threshold(model) else {}),
    )
    if config.maps and is_routed(model):
        _draw_maps(job, model, config)
    return _Model(job, cost.routed / 1e9)


def _time(first: Mapping[str, Job[TrainConfig]], config: ImageStudyConfig) -> dict[str, list[float]]:
    """Return the times of a batch of evaluation images by model, in milliseconds for each image."""
    run = first["dense"].config
    device = choose_device(run.device)
    images = next(iter(create_eval_stream(run.data).batches(0)))[0][: config.latency_batch].to(device)
    reads = {name: partial(_trained(job), images) for name, job in first.items()}
    with torch.inference_mode():
        times = interleave(reads, seconds=0, rounds=config.latency_rounds, device=device)
    return {name: [time / len(images) for time in rounds] for name, rounds in times.items()}


def _points(
    config: ImageStudyConfig,
    work: Sequence[Job[TrainConfig]],
    models: Mapping[str, _Model],
    found: Mapping[str, Mapping[int, _Found]],
    times: Mapping[str, list[float]] | None = None,
) -> list[Point]:
    accuracy = {name: {seed: one.result.top1 for seed, one in sorted(found[name].items())} for name in models}
    to_dense = compare(accuracy, dict.fromkeys(models, "dense"))
    to_control = compare(accuracy, partners(config, work))
    points = []
    for name, model in models.items():
        before = [one.before.top1 for one in found[name].values() if one.before is not None]
        own = list(accuracy[name].values())
        points.append(
            Point(
                name=name,
                router=model.job.router,
                capacity=model.job.capacity,
                gflops=model.gflops,
                latency_ms=median(times[name]) if times else None,
                speedup=ratios(times["dense"], times[name]).median if times else None,
                accuracy_mean=mean(own),
                accuracy_std=spread(own),
                accuracy=accuracy[name],
                to_dense=to_dense[name],
                to_control=to_control[name],
                before=mean(before) if before else None,
                kept=mean(one.result.mean_kept for one in found[name].values()),
                seeds=len(own),
            )
        )
    return points


def _draw_maps(job: Job[TrainConfig], model: nn.Module, config: ImageStudyConfig) -> None:
    """Draw what a routed model kept on the first evaluation images."""
    images = next(iter(create_eval_stream(job.config.data).batches(0)))[0][: config.maps]
    stack = find_stack(model)
    with torch.inference_mode(), trace(model) as decisions:
        model(images.to(choose_device(job.config.device)))
    patches = next(iter(decisions.values())).score_BN.shape[1] - stack.prefix
    side = round(patches**0.5)
    low, high = images.amin(), images.amax()
    figure = draw_routing_maps((images - low) / (high - low), decisions, stack.prefix, (side, patches // side))
    Path(config.output).mkdir(parents=True, exist_ok=True)
    figure.savefig(Path(config.output) / f"maps-{job.name}.png", dpi=150, bbox_inches="tight")
