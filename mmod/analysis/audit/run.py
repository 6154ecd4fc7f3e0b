"""The audit of a routed model: the same images again and again, each time with other tokens kept.

Axes: B images, N tokens, D channels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from mmod.analysis.audit.auditor import Auditor, Judge
from mmod.analysis.audit.choices import Place, choices
from mmod.analysis.audit.judges import judge_classes
from mmod.analysis.audit.result import Audit, compare
from mmod.values import check_value

__all__ = ["audit"]


@torch.no_grad()
def audit(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    judge: Judge = judge_classes,
    positions_from: Iterable[Any] | None = None,
    conditions: Sequence[str] | None = None,
    own: Mapping[str, Callable[[Place], Tensor]] | None = None,
    draws: int = 5,
    grid: tuple[int, int] | None = None,
    margin: float = 5.0,
    resamples: int = 2000,
    progress: bool = False,
) -> Audit:
    """Find out whether a routed model's decisions follow content or position, or are no better than chance.

    The model is frozen. Each image is judged with the tokens that the routers keep and with as many others, chosen by
    each condition: at "random"; by position alone ("stride", "centre", "border", and "mean mask", the positions that
    the router keeps most often); by "token norm"; "inverted", what the router dropped, lowest score first, and then,
    where fewer were dropped than kept, of the rest those of lowest score; "shuffled", what it keeps of the image
    before. Routers that share a score choose once. The best fixed position is picked on the audited images.

    Memory holds two numbers for each image and condition, whatever the size of images.

    Args:
        model: A routed model whose skipped tokens pass; its mode is restored at the end.
        batches: The evaluation set, in an order that does not follow the classes. It is passed twice, so it must be no
            generator.
        judge: Runs the model on a batch and returns the loss and the accuracy in [0, 1] of each sample, (B,) each; the
            default takes images and classes, and `mmod.analysis.judge_answers` batches of a language model.
        positions_from: Batches of a training set, from which positions are counted; None for the evaluation set.
        conditions: Names of the conditions, None for all.
        own: Further conditions, as functions from an `mmod.analysis.Place` to ranks (B, N), of which the highest are
            kept.
        draws: Random choices for each image, which are averaged.
        grid: Rows and columns of the tokens that may be skipped; None asks the model, and takes a square where it does
            not say.
        margin: Points of accuracy: a router without a clear gain over chance, the interval of which ends below the
            margin, is no better than random.
        resamples: How often images are resampled, and signs drawn.
        progress: Show a bar.

    Returns:
        The conditions with intervals and tests, the verdict, and how the decisions of the blocks hang together.

    Raises:
        TypeError: Batches that can be passed once only.
        ValueError: Nothing in the model is routed, skipped tokens join others, routers do not run in it, an unknown
            condition, or a set of fewer than two images.

    Example:
        >>> import timm, torch, mmod
        >>> model = mmod.route_(timm.create_model("test_vit", num_classes=2), mmod.RoutingConfig(router="norm"))
        >>> batches = [(torch.randn(8, 3, 160, 160), torch.arange(8) % 2)]
        >>> found = mmod.audit(model, batches, conditions=["random", "stride"], draws=2)
        >>> found.images, [condition.name for condition in found.conditions]
        (8, ['as learned', 'random', 'stride'])
    """
    for name, value, limit in (("draws", draws, "[1, inf)"), ("resamples", resamples, "[100, inf)")):
        check_value(name, value, int, limit)
    made = choices(None if conditions is None else tuple(conditions), own)
    for given in (batches, positions_from):
        if isinstance(given, Iterator):
            raise TypeError(f"batches are passed twice, so they must be a list or a loader, got {given!r}")
    auditor = Auditor(model, judge, made, draws, grid)
    with _frozen(model):
        for batch in tqdm(batches if positions_from is None else positions_from, "positions", disable=not progress):
            auditor.learn(batch)
        for batch in tqdm(batches, "audit", disable=not progress):
            auditor.judge_batch(batch)
    accuracy, loss = auditor.outcomes()
    across = auditor.across.result()
    return compare(accuracy, loss, made, resamples=resamples, margin=margin, draws=draws, across=across)


@contextmanager
def _frozen(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode, and each of its modules back into its own at the end."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
