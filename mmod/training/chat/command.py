"""The command that fine-tunes a vision-language model, or says what that would cost."""

from __future__ import annotations

from mmod.training.chat.config import TrainConfig
from mmod.training.engine.parse import parse_config

__all__ = ["main"]

_DRY = "--dry-run"


def main(arguments: list[str], program: str | None = None) -> None:
    """Fine-tune as the command line `CONFIG [--dry-run] [--key value]` says and print what came out.

    Args:
        arguments: The command line without the program's name; `--dry-run` estimates the cost and trains nothing.
        program: The program's name in its help; None takes that of the process.
    """
    config = parse_config([word for word in arguments if word != _DRY], TrainConfig, program)
    # A command line that asks for help only is answered without torch.
    from mmod.training.chat.estimate import estimate
    from mmod.training.chat.recipe import fit

    print(estimate(config) if _DRY in arguments else fit(config))
