"""open_clip's training program with a routed model: two of its functions are prepared, none is copied."""

from __future__ import annotations

import argparse
import contextlib
import functools
from collections.abc import Iterator, Sequence
from pathlib import Path

from mmod.config import RoutingConfig
from mmod.io.refusals import OneLineParser
from mmod.io.yaml import parse_option
from mmod.lazy import name_missing_extra
from mmod.methods.resolve import resolve_routing

_DESCRIPTION = """Run open_clip's training program on a routed model: everything after `--` is open_clip's own.

`--image "{capacity: 0.5}" --text "{capacity: 0.5}" -- --model ViT-B-32 --train-data "shards/{00000..00127}.tar"
--dataset-type webdataset` routes both towers by attention.
"""


def main(arguments: Sequence[str]) -> None:
    """Run open_clip's program as the command line `[--image ROUTING] [--text ROUTING] -- ARGUMENTS` says."""
    arguments = list(arguments)
    split = len(arguments)
    if "--" in arguments:
        split = arguments.index("--")
    parser = OneLineParser(description=_DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter)
    for tower in ("image", "text"):
        text = f"YAML mapping: how the {tower} tower is routed, fields of mmod.RoutingConfig or `preset: NAME`"
        parser.add_argument(f"--{tower}", type=parse_option, metavar="ROUTING", help=text)
    parser.add_argument("--models", metavar="PATH", help="JSON file or folder with further model configs")
    options = parser.parse_args(arguments[:split])
    towers = {name: fields for name, fields in (("image", options.image), ("text", options.text)) if fields is not None}
    if not towers:
        parser.error("give --image or --text or both: the routing of a tower")
    parts = {name: resolve_routing(fields) for name, fields in towers.items()}
    train_open_clip(arguments[split + 1 :], models=options.models, **parts)


def train_open_clip(
    arguments: Sequence[str], config: RoutingConfig | None = None, *, models: str | None = None, **parts: RoutingConfig
) -> None:
    """Run `open_clip_train.main` with a routed model; it also reads shards with webdataset 0.2.96 and later.

    Args:
        models: A JSON file, or a folder of them, with further model configs of open_clip's form.
    """
    if any(argument.startswith("--distill") for argument in arguments):
        raise ValueError("--distill-model would be routed like the model: distill with mmod train pairs instead")
    from mmod.opening.open_clip import add_model_configs
    from mmod.registry.open_clip import routed

    if models is not None:
        add_model_configs(Path(models))
    with readable_shards(), routed(config, **parts):
        from open_clip_train.main import main

        main(list(arguments))


@contextlib.contextmanager
def readable_shards() -> Iterator[None]:
    """Let open_clip's reader ask webdataset for no end-of-shard marks, which it would take for members of a shard."""
    with name_missing_extra():
        from open_clip_train import data
    original = data.tar_file_expander
    data.tar_file_expander = functools.partial(original, eof_value=None)
    try:
        yield
    finally:
        data.tar_file_expander = original
