"""How far a changed model is from itself: divergences of what it says, over calibration batches.

Axes: R rows (images, or text tokens of a batch), F classes, words or features.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from mmod.values import check_finite, one_of

IGNORED = -100


def kl_divergence(own_RF: Tensor, changed_RF: Tensor) -> Tensor:
    """Return the Kullback-Leibler divergence of a changed model's logits from its own, for each row (R).

    Args:
        own_RF: Logits of the model as it is (R, F).
        changed_RF: Logits of the changed model (R, F).

    Example:
        >>> kl_divergence(torch.zeros(1, 2), torch.zeros(1, 2)).tolist()
        [0.0]
    """
    own_RF, changed_RF = own_RF.float().log_softmax(-1), changed_RF.float().log_softmax(-1)
    return (own_RF.exp() * (own_RF - changed_RF)).sum(-1).clamp(min=0)


def cosine_divergence(own_RF: Tensor, changed_RF: Tensor) -> Tensor:
    """Return one minus the cosine between a changed model's features and its own, for each row (R).

    Args:
        own_RF: Features of the model as it is (R, F).
        changed_RF: Features of the changed model (R, F).

    Example:
        >>> cosine_divergence(torch.ones(1, 2), 3 * torch.ones(1, 2)).round(decimals=4).tolist()
        [0.0]
    """
    return 1 - torch.cosine_similarity(own_RF.float(), changed_RF.float(), dim=-1)


DIVERGENCES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"kl": kl_divergence, "cosine": cosine_divergence}


def divergence_of(name: str | None, model: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a divergence by its name; None chooses "kl" for models that give logits and "cosine" for others.

    Args:
        name: "kl", "cosine" or None.
        model: The model.

    Raises:
        ValueError: Another name.
    """
    if name is None:
        gives_logits = hasattr(model, "get_output_embeddings") or bool(getattr(model, "num_classes", 0))
        name = "kl" if gives_logits else "cosine"
    one_of("divergence", name, tuple(DIVERGENCES))
    return DIVERGENCES[name]


@torch.no_grad()
def outputs(model: nn.Module, batch: Any, part: str, image_token: int | None = None) -> Tensor:
    """Return what a model says of a batch, as rows (R, F).

    Of a language model these are the logits that predict tokens of the answer where the batch has `labels`, and else
    those of all text tokens; of other models, all rows of what they return.

    Args:
        model: The model.
        batch: Its arguments by name, or its only argument.
        part: Of a model with several outputs, as CLIP's, the one that is read: that of "image" or "text".
        image_token: The id of image tokens, or None where there are none.

    Raises:
        TypeError: An output of another kind, or of integers or complex numbers.
        ValueError: NaN or infinity in an output.
    """
    rows_RF = _rows(model, batch, part, image_token)
    check_finite(f"outputs of this {type(model).__name__}", rows_RF)
    return rows_RF


def _rows(model: nn.Module, batch: Any, part: str, image_token: int | None) -> Tensor:
    if isinstance(batch, Mapping):
        given = {name: value for name, value in batch.items() if name != "labels"}
        if hasattr(model, "generation_config"):
            given["use_cache"] = False
        found = model(**given)
    else:
        given, found = {}, model(batch)
    if "input_ids" in given and hasattr(found, "logits"):
        chosen_BN = _positions(batch, image_token)
        logits_RF: Tensor = found.logits[chosen_BN]
        return logits_RF
    if isinstance(found, (tuple, list)):
        found = found[1 if part == "text" else 0]
    elif isinstance(found, Mapping):
        found = found["logits"] if "logits" in found else found[f"{part}_features"]
    if not isinstance(found, Tensor):
        raise TypeError(f"cannot compare what this {type(model).__name__} returns: {type(found).__name__}")
    return found.flatten(0, -2)


def _positions(batch: Mapping[str, Any], image_token: int | None) -> Tensor:
    """Return at which tokens a language model's logits are read (B, N)."""
    ids_BN = batch["input_ids"]
    labels_BN = batch.get("labels")
    if labels_BN is not None:
        # The logits of a token are about the next one.
        return torch.nn.functional.pad(labels_BN[:, 1:] != IGNORED, (0, 1))
    chosen_BN = torch.ones_like(ids_BN, dtype=torch.bool)
    mask_BN = batch.get("attention_mask")
    if isinstance(mask_BN, Tensor) and mask_BN.ndim == 2:
        chosen_BN = mask_BN.bool()
    return chosen_BN if image_token is None else chosen_BN & (ids_BN != image_token)
