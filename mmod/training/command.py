"""The commands `mmod train KIND`: train, or estimate what training would cost."""

from __future__ import annotations

from collections.abc import Sequence

from mmod.training.engine.parse import parse_config
from mmod.training.kinds import CONFIGS

_DRY = "--dry-run"


def main(arguments: Sequence[str], kind: str) -> None:
    """Train as the command line `CONFIG [--key value]` says and print the result.

    With `--dry-run`, which conversations take, print what the run would cost instead.

    Args:
        arguments: The command line.
        kind: A key of `CONFIGS`.
    """
    dry = kind == "chat" and _DRY in arguments
    config = parse_config([word for word in arguments if not dry or word != _DRY], CONFIGS[kind])
    # Imported here, because `--help` runs without torch.
    if dry:
        from mmod.training.chat.estimate import estimate

        print(estimate(config))  # type: ignore[arg-type]
        return
    from mmod.training.kinds import recipe_of

    print(recipe_of(config).fit())
