"""open_clip's own training program with a routed model: nothing of it is copied, two of its parts are prepared."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from pathlib import Path

import open_clip

from mmod import RoutingConfig
from mmod.registry.open_clip import routed

__all__ = ["train_open_clip"]


def train_open_clip(
    arguments: Sequence[str], config: RoutingConfig | None = None, *, models: str | None = None, **parts: RoutingConfig
) -> None:
    """Run `open_clip_train.main` so that the model it builds is routed.

    The program reads webdataset shards with any version of webdataset from 0.2.96 on, which its own reader does not.

    Args:
        arguments: The program's own command line.
        config: How to route both towers, as in `mmod.route_`.
        models: A JSON file, or a folder of them, with further model configs of open_clip's form.
        parts: How to route one tower, `image` or `text`, instead.

    Raises:
        FileNotFoundError: If `models` is not there.
        ModuleNotFoundError: If pandas is not installed, which the program needs.
        ValueError: If the program would build a teacher, which would be routed, too.
    """
    if any(argument.startswith("--distill") for argument in arguments):
        raise ValueError("--distill-model would be routed like the model: distill with tools/train_clip.py instead")
    if models is not None:
        if not Path(models).exists():
            raise FileNotFoundError(f"no model config at {models!r}")
        open_clip.add_model_config(models)
    with readable_shards(), routed(config, **parts):
        from open_clip_train.main import main

        main(list(arguments))


@contextlib.contextmanager
def readable_shards() -> Iterator[None]:
    """Let open_clip's reader ask webdataset for no end-of-shard marks, which it would take for members of a shard.

    Raises:
        ModuleNotFoundError: If pandas is not installed.
    """
    try:
        from open_clip_train import data
    except ModuleNotFoundError as error:
        if error.name != "pandas":
            raise
        raise ModuleNotFoundError(
            "open_clip's training program needs the package pandas: pip install pandas"
        ) from error
    original = data.tar_file_expander
    data.tar_file_expander = functools.partial(original, eof_value=None)
    try:
        yield
    finally:
        data.tar_file_expander = original
