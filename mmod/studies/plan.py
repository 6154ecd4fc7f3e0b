"""The command that searches a plan for the model of a run: `mmod plan CONFIG_OR_RUN [--key value]`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mmod.planning.candidate import PlanOptions
from mmod.training.engine.arguments import parse_run
from mmod.training.kinds import extended


@dataclass(frozen=True, kw_only=True)
class Searched:
    """The keys that a search adds to a training config.

    Args:
        plan: How it is searched. The plan goes to the folder `plan` in `output`.
    """

    plan: PlanOptions = field(default_factory=PlanOptions)


SEARCHES = extended(Searched)
"""The configs of searches by kind: training configs, whose model and data are searched on their device."""


def main(arguments: Sequence[str]) -> None:
    """Search as the command line `CONFIG_OR_RUN [--kind KIND] [--key value]` says and print the result."""
    config = parse_run(arguments, SEARCHES)
    # Imported late: help is answered without torch.
    from mmod.studies.measure import search_for

    folder = Path(config.output) / "plan"
    (search,) = search_for(config, [config.plan], folder)
    print(f"{search}\n\nPlan, picture and scores: {folder}")
