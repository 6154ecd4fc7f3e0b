"""FLOPs, memory, traces, timing and plots of routed models."""

from mmod.analysis.flop_report import BlockFlops, FlopReport, PrefillFlops
from mmod.analysis.flops import flops
from mmod.analysis.prefill import prefill_flops
from mmod.analysis.trace import Trace, trace

__all__ = ["BlockFlops", "FlopReport", "PrefillFlops", "Trace", "flops", "prefill_flops", "trace"]
