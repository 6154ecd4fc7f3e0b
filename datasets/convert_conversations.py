"""Check conversations in LLaVA's JSON format: `convert_conversations.py SOURCE OUTPUT [--key value]`.

python datasets/convert_conversations.py data/llava_v1_5_mix665k.json data/checked --images data/images
python datasets/convert_conversations.py data/mine.jsonl data/checked --on_fault drop --shards true

Every image is opened, every role and the number of `<image>` checked. Started again, the same command goes on where it
was interrupted. Records with a fault are listed with the reason, and left out only with `--on_fault drop`.
"""

import sys

from mmod.data.command_line import parse_conversion
from mmod.data.convert.conversations import ConvertConversationsConfig, convert_conversations


def main(arguments: list[str]) -> None:
    """Convert as the command line says and print what was left out and why."""
    try:
        print(convert_conversations(parse_conversion(__doc__, ConvertConversationsConfig, arguments)))
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main(sys.argv[1:])
