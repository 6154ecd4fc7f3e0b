"""FLOPs, memory, traces, audits, timing and plots of routed models."""

from mmod.analysis.audit import Audit, DecisionContext, audit, judge_answers, judge_classes
from mmod.analysis.flop_report import BlockFlops, FlopReport, PrefillFlops
from mmod.analysis.flops import flops
from mmod.analysis.prefill import prefill_flops
from mmod.analysis.redundancy import RedundancyReport, redundancy
from mmod.analysis.trace import Trace, trace

__all__ = [
    "Audit",
    "BlockFlops",
    "FlopReport",
    "DecisionContext",
    "PrefillFlops",
    "RedundancyReport",
    "Trace",
    "audit",
    "flops",
    "judge_answers",
    "judge_classes",
    "prefill_flops",
    "redundancy",
    "trace",
]
