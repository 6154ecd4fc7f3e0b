"""Audits: what the decisions of a routed model are worth, told by counterfactuals, and how they hang together."""

from mmod.analysis.audit.across import Across
from mmod.analysis.audit.choices import Place
from mmod.analysis.audit.generation import Generation, judge_generation
from mmod.analysis.audit.influence import Influence
from mmod.analysis.audit.information import Information
from mmod.analysis.audit.judges import judge_answers, judge_classes
from mmod.analysis.audit.oracle import LeaveOneOut
from mmod.analysis.audit.result import Audit, Condition
from mmod.analysis.audit.run import audit
from mmod.analysis.audit.shifts import SHIFTS
from mmod.analysis.audit.strata import Stratum
from mmod.analysis.statistics import Estimate

__all__ = [
    "SHIFTS",
    "Across",
    "Audit",
    "Condition",
    "Estimate",
    "Generation",
    "Influence",
    "Information",
    "LeaveOneOut",
    "Place",
    "Stratum",
    "audit",
    "judge_answers",
    "judge_classes",
    "judge_generation",
]
