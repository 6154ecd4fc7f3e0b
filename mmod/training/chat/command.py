"""The command that fine-tunes a vision-language model, or says what that would cost."""

from __future__ import annotations

from collections.abc import Sequence

from mmod.training.chat.config import TrainConfig
from mmod.training.engine.parse import parse_config

__all__ = ["main"]

_DRY = "--dry-run"


def main(arguments: Sequence[str]) -> None:
    """Fine-tune as the command line `CONFIG [--dry-run] [--key value]` says and print what came out.

    With `--dry-run` print what the run would cost, and train nothing.
    """
    config = parse_config([word for word in arguments if word != _DRY], TrainConfig)
    # A command line that asks for help only is answered without torch.
    from mmod.training.chat.estimate import estimate
    from mmod.training.chat.recipe import fit

    print(estimate(config) if _DRY in arguments else fit(config))
