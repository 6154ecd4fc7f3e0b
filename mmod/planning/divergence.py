"""Divergence of a routed model's outputs from the dense model's, over calibration batches.

Axes: R rows (images, or text tokens of a batch), F classes, vocabulary entries or features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmod.adapters import image_facts, image_output, tensor_of
from mmod.config import RoutingConfig
from mmod.methods.route import Route
from mmod.model import change_, unroute_
from mmod.values import IGNORED, check_finite, one_of

PromptBatch = Mapping[str, Any]
"""Prompts as the model's processor returns them by name: tensors of tokens (B, N), of images, and perhaps others."""


def kl_divergence(dense_RF: Tensor, changed_RF: Tensor) -> Tensor:
    """Return the Kullback-Leibler divergence of a changed model's logits from the dense model's, per row (R)."""
    dense_RF = dense_RF.float().log_softmax(-1)
    changed_RF = changed_RF.float().log_softmax(-1)
    # Rounding may leave equal rows below 0.
    return (dense_RF.exp() * (dense_RF - changed_RF)).sum(-1).clamp(min=0)


def cosine_divergence(dense_RF: Tensor, changed_RF: Tensor) -> Tensor:
    """Return one minus the cosine of a changed model's features and the dense model's, per row (R)."""
    return 1 - torch.cosine_similarity(dense_RF.float(), changed_RF.float(), dim=-1)


DIVERGENCES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"kl": kl_divergence, "cosine": cosine_divergence}


def divergence_of(name: str | None, model: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a divergence by name; None selects "kl" for models with logits and "cosine" for others."""
    if name is None:
        gives_logits = image_facts(model).classes or hasattr(model, "generation_config")
        name = "kl" if gives_logits else "cosine"
    one_of("divergence", name, tuple(DIVERGENCES))
    return DIVERGENCES[name]


def check_batch(batch: object) -> None:
    """Raise a TypeError unless a batch is what a model is called with."""
    if not isinstance(batch, (Tensor, Mapping)):
        raise TypeError(f"a batch must be the model's keyword arguments, or one tensor, got {type(batch).__name__}")


def check_batches(batches: object) -> None:
    """Raise a TypeError unless batches can be iterated, and are more than the contents of one."""
    if isinstance(batches, (str, Path)):
        raise TypeError(
            f"batches must be a list or a loader of batches, got {str(batches)!r}: folders and files are read by the "
            "command, mmod advise MODEL --images FOLDER"
        )
    is_batch = isinstance(batches, (Tensor, Mapping))
    if is_batch or not isinstance(batches, Iterable):
        one = " alone: put it into a list" if is_batch else ""
        raise TypeError(f"batches must be a list or a loader of batches, got a {type(batches).__name__}{one}")


@torch.no_grad()
def outputs(model: nn.Module, batch: Any, part: str) -> Tensor:
    """Return a model's outputs for a batch, as rows (R, F).

    For a language model these are the logits that predict the answer's tokens if the batch has `labels`, and the logits
    of all text tokens otherwise. For other models they are all rows of the output.
    """
    check_batch(batch)
    if isinstance(batch, Mapping):
        arguments = {name: value for name, value in batch.items() if name != "labels"}
        if hasattr(model, "generation_config"):
            # Nothing is generated behind the batch.
            arguments["use_cache"] = False
        output = model(**arguments)
    else:
        arguments = {}
        output = image_output(model, batch, part)
    if "input_ids" in arguments and hasattr(output, "logits"):
        output = output.logits[compared(batch, image_token(model))]
    output = tensor_of(model, output, part)
    check_finite(f"outputs of this {type(model).__name__}", output)
    return output.flatten(0, -2)


def image_token(model: nn.Module) -> int | None:
    """Return the id of the image tokens of a model that reads them in its text; None for others."""
    token = getattr(getattr(model, "config", None), "image_token_id", None)
    return None if token is None else int(token)


@contextmanager
def routed(model: nn.Module, part: str, config: RoutingConfig) -> Iterator[None]:
    """Route a part of a dense model within the context."""
    change_(model, Route({part: config}))
    try:
        yield
    finally:
        unroute_(model)


def check_rows(rows: int) -> None:
    """Raise a ValueError unless batches had outputs to compare."""
    if not rows:
        raise ValueError("no calibration samples: batches is empty, or has no outputs to compare")


def compared(batch: PromptBatch, image_token: int | None) -> Tensor:
    """Return the mask of tokens whose logits are compared (B, N)."""
    ids_BN = batch["input_ids"]
    if batch.get("labels") is not None:
        # Logits at a token predict the next token.
        return F.pad(batch["labels"][:, 1:] != IGNORED, (0, 1))
    # What a model predicts at image tokens is not trained.
    text_BN = real_tokens(batch)
    if image_token is not None:
        text_BN = text_BN & (ids_BN != image_token)
    return text_BN


def real_tokens(batch: PromptBatch) -> Tensor:
    """Return the mask of tokens that are no padding (B, N)."""
    mask_BN = batch.get("attention_mask")
    if isinstance(mask_BN, Tensor) and mask_BN.ndim == 2:
        return mask_BN.bool()
    return torch.ones_like(batch["input_ids"], dtype=torch.bool)
