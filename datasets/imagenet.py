"""Unpack ImageNet's archives into folders of classes: `python datasets/imagenet.py --help`, or `mmod data imagenet`."""

import sys

from mmod.data.commands import main

if __name__ == "__main__":
    main(["imagenet", *sys.argv[1:]])
