"""Build the embedded set "cluttered digits": `python scripts/cluttered_digits.py --help` says how."""

import sys

from mmod.data.commands import main

if __name__ == "__main__":
    main(["digits", *sys.argv[1:]])
