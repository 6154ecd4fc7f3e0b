"""What did it cost, lose, look at?"""

from mmod.measuring.benchmark import BenchmarkConfig, benchmark
from mmod.measuring.flop_report import BlockFlops, FlopReport
from mmod.measuring.flops import flops
from mmod.measuring.free import free_routing
from mmod.measuring.generation import GenerationConfig, GenerationRow, benchmark_generation
from mmod.measuring.language import PrefillFlops, prefill_flops
from mmod.measuring.op_benchmark import OpBenchmarkConfig, OpRow, benchmark_ops
from mmod.measuring.op_cases import OpSize
from mmod.measuring.report import BenchmarkReport, BenchmarkRow
from mmod.measuring.suite import Bar, SuiteConfig, SuiteFailedError, benchmark_suite
from mmod.measuring.trace import Trace, trace
from mmod.measuring.verify import WrongOutputError, check_dense, check_reference

__all__ = [
    "Bar",
    "BenchmarkConfig",
    "BenchmarkReport",
    "BenchmarkRow",
    "BlockFlops",
    "FlopReport",
    "GenerationConfig",
    "GenerationRow",
    "OpBenchmarkConfig",
    "OpRow",
    "OpSize",
    "PrefillFlops",
    "SuiteConfig",
    "SuiteFailedError",
    "Trace",
    "WrongOutputError",
    "benchmark",
    "benchmark_generation",
    "benchmark_ops",
    "benchmark_suite",
    "check_dense",
    "check_reference",
    "flops",
    "free_routing",
    "prefill_flops",
    "trace",
]
