"""Check conversations in LLaVA's JSON format: `python scripts/convert_conversations.py --help` says how."""

import sys

from mmod.data.commands import main

if __name__ == "__main__":
    main(["convert-conversations", *sys.argv[1:]])
