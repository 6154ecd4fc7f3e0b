"""Audits: counterfactual tests of a routed model's decisions, and how decisions of blocks depend on each other."""

from mmod.analysis.audit.across import Across
from mmod.analysis.audit.choices import DecisionContext
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
    "DecisionContext",
    "Stratum",
    "audit",
    "judge_answers",
    "judge_classes",
    "judge_generation",
]
