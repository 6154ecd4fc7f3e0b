"""Duplicate patches of pages and screens: `python -m scripts.pages_and_screens COMMAND FOLDER`.

FOLDER takes everything that is written. `photograph` needs Chromium and packages of Debian's documentation, `evaluate`
and `time` the weights of a ViT-S/14. Drawn pages and screens need neither. A stopped command goes on where it was.
"""

import argparse
import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from mmod.io.store import STORE, Store
from scripts.doc_tables import markdown
from scripts.pages_and_screens import drawn, picture, sources, study, tuned, wide
from scripts.pages_and_screens.browser import browser, photograph
from scripts.pages_and_screens.duplicates import FORMS, shares
from scripts.pages_and_screens.rows import TIMED, Row, rows
from scripts.pages_and_screens.tables import (
    MODULE,
    duplicates_table,
    rounded,
    sources_table,
    times_table,
    tower_table,
    tuned_table,
)
from scripts.photo_attempts import dinov2

PHOTOGRAPHS = "photographs"
# Width and height of the windows of HTML pages in pixels, by set, and the number of examples to fit and to test.
WINDOWS = {"HTML pages": (728, 420), "large HTML pages": (1022, 476), "small HTML pages": (504, 336)}
FITTED = 36
TESTED = 60
DRAWN = (476, 644)
DRAWN_FITTED = 32
DRAWN_TESTED = 12
# Width, height and number of the windows in a batch that is timed alone, by their number of patches.
SIZES = {"2,482 patches": (1022, 476, 1), "10,010 patches": (1274, 1540, 1), "8 of 1,560 patches": (728, 420, 8)}
BATCHES = 4
# Pixels of a screenshot along a pixel of the page: a plain display, and one of high resolution.
SCALES = (1, 2)
# Pictures of a kind that are drawn, or taken from packages.
COUNTED = 60
DEPTH = 11
Picture = Callable[[], Image.Image]


def photograph_all(folder: Path, per_package: int) -> None:
    """Write the photographs of every kind; those that are there stay."""
    target = folder / PHOTOGRAPHS
    written = folder / "pages"
    if not (target / "PDF page").exists():
        sources.render_pdfs(target / "PDF page")
    asked = {
        "HTML page, light": (sources.pages(per_package), False),
        "HTML page, dark": (sources.pages(per_package), True),
        "form, light": (sources.forms(written), False),
        "form, dark": (sources.forms(written), True),
        "spreadsheet": (sources.sheets(written), False),
        "terminal": (sources.terminals(written), False),
    }
    with browser() as driver:
        for kind, (pages, dark) in asked.items():
            for number, page in enumerate(pages):
                path = target / kind / f"{number:03d}-{page.split}.png"
                if not path.exists():
                    photograph(driver, page, path, dark)


def kinds(folder: Path) -> dict[str, Sequence[Picture]]:
    """Return pictures by kind: photographs, those that packages hold, and drawn ones."""
    found: dict[str, Sequence[Picture]] = {}
    for place in sorted((folder / PHOTOGRAPHS).glob("*")):
        found[place.name] = [_opened(file) for file in sorted(place.glob("*.png")) if not file.match("*.labels.png")]
    for kind in sources.PICTURES:
        found[kind] = [_opened(file) for file in sources.pictures(kind, COUNTED)]
    for name, make in {"drawn page": drawn.page, "drawn screen": drawn.screen}.items():
        found[name] = [_drawn(make, seed) for seed in range(COUNTED)]
    return {kind: pictures for kind, pictures in found.items() if pictures}


def _opened(file: Path) -> Picture:
    return lambda: Image.open(file).convert("RGB")


def _drawn(make: Callable[[int], drawn.Canvas], seed: int) -> Picture:
    return lambda: make(seed).picture


def count(store: Store, pictures: dict[str, Sequence[Picture]]) -> None:
    """Put the shares of duplicates of each picture in each form into the store."""
    for kind, members in pictures.items():
        for number, opened in enumerate(members):
            for form, change in FORMS.items():
                counted = functools.partial(_counted, opened, change)
                store.once({"kind": kind, "form": form, "picture": number}, counted)


def _counted(opened: Picture, change: Callable[[Image.Image], Image.Image]) -> list[float]:
    return shares(change(opened()))


