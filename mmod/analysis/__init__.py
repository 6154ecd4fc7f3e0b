"""FLOPs, memory, traces, audits, timing and plots of routed models."""

# The one list of this package's names.
# ruff: noqa: F401
from mmod.analysis.audit.choices import DecisionContext
from mmod.analysis.audit.evaluations import LabelledBatch, evaluate_answers, evaluate_classes
from mmod.analysis.audit.generation import evaluate_generation
from mmod.analysis.audit.result import Audit
from mmod.analysis.audit.run import audit
from mmod.analysis.audit.shifts import SHIFTS
from mmod.analysis.flop_report import BlockFlops, FlopReport, PrefillFlops
from mmod.analysis.flops import flops
from mmod.analysis.inside import to_all_tokens
from mmod.analysis.prefill import Prompt
from mmod.analysis.redundancy import RedundancyReport, redundancy
from mmod.analysis.trace import Trace, trace
