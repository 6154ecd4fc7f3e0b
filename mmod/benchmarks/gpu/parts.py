"""The parts of the GPU benchmark, the most valuable first, with their time boxes and the figures of the summary."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from mmod.benchmarks.generation import GenerationConfig
from mmod.benchmarks.gpu.config import GpuConfig
from mmod.benchmarks.gpu.machine import benchmark_attention, describe_machine
from mmod.benchmarks.gpu.programs import check_memory, run_tests
from mmod.benchmarks.gpu.training import compare_training
from mmod.benchmarks.models.benchmark import BenchmarkConfig
from mmod.benchmarks.ops.benchmark import OpBenchmarkConfig
from mmod.benchmarks.ops.case import OpSize
from mmod.benchmarks.report import BenchmarkReport, Options, benchmark

LONG = [
    {"images": 256, "tokens": 197, "heads": 12},
    {"images": 32, "tokens": 1370, "heads": 16},
    {"images": 4, "tokens": 2928, "heads": 32, "head_channels": 128},
]


@dataclass(frozen=True)
class BenchmarkPart:
    """A part of the GPU benchmark.

    Args:
        run: Measures it into the folder `out` of a config; continues where it was killed.
        seconds: Time box on a GPU.
        figures: Columns that the summary shows; none for rows of `FiguresRow`.
        where: Values of columns that a row must have to be in the summary.
    """

    run: Callable[[GpuConfig], BenchmarkReport]
    seconds: float
    figures: tuple[str, ...] = ()
    where: Mapping[str, Any] = field(default_factory=dict)


def _measure(make: Callable[[GpuConfig], Options], config: GpuConfig) -> BenchmarkReport:
    return benchmark(make(config), progress=False)


def _timing(config: GpuConfig, seconds: float, rounds: int) -> dict[str, Any]:
    quick = {"seconds": 0.0, "rounds": 2} if config.rehearses else {"seconds": seconds, "rounds": rounds}
    return {**quick, "device": config.device, "threads": config.threads, "out": config.out}


def _ops(config: GpuConfig) -> OpBenchmarkConfig:
    small = [OpSize(images=2, tokens=17, heads=2, head_channels=16)]
    return OpBenchmarkConfig(
        sizes=small if config.rehearses else [OpSize(**size) for size in LONG],
        dtypes=["bfloat16"],
        step=["forward"] if config.rehearses else ["forward", "train"],
        **_timing(config, 0.3, 10),
    )


def _models(config: GpuConfig, step: Any, execution: Any = "eager") -> BenchmarkConfig:
    options: dict[str, Any] = {"model": "vit_base_patch16_224", "batch_sizes": [1, 256, 32, 8]}
    if step == "train":
        options["batch_sizes"] = [64]
    if config.rehearses:
        options = {"model": "test_vit", "model_args": {"img_size": 64}, "batch_sizes": [1]}
        # CUDA graphs need a GPU.
        execution = "eager"
    return BenchmarkConfig(
        **options, capacities=[0.25], dtype="bfloat16", execution=[execution], step=[step], **_timing(config, 2.0, 10)
    )


def _llava(config: GpuConfig) -> GenerationConfig:
    options: dict[str, Any] = {"hidden": 4096, "intermediate": 11008, "layers": 8, "vocabulary": 32000}
    if config.rehearses:
        options = {"hidden": 64, "layers": 6, "vocabulary": 50, "image_tokens": [24], "text_tokens": 8}
    presets = ["p-mod", "a-mod", "videollm-mod"]
    return GenerationConfig(presets=presets, **options, batch_sizes=[1], dtype="bfloat16", **_timing(config, 2.0, 10))


PARTS: dict[str, BenchmarkPart] = {
    "environment": BenchmarkPart(describe_machine, 40, where={"what": "machine"}),
    "tests": BenchmarkPart(run_tests, 240),
    "models": BenchmarkPart(
        partial(_measure, partial(_models, step="forward")), 90, ("speedup", "flop_speedup", "of_free")
    ),
    "attention": BenchmarkPart(benchmark_attention, 40),
    "ops": BenchmarkPart(
        partial(_measure, _ops), 150, ("ms", "of_bound", "of_baseline", "baseline"), {"path": "auto"}
    ),
    "graphs": BenchmarkPart(
        partial(_measure, partial(_models, step="forward", execution="cudagraphs")),
        240, ("speedup", "flop_speedup", "of_free"),
    ),
    "llava": BenchmarkPart(
        partial(_measure, _llava), 120,
        ("dense_ms", "speedup", "flop_speedup", "cache_share", "decode"),
    ),
    "memory": BenchmarkPart(
        partial(_measure, partial(_models, step="train")), 60, ("speedup", "peak_of_dense", "peak_of_bound")
    ),
    "training": BenchmarkPart(compare_training, 290),
    "memcheck": BenchmarkPart(check_memory, 120),
}  # fmt: skip
