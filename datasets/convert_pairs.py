"""Convert a table of images and captions to webdataset shards: `convert_pairs.py SOURCE OUTPUT [--key value]`.

python datasets/convert_pairs.py data/captions.csv data/shards --image_column file --resize 384
python datasets/convert_pairs.py annotations/captions_train2017.json data/coco --images data/train2017

SOURCE is a .csv, .tsv or .parquet table or COCO's caption annotations in .json. Started again, the same command goes on
where it was interrupted; rows that become no sample are reported with the reason.
"""

import sys

from mmod.data.command_line import parse_conversion
from mmod.data.convert.pairs import ConvertConfig, convert_pairs


def main(arguments: list[str]) -> None:
    """Convert as the command line says and print what was dropped and why."""
    try:
        print(convert_pairs(parse_conversion(__doc__, ConvertConfig, arguments)))
    except (OSError, ValueError, ModuleNotFoundError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main(sys.argv[1:])
