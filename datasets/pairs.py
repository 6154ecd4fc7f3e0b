"""Convert a table of images and captions to shards: `python datasets/pairs.py --help`, or `mmod data pairs`."""

import sys

from mmod.data.commands import main

if __name__ == "__main__":
    main(["pairs", *sys.argv[1:]])
