"""Rows for screens and pages: duplicates left out, and as many image tokens left out in other ways, and their table."""

import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

import mmod
from mmod.data.readers.conversations import ConversationsConfig, open_conversations
from mmod.data.records import prior_of
from scripts.pages_and_screens.duplicates import differences
from scripts.real_halves.compare import DENSE, ends, fewer, together
from scripts.real_halves.evaluate import by_picture, costs, gap, loaded
from scripts.real_halves.model import PATCH
from scripts.real_halves.questions import PICTURES, held_out_in
from scripts.real_halves.rows import FASTV, SPREAD, VISIONZIP, ImageShare, Row, families, fitted, spread
from scripts.real_halves.screens import HELD_OUT_PICTURE, KINDS

BOTH = "duplicates left out of both"
_TEXT = 18
_ROUNDS = 3
_PROMPTS = 4
_PRIOR = "the most frequent answer, no picture"
_COMMANDS = [
    "python -m scripts.real_halves evaluate FOLDER --patches 12 --limit 150",
    "python -m scripts.real_halves table FOLDER --patches 12",
]


def kept_share(questions: Path, patches: int) -> float:
    """Return the mean share of the patches of held-out pictures that equal no neighbour."""
    pictures = [Image.open(file) for file in sorted((questions / PICTURES).glob(f"{HELD_OUT_PICTURE}*.png"))]
    side = patches * PATCH
    pixels = (np.asarray(picture.resize((side, side), Image.Resampling.BICUBIC)) for picture in pictures)
    return float(np.mean([(differences(pixel_RC3, PATCH) > 0).mean() for pixel_RC3 in pixels]))


def rows(folder: Path, patches: int) -> dict[str, Row]:
    """Return the rows by name, the dense model first; those without duplicates spend as much on image tokens.

    Args:
        folder: Holds the trained model and its questions.
        patches: Side of the images in patches.
    """
    dense, _ = loaded(folder / "model")
    dense.to("meta")
    depth = len(dense.model.language_model.layers)
    kept = kept_share(folder / "questions", patches)
    share = ImageShare(dense, _TEXT, patches**2)
    budget = share(spread(depth, 0, kept, "stride"))
    side = fewer(patches, budget)
    named = {name: family for name, family in families(depth).items() if name in (SPREAD, "random", FASTV, VISIONZIP)}
    tower = mmod.preset("pixelprune")
    language = mmod.preset("pixelprune-language")
    return {
        DENSE: Row(),
        "duplicates left out of the tower": Row(image=tower),
        "duplicates left out of the language model": Row(language),
        BOTH: Row(language, tower),
        **{name: Row(fitted(share, family, budget)) for name, family in named.items()},
        "pooled tokens": Row(tokens=side),
        "fewer pixels": Row(patches=side),
    }


def table(folder: Path, patches: int) -> dict[str, Any]:
    """Return the table of the rows that were evaluated, as `scripts.doc_tables` writes it.

    Differences are in points, paired by picture.
    """
    questions = folder / "questions"
    journal = folder / f"answers-{patches}.jsonl"
    answered = {name: together(files) for name, files in by_picture(journal).items()}
    kinds = _right_by_kind(journal)
    found = {name: row for name, row in rows(folder, patches).items() if name in answered}
    spent = costs(folder / "model", questions, found, patches, _ROUNDS, _PROMPTS)
    accuracy = {name: 100 * sums[:, 0].sum() / sums[:, 1].sum() for name, sums in answered.items()}
    lines = list[list[Any]]()
    for name in found:
        cost = spent[name]
        # The others of the prompt are text.
        image = patches**2 - spent[DENSE].tokens + cost.tokens
        line: list[Any] = [name, image, cost.prefill, cost.decoding, cost.cache / 1e6, cost.peak / 1e6]
        line += [accuracy[name], 100 * accuracy[name] / accuracy[DENSE]]
        line.append(None if name == DENSE else ends(gap(answered[name], answered[DENSE])))
        line.append(None if name == BOTH else ends(gap(answered[BOTH], answered[name])))
        lines.append([*line, *(kinds[name].get(kind) for kind in KINDS)])
    prior = _prior(questions)
    lines.append([_PRIOR, *[None] * 9, *(prior.get(kind) for kind in KINDS)])
    titles = ["", "image tokens", "prefill, ms", "decoding, ms", "cache, MB", "peak, MB", "right %", "kept % of dense"]
    difference = "{:+.1f} [{:+.1f}, {:+.1f}]"
    numbers = ["{:.0f}", "{:.0f}", "{:.0f}", "{:.1f}", "{:.0f}", "{:.1f}", "{:.1f}"]
    return {
        "commands": _COMMANDS,
        "columns": [*titles, "to dense", f"{BOTH}, to it", *(f"{kind} %" for kind in KINDS)],
        "formats": ["{}", *numbers, difference, difference, *["{:.1f}"] * len(KINDS)],
        "rows": lines,
    }


def _right_by_kind(journal: Path) -> dict[str, dict[str, float]]:
    """Return the percentage of right answers of every row by kind of question."""
    found: dict[str, dict[str, float]] = {}
    for line in journal.read_text().splitlines():
        record = json.loads(line)
        right, asked = Counter[str](), Counter[str]()
        for one in (one for answers in record["answers"].values() for one in answers):
            right[one["kind"]] += one["right"]
            asked[one["kind"]] += 1
        found[record["name"]] = {kind: 100 * right[kind] / asked[kind] for kind in asked}
    return found


def _prior(questions: Path) -> dict[str, float]:
    """Return the percentage of right answers by kind that always give a question's most frequent one in training."""
    train, *held_out = (
        open_conversations(str(questions / f"{name}.json"), ConversationsConfig(images=str(questions))).turns()
        for name in ("train", *held_out_in(questions))
    )
    return {kind: 100 * share for kind, share in prior_of(train, itertools.chain(*held_out)).items()}
