"""The commands that may follow a finished run."""

from __future__ import annotations

import shlex

from torch import nn

from mmod.adapters import find_part
from mmod.config import RoutingConfig
from mmod.methods.route import Route, is_routed
from mmod.model import change_
from mmod.training.engine.evaluate import RoutedResult
from mmod.training.engine.kind import Kind
from mmod.training.engine.run_folder import FitResult

# What advice reads besides the model.
ADVISED = {"image": "--images FOLDER", "chat": "--prompts FILE"}


def next_commands(kind: Kind, result: FitResult[RoutedResult | None]) -> str:
    """Return the commands that a finished run may be followed by, and where its model is."""
    config = kind.config
    folder = shlex.quote(result.folder)
    saved = "final model" if result.average is None else "final model, the moving average of the weights,"
    lines = [f"next: the {saved} is in {folder}/model"]
    commands = {}
    if result.evaluation is not None:
        commands[f"mmod evaluate {folder}"] = "score, FLOPs and time of the final model"
        # Methods for training alone leave the final model dense.
        model = kind.sketch().eval()
        if is_routed(model):
            commands[f"mmod audit {folder}"] = "what its routers learned"
        elif config.routing is None and not config.methods and _is_routable(model, kind.planned_part):
            commands[f"mmod plan {folder}"] = "which tokens may miss which operator, without training"
            if config.kind in ADVISED:
                commands[f"mmod advise {folder} {ADVISED[config.kind]}"] = "what makes it faster, without training"
    width = max(map(len, commands), default=0)
    lines += [f"  {command:<{width}}  # {purpose}" for command, purpose in commands.items()]
    return "\n".join(lines)


def _is_routable(model: nn.Module, planned_part: str) -> bool:
    """Return whether the part of a dense model on meta that plans are searched for can be routed; change the model."""
    try:
        part, _ = find_part(model, planned_part)
        # Tried rather than asked: only routing itself knows all that it refuses.
        change_(model, Route({part: RoutingConfig(router="random")}))
    except ValueError:
        return False
    return True
