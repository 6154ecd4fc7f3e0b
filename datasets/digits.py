"""Build the embedded set "cluttered digits": `python datasets/digits.py --help`, or `mmod data digits`."""

import sys

from mmod.data.commands import main

if __name__ == "__main__":
    main(["digits", *sys.argv[1:]])
