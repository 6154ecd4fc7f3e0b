"""Tables of what was counted and evaluated, in the format of `scripts/doc_tables.py`."""

import functools
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from mmod.analysis.statistics import Resampling
from mmod.io.store import Store
from mmod.studies.image import mean_iou, right_patches
from scripts.pages_and_screens import sources, tuned
from scripts.pages_and_screens.duplicates import FORMS
from scripts.pages_and_screens.rows import DENSE
from scripts.pages_and_screens.study import HEAD, OWN_HEAD, identity

KINDS = (
    "HTML page, light",
    "HTML page, dark",
    "form, light",
    "form, dark",
    "PDF page",
    "spreadsheet",
    "terminal",
    "screenshot",
    "plot",
    "drawn page",
    "drawn screen",
)
MODULE = "python -m scripts.pages_and_screens"
REFERENCE = "duplicate"
"""The row that others are compared with, beside dense."""
_ACCURACY = ("mean IoU %", "to dense", "right patches %", "to dense", "duplicate to it")
_DIFFERENCE = "{:+.1f} [{:+.1f}, {:+.1f}]"


def sources_table() -> dict[str, Any]:
    """Return the packages that hold the pages, with their licences."""
    others = [
        ["forms", "libjs-bootstrap5-doc", "MIT"],
        ["screenshots", "debian-handbook, kicad-doc-en", "as above"],
        ["plots, spreadsheets", "python-sklearn-doc, scikit-learn", "BSD-3-Clause"],
        ["PDF pages", ", ".join(sources.PDFS), "as above"],
    ]
    return {
        "commands": [f"{MODULE} photograph FOLDER"],
        "columns": ["", "package", "licence"],
        "formats": ["{}", "{}", "{}"],
        "rows": [*(["HTML pages", name, licence] for name, (_, licence) in sources.PAGES.items()), *others],
    }


def duplicates_table(store: Store) -> dict[str, Any]:
    """Return the shares of duplicates by kind and form, of patches and of 2 x 2 groups."""
    lines = list[list[Any]]()
    for kind in KINDS:
        line: list[Any] = [kind, 0]
        for form in FORMS:
            numbered = ({"kind": kind, "form": form, "picture": number} for number in itertools.count())
            counted = list(itertools.takewhile(lambda value: value is not None, map(store.get, numbered)))
            if not counted:
                break
            exact, exact_groups, near, near_groups = (100 * np.mean(counted, axis=0)).tolist()
            line[1] = len(counted)
            line.append([exact, exact_groups])
            if form != "PNG":
                line.append([near, near_groups])
        if line[1]:
            lines.append(line)
    forms = [title for form in FORMS for title in ([form] if form == "PNG" else [f"{form}, equal", "within 6"])]
    return {
        "commands": [f"{MODULE} count FOLDER"],
        "columns": ["", "pictures", *forms],
        "formats": ["{}", "{}", *["{:.0f} / {:.0f}"] * len(forms)],
        "rows": lines,
    }


def tower_table(store: Store, name: str, rows: Sequence[str]) -> dict[str, Any]:
    """Return speed and accuracy of the rows of a set, on the pictures that all of them were evaluated for."""
    numbers = pictures(store, name, rows)
    resampling = Resampling(len(numbers))
    values = {row: [store.get(identity(name, row, number)) for number in numbers] for row in rows}
    dense = _confusions(values[DENSE], HEAD)
    reference = _confusions(values.get(REFERENCE, values[DENSE]), HEAD)
    lines = list[list[Any]]()
    for row, value in values.items():
        speed = sum(one["dense_seconds"] for one in value) / sum(one["seconds"] for one in value)
        for head in (HEAD, OWN_HEAD):
            if head not in value[0]:
                continue
            outcomes = _confusions(value, head)
            line: list[Any] = [row if head == HEAD else f"{row}, a head of its own", _kept(value), speed]
            for figure in (mean_iou, right_patches):
                line.append(float(figure(outcomes, np.full((1, len(numbers)), 1 / len(numbers)))[0]))
                line.append(None if row == DENSE else _difference(resampling, figure, outcomes, dense))
            line.append(None if row == REFERENCE else _difference(resampling, right_patches, reference, outcomes))
            lines.append(line)
    return {
        "commands": [f"{MODULE} evaluate FOLDER WEIGHTS"],
        "columns": ["", "kept %", "speed", *_ACCURACY],
        "formats": ["{}", "{:.0f}", "{:.2f}", "{:.1f}", _DIFFERENCE, "{:.1f}", _DIFFERENCE, _DIFFERENCE],
        "rows": lines,
    }


