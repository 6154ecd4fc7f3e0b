"""The configuration of an isoFLOP study."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

from mmod.studies.config import refuse_set_by_study
from mmod.values import Checked, check_distinct


@dataclass(frozen=True, kw_only=True)
class IsoflopConfig(Checked):
    """A grid of sizes, budgets and routings of a causal language model, every model with its best learning rate.

    A model is trained for as many steps as its budget pays for, so that a cheaper model sees more text. Its rate is the
    best of `rates` with a further seed, whose results are not reported.

    Args:
        output: The study's folder; its runs, table and picture go there. A stopped study resumes there, and may get
            more sizes, budgets, routings and seeds; without the earlier ones or at other rates, it is refused.
        dense: Training config of the dense model, a YAML file; the study sets `output`, `seed`, `routing`, `optim.lr`
            and `epoch_steps`. A run has the config's `epochs`, or up to twice as many if its steps then come nearer
            to the budget; warm-up takes some of them.
        sizes: Name of each size to the fields of `model.config` that differ.
        budgets: FLOPs of a training run: forward and backward passes, with the logits of all tokens.
        routings: Name of a series to its routing, as in a training config; or to `methods:`, and `routing:` where the
            model is routed as well; null is the dense model. The first series is what others are compared with.
        rates: Learning rates that are tried for every size, budget and routing; one needs no trial.
        changes: Fields of the training config to set differently in all runs, nested as in the file.
        seeds: Number of seeds.
        processes: Parallel runs, in processes of one thread.

    Source: Hoffmann et al., arXiv 2203.15556, approach 2; Raposo et al., arXiv 2404.02258, section 4.
    """

    output: str
    dense: str
    sizes: dict[str, dict[str, object]]
    budgets: Annotated[list[float], "(0, inf)"]
    routings: dict[str, dict[str, Any] | None]
    rates: Annotated[list[float], "(0, inf)"]
    changes: dict[str, object] = field(default_factory=dict)
    seeds: Annotated[int, "[1, inf)"] = 3
    processes: Annotated[int, "[1, inf)"] = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_distinct(self, "sizes", "budgets", "routings", "rates")
        refuse_set_by_study("changes", self.changes, "methods", "epoch_steps")
