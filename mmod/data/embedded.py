"""The embedded sets by name, and where the shards of one are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mmod.data.synthetic.build import SyntheticSet
from mmod.data.synthetic.crowds import CROWDS
from mmod.data.synthetic.digits import DIGITS
from mmod.data.synthetic.questions import QUESTIONS
from mmod.data.synthetic.scenes import SCENES

SETS: dict[str, SyntheticSet[Any, Any]] = {made.name: made for made in (DIGITS, CROWDS, SCENES, QUESTIONS)}


def locate(name: str, source: str, root: str | Path | None, progress: bool = True) -> str:
    """Return the pattern of the shards of a source, built if missing, if it is one of an embedded set; else the source.

    Args:
        name: The set whose samples the caller reads.
        source: `NAME:DIFFICULTY/SPLIT`, or anything else.
    """
    return SETS[name].locate(source, root, progress) if source.startswith(f"{name}:") else source
