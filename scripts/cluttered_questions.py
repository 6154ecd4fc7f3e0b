"""Build the embedded set "cluttered questions": `python scripts/cluttered_questions.py --help` says how."""

import sys

from mmod.data.commands import main

if __name__ == "__main__":
    main(["questions", *sys.argv[1:]])
