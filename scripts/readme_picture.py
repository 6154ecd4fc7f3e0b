"""Draw the README's picture from the main job's results: `scripts/readme_picture.py runs/tradeoff/digits [PICTURE]`.

Six of its series stand in the picture; the table has all of them.
"""

import argparse
import csv
from pathlib import Path

from mmod.analysis.fronts import draw_tradeoff

SERIES = ("dense", "gradual", "a-mod", "random", "prune", "shallow")
COSTS = {"gflops": "GFLOPs per image", "latency_ms": "ms per image, batch 32"}
PICTURE = Path(__file__).parents[1] / "docs" / "images" / "main_job.png"


def main() -> None:
    """Read the study's table and draw it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("study", type=Path, help="folder of the main job")
    parser.add_argument("picture", type=Path, nargs="?", default=PICTURE, help="file to write; that of the README")
    options = parser.parse_args()
    with open(options.study / "tradeoff.csv", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["series"] in SERIES]
    measured = [{**row, **{key: float(row[key]) for key in ("top1", *COSTS)}} for row in rows]
    draw_tradeoff(measured, costs=COSTS).savefig(options.picture, dpi=150)
    print(options.picture)


if __name__ == "__main__":
    main()
