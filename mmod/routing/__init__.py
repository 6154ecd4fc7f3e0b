"""Routing: scores, selection, gates and the router that joins them; no model is known here."""

# The one list of this package's names.
# ruff: noqa: F401
from mmod.ops.gate import apply_gate
from mmod.ops.select import Kept, kept_count, select_threshold, select_topk
from mmod.routing.decision import Joined, Routing, Rule, TokenGroups, TokenMasks, only_free
from mmod.routing.decoder import DecoderRouter, Predictor
from mmod.routing.groups import assign_groups, decoded_groups, select_within
from mmod.routing.router import Router
from mmod.routing.score.change import token_change
from mmod.routing.score.controls import RandomScore
from mmod.routing.score.diversity import DiversityScore
from mmod.routing.score.function import FunctionScore
from mmod.routing.score.linear import LinearScore
from mmod.routing.score.redundancy import RedundancyScore
from mmod.routing.score.temporal import TemporalScore
from mmod.routing.shared import BorrowedScore, share_score, unshare_score
