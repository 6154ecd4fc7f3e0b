"""Check conversations and pack them: `python datasets/conversations.py --help`, or `mmod data conversations`."""

import sys

from mmod.data.commands import main

if __name__ == "__main__":
    main(["conversations", *sys.argv[1:]])
