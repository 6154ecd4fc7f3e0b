"""Benchmarks of ops, routed models, generation and drafts; the output of every timed path was checked first."""

from typing import TYPE_CHECKING

from mmod.lazy import lazy_names

# For type checkers; at run time, lazy_names imports the same names on first use.
# ruff: noqa: F401
if TYPE_CHECKING:
    from mmod.benchmarks.drafts import DraftConfig
    from mmod.benchmarks.generation import GenerationConfig
    from mmod.benchmarks.models.benchmark import BenchmarkConfig
    from mmod.benchmarks.models.paths import free_routing
    from mmod.benchmarks.ops.benchmark import OpBenchmarkConfig
    from mmod.benchmarks.ops.case import OpSize
    from mmod.benchmarks.oracle import WrongOutputError, check_dense, check_reference
    from mmod.benchmarks.program import ProgramConfig
    from mmod.benchmarks.report import BenchmarkReport, benchmark
    from mmod.benchmarks.suite import Criterion, SuiteConfig, SuiteFailedError, benchmark_suite

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "mmod.benchmarks.drafts": ["DraftConfig"],
        "mmod.benchmarks.generation": ["GenerationConfig"],
        "mmod.benchmarks.models.benchmark": ["BenchmarkConfig"],
        "mmod.benchmarks.models.paths": ["free_routing"],
        "mmod.benchmarks.ops.benchmark": ["OpBenchmarkConfig"],
        "mmod.benchmarks.ops.case": ["OpSize"],
        "mmod.benchmarks.oracle": ["WrongOutputError", "check_dense", "check_reference"],
        "mmod.benchmarks.program": ["ProgramConfig"],
        "mmod.benchmarks.report": ["BenchmarkReport", "benchmark"],
        "mmod.benchmarks.suite": ["Criterion", "SuiteConfig", "SuiteFailedError", "benchmark_suite"],
    },
)
