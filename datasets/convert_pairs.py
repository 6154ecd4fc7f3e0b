"""Convert a table of images and captions to webdataset shards: `convert_pairs.py SOURCE OUTPUT [--key value]`.

python datasets/convert_pairs.py data/captions.csv data/shards --image_column file --resize 384
python datasets/convert_pairs.py annotations/captions_train2017.json data/coco --images data/train2017

SOURCE is a .csv, .tsv or .parquet table or COCO's caption annotations in .json. Started again, the same command goes on
where it was interrupted; rows that become no sample are reported with the reason.
"""

import argparse
import sys

from jsonargparse import ArgumentParser

from mmod.data.convert_pairs import ConvertConfig, convert_pairs


def main(arguments: list[str]) -> None:
    """Convert as the command line says and print what was dropped and why."""
    parser = ArgumentParser(
        usage="%(prog)s SOURCE OUTPUT [--key value]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_class_arguments(ConvertConfig)
    if len(arguments) > 1 and not arguments[0].startswith("-"):
        arguments = ["--source", arguments[0], "--output", *arguments[1:]]
    options = parser.parse_args(arguments)
    try:
        print(convert_pairs(ConvertConfig(**options.as_dict())))
    except (OSError, ValueError, ModuleNotFoundError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main(sys.argv[1:])
