"""The command that searches a plan: `mmod plan CONFIG [--kind KIND] [--key value]`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmod.io.locks import locked
from mmod.studies.config import PlanOptions
from mmod.training.engine.config import RunConfig
from mmod.training.engine.parse import parse_config
from mmod.training.kinds import CONFIGS, recipe_of, split_kind

if TYPE_CHECKING:
    # By way of the package, which readers of the fields' types import without torch.
    import mmod.planning

__all__ = ["main", "plan_config", "search_for", "search_run"]

_DOCS = """The keys of a training config, whose model, data and device say what is searched.

Args:
    plan: How it is searched. What is found goes to the folder `plan` in `output`.
"""


def plan_config(kind: str) -> Any:
    """Return the dataclass of the config of a search: that of a run of a kind of training, with `plan`.

    Args:
        kind: A name of `mmod.training.kinds.CONFIGS`.
    """
    group = ("plan", PlanOptions, dataclasses.field(default_factory=PlanOptions))
    return dataclasses.make_dataclass(
        "PlanConfig", [group], bases=(CONFIGS[kind],), namespace={"__doc__": _DOCS}, frozen=True, kw_only=True
    )


def search_run(config: Any) -> mmod.planning.PlanSearch:
    """Search a plan for the model that a run would start from, and write what was found into its folder `plan`.

    Args:
        config: The model with its weights, the data, and how to search; see `plan_config`.

    Raises:
        FileExistsError: The folder holds another plan of the same name.
        ValueError: A config that starts from no weights or routes, or the folder belongs to another search.
    """
    return search_for(config, config.plan, Path(config.output) / "plan")


def search_for(config: RunConfig, options: PlanOptions, folder: Path) -> mmod.planning.PlanSearch:
    """Search a plan for the model that a run would start from, and write what was found.

    Scores are kept batch by batch in `scores.jsonl`, so that the search goes on where it stopped and another budget
    tries nothing again; each budget has a plan and a picture of its own.

    Args:
        config: The run: its model with weights, and its training data.
        options: How to search.
        folder: Where scores, plan and picture go.

    Raises:
        FileExistsError: The folder holds another plan of the same name.
        ValueError: A run that starts from no weights or routes, or the folder belongs to another search.
    """
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
        found = search_plan(
            model,
            batches,
            options.budget,
            part=options.part or recipe.part,
            options=None if options.options is None else [Option(*each) for each in options.options],
            router=options.router,
            cost=options.cost,
            divergence=options.divergence,
            rounds=options.rounds,
            progress_file=folder / "scores.jsonl",
        )
        path = folder / f"{name}.json"
        if not path.exists() or Plan.load(path) != found.plan:
            found.plan.save(path)
        found.plot(folder / f"{name}.png")
    return found


def main(arguments: Sequence[str]) -> None:
    """Search as the command line `CONFIG [--kind KIND] [--key value]` says and print what was found."""
    kind, arguments = split_kind(arguments)
    config: Any = parse_config(arguments, plan_config(kind))
    found = search_run(config)
    print(f"{found}\n\nPlan, picture and scores: {Path(config.output) / 'plan'}")
