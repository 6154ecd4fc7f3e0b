"""How `mmod.open_model` opens the runs of text."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mmod.opening.open import open_model
from mmod.opening.opened import Opened
from mmod.opening.runs import find_weights

# A model of bytes, whose end token ends a file.
_BYTES = {"vocab_size": 256, "pad_token_id": None, "bos_token_id": 0, "eos_token_id": 0}


def open_start(model: Mapping[str, Any], weights: bool = True) -> Opened:
    """Open the model that fields of `ModelConfig` name, with random weights: none are published."""
    if model.get("config") is not None:
        return open_model({**_BYTES, **model["config"]}, pretrained=False)
    return open_model(find_weights(str(model["checkpoint"])).parent, pretrained=False, dense=True)


def of_run(opened: Opened, fields: Mapping[str, Any], run: Path) -> Opened:
    """Return the model, which reads bytes."""
    return opened
