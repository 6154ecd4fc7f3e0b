"""What did it cost, lose, look at?"""

from mmod.measuring.benchmark import BenchmarkConfig, benchmark
from mmod.measuring.flop_report import BlockFlops, FlopReport
from mmod.measuring.flops import flops
from mmod.measuring.free import free_routing
from mmod.measuring.report import BenchmarkReport, BenchmarkRow
from mmod.measuring.trace import Trace, trace
from mmod.measuring.verify import WrongOutputError, check_dense, check_reference

__all__ = [
    "BenchmarkConfig",
    "BenchmarkReport",
    "BenchmarkRow",
    "BlockFlops",
    "FlopReport",
    "Trace",
    "WrongOutputError",
    "benchmark",
    "check_dense",
    "check_reference",
    "flops",
    "free_routing",
    "trace",
]
