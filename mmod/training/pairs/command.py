"""The command that trains on image-text pairs."""

from __future__ import annotations

from mmod.training.engine.parse import parse_config
from mmod.training.pairs.config import TrainConfig

__all__ = ["main"]


def main(arguments: list[str], program: str | None = None) -> None:
    """Train as the command line `CONFIG [--key value]` says and print what came out.

    Args:
        arguments: The command line without the program's name.
        program: The program's name in its help; None takes that of the process.
    """
    config = parse_config(arguments, TrainConfig, program)
    # A command line that asks for help only is answered without torch.
    from mmod.training.pairs.recipe import fit

    print(fit(config))
