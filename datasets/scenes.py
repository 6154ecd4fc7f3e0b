"""Build the embedded set "captioned scenes": `python datasets/scenes.py --help`, or `mmod data scenes`."""

import sys

from mmod.data.commands import main

if __name__ == "__main__":
    main(["scenes", *sys.argv[1:]])
