"""Build the data set "cluttered digits" as webdataset shards, or draw a picture of it.

python datasets/cluttered_digits.py runs/data/cluttered-digits-default
python datasets/cluttered_digits.py runs/data/many-small --level hard --digit_size [8,12] --clutter 24
python datasets/cluttered_digits.py --montage cluttered_digits.png
"""

import sys

from mmod.data.command_line import build_config, create_build_parser
from mmod.data.synthetic.digits import LEVELS, DigitsConfig, build_digits, save_montage


def parse_arguments(arguments: list[str]) -> tuple[str | None, str | None, DigitsConfig]:
    """Read the command line: a level gives the defaults, flags change them.

    Returns:
        Folder of the build, file of the picture, parameters.
    """
    parser = create_build_parser(__doc__, LEVELS, arguments)
    parser.add_argument("root", nargs="?", help="folder of the build")
    parser.add_argument("--montage", help="PNG file to draw test scenes into, instead of building")
    options = parser.parse_args(arguments)
    if (options.root is None) == (options.montage is None):
        parser.error("give either the folder of a build or --montage FILE")
    return options.root, options.montage, build_config(LEVELS, options)


def main() -> None:
    """Build or draw what the command line asks for."""
    try:
        root, montage, config = parse_arguments(sys.argv[1:])
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
