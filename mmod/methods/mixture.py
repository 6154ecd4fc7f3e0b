"""Mixtures of experts: which tokens each expert computes, and the loss that balances their loads.

Axes: B images or texts, N tokens, E experts, J experts with those that do nothing, K slots of an expert in an image,
T rows of all experts, D channels.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mmod.routing import Routing
from mmod.routing.groups import slots_of


class Choice(NamedTuple):
    """Which tokens each expert computes, where all experts have as many slots.

    Args:
        index_EBK: The tokens (E, B, K).
        gate_EBK: Weight of what the expert makes of each, 0 in empty slots (E, B, K).
    """

    index_EBK: Tensor
    gate_EBK: Tensor


class ExpertRows(NamedTuple):
    """Which rows of a flat batch each expert computes, one expert after the other.

    Args:
        row_T: The rows, of B * N (T).
        gate_T: Weight of what the expert makes of each (T).
        counts: Rows of each expert.
    """

    row_T: Tensor
    gate_T: Tensor
    counts: list[int]


def choose_tokens(prob_BNJ: Tensor, experts: int, slots: int, choice: str, normalize: bool = False) -> Choice:
    """Deal out the tokens of each image among experts; ties go to the lower position.

    Args:
        prob_BNJ: Probabilities of each token over experts, those that do nothing last (B, N, J).
        experts: Experts E that compute.
        slots: Slots K of each in an image.
        choice: "experts" or "tokens", see `Experts`.
        normalize: Divide the weights of a token by their sum.

    Example:
        >>> prob = torch.tensor([[[0.7, 0.2, 0.1], [0.6, 0.3, 0.1], [0.1, 0.1, 0.8]]])
        >>> choose_tokens(prob, 2, 1, "experts").index_EBK.flatten().tolist()
        [0, 1]
        >>> choose_tokens(prob, 2, 1, "tokens").gate_EBK.flatten().tolist()
        [0.699999988079071, 0.0]
    """
    own_EBN = prob_BNJ[..., :experts].permute(2, 0, 1)
    if choice == "tokens":
        # What another expert is for ranks last and weighs nothing.
        own_EBN = torch.where(chosen_expert(prob_BNJ, experts), own_EBN, 0.0)
    index_EBK = torch.sort(-own_EBN.detach(), dim=-1, stable=True).indices[..., :slots]
    gate_EBK = own_EBN.gather(-1, index_EBK)
    if normalize:
        total_EBN = torch.zeros_like(own_EBN).scatter(-1, index_EBK, gate_EBK).sum(dim=0, keepdim=True)
        gate_EBK = gate_EBK / total_EBN.expand_as(own_EBN).gather(-1, index_EBK).clamp_min(1e-9)
    return Choice(index_EBK, gate_EBK)


def chosen_expert(prob_BNJ: Tensor, experts: int) -> Tensor:
    """Return for each expert that computes whether a token finds it the most likely (E, B, N).

    Args:
        prob_BNJ: Probabilities of each token over experts, those that do nothing last (B, N, J).
        experts: Experts E that compute.
    """
    expert_E11 = torch.arange(experts, device=prob_BNJ.device)[:, None, None]
    return prob_BNJ.argmax(dim=-1) == expert_E11


def all_of(keep_EBN: Tensor, prob_BNJ: Tensor, normalize: bool = False) -> ExpertRows:
    """Give experts all tokens that are theirs, however many.

    Args:
        keep_EBN: Whether an expert computes a token (E, B, N).
        prob_BNJ: Probabilities of each token over experts, those that do nothing last (B, N, J).
        normalize: Divide the weights of a token by their sum.

    Example:
        >>> prob = torch.tensor([[[0.7, 0.2, 0.1], [0.6, 0.3, 0.1], [0.1, 0.1, 0.8]]])
        >>> rows = all_of(chosen_expert(prob, 2), prob)
        >>> rows.row_T.tolist(), rows.counts
        ([0, 1], [2, 0])
    """
    gate_EBN = torch.where(keep_EBN, prob_BNJ[..., : len(keep_EBN)].permute(2, 0, 1), 0.0)
    if normalize:
        gate_EBN = gate_EBN / gate_EBN.sum(dim=0, keepdim=True).clamp_min(1e-9)
    keep = keep_EBN.flatten(1)
    expert_T, row_T = keep.nonzero(as_tuple=True)
    return ExpertRows(row_T, gate_EBN.flatten(1)[expert_T, row_T], keep.sum(dim=1).tolist())


def route_logits(x_BND: Tensor, router: Any) -> Tensor:
    """Return a linear router's logits (B, N, J), in fp32 under autocast too.

    Args:
        x_BND: Tokens.
        router: The linear layer, without a bias.
    """
    x_BND = x_BND.to(torch.promote_types(x_BND.dtype, torch.float32))
    weight, device = router.weight.to(x_BND.dtype), x_BND.device.type
    # Torch has no answer for meta, where shapes are followed and nothing is rounded.
    if device != "meta" and torch.is_autocast_enabled(device):
        with torch.autocast(device, enabled=False):
            return F.linear(x_BND, weight)
    return F.linear(x_BND, weight)


def probabilities(x_BND: Tensor, router: Any) -> Tensor:
    """Return the softmax of a linear router's logits (B, N, J), in fp32 under autocast too.

    Args:
        x_BND: Tokens.
        router: The linear layer, without a bias.
    """
    return route_logits(x_BND, router).softmax(dim=-1)


def balance_loss(prob_BNJ: Tensor) -> Tensor:
    """Return the load-balance loss, 1 where tokens and probabilities are spread evenly: J sum_j share_j * mean_j.

    Args:
        prob_BNJ: Probabilities of each token over all experts (B, N, J).

    Source: Fedus et al., arXiv 2101.03961, Eq. 4 to 6, over the experts that do nothing too.

    Example:
        >>> balance_loss(torch.tensor([[[0.5, 0.25], [0.25, 0.5]]])).item()
        0.75
    """
    count = prob_BNJ.shape[-1]
    share_J = F.one_hot(prob_BNJ.argmax(dim=-1), count).to(prob_BNJ.dtype).mean(dim=(0, 1))
    return count * (share_J * prob_BNJ.mean(dim=(0, 1))).sum()


def computed(rows: ExpertRows, experts: int, x_BND: Tensor) -> Tensor:
    """Return which tokens experts compute (E, B, N); an empty slot computes its token at a weight of 0.

    Args:
        rows: The rows of each expert.
        experts: Experts E.
        x_BND: The tokens.
    """
    keep = torch.zeros(experts, x_BND.shape[0] * x_BND.shape[1], dtype=torch.bool, device=x_BND.device)
    keep[_experts_of(rows), rows.row_T] = True
    return keep.view(experts, *x_BND.shape[:2])


def expert_decisions(rows: ExpertRows, prob_BNJ: Tensor, logit_EBN: Tensor | None) -> list[Routing]:
    """Return the decision of each expert: which tokens it computes, and the weight of what it makes of them.

    Args:
        rows: The rows of each expert.
        prob_BNJ: Probabilities of each token over experts, those that do nothing last (B, N, J).
        logit_EBN: Logits by which each token is decided by itself, where it can be (E, B, N).
    """
    experts, (batch, tokens, _) = len(rows.counts), prob_BNJ.shape
    if prob_BNJ.is_meta:
        index = torch.arange(rows.counts[0] // batch, device=prob_BNJ.device).expand(batch, -1)
        return [Routing(prob_BNJ[..., number], index) for number in range(experts)]
    keep_EBN = computed(rows, experts, prob_BNJ)
    gate = prob_BNJ.new_zeros(experts, batch * tokens)
    gate[_experts_of(rows), rows.row_T] = rows.gate_T
    decisions = []
    for number, (keep_BN, gate_BN) in enumerate(zip(keep_EBN, gate.view(experts, batch, tokens))):
        index_BK, valid_BK, total = slots_of(keep_BN, keep_BN.sum(1).tolist())
        predicted_BN = None if logit_EBN is None else logit_EBN[number]
        weights = {"gate_BK": gate_BN.gather(1, index_BK), "valid_BK": valid_BK, "predicted_BN": predicted_BN}
        decisions.append(Routing(prob_BNJ[..., number], index_BK, **weights, total=total))
    return decisions


def _experts_of(rows: ExpertRows) -> Tensor:
    """Return the expert of each row (T)."""
    device = rows.row_T.device
    counts = torch.tensor(rows.counts, device=device)
    return torch.arange(len(rows.counts), device=device).repeat_interleave(counts, output_size=len(rows.row_T))