def tuned_table(store: Store, name: str) -> dict[str, Any]:
    """Return speed and accuracy of the tuned towers of a set.

    Deviations are over seeds. Intervals of differences are over pictures, the same for all seeds and arms.
    """
    runs = {arm: [store.get(tuned.identity(name, arm, seed)) for seed in tuned.SEEDS] for arm in tuned.ARMS}
    outcomes = {arm: {"confusion": [value["confusion"] for value in values]} for arm, values in runs.items()}
    pictures = len(runs[DENSE][0]["confusion"])
    resampling = Resampling(pictures)
    lines = list[list[Any]]()
    for arm, values in runs.items():
        line: list[Any] = [arm]
        for part in ("train_seconds", "seconds"):
            dense, spent = (sum(value[part] for value in of_arm) for of_arm in (runs[DENSE], values))
            line.append(dense / spent)
        head = HEAD if tuned.ARMS[arm] == 1 else OWN_HEAD
        untuned = [store.get(identity(name, arm, number)) for number in range(pictures)]
        weight_SN = np.full((1, pictures), 1 / pictures)
        known = all(value is not None for value in untuned)
        line.append(float(right_patches(_confusions(untuned, head), weight_SN)[0]) if known else None)
        for figure in (mean_iou, right_patches):
            value_S = _of_seeds(figure, outcomes[arm], weight_SN)[:, 0]
            mean = functools.partial(_mean_of_seeds, figure)
            line.append([float(value_S.mean()), float(value_S.std(ddof=1))])
            line.append(None if arm == DENSE else _difference(resampling, mean, outcomes[arm], outcomes[DENSE]))
        line.append(None if arm == REFERENCE else _difference(resampling, mean, outcomes[REFERENCE], outcomes[arm]))
        lines.append(line)
    return {
        "commands": [f"{MODULE} tune FOLDER WEIGHTS"],
        "columns": ["", "training speed", "speed", "right patches % before", *_ACCURACY],
        "formats": ["{}", *["{:.2f}"] * 2, "{:.1f}", *["{:.1f} ± {:.1f}", _DIFFERENCE] * 2, _DIFFERENCE],
        "rows": lines,
    }


def _of_seeds(figure: Any, outcomes: Mapping[str, Any], weight_SN: np.ndarray) -> np.ndarray:
    """Return the figure of each seed in each draw."""
    return np.stack([figure({"confusion": confusion_NCC}, weight_SN) for confusion_NCC in outcomes["confusion"]])


def _mean_of_seeds(figure: Any, outcomes: Mapping[str, Any], weight_SN: np.ndarray) -> np.ndarray:
    return _of_seeds(figure, outcomes, weight_SN).mean(axis=0)


def _confusions(values: Sequence[Mapping[str, Any]], head: str) -> dict[str, Any]:
    return {"confusion": np.stack([value[head] for value in values])}


def times_table(store: Store, sizes: Iterable[str], rows: Iterable[str]) -> dict[str, Any]:
    """Return the speed of the rows compared with dense for pictures of several sizes."""
    lines = list[list[Any]]()
    for row in rows:
        line: list[Any] = [row]
        for size in sizes:
            values = [store.get(identity(size, row, number)) for number in pictures(store, size, [row])]
            dense = store.get(identity(size, DENSE, 0))["seconds"]
            line += [_kept(values), dense * len(values) / sum(value["seconds"] for value in values)]
        lines.append(line)
    return {
        "commands": [f"{MODULE} time FOLDER WEIGHTS"],
        "columns": ["", *(title for size in sizes for title in (f"{size}: kept %", "speed"))],
        "formats": ["{}", *["{:.0f}", "{:.2f}"] * (len(lines[0]) // 2)],
        "rows": lines,
    }


def _kept(values: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the mean share of the patches that are computed in percent; None where it is not one number."""
    return None if values[0]["kept"] is None else 100 * float(np.mean([value["kept"] for value in values]))


def pictures(store: Store, name: str, rows: Sequence[str]) -> list[int]:
    """Return the numbers of the pictures of a set, counted from 0, that all rows were evaluated for."""
    present = itertools.takewhile(
        lambda number: any(identity(name, row, number) in store for row in rows), itertools.count()
    )
    return [number for number in present if all(identity(name, row, number) in store for row in rows)]


def _difference(resampling: Resampling, figure: Any, one: dict[str, Any], other: dict[str, Any]) -> list[float]:
    """Return the difference of a figure with the ends of its interval, paired by picture."""
    estimate = resampling.of(lambda weight_SN: figure(one, weight_SN) - figure(other, weight_SN))
    return [estimate.value, estimate.low, estimate.high]


def rounded(value: Any) -> Any:
    """Return plain values with two decimals."""
    if isinstance(value, dict):
        return {key: rounded(one) for key, one in value.items()}
    if isinstance(value, list):
        return [rounded(one) for one in value]
    return round(value, 2) if isinstance(value, float) else value
