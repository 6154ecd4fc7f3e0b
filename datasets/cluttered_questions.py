"""Build the embedded question-answering set "cluttered questions" as webdataset shards, or as JSON with images.

python datasets/cluttered_questions.py runs/data/cluttered-questions-default
python datasets/cluttered_questions.py runs/data/mine --level hard --clutter 40
python datasets/cluttered_questions.py runs/data/as-json --json true
"""

import argparse
import sys
from dataclasses import asdict

from jsonargparse import ArgumentParser

from mmod.data.priors import measure_prior
from mmod.data.question_files import build_questions, export_questions
from mmod.data.questions import LEVELS, QuestionsConfig


def parse_arguments() -> tuple[str, bool, QuestionsConfig]:
    """Read the command line: a level gives the defaults, flags change them.

    Returns:
        Folder of the build, whether JSON is wanted, parameters.
    """
    level_parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    level_parser.add_argument("--level", choices=LEVELS, default="default")
    level = level_parser.parse_known_args()[0].level

    parser = ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("root", help="folder of the build")
    parser.add_argument("--level", choices=list(LEVELS), default="default", help="named parameters to start from")
    parser.add_argument("--json", type=bool, default=False, help="write SPLIT.json and images/ instead of shards")
    parser.add_class_arguments(QuestionsConfig)
    parser.set_defaults(asdict(LEVELS[level]))
    arguments = parser.parse_args()
    names = QuestionsConfig.__dataclass_fields__
    return arguments.root, arguments.json, QuestionsConfig(**{name: arguments[name] for name in names})


def main() -> None:
    """Build what the command line asks for and print what a model gets right without looking."""
    try:
        root, as_json, config = parse_arguments()
        written = (export_questions if as_json else build_questions)(root, config, progress=True)
    except (FileExistsError, ValueError) as error:
        sys.exit(f"error: {error}")
    for name, entry in written["shards" if "shards" in written else "files"].items():
        print(f"{root}/{name}: {entry['samples']} conversations, sha256 {entry['sha256'][:16]}")
    for kind, share in measure_prior(config).items():
        print(f"right without looking: {kind} {100 * share:.1f} %")


if __name__ == "__main__":
    main()
