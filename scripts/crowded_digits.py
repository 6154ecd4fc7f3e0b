"""Build the embedded set "crowded digits": `python scripts/crowded_digits.py --help` says how."""

import sys

from mmod.data.commands import main

if __name__ == "__main__":
    main(["crowds", *sys.argv[1:]])
