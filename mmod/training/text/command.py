"""The command that trains a causal language model."""

from __future__ import annotations

from collections.abc import Sequence

from mmod.training.engine.parse import parse_config
from mmod.training.text.config import TrainConfig

__all__ = ["main"]


def main(arguments: Sequence[str]) -> None:
    """Train as the command line `CONFIG [--key value]` says and print what came out."""
    config = parse_config(arguments, TrainConfig)
    # A command line that asks for help only is answered without torch.
    from mmod.training.text.recipe import fit

    print(fit(config))
