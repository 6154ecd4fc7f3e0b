"""Strata of an audit's samples and kinds of its tokens, as far as the sets name them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mmod.data.config import DataConfig
from mmod.data.readers.chat import IGNORED
from mmod.data.readers.images import spread
from mmod.data.synthetic.digits import DIFFICULTIES, DigitScene, compose_scenes


def scenes_of(data: DataConfig) -> list[DigitScene]:
    """Return the scenes of the embedded digits in the order of the set; empty for other sets."""
    source, _, difficulty = data.source.partition(":")
    if source != "digits":
        return []
    scenes = list(compose_scenes(DIFFICULTIES[difficulty or "default"], data.val_split))
    if data.val_limit is None:
        return scenes
    return [scenes[int(place)] for place in spread([scene.label for scene in scenes], data.val_limit)]


def strata_of(scenes: Sequence[DigitScene], targets: Tensor) -> dict[str, list[float]]:
    """Return size and place of the digit in every scene, and the patches with an object where patches have classes."""
    strata: dict[str, list[float]] = {}
    if scenes:
        boxes = torch.tensor([scene.box for scene in scenes], dtype=torch.float64)
        middle = (boxes[:, :2] + boxes[:, 2:] - len(scenes[0].image)) / 2
        strata["side of the object"] = (boxes[:, 2] - boxes[:, 0]).tolist()
        strata["distance of the object from the middle"] = middle.norm(dim=1).tolist()
    if targets.ndim == 2:
        strata["patches with an object"] = (targets > 0).sum(1).tolist()
    return strata


def regions_of(scene: DigitScene, grid: tuple[int, int]) -> NDArray[np.str_]:
    """Return the content of every patch by its middle: the digit's box, ink of other digits, or background (P)."""
    pixels = torch.from_numpy(scene.image)[None].float()
    has_ink = torch.nn.functional.adaptive_max_pool2d(pixels, grid)[0] > 0
    left, top, right, bottom = scene.box
    rows, columns = ((np.arange(count) + 0.5) * len(scene.image) / count for count in grid)
    is_object = ((rows >= top) & (rows < bottom))[:, None] & ((columns >= left) & (columns < right))
    return np.where(is_object, "object", np.where(has_ink, "clutter", "background")).flatten()


def roles_of(batch: Mapping[str, Tensor], processor: Any) -> dict[str, NDArray[np.str_]]:
    """Return what every token of a batch of conversations is: image, question, answer or special token (B, N)."""
    tokens = batch["input_ids"]
    is_special = torch.isin(tokens, torch.tensor(processor.tokenizer.all_special_ids))
    names = np.where(batch["labels"] != IGNORED, "answer", np.where(is_special, "special token", "question"))
    return {"role": np.where(tokens == processor.image_token_id, "image", names)}
