"""Build the embedded question-answering set "cluttered questions" as webdataset shards, or as JSON with images.

python datasets/cluttered_questions.py runs/data/cluttered-questions-default
python datasets/cluttered_questions.py runs/data/mine --level hard --clutter 40
python datasets/cluttered_questions.py runs/data/as-json --json true
"""

import sys

from mmod.data.command_line import build_config, create_build_parser
from mmod.data.synthetic.priors import measure_prior
from mmod.data.synthetic.question_files import build_questions, export_questions
from mmod.data.synthetic.questions import LEVELS, QuestionsConfig


def parse_arguments(arguments: list[str]) -> tuple[str, bool, QuestionsConfig]:
    """Read the command line: a level gives the defaults, flags change them.

    Returns:
        Folder of the build, whether JSON is wanted, parameters.
    """
    parser = create_build_parser(__doc__, LEVELS, arguments)
    parser.add_argument("root", help="folder of the build")
    parser.add_argument("--json", type=bool, default=False, help="write SPLIT.json and images/ instead of shards")
    options = parser.parse_args(arguments)
    return options.root, options.json, build_config(LEVELS, options)


def main() -> None:
    """Build what the command line asks for and print what a model gets right without looking."""
    try:
        root, as_json, config = parse_arguments(sys.argv[1:])
        written = (export_questions if as_json else build_questions)(root, config, progress=True)
    except (FileExistsError, ValueError) as error:
        sys.exit(f"error: {error}")
    for name, entry in written["shards" if "shards" in written else "files"].items():
        print(f"{root}/{name}: {entry['samples']} conversations, sha256 {entry['sha256'][:16]}")
    for kind, share in measure_prior(config).items():
        print(f"right without looking: {kind} {100 * share:.1f} %")


if __name__ == "__main__":
    main()
