"""The trade-off between answers and cost of routed vision-language models: prefill, decoding, cache and FLOPs."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mmod import is_routed
from mmod.analysis.plots import draw_tradeoff
from mmod.analysis.prefill import PrefillFlops, prefill_flops
from mmod.analysis.timing import interleave, ratios
from mmod.data.readers.chat import ChatCollator
from mmod.data.readers.conversations import Conversations, open_conversations
from mmod.io.yaml import read_yaml
from mmod.training.chat.config import VlmConfig
from mmod.training.chat.evaluate import generate, mean_over_kinds
from mmod.training.chat.model import create_vlm
from mmod.training.chat.recipe import MODEL, VlmResult, finetune
from mmod.training.engine.distributed import choose_device
from mmod.training.studies.chat_pictures import draw_answers, draw_maps
from mmod.training.studies.config import ChatStudyConfig
from mmod.training.studies.paired import Difference, compare, spread, verdict
from mmod.training.studies.runs import Crew, Job, Tick
from mmod.training.studies.study import (
    BASE,
    compared,
    markdown_table,
    merged,
    partners,
    write_outcome,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["VlmPoint", "ChatStudyConfig", "VlmTradeoffResult", "run_vlm_tradeoff"]

_DENSE = "dense"


@dataclass(frozen=True)
class VlmPoint:
    """One model of a study.

    Args:
        name: Router, and capacity where the study sets it.
        router: The series.
        flops_share: FLOPs of reading a prompt as a share of the dense model's.
        gflops: FLOPs of reading a prompt of mean length in the language model, in 1e9.
        image_share: Share of image-token-layer pairs of the language model that are computed.
        prefill_ms: Median time of reading a prompt within a batch, in milliseconds.
        prefill_speedup: Dense time over this time, median of interleaved rounds.
        decode_per_s: Tokens decoded in a second for a batch of prompts, their reading left out.
        cache_bytes: Keys and values that are held after reading a prompt.
        accuracy: Mean over the kinds of questions that need an image, in percent, mean over seeds.
        accuracy_std: Sample standard deviation over seeds; None for a single one.
        accuracy_of: Accuracy of each seed.
        to_dense: How much higher it is than the dense model's, paired by seed; None for the dense model.
        to_control: The same to its control's; None where it has none.
        right: Percent of right answers of each kind, mean over seeds.
        right_std: Sample standard deviation of each kind over seeds; None for a single one.
        kept: Share of the tokens that could be skipped which routed layers kept on the questions, mean over layers.
        seeds: Number of seeds.
    """

    name: str
    router: str
    flops_share: float
    gflops: float
    image_share: float
    prefill_ms: float
    prefill_speedup: float
    decode_per_s: float
    cache_bytes: int
    accuracy: float
    accuracy_std: float | None
    accuracy_of: dict[int, float]
    to_dense: Difference | None
    to_control: Difference | None
    right: dict[str, float]
    right_std: dict[str, float | None]
    kept: float
    seeds: int


@dataclass(frozen=True)
class VlmTradeoffResult:
    """The outcome of a study.

    Args:
        folder: The study's folder with `tradeoff.{csv,json,md,png}`, `answers.png` and `maps-*.png`.
        points: Its points.
        prior: Percent of right answers without looking, by kind.
    """

    folder: str
    points: list[VlmPoint]
    prior: dict[str, float]

    def table(self) -> str:
        """Return the points as a Markdown table, the prior in its last row, and what the seeds do not tell apart."""
        kinds = list(self.prior)
        head = ["model", "image FLOPs", "FLOPs", "prefill ms", "speed-up", "decode tok/s", "cache bytes"]
        head += ["right %", "to dense", "to control", *kinds]
        rows = []
        for p in self.points:
            cells = [p.name, f"{p.image_share:.3f}", f"{p.flops_share:.3f}", f"{p.prefill_ms:.2f}"]
            cells += [f"{p.prefill_speedup:.2f}", f"{p.decode_per_s:.0f}", f"{p.cache_bytes:,}"]
            cells.append(_spread(p.accuracy, p.accuracy_std))
            cells += ["" if gap is None else str(gap) for gap in (p.to_dense, p.to_control)]
            cells += [_spread(p.right[kind], p.right_std[kind]) for kind in kinds]
            rows.append(cells)
        prior = [f"{self.prior[kind]:.1f}" for kind in kinds]
        cells = ["language-only prior", *[""] * 6, f"{mean_over_kinds(self.prior):.1f}", "", "", *prior]
        told = verdict({p.name: p.accuracy_of for p in self.points})
        return f"{markdown_table(head, [*rows, cells])}\n\n{told}"


def _spread(value: float, std: float | None) -> str:
    return f"{value:.1f}" if std is None else f"{value:.1f} ± {std:.1f}"


def run_vlm_tradeoff(config: ChatStudyConfig, *, progress: bool = True) -> VlmTradeoffResult:
    """Run a study: train or load the dense model, route it, fine-tune, ask, time, and draw.

    Args:
        config: The study.
        progress: Show bars.

    Returns:
        The points and the language-only prior; the same are written as CSV, JSON, Markdown and a picture.

    Raises:
        ValueError: The folder holds runs of another config, or a part of the config does not fit the model.
    """
    work = list(vlm_jobs(config))
    results: dict[str, dict[int, VlmResult]] = {}
    for job, found in Crew(config.processes, progress).run(work, _do):
        results.setdefault(job.name, {})[job.seed] = found
    prior = results[_DENSE][0].prior
    first = compared(work)
    models, collator = _trained(first)
    val = open_conversations(str(first[_DENSE].config.data.val), first[_DENSE].config.data)
    points = _measure(config, work, results, models, collator, val)
    if config.maps:
        talks = [val[index] for index in _with_one_image(val, config.maps)]
        draw_maps(models, collator, talks, Path(config.output))
    result = VlmTradeoffResult(config.output, points, prior)
    write_outcome(config, result, _draw, threads=torch.get_num_threads(), cores=os.cpu_count(), prior=prior)
    right = {point.name: {"all": point.accuracy, **point.right} for point in points}
    figure = draw_answers(right, {point.name: point.flops_share for point in points})
    figure.savefig(Path(config.output) / "answers.png", dpi=150)
    return result


def _do(job: Job[VlmConfig], tick: Tick) -> VlmResult:
    """Do one run; the results of finished ones are read from their folders."""
    return finetune(job.config, progress=False)


def vlm_jobs(config: ChatStudyConfig) -> Iterator[Job[VlmConfig]]:
    """Yield the runs of a study in the order they must be done.

    Args:
        config: The study.

    Raises:
        ValueError: If a config does not say where its evaluation questions come from.
    """
    recipe = merged(read_yaml(config.dense), config.changes)
    tuning = merged(recipe, config.finetune)
    for seed in range(config.seeds):
        root = Path(config.output) / f"seed{seed}"
        if config.train_dense:
            base = _parse({**recipe, "output": str(root / BASE), "seed": seed})
            yield Job(BASE, BASE, 1.0, seed, base)
            arguments = tuning["model"].get("args", {})
            tuning = {**tuning, "model": {"args": arguments, "checkpoint": str(root / BASE / MODEL)}}
        dense = _parse({**tuning, "output": str(root / _DENSE), "seed": seed})
        if dense.data.val is None:
            raise ValueError(f"{config.dense!r} has no data.val, so there is nothing to ask")
        yield Job(_DENSE, _DENSE, 1.0, seed, dense)
        for router, routing in config.routers.items():
            for capacity in config.capacities:
                name = router if capacity is None else f"{router}-{capacity:g}"
                fields = routing if capacity is None else {**routing, "capacity": capacity}
                tuned = {**tuning, "output": str(root / name), "seed": seed, "routing": {config.part: fields}}
                yield Job(name, router, 1.0 if capacity is None else capacity, seed, _parse(tuned))


def _parse(fields: Mapping[str, Any]) -> VlmConfig:
    return VlmConfig.from_dict(fields)


def _trained(first: Mapping[str, Job[VlmConfig]]) -> tuple[dict[str, Any], ChatCollator]:
    """Load the models of the first seed, and what encodes questions for all of them."""
    models: dict[str, Any] = {}
    for name, job in first.items():
        weights = dataclasses.replace(job.config.model, checkpoint=str(Path(job.config.output) / MODEL), config=None)
        trained = dataclasses.replace(job.config, model=weights, routing=None, lora=None, frozen=[])
        model, processor = create_vlm(trained)
        models[name] = model.to(choose_device()).eval()
    return models, ChatCollator(processor, first[_DENSE].config.data.max_length)


def _measure(
    config: ChatStudyConfig,
    work: Sequence[Job[VlmConfig]],
    results: Mapping[str, Mapping[int, VlmResult]],
    models: Mapping[str, Any],
    collator: ChatCollator,
    val: Conversations,
) -> list[VlmPoint]:
    prompts = collator.prompts([val[index] for index in _with_one_image(val, config.timed_prompts)])
    count = len(prompts["input_ids"])
    image = int((prompts["input_ids"] == collator.processor.image_token_id).sum()) // count
    text = int(prompts["attention_mask"].sum()) // count - image
    reads = {name: partial(_read, model, prompts) for name, model in models.items()}
    device = next(iter(models.values())).device
    with torch.inference_mode():
        times = interleave(reads, seconds=0, rounds=config.timed_rounds, device=device)
        rates = {name: _decode_rate(model, collator, prompts, config, times[name]) for name, model in models.items()}
        held = {name: _cache_bytes(read()) // count for name, read in reads.items()}
    first = compared(work)
    all_answers = {
        name: {seed: found.answers for seed, found in sorted(results[name].items()) if found.answers is not None}
        for name in first
    }
    accuracy = {name: {seed: found.accuracy for seed, found in own.items()} for name, own in all_answers.items()}
    to_dense = compare(accuracy, dict.fromkeys(first, _DENSE))
    to_control = compare(accuracy, partners(config, work))
    points = []
    for name, job in first.items():
        answers = list(all_answers[name].values())
        kept = answers[0].kept
        cost = prefill_flops(models[name], text, image, kept if is_routed(models[name]) else None)
        own = list(accuracy[name].values())
        right = {kind: [found.right[kind] for found in answers] for kind in answers[0].right}
        points.append(
            VlmPoint(
                name=name,
                router=job.router,
                flops_share=cost.share,
                gflops=cost.routed / 1e9,
                image_share=_image_share(cost),
                prefill_ms=median(times[name]) / count,
                prefill_speedup=ratios(times[_DENSE], times[name]).median,
                decode_per_s=rates[name],
                cache_bytes=held[name],
                accuracy=mean(own),
                accuracy_std=spread(own),
                accuracy_of=accuracy[name],
                to_dense=to_dense[name],
                to_control=to_control[name],
                right={kind: mean(shares) for kind, shares in right.items()},
                right_std={kind: spread(shares) for kind, shares in right.items()},
                kept=mean(mean(found.kept.values()) if found.kept else 1.0 for found in answers),
                seeds=len(own),
            )
        )
    return points


def _image_share(cost: PrefillFlops) -> float:
    text = cost.tokens - cost.image_tokens
    return sum(max(0, row.kept - text) for row in cost.layers) / (cost.image_tokens * len(cost.layers))


def _with_one_image(val: Conversations, count: int) -> list[int]:
    """Return the first conversations with one image: their prompts are about equally long."""
    found = [index for index in range(len(val)) if val.images[index] == 1][:count]
    if not found:
        raise ValueError("no evaluation question has one image, so there is nothing to time")
    return found


def _read(model: Any, prompts: Mapping[str, Tensor]) -> Any:
    """Read prompts and return the cache of their keys and values."""
    inputs = {name: value.to(model.device) for name, value in prompts.items()}
    return model(**inputs, use_cache=True, logits_to_keep=1).past_key_values


def _cache_bytes(cache: Any) -> int:
    return sum(int(layer.keys.nbytes + layer.values.nbytes) for layer in cache.layers)


def _decode_rate(
    model: Any, collator: ChatCollator, prompts: Mapping[str, Tensor], config: ChatStudyConfig, read_ms: list[float]
) -> float:
    """Return tokens decoded in a second over a batch, without the time of reading the prompts."""
    taken = []
    for _ in range(config.timed_rounds):
        started = time.perf_counter()
        generate(model, collator, prompts, config.timed_tokens, exactly=True)
        taken.append(time.perf_counter() - started)
    # The first token comes from reading the prompt.
    seconds = max(median(taken) - median(read_ms) / 1e3, 1e-9)
    return len(prompts["input_ids"]) * max(1, config.timed_tokens - 1) / seconds


def _draw(points: list[dict[str, Any]]) -> Figure:
    shown = {"capacity": "image_share", "latency_ms": "prefill_ms", "accuracy_mean": "accuracy"}
    drawn = [point | {key: point[name] for key, name in shown.items()} for point in points]
    return draw_tradeoff(drawn, "right answers")
