"""Checks of a GPU as benchmarks: machine, tests, fused attention, one comparison of trainings, memory accesses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from mmod.benchmarks.gpu.config import GpuOptions
from mmod.benchmarks.gpu.machine import benchmark_attention, describe_machine
from mmod.benchmarks.gpu.programs import check_memory, run_tests
from mmod.benchmarks.gpu.training import compare_training
from mmod.benchmarks.report import Runs

CHECKS: dict[str, Callable[[GpuOptions], Runs]] = {
    "environment": describe_machine,
    "tests": run_tests,
    "attention": benchmark_attention,
    "training": compare_training,
    "memcheck": check_memory,
}


@dataclass(frozen=True, kw_only=True)
class CheckConfig(GpuOptions):
    """One check of a GPU.

    Args:
        check: "environment", "tests" (those marked `gpu`), "attention" (which fused attention torch picks), "training"
            (dense, A-MoD, MoD and merging for a minute each), or "memcheck" (kernels under compute-sanitizer).
    """

    check: Literal["environment", "tests", "attention", "training", "memcheck"]

    def runs(self) -> Runs:
        """Return the runs of the check."""
        return CHECKS[self.check](self)
