"""Benchmarks of ops, routed models and generation; each speed is that of a path whose output was checked."""

from mmod.benchmarks.generation.benchmark import GenerationConfig, GenerationRow, benchmark_generation
from mmod.benchmarks.models.benchmark import BenchmarkConfig, benchmark
from mmod.benchmarks.models.free import free_routing
from mmod.benchmarks.ops.benchmark import OpBenchmarkConfig, OpRow, benchmark_ops
from mmod.benchmarks.ops.cases import OpSize
from mmod.benchmarks.oracle import WrongOutputError, check_dense, check_reference
from mmod.benchmarks.report import BenchmarkReport, BenchmarkRow
from mmod.benchmarks.suite import Bar, SuiteConfig, SuiteFailedError, benchmark_suite

__all__ = [
    "Bar",
    "BenchmarkConfig",
    "BenchmarkReport",
    "BenchmarkRow",
    "GenerationConfig",
    "GenerationRow",
    "OpBenchmarkConfig",
    "OpRow",
    "OpSize",
    "SuiteConfig",
    "SuiteFailedError",
    "WrongOutputError",
    "benchmark",
    "benchmark_generation",
    "benchmark_ops",
    "benchmark_suite",
    "check_dense",
    "check_reference",
    "free_routing",
]
