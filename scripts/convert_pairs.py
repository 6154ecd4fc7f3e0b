"""Convert a table of images and captions to webdataset shards: `python scripts/convert_pairs.py --help` says how."""

import sys

from mmod.data.commands import main

if __name__ == "__main__":
    main(["convert-pairs", *sys.argv[1:]])
