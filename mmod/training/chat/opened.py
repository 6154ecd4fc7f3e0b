"""How `mmod.open_model` opens the runs of conversations: by what they saved."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mmod.opening.opened import Opened


def open_start(model: Mapping[str, Any], weights: bool = True) -> Opened:
    """Refuse a run that saved no model: its checkpoints are those of transformers' trainer."""
    raise ValueError("a run of kind 'chat' is opened by the model that it saved, and it has not saved any")


def of_run(opened: Opened, fields: Mapping[str, Any], run: Path) -> Opened:
    """Return the model, which is saved with its processor."""
    return opened
