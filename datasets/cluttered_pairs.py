"""Build the embedded image-text set "captioned scenes" as webdataset shards.

python datasets/cluttered_pairs.py runs/data/captioned-scenes-default
python datasets/cluttered_pairs.py runs/data/mine --level hard --clutter 40
"""

import sys

from mmod.data.command_line import build_config, create_build_parser
from mmod.data.synthetic.scenes import LEVELS, ScenesConfig, build_scenes


def parse_arguments(arguments: list[str]) -> tuple[str, ScenesConfig]:
    """Read the command line: a level gives the defaults, flags change them.

    Returns:
        Folder of the build, parameters.
    """
    parser = create_build_parser(__doc__, LEVELS, arguments)
    parser.add_argument("root", help="folder of the build")
    options = parser.parse_args(arguments)
    return options.root, build_config(LEVELS, options)


def main() -> None:
    """Build what the command line asks for."""
    try:
        root, config = parse_arguments(sys.argv[1:])
        manifest = build_scenes(root, config, progress=True)
    except (FileExistsError, ValueError) as error:
        sys.exit(f"error: {error}")
    for name, shard in manifest["shards"].items():
        print(f"{root}/{name}: {shard['samples']} pairs, sha256 {shard['sha256'][:16]}")


if __name__ == "__main__":
    main()
