"""Edits of saved models that loading must refuse."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file


def edit(folder: Path, change: Callable[[dict[str, Any], dict[str, torch.Tensor]], None]) -> None:
    """Change config and weights alike, as a file of another origin would differ."""
    config = json.loads((folder / "mmod.json").read_text())
    weights = load_file(folder / "model.safetensors")
    change(config, weights)
    text = json.dumps(config)
    (folder / "mmod.json").write_text(text)
    save_file(weights, folder / "model.safetensors", metadata={"mmod": text})
    # A file of another origin has the checksums of its own weights, or none.
    (folder / "sha256.json").unlink(missing_ok=True)


ROUTER = "blocks.2.router.score.weight"
CHANGES = [
    (lambda config, weights: config.update(format_version=99), r"format version 99; .*A later mmod wrote it"),
    (lambda config, weights: config.update(format_version=0), r"format version 0; .*build the dense model in Python"),
    (lambda config, weights: config.pop("format_version"), "format version None"),
    (lambda config, weights: config.pop("methods"), "must hold"),
    (lambda config, weights: config.update(methods=[3]), r"methods must be a list of mappings, got \[3\]"),
    (lambda config, weights: config.update(library="transformers"), "are saved by their own save_pretrained"),
    (lambda config, weights: config["methods"][0]["parts"]["image"].update(routr="linear"), "routr"),
    (lambda config, weights: config["model"].update(architecture="vit_of_tomorrow"), "vit_of_tomorrow"),
    (lambda config, weights: weights.pop(ROUTER), f"missing: 1 key .{ROUTER}.$"),
    (lambda config, weights: weights.update(other=torch.zeros(1)), "fit: not in the model: 1 key .other."),
    (lambda config, weights: weights.update({ROUTER: torch.zeros(1, 3)}), rf"{ROUTER} has shape \(1, 3\)"),
]
"""Change of a saved model, and what the message says."""
