"""Auxiliary losses of routers, collected over a model.

Axes: B images, N tokens.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmod.blocks import Deciding
from mmod.config import register_loss
from mmod.methods.base import refuse_evaluated
from mmod.routing import Router, Routing, TokenGroups, apply_gate, select_topk, select_within
from mmod.values import check_module


@register_loss("membership")
def membership_loss(routing: Routing, router: Router) -> Tensor:
    """Return the binary cross-entropy between scores and the kept mask.

    It pushes scores of kept tokens above 0 and others below, so that a token's score alone predicts whether it is kept.
    Padding and protected tokens do not count. If a predictor predicts the kept mask, the loss trains the predictor.

    Source: Raposo et al., arXiv 2404.02258, section 3.5.
    """
    return _cross_entropy(routing.logit_BN, routing.keep_BN, routing, router)


@register_loss("load")
def load_loss(routing: Routing, router: Router) -> Tensor:
    """Return the kept share, without a gradient, times the mean gate, over tokens that may be skipped.

    Source: MoDification, arXiv 2410.14268.
    """
    gate_BN = apply_gate(routing.score_BN, router.config.gate.name, router.config.gate.scale)
    # A config takes this loss only with a gate that weighs.
    assert gate_BN is not None
    counted_BN = routing.tokens.gated(routing.score_BN, router.prefix)
    return _mean(routing.keep_BN.float(), counted_BN) * _mean(gate_BN, counted_BN)


@register_loss("capacity")
def capacity_loss(routing: Routing, router: Router) -> Tensor:
    """Return the absolute difference between the kept share and the router's capacity.

    The value is that of the hard decision; the gradient is the sigmoid's (straight-through). Like capacity, the share
    counts protected tokens and no padding.

    Source: Router-Tuning, arXiv 2410.13184, and D-LLM, NeurIPS 2024, with a two-sided distance.
    """
    soft_BN = torch.sigmoid(routing.score_BN)
    tokens = routing.tokens
    counted_BN: Tensor | None
    if isinstance(tokens, TokenGroups):
        counted_BN = tokens.gated_BN
    else:
        counted_BN = tokens.valid_BN
    share = _mean(routing.keep_BN.float() + soft_BN - soft_BN.detach(), counted_BN)
    return (share - float(router.capacity)).abs()


@register_loss("importance", reads_importance=True)
def importance_loss(routing: Routing, router: Router) -> Tensor:
    """Return the binary cross-entropy between scores and the selection by importance."""
    importance_BN = routing.importance_BN
    tokens = routing.tokens
    if importance_BN is None:
        raise ValueError("the importance loss reads importance of the block in front, which did not run in training")
    if isinstance(tokens, TokenGroups):
        kept = select_within(importance_BN, router.capacity, tokens)
    else:
        kept, _ = select_topk(importance_BN, router.capacity, router.prefix, tokens.valid_BN, tokens.protect_BN)
    target_BN = kept.among(importance_BN.shape[1])
    return _cross_entropy(routing.score_BN, target_BN, routing, router)


def _cross_entropy(logit_BN: Tensor, target_BN: Tensor, routing: Routing, router: Router) -> Tensor:
    """Return the mean binary cross-entropy over tokens that may be skipped."""
    loss_BN = F.binary_cross_entropy_with_logits(logit_BN, target_BN.to(logit_BN.dtype), reduction="none")
    return _mean(loss_BN, routing.tokens.gated(routing.score_BN, router.prefix))


def _mean(value_BN: Tensor, counted_BN: Tensor | None) -> Tensor:
    """Return the mean over counted tokens, or over all for None; 0 without any."""
    if counted_BN is None:
        return value_BN.mean() if value_BN.numel() else value_BN.sum()
    return torch.where(counted_BN, value_BN, 0.0).sum() / counted_BN.sum().clamp(min=1)


def auxiliary_loss(model: nn.Module) -> Tensor:
    """Return the weighted auxiliary losses of a model's passes since the last call; 0 for a model without losses.

    A loss is a mean over tokens and a sum over routed blocks, as in the sources of the presets' weights. The losses of
    several forward passes, as of two views, are added. Passes in evaluation mode or under `torch.no_grad` leave none. A
    loss can be collected once, by the thread that ran the pass, and before the backward pass.

    Args:
        model: A model, possibly wrapped, after a forward pass in training mode.

    Raises:
        ValueError: The model is routed in training alone, and in evaluation mode.
        RuntimeError: There was no forward pass in training mode since the last call, or its graph is gone, as it is
            under `torch.no_grad` and with reentrant gradient checkpointing.

    Example:
        >>> import timm, mmod
        >>> model = mmod.route_(timm.create_model("test_vit"), mmod.preset("distilled"))
        >>> _ = model(torch.randn(2, 3, 160, 160))
        >>> mmod.auxiliary_loss(model).requires_grad
        True
    """
    check_module(model)
    deciding = {name: module for name, module in model.named_modules() if isinstance(module, Deciding)}
    if not deciding:
        refuse_evaluated(model)
    terms = []
    for name, module in deciding.items():
        if module.mod_has_loss:
            terms.append(module.mod_auxiliary_loss(name, model.training))
    if not terms:
        parameter = next(model.parameters(), None)
        device = None
        if parameter is not None:
            device = parameter.device
        return torch.zeros((), device=device)
    # Blocks may be on several devices.
    return torch.stack([term.to(terms[0].device) for term in terms]).sum()
