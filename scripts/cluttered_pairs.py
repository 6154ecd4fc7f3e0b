"""Build the embedded set "captioned scenes": `python scripts/cluttered_pairs.py --help` says how."""

import sys

from mmod.data.commands import main

if __name__ == "__main__":
    main(["scenes", *sys.argv[1:]])
