"""Run open_clip's training program on a routed model: `train_open_clip.py [ROUTING] -- OPEN_CLIP_ARGUMENTS`.

`python tools/train_open_clip.py --image "{capacity: 0.5}" --text "{capacity: 0.5}" -- --model ViT-B-32 --train-data
"shards/{00000..00127}.tar" --dataset-type webdataset` routes both towers by attention; everything after `--` is
open_clip's own. Works under torchrun.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from mmod.io.yaml import parse_yaml
from mmod.training.engine.command import one_line_errors
from mmod.training.engine.optional_dependency import extra
from mmod.training.image.config import resolve_routing


def main(arguments: list[str]) -> None:
    """Parse the routing and hand the rest to open_clip."""
    with extra("clip"):
        from mmod.training.pairs.open_clip_program import train_open_clip
    place = arguments.index("--") if "--" in arguments else len(arguments)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    for tower in ("image", "text"):
        text = f"YAML mapping: how the {tower} tower is routed, fields of mmod.RoutingConfig or `preset: NAME`"
        parser.add_argument(f"--{tower}", type=mapping, metavar="ROUTING", help=text)
    parser.add_argument("--models", metavar="PATH", help="JSON file or folder with further model configs")
    options = parser.parse_args(arguments[:place])
    towers = {name: fields for name, fields in (("image", options.image), ("text", options.text)) if fields is not None}
    if not towers:
        parser.error("give --image or --text or both: the routing of a tower")
    parts = {name: resolve_routing(fields) for name, fields in towers.items()}
    train_open_clip(arguments[place + 1 :], models=options.models, **parts)


def mapping(text: str) -> dict[str, Any]:
    """Return the mapping that an option holds."""
    try:
        fields = parse_yaml(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if not isinstance(fields, dict):
        raise argparse.ArgumentTypeError(f"must be a mapping of keys to values, got {text!r}")
    return fields


if __name__ == "__main__":
    with one_line_errors():
        main(sys.argv[1:])
