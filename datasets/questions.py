"""Build the embedded set "cluttered questions": `python datasets/questions.py --help`, or `mmod data questions`."""

import sys

from mmod.data.commands import main

if __name__ == "__main__":
    main(["questions", *sys.argv[1:]])