def html_pages(folder: Path, split: str) -> list[Path]:
    """Return the photographs of HTML pages of a split, every second one dark."""
    light = sorted((folder / PHOTOGRAPHS / "HTML page, light").glob(f"*-{split}.png"))
    dark = folder / PHOTOGRAPHS / "HTML page, dark"
    return [dark / file.name if int(file.name[:3]) % 2 else file for file in light]


def examples_of(folder: Path, name: str) -> study.Examples:
    """Return one of the sets of examples that `SETS` names."""
    if name in WINDOWS:
        train = html_pages(folder, sources.TRAIN)[:FITTED]
        test = html_pages(folder, sources.TEST)[:TESTED]
        size = WINDOWS[name]
        return study.Examples(name, study.Windows(train, *size), study.Windows(test, *size))
    make = {"drawn pages": drawn.page, "drawn screens": drawn.screen}[name]
    train_canvases = [study.from_canvas(make(1000 + seed, *DRAWN)) for seed in range(DRAWN_FITTED)]
    return study.Examples(name, train_canvases, [study.from_canvas(make(seed, *DRAWN)) for seed in range(DRAWN_TESTED)])


def tuning_examples(folder: Path, name: str) -> Sequence[study.Example]:
    """Return what towers are tuned on: windows of all photographs for training, light and dark, or drawn pictures."""
    if name not in WINDOWS:
        return examples_of(folder, name).train
    files = list[Path]()
    for style in ("light", "dark"):
        files += sorted((folder / PHOTOGRAPHS / f"HTML page, {style}").glob(f"*-{sources.TRAIN}.png"))
    return study.Windows(files, *WINDOWS[name])


