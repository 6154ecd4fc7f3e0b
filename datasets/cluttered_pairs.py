"""Build the embedded image-text set "captioned scenes" as webdataset shards.

python datasets/cluttered_pairs.py runs/data/captioned-scenes-default
python datasets/cluttered_pairs.py runs/data/mine --level hard --clutter 40
"""

import argparse
import sys
from dataclasses import asdict

from jsonargparse import ArgumentParser

from mmod.data.scenes import LEVELS, ScenesConfig, build_scenes


def parse_arguments() -> tuple[str, ScenesConfig]:
    """Read the command line: a level gives the defaults, flags change them.

    Returns:
        Folder of the build, parameters.
    """
    level_parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    level_parser.add_argument("--level", choices=LEVELS, default="default")
    level = level_parser.parse_known_args()[0].level

    parser = ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("root", help="folder of the build")
    parser.add_argument("--level", choices=list(LEVELS), default="default", help="named parameters to start from")
    parser.add_class_arguments(ScenesConfig)
    parser.set_defaults(asdict(LEVELS[level]))
    arguments = parser.parse_args()
    names = ScenesConfig.__dataclass_fields__
    return arguments.root, ScenesConfig(**{name: arguments[name] for name in names})


def main() -> None:
    """Build what the command line asks for."""
    try:
        root, config = parse_arguments()
        manifest = build_scenes(root, config, progress=True)
    except (FileExistsError, ValueError) as error:
        sys.exit(f"error: {error}")
    for name, shard in manifest["shards"].items():
        print(f"{root}/{name}: {shard['samples']} pairs, sha256 {shard['sha256'][:16]}")


if __name__ == "__main__":
    main()
