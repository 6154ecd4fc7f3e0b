"""The commands `mmod train KIND`: train, or estimate what training would cost."""

from __future__ import annotations

from collections.abc import Sequence

from mmod.training.engine.parse import parse_config
from mmod.training.kinds import CONFIGS, recipe_of

_DRY = "--dry-run"


def main(arguments: Sequence[str], kind: str) -> None:
    """Train as the command line `CONFIG [--key value] [--dry-run]` says and print the result, or the run's cost."""
    recipe = recipe_of(parse_config([word for word in arguments if word != _DRY], CONFIGS[kind]))
    print(recipe.estimate() if _DRY in arguments else recipe.fit())