def time_windows(folder: Path, store: Store, model: Any) -> None:
    """Time some rows on batches of windows of pages, evenly spread over the packages, in several sizes."""
    largest = max(width for width, *_ in SIZES.values())
    wide = [file for file in html_pages(folder, sources.TEST) if Image.open(file).width >= largest]
    table = {name: row for name, row in rows().items() if name in TIMED}
    for size, (width, height, batch) in SIZES.items():
        step = len(wide) // (BATCHES * batch)
        windows = study.Windows(wide[step // 2 :: step][: BATCHES * batch], width, height)
        images = [image for image, _ in windows]
        batches = [torch.cat(images[first : first + batch]) for first in range(0, len(images), batch)]
        study.time_rows(store, size, batches, table, model)


def screenshots(folder: Path, scale: int) -> list[Path]:
    """Return the screenshots of a scale, photographed if there are none."""
    target = folder / f"screenshots {scale}x"
    if not target.exists():
        with browser() as driver:
            wide.screenshots(driver, target, scale)
    return sorted(file for file in target.glob("*.png") if not file.match("*.labels.png"))


def measure_screenshot(folder: Path, store: Store, scale: int, hosts: Sequence[str], rounds: int) -> None:
    """Measure the screenshot whose share of kept tokens is the median."""
    picture = Image.open(wide.median_page(store, scale, screenshots(folder, scale)))
    for host in hosts:
        wide.measure(store, host, scale, picture, rounds)


def wide_table(folder: Path, store: Store) -> dict[str, Any]:
    """Return what screenshots of each scale cost, in models that were measured or could be."""
    lines = list[list[Any]]()
    for scale in SCALES:
        if not (folder / f"screenshots {scale}x").exists():
            continue
        picture = Image.open(wide.median_page(store, scale, screenshots(folder, scale)))
        lines.append([f"{picture.width} x {picture.height} pixels", *[None] * (len(wide.COLUMNS) - 1)])
        for host in wide.HOSTS:
            lines += wide.lines_of(store, host, scale, picture)
    return {
        "commands": [f"{MODULE} wide FOLDER"],
        "columns": list(wide.COLUMNS),
        "formats": list(wide.COLUMNS.values()),
        "rows": lines,
    }


def write_picture(path: Path) -> None:
    """Write the picture of the docs."""
    with browser() as driver:
        photograph(driver, picture.PAGE, path)
    page = Image.open(path).convert("RGB").crop((0, 0, *picture.SIZE))
    picture.shown(page).save(path, optimize=True)


SETS = (*WINDOWS, "drawn pages", "drawn screens")


def main() -> None:
    """Run a command."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.pages_and_screens",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    taking = commands.add_parser("photograph", help="photograph pages, and draw those of PDF files")
    taking.add_argument("folder", type=Path)
    taking.add_argument("--per-package", type=int, default=5, help="HTML pages of each package")
    counting = commands.add_parser("count", help="count duplicate patches by kind and form of file")
    counting.add_argument("folder", type=Path)
    evaluating = commands.add_parser("evaluate", help="label patches with every row")
    evaluating.add_argument("folder", type=Path)
    evaluating.add_argument("weights", type=Path, help="weights of timm's vit_small_patch14_dinov2")
    evaluating.add_argument("--sets", nargs="*", default=SETS, choices=SETS)
    evaluating.add_argument("--rows", nargs="*", help="names of rows; all by default")
    tuning = commands.add_parser("tune", help="fine-tune the tower dense, without duplicates and on fewer pixels")
    tuning.add_argument("folder", type=Path)
    tuning.add_argument("weights", type=Path, help="weights of timm's vit_small_patch14_dinov2")
    tuning.add_argument("--set", default="small HTML pages", choices=SETS, help="the examples")
    timing = commands.add_parser("time", help="time some rows on larger and larger windows of HTML pages")
    timing.add_argument("folder", type=Path)
    timing.add_argument("weights", type=Path, help="weights of timm's vit_small_patch14_dinov2")
    measuring = commands.add_parser("wide", help="measure a screenshot of 2,000 px in Qwen's models at full width")
    measuring.add_argument("folder", type=Path)
    measuring.add_argument("--scale", type=int, default=1, choices=SCALES, help="pixels along a pixel of the page")
    measuring.add_argument("--rounds", type=int, default=2, help="timed rounds")
    measuring.add_argument("--hosts", nargs="*", default=list(wide.HOSTS), choices=list(wide.HOSTS))
    drawing = commands.add_parser("picture", help="write the picture of the docs, patches that a tower computes")
    drawing.add_argument("folder", type=Path)
    tables = commands.add_parser("table", help="write the tables")
    tables.add_argument("folder", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    store = Store(options.folder / STORE)
    if options.command == "photograph":
        photograph_all(options.folder, options.per_package)
    elif options.command == "count":
        count(store, kinds(options.folder))
    elif options.command == "evaluate":
        table = rows()
        asked: dict[str, Row] = {name: table[name] for name in options.rows or table}
        with torch.inference_mode():
            model = dinov2(options.weights, DEPTH)
            for name in options.sets:
                study.evaluate(store, examples_of(options.folder, name), asked, model)
    elif options.command == "tune":
        examples = examples_of(options.folder, options.set)
        train = tuning_examples(options.folder, options.set)
        tuned.tune(store, examples, train, dinov2(options.weights, DEPTH))
    elif options.command == "picture":
        write_picture(options.folder / "picture.png")
    elif options.command == "wide":
        with torch.inference_mode():
            measure_screenshot(options.folder, store, options.scale, options.hosts, options.rounds)
    elif options.command == "time":
        with torch.inference_mode():
            time_windows(options.folder, store, dinov2(options.weights, DEPTH))
    else:
        write_tables(options.folder, store)


def write_tables(folder: Path, store: Store) -> None:
    """Write the tables of all that the store holds, and print them."""
    written = {"sources": sources_table(), "duplicates": duplicates_table(store)}
    for name in SETS:
        done = [row for row in rows() if study.identity(name, row, 0) in store]
        if done:
            written[name.replace(" ", "-")] = tower_table(store, name, done)
        if tuned.is_done(store, name):
            written[f"tuned-{name.replace(' ', '-')}"] = tuned_table(store, name)
    timed = [row for row in TIMED if study.identity(next(iter(SIZES)), row, 0) in store]
    if timed:
        written["sizes"] = times_table(store, SIZES, timed)
    screens = wide_table(folder, store)
    if screens["rows"]:
        written["wide"] = screens
    (folder / "tables.json").write_text(json.dumps(rounded(written), indent=1))
    for shown in written.values():
        print(markdown(shown))


if __name__ == "__main__":
    main()
