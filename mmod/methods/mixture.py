"""An MLP that is a mixture of experts: which tokens each computes, and what they make of them.

Axes: B images or texts, N tokens, E experts, J experts with those that do nothing, K slots of an expert in an image,
T rows of all experts, D channels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmod.blocks import StandingModule
from mmod.blocks.forward_pass import PerThread, recomputing

if TYPE_CHECKING:
    from mmod.methods.experts import Experts


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


class Decision(NamedTuple):
    """What the experts of an MLP computed in a pass.

    Args:
        logit_EBN: What says of each token alone whether an expert computes it, from 0 on; None where nothing does
            (E, B, N).
        keep_EBN: Whether it did (E, B, N).
    """

    logit_EBN: Tensor | None
    keep_EBN: Tensor


class _Record:
    """What an `ExpertMlp` leaves behind in one thread.

    Attributes:
        loss: Weighed loss of the last pass in training mode.
        asked: Somebody wants the decision of the last pass.
        decision: That decision.
    """

    def __init__(self) -> None:
        self.loss: Tensor | None = None
        self.asked = False
        self.decision: Decision | None = None


class ExpertState:
    """What an `ExpertMlp` knows beside its modules.

    Args:
        config: How its experts work.

    Attributes:
        together: Experts choose together in evaluation, too, whatever the config says.
    """

    def __init__(self, config: Experts) -> None:
        self.config = config
        self.together = False
        self.records = PerThread(_Record)


class ExpertMlp(StandingModule):
    """Mixin that makes an MLP the first of several experts.

    Attributes:
        router: From tokens to logits over the experts.
        others: The other experts that compute.
        predictors: One for each expert, where predictors decide in evaluation.
        mod_state: Plain state, see `ExpertState`.
    """

    router: nn.Linear
    others: nn.ModuleList
    predictors: nn.ModuleList
    mod_state: ExpertState

    def chooses_together(self, training: bool) -> bool:
        """Return whether which tokens an expert computes depends on the other tokens."""
        return self.mod_state.config.chooses_together(training or self.mod_state.together)

    def forward(self, x_BND: Tensor) -> Tensor:
        """Return the weighed sum of what experts make of the tokens (B, N, D); zero for those without an expert."""
        config, logit_BNJ = self.mod_state.config, route_logits(x_BND, self.router)
        prob_BNJ, learns = logit_BNJ.softmax(dim=-1), self.training and not recomputing()
        logit_EBN = self._alone(x_BND, logit_BNJ) if config.sampling is not None else None
        if x_BND.is_meta or self.chooses_together(self.training):
            rows = self._dealt(prob_BNJ)
        else:
            keep_EBN = chosen_expert(prob_BNJ, config.experts) if logit_EBN is None else logit_EBN >= 0
            rows = all_of(keep_EBN, prob_BNJ, config.normalize)
        record = self.mod_state.records.own
        if record.asked or (learns and logit_EBN is not None):
            record.decision = Decision(logit_EBN, computed(rows, config.experts, x_BND))
        if learns:
            record.loss = self._loss(prob_BNJ, record.decision)
        return self._compute(x_BND, rows)

    def _alone(self, x_BND: Tensor, logit_BNJ: Tensor) -> Tensor:
        """Return the logits by which experts decide of each token alone (E, B, N)."""
        if self.mod_state.config.sampling == "score":
            return logit_BNJ[..., : self.mod_state.config.experts].permute(2, 0, 1)
        return torch.stack([predictor(x_BND) for predictor in self.predictors])

    def _dealt(self, prob_BNJ: Tensor) -> ExpertRows:
        """Deal out the tokens of each image by slots."""
        config, (batch, tokens, _) = self.mod_state.config, prob_BNJ.shape
        slots = config.slots_of(tokens)
        index_EBK, gate_EBK = choose_tokens(prob_BNJ, config.experts, slots, config.choice, config.normalize)
        row_EBK = index_EBK + tokens * torch.arange(batch, device=prob_BNJ.device).unsqueeze(1)
        return ExpertRows(row_EBK.flatten(), gate_EBK.flatten(), [batch * slots] * config.experts)

    def _compute(self, x_BND: Tensor, rows: ExpertRows) -> Tensor:
        flat = x_BND.reshape(-1, x_BND.shape[-1])
        given = flat.index_select(0, rows.row_T).unsqueeze(0).split(rows.counts, dim=1)
        # In training experts without a token run as well, so that all of their weights have a gradient.
        y = torch.cat(
            [
                expert(own) if own.shape[1] or self.training else own
                for expert, own in zip((super().forward, *self.others), given)
            ],
            dim=1,
        )[0]
        y = y * rows.gate_T.unsqueeze(1).to(y.dtype)
        return y.new_zeros(flat.shape[0], y.shape[1]).index_add(0, rows.row_T, y).view(*x_BND.shape[:2], -1)

    def _loss(self, prob_BNJ: Tensor, decision: Decision | None) -> Tensor | None:
        config = self.mod_state.config
        if not config.has_loss:
            return None
        if config.choice == "tokens":
            return config.balance * balance_loss(prob_BNJ)
        assert decision is not None
        assert decision.logit_EBN is not None
        target = decision.keep_EBN.to(decision.logit_EBN.dtype)
        return config.membership * F.binary_cross_entropy_with_logits(decision.logit_EBN, target)

    def auxiliary_loss(self) -> Tensor | None:
        """Return the weighed loss of the last pass in training mode, once; None where there is none."""
        record = self.mod_state.records.own
        loss, record.loss = record.loss, None
        return loss


def computed(rows: ExpertRows, experts: int, x_BND: Tensor) -> Tensor:
    """Return which tokens experts compute (E, B, N); an empty slot computes its token at a weight of 0.

    Args:
        rows: The rows of each expert.
        experts: Experts E.
        x_BND: The tokens.
    """
    batch, tokens = x_BND.shape[:2]
    expert_T = torch.arange(experts, device=x_BND.device).repeat_interleave(
        torch.tensor(rows.counts, device=x_BND.device), output_size=len(rows.row_T)
    )
    keep = torch.zeros(experts, batch * tokens, dtype=torch.bool, device=x_BND.device)
    keep[expert_T, rows.row_T] = True
    return keep.view(experts, batch, tokens)
