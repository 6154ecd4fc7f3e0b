"""FLOPs, memory, traces, timing and plots of routed models."""

# The one list of this package's names.
# ruff: noqa: F401
from mmod.analysis.flop_count import flops
from mmod.analysis.flop_report import BlockFlops, FlopReport, PrefillFlops
from mmod.analysis.inside import to_all_tokens
from mmod.analysis.prefill import Prompt
from mmod.analysis.repeats import RedundancyReport, redundancy
from mmod.analysis.tracing import Trace, trace
