"""Audits: what routed models decide, and whether other decisions would do as well."""

# The one list of this package's names.
# ruff: noqa: F401
from mmod.analysis.evaluations import evaluate_answers, evaluate_classes
from mmod.audits.choices import DecisionContext
from mmod.audits.contexts import Comparisons, LabelledBatch
from mmod.audits.generation import evaluate_generation
from mmod.audits.result import Audit
from mmod.audits.run import audit
from mmod.audits.shifts import SHIFTS
