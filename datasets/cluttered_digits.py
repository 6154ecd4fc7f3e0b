"""Build the data set "cluttered digits" as webdataset shards, or draw a picture of it.

python datasets/cluttered_digits.py runs/data/cluttered-digits-default
python datasets/cluttered_digits.py runs/data/many-small --level hard --digit_size [8,12] --clutter 24
python datasets/cluttered_digits.py --montage cluttered_digits.png
"""

import argparse
import sys
from dataclasses import asdict

from jsonargparse import ArgumentParser

from mmod.data.digits import LEVELS, DigitsConfig, build_digits, save_montage


def parse_arguments() -> tuple[str | None, str | None, DigitsConfig]:
    """Read the command line: a level gives the defaults, flags change them.

    Returns:
        Folder of the build, file of the picture, parameters.
    """
    level_parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    level_parser.add_argument("--level", choices=LEVELS, default="default")
    level = level_parser.parse_known_args()[0].level

    parser = ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("root", nargs="?", help="folder of the build")
    parser.add_argument("--level", choices=list(LEVELS), default="default", help="named parameters to start from")
    parser.add_argument("--montage", help="PNG file to draw test scenes into, instead of building")
    parser.add_class_arguments(DigitsConfig)
    parser.set_defaults(asdict(LEVELS[level]))
    arguments = parser.parse_args()
    if (arguments.root is None) == (arguments.montage is None):
        parser.error("give either the folder of a build or --montage FILE")
    names = DigitsConfig.__dataclass_fields__
    return arguments.root, arguments.montage, DigitsConfig(**{name: arguments[name] for name in names})


def main() -> None:
    """Build or draw what the command line asks for."""
    try:
        root, montage, config = parse_arguments()
        if montage:
            save_montage(montage, config)
            print(f"drew {montage}")
            return
        manifest = build_digits(root, config, progress=True)
    except (FileExistsError, ValueError) as error:
        sys.exit(f"error: {error}")
    for name, shard in manifest["shards"].items():
        print(f"{root}/{name}: {shard['samples']} scenes, sha256 {shard['sha256'][:16]}")


if __name__ == "__main__":
    main()
