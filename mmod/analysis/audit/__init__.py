"""Audits: counterfactual tests of a routed model's decisions, and how decisions of blocks depend on each other."""

from mmod.analysis.audit.choices import DecisionContext
from mmod.analysis.audit.generation import judge_generation
from mmod.analysis.audit.judges import judge_answers, judge_classes
from mmod.analysis.audit.result import Audit
from mmod.analysis.audit.run import audit
from mmod.analysis.audit.shifts import SHIFTS

__all__ = ["SHIFTS", "Audit", "DecisionContext", "audit", "judge_answers", "judge_classes", "judge_generation"]
