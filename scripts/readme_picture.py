"""Draw the picture of the main job: `scripts/readme_picture.py runs/tradeoff/digits [PICTURE]`.

Left the patches that gradual merging keeps, as the main job has drawn them; right the front of its table in the docs.
"""

import argparse
import json
from pathlib import Path

from matplotlib.image import imread

from mmod.analysis.fronts import Fronts, Mark
from mmod.analysis.style import INK, new_figure, tidy

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs" / "images" / "main_job.png"
MAPS = "maps-gradual-0.5.png"


def marks() -> list[Mark]:
    """Return the models of the main job by their speed-up in batches of 32."""
    table = json.loads((ROOT / "docs/notebook/results/equal_time.json").read_text())["the-main-job"]
    found = []
    for row in table["rows"]:
        values = dict(zip(table["columns"], row))
        series = row[0].rpartition("-")[0] or row[0]
        found.append(Mark(row[0], series, values["batch 32"], *[values["top-1 %"]] * 3))
    return found


def main() -> None:
    """Read the study's maps and the table, and draw them side by side."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("study", type=Path, help="folder of the main job")
    parser.add_argument("picture", type=Path, nargs="?", default=PICTURE, help="file to write; that of the docs")
    options = parser.parse_args()
    figure = new_figure(11, 4)
    kept, front = figure.subplots(1, 2, width_ratios=(1.35, 1))
    kept.imshow(imread(options.study / MAPS))
    kept.set_axis_off()
    kept.set_title("gradual-0.5: patches that are computed, by block", fontsize=10, color=INK)
    fronts = Fronts([front], [marks()], faster=True)
    front.set(xlabel="times as fast, batches of 32", ylabel="top-1 accuracy in %")
    tidy(front, "both")
    fronts.name(figure, "shallow: trained from scratch, all else untrained")
    figure.savefig(options.picture, dpi=120)
    print(options.picture)


if __name__ == "__main__":
    main()
