"""The embedded sets by name, where the shards of one are, and what a model of images and text is asked of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mmod.data.synthetic.build import SyntheticSet
from mmod.data.synthetic.crowds import CROWDS
from mmod.data.synthetic.digits import DIGITS
from mmod.data.synthetic.questions import QUESTIONS
from mmod.data.synthetic.scenes import SCENES, all_contents

SETS: dict[str, SyntheticSet[Any, Any]] = {made.name: made for made in (DIGITS, CROWDS, SCENES, QUESTIONS)}


def locate(name: str, source: str, root: str | Path | None, progress: bool = True) -> str:
    """Return the pattern of the shards of a source, built if missing, if it is one of an embedded set; else the source.

    Args:
        name: The set whose samples the caller reads.
        source: `NAME:DIFFICULTY/SPLIT`, or anything else.
    """
    if source.startswith(f"{name}:"):
        return SETS[name].locate(source, root, progress)
    return source


def zero_shot_prompts() -> tuple[list[str], list[str]]:
    """Return the ten classes, and all captions of scenes with `{}` for the first digit, by which open_clip classifies.

    Example:
        >>> classes, templates = zero_shot_prompts()
        >>> classes[7], len(templates), templates[0]
        ('7', 160, 'a large {} left of a large 0 on clutter')
    """
    contents = [content for content in all_contents() if content.digits[0] == 0]
    templates = [content.caption.replace("0", "{}", 1) for content in contents]
    return [str(digit) for digit in range(10)], templates
