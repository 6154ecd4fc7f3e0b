"""Build the embedded set "crowded digits": `python datasets/crowds.py --help`, or `mmod data crowds`."""

import sys

from mmod.data.commands import main

if __name__ == "__main__":
    main(["crowds", *sys.argv[1:]])
