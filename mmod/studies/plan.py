"""The search of a plan for the model that a run would start from: `mmod plan CONFIG_OR_RUN [--key value]`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmod.io.files import locked
from mmod.studies.config import PlanOptions
from mmod.training.engine.config import RunConfig
from mmod.training.kinds import config_with, parse_kind, recipe_of

if TYPE_CHECKING:
    # By way of the package, which readers of the fields' types import without torch.
    import mmod.planning


def plan_config(kind: str) -> Any:
    """Return the dataclass of the config of a search: that of a kind of training, with `plan`."""
    purpose = "How it is searched. The plan goes to the folder `plan` in `output`."
    return config_with(kind, "plan", PlanOptions, purpose)


def search_for(config: RunConfig, options: PlanOptions, folder: Path) -> mmod.planning.PlanSearch:
    """Search a plan for the model that a run would start from, and write plan and picture into a folder."""
    from mmod import Option, Plan, search_plan

    recipe = recipe_of(config)
    if getattr(config, "routing", None) is not None:
        raise ValueError("a plan is searched for a dense model: set `routing: null`")
    if not recipe.has_weights:
        raise ValueError("nothing to search: the config starts from no weights; set model.checkpoint")
    model = recipe.load()
    batches = recipe.calibration(model, options.batches, options.batch_size)
    name = f"{options.cost}-{options.budget:g}" + (f"-rounds-{options.rounds}" if options.rounds else "")
    with locked(folder, wait=True):
        folder.mkdir(parents=True, exist_ok=True)
        search = search_plan(
            model,
            batches,
            options.budget,
            part=options.part or recipe.part,
            options=None if options.options is None else [Option(*option) for option in options.options],
            router=options.router,
            cost=options.cost,
            divergence=options.divergence,
            rounds=options.rounds,
            # A stopped search continues, and another budget scores nothing again.
            progress_file=folder / "scores.jsonl",
        )
        path = folder / f"{name}.json"
        if not path.exists() or Plan.load(path) != search.plan:
            search.plan.save(path)
        for suffix in ("png", "svg"):
            search.plot(folder / f"{name}.{suffix}", overwrite=True)
    return search


def main(arguments: Sequence[str]) -> None:
    """Search as the command line `CONFIG_OR_RUN [--kind KIND] [--key value]` says and print the result."""
    config: Any = parse_kind(arguments, plan_config)
    folder = Path(config.output) / "plan"
    print(f"{search_for(config, config.plan, folder)}\n\nPlan, picture and scores: {folder}")
