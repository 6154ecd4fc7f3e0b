"""Command lines of data: embedded sets are built, sets of others are converted."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType

from mmod.data.embedded import SETS
from mmod.data.synthetic.build import BuiltFile, Config, Scene, SyntheticSet, save_montage
from mmod.data.synthetic.questions import export_questions, measure_prior
from mmod.io.options import add_fields, split_options, with_options
from mmod.io.refusals import OneLineParser, one_line_exit
from mmod.plain import from_plain

CONVERSIONS = ("pairs", "conversations")
"""Sets of others: modules of `mmod.data.convert`."""
_BUILD = """Build the embedded set "{0.title}" as webdataset shards, or draw a picture of it.

%(prog)s runs/data/mine
%(prog)s runs/data/mine --difficulty hard --clutter 24
%(prog)s --montage {0.name}.png"""


def main(arguments: Sequence[str]) -> None:
    """Build one of `SETS`, or run one of `CONVERSIONS`; print what it wrote, or a one-line error."""
    parser = OneLineParser(description=__doc__)
    parser.add_argument("command", choices=(*SETS, *CONVERSIONS))
    name = parser.parse_args(arguments[:1]).command
    # A script's name already says which set it builds.
    prog = parser.prog
    if not prog.endswith(".py"):
        prog = f"{prog} {name}"
    try:
        if name in CONVERSIONS:
            _convert(importlib.import_module(f"mmod.data.convert.{name}"), arguments[1:], prog)
            return
        export = export_questions if name == "questions" else None
        config = _build(SETS[name], arguments[1:], prog, export)
        if name == "questions" and config is not None:
            for question_type, share in measure_prior(config).items():
                print(f"accuracy without the image: {question_type} {100 * share:.1f} %")
    except (OSError, ValueError, TypeError, ModuleNotFoundError) as error:
        raise one_line_exit(error) from error


def _convert(module: ModuleType, arguments: Sequence[str], prog: str) -> None:
    """Convert as a command line `SOURCE OUTPUT [--key value]` says, and print the report."""
    settings, convert = module.CONVERSION
    parser = _parser(module.__doc__, prog)
    add_fields(parser, settings)
    given = vars(parser.parse_args(arguments))
    config = from_plain(settings, with_options({}, given.items(), settings))
    print(json.dumps(convert(config), indent=2))


def _parser(description: str | None, prog: str) -> OneLineParser:
    return OneLineParser(description=description, prog=prog, formatter_class=argparse.RawDescriptionHelpFormatter)


def _build(
    dataset: SyntheticSet[Config, Scene],
    arguments: Sequence[str],
    prog: str,
    export: Callable[..., Mapping[str, BuiltFile]] | None = None,
) -> Config | None:
    """Build or draw a set, and return its parameters, None for a picture; `export` writes JSON instead of shards."""
    kind = type(dataset.config("default"))
    parser = _parser(_BUILD.format(dataset), prog)
    parser.add_argument("root", nargs="?", help="folder of the build")
    parser.add_argument("--montage", help="PNG file to draw test images into, instead of building")
    names = list(dataset.difficulties)
    parser.add_argument("--difficulty", choices=names, default="default", help="named parameters to start from")
    if export is not None:
        parser.add_argument("--json", action="store_true", help="write SPLIT.json and images/ instead of shards")
    add_fields(parser, kind)
    options, words = parser.parse_known_args(arguments)
    known = [field.name for field in dataclasses.fields(kind)]
    for word in words:
        # Keys inside a group have a dot. What stands behind an unknown one was taken for the folder.
        if word.startswith("--") and re.split("[.=]", word[2:])[0] not in known:
            parser.error(f"unrecognized arguments: {word}")
    # Neither or both: a build and a picture are two requests.
    if (options.root is None) == (options.montage is None):
        parser.error("give either the folder of a build or --montage FILE")
    try:
        fields = dataclasses.asdict(dataset.config(options.difficulty))
        typed = [(name, text) for name, text in vars(options).items() if name in fields]
        config = from_plain(kind, with_options(fields, [*typed, *split_options(words)], kind))
    except (ValueError, TypeError) as error:
        parser.exit(2, f"error: {error}\n")
    if options.montage is not None:
        save_montage(options.montage, dataset, config)
        print(f"drew {options.montage}")
        return None
    written: Mapping[str, BuiltFile]
    if export is not None and options.json:
        written = export(options.root, config, progress=True)
    else:
        written = dataset.build(options.root, config, progress=True)
    for name, entry in written.items():
        checksum = entry["sha256"][:16]
        print(f"{options.root}/{name}: {entry['samples']} {config.counts}, sha256 {checksum}")
    return config
