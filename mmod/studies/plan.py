"""The search of a plan for the model that a run would start from: `mmod plan CONFIG_OR_RUN [--key value]`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from mmod.io.files import locked, make_folder
from mmod.planning.candidate import PlanOptions
from mmod.training.engine.arguments import parse_run
from mmod.training.engine.config import RunConfig
from mmod.training.kinds import extended, kind_of

if TYPE_CHECKING:
    # By way of the package, which readers of the fields' types import without torch.
    import mmod.planning
    from mmod.planning.plan_search import Option


@dataclass(frozen=True, kw_only=True)
class Searched:
    """The keys that a search adds to a training config.

    Args:
        plan: How it is searched. The plan goes to the folder `plan` in `output`.
    """

    plan: PlanOptions = field(default_factory=PlanOptions)


SEARCHES = extended(Searched)
"""The configs of searches by kind: training configs, whose model and data are searched on their device."""


def check_searches(run_config: RunConfig, searches: Sequence[PlanOptions]) -> None:
    """Raise a ValueError for a budget that no plan reaches, where the size of images alone says what plans cost."""
    import torch

    from mmod.planning.search import check_reachable
    from mmod.training.engine.start import sketch

    # FLOPs of prompts follow from the data, and times from the weights.
    shares = [options for options in searches if options.cost == "flops"]
    if not shares or run_config.image_shape is None:
        return
    model = sketch(kind_of(run_config))
    for options in shares:
        image = torch.empty(1, *run_config.image_shape, device="meta")
        check_reachable(
            model, image, options.budget, options.part or run_config.parts[0], _named(options), options.router
        )


def _named(options: PlanOptions) -> list[Option] | None:
    from mmod.planning.plan_search import Option

    if options.options is None:
        return None
    return [Option(*option) for option in options.options]


def search_for(run_config: RunConfig, searches: Sequence[PlanOptions], folder: Path) -> list[mmod.planning.PlanSearch]:
    """Search plans for the model that a run would start from, which is loaded once, and write them into a folder.

    Args:
        searches: Searches that differ in their budgets alone.
    """
    # Imported late: help is answered without torch.
    from mmod.config import RoutingConfig
    from mmod.io.store import STORE
    from mmod.planning.search import search_plan
    from mmod.training.engine.kind import calibration, load

    kind = kind_of(run_config)
    if getattr(run_config, "routing", None) is not None:
        raise ValueError("a plan is searched for a dense model: set `routing: null`")
    if not run_config.model.has_weights:
        raise ValueError("nothing to search: the config starts from no weights; set model.checkpoint")
    model = load(kind)
    found = []
    for options in searches:
        name = f"{options.cost}-{options.budget:g}" + (f"-rounds-{options.rounds}" if options.rounds else "")
        # Processes of one study may search the plans of one series.
        with locked(folder, wait=True):
            make_folder(folder)
            search = search_plan(
                model,
                calibration(kind, model, options.batches, options.batch_size),
                options.budget,
                part=options.part or run_config.parts[0],
                options=_named(options),
                router=options.router,
                cost=options.cost,
                divergence=options.divergence,
                rounds=options.rounds,
                # A stopped search continues, and another budget scores nothing again.
                store=folder / STORE,
            )
            path = folder / f"{name}.json"
            if not path.exists() or RoutingConfig.load(path) != search.plan:
                search.plan.save(path)
            for suffix in ("png", "svg"):
                search.plot(folder / f"{name}.{suffix}", overwrite=True)
        found.append(search)
    return found


def main(arguments: Sequence[str]) -> None:
    """Search as the command line `CONFIG_OR_RUN [--kind KIND] [--key value]` says and print the result."""
    config = parse_run(arguments, SEARCHES)
    folder = Path(config.output) / "plan"
    (search,) = search_for(config, [config.plan], folder)
    print(f"{search}\n\nPlan, picture and scores: {folder}")
