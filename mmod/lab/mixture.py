"""What mixtures of experts and of recursions share: how tokens are assigned, and the losses of that.

Axes: B images or texts, N tokens, E experts, J experts including idle ones, K slots of an expert in an image,
T rows of all experts, D channels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmod.adapters import BlockStack
from mmod.blocks import Deciding
from mmod.methods.base import Method
from mmod.ops.casting import without_autocast
from mmod.ops.select import best_first
from mmod.routing import Kept, Routing
from mmod.routing.added import Added
from mmod.routing.decoder import ExactLinear
from mmod.routing.groups import kept_by_mask


@dataclass(frozen=True, kw_only=True)
class Mixture(Method):
    """A method in which experts or recursions choose tokens, or tokens choose them.

    Args:
        choice: "topk": each expert or recursion takes its top tokens, among all tokens of an image or text (expert
            choice). "tokens": each token chooses by itself (token choice). "score" and "predictor" are for language
            models, which generate one token at a time: they choose by top-k in training. In evaluation, "score" takes
            each token whose logit is at least 0, and "predictor" uses a small network that reads the token without a
            gradient.
        balance: Weight of the load-balance loss, for "tokens".
        membership: Weight of the loss by which "score" and "predictor" learn to predict the top-k choice.

    Attributes:
        nested: A module's decision is among the tokens that the decision before kept.
    """

    decoders: ClassVar[bool] = True
    nested: ClassVar[bool] = False
    choice: Literal["topk", "tokens", "score", "predictor"] = "topk"
    balance: Annotated[float, "[0, inf)"] = 0.01
    membership: Annotated[float, "[0, inf)"] = 0.01

    @property
    def has_loss(self) -> bool:
        """Whether there is a load-balance loss or a membership loss."""
        if self.choice == "tokens":
            return self.balance > 0
        return self.two_ways and self.membership > 0

    @property
    def two_ways(self) -> bool:
        """Whether tokens are chosen by top-k in training and one by one in evaluation."""
        return self.choice in ("score", "predictor")

    def chooses_together(self, training: bool) -> bool:
        """Return whether the choice of a token depends on other tokens."""
        if self.two_ways:
            return training
        return self.choice == "topk"

    @property
    def causal(self) -> bool:
        """Whether evaluation decides token by token."""
        return not self.chooses_together(training=False)

    def check(self, model: nn.Module, stack: BlockStack) -> None:
        """Raise a ValueError unless the blocks receive complete images or texts that allow the choice."""
        if self.two_ways and not stack.language:
            raise ValueError(f"choice={self.choice!r} is for language models: all tokens of an image are known at once")
        if type(model).__name__ == "NaFlexVit":
            raise ValueError(f"{self.kind} choose among the tokens of an image, which may be padding in a NaFlexVit")


class Choosing(Added, Deciding):
    """Mixin of a module in which a `Mixture`, the `config` of its state, assigns tokens to experts or recursions."""

    @property
    def mod_has_loss(self) -> bool:
        """Whether the method has a loss."""
        return bool(self.mod_state.config.has_loss)

    def mod_chooses_together(self, training: bool) -> bool:
        """Return whether the choice of a token depends on other tokens."""
        return bool(self.mod_state.config.chooses_together(training or self.mod_record.together))

    def mod_decided_alone(self, decisions: Mapping[str, Routing]) -> dict[str, Tensor]:
        """Return which tokens have a logit of at least 0 (B, N), by expert or recursion, if evaluation decides so."""
        config: Mixture = self.mod_state.config
        if not config.two_ways:
            return {}
        alone: dict[str, Tensor] = {}
        candidate_BN = None
        for name, routing in decisions.items():
            keep_BN = routing.logit_BN >= 0
            if candidate_BN is not None:
                keep_BN = keep_BN & candidate_BN
            alone[name] = keep_BN
            if config.nested:
                candidate_BN = routing.keep_BN
        return alone


class ExpertRows(NamedTuple):
    """Rows of a flat batch by expert, weights of their outputs (T), 0 in empty slots, and rows per expert."""

    row_T: Tensor
    gate_T: Tensor
    counts: list[int]


def choose_tokens(
    prob_BNJ: Tensor,
    experts: int,
    slots: int,
    choice: str,
    normalize: bool = False,
    valid_BN: Tensor | None = None,
    slots_B: Tensor | None = None,
) -> ExpertRows:
    """Assign the tokens of every image to expert slots; ties go to the lower position.

    Args:
        prob_BNJ: Probabilities over all experts, idle ones last (B, N, J).
        slots: Slots of each expert in an image.
        normalize: Make the weights of a token sum to 1.
        valid_BN: False at tokens that take no slot (B, N); None if all may.
        slots_B: Slots of each expert in an image with such tokens, at most `slots` (B); the others stay empty.

    Example:
        >>> prob = torch.tensor([[[0.7, 0.2, 0.1], [0.6, 0.3, 0.1], [0.1, 0.1, 0.8]]])
        >>> choose_tokens(prob, 2, 1, "experts").row_T.tolist()
        [0, 1]
        >>> choose_tokens(prob, 2, 1, "tokens").gate_T.tolist()
        [0.699999988079071, 0.0]
    """
    weight_EBN = prob_BNJ[..., :experts].permute(2, 0, 1)
    if choice == "tokens":
        # Tokens of other experts rank last, with weight 0.
        weight_EBN = torch.where(chosen_expert(prob_BNJ, experts), weight_EBN, 0.0)
    ranked_EBN = weight_EBN
    if valid_BN is not None:
        ranked_EBN = weight_EBN.masked_fill(~valid_BN, -torch.inf)
    index_EBK = best_first(ranked_EBN, slots)
    # Weights and not ranks: tokens that may take no slot were ranked at -inf, which would weigh as NaN.
    gate_EBK = weight_EBN.gather(-1, index_EBK)
    if slots_B is not None:
        gate_EBK = gate_EBK * (torch.arange(slots, device=slots_B.device) < slots_B.unsqueeze(1))
    if normalize:
        gate_EBN = torch.zeros_like(weight_EBN).scatter(-1, index_EBK, gate_EBK)
        total_EBN = gate_EBN.sum(dim=0, keepdim=True).expand_as(weight_EBN)
        gate_EBK = gate_EBK / total_EBN.gather(-1, index_EBK).clamp_min(1e-9)
    batch, tokens, _ = prob_BNJ.shape
    # Rows are numbered over the batch, so that each expert runs once for all images.
    row_EBK = index_EBK + tokens * torch.arange(batch, device=prob_BNJ.device).unsqueeze(1)
    return ExpertRows(row_EBK.flatten(), gate_EBK.flatten(), [batch * slots] * experts)


def chosen_expert(prob_BNJ: Tensor, experts: int) -> Tensor:
    """Return for every active expert which tokens have it as their most likely one (E, B, N)."""
    expert_E11 = torch.arange(experts, device=prob_BNJ.device)[:, None, None]
    return prob_BNJ.argmax(dim=-1) == expert_E11


def all_of(keep_EBN: Tensor, prob_BNJ: Tensor, normalize: bool = False) -> ExpertRows:
    """Return the rows of experts that compute the tokens in a mask, without a limit of slots.

    Example:
        >>> prob = torch.tensor([[[0.7, 0.2, 0.1], [0.6, 0.3, 0.1], [0.1, 0.1, 0.8]]])
        >>> rows = all_of(chosen_expert(prob, 2), prob)
        >>> rows.row_T.tolist(), rows.counts
        ([0, 1], [2, 0])
    """
    prob_EBN = prob_BNJ[..., : keep_EBN.shape[0]].permute(2, 0, 1)
    gate_EBN = torch.where(keep_EBN, prob_EBN, 0.0)
    if normalize:
        gate_EBN = gate_EBN / gate_EBN.sum(dim=0, keepdim=True).clamp_min(1e-9)
    keep = keep_EBN.flatten(1)
    # In the order of experts, so that each finds its rows side by side.
    expert_T, row_T = keep.nonzero(as_tuple=True)
    return ExpertRows(row_T, gate_EBN.flatten(1)[expert_T, row_T], keep.sum(dim=1).tolist())


class TokenRouter(ExactLinear):
    """A linear router without a bias, whose logits are computed in fp32, under autocast too."""

    def __init__(self, dim: int, outputs: int, like: Tensor) -> None:
        super().__init__(dim, outputs, bias=False, device=like.device, dtype=like.dtype)

    def draw(self) -> None:
        """Draw the initial weight."""
        super().draw()
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, x_BND: Tensor) -> Tensor:
        """Return logits (B, N, J)."""
        self.check_values(x_BND)
        x_BND = x_BND.to(torch.promote_types(x_BND.dtype, torch.float32))
        with without_autocast(x_BND):
            return F.linear(x_BND, self.weight.to(x_BND.dtype))


def numbered(module: nn.Module, name: str) -> dict[str, nn.Module]:
    """Return the modules in a list that another one may hold, by their names in it."""
    held: Any = module._modules.get(name) or ()
    return {f"{name}.{number}": item for number, item in enumerate(held)}


def first_floating(module: nn.Module) -> Tensor:
    """Return the first floating-point weight of a module: those of quantized layers are integers, or none."""
    return next(weight for weight in module.parameters() if weight.is_floating_point())


def balance_loss(prob_BNJ: Tensor) -> Tensor:
    """Return the load-balance loss `J sum_j share_j * mean_j`, which is 1 for a uniform load.

    Source: Fedus et al., arXiv 2101.03961, Eq. 4 to 6, including idle experts.

    Example:
        >>> balance_loss(torch.tensor([[[0.5, 0.25], [0.25, 0.5]]])).item()
        0.75
    """
    count = prob_BNJ.shape[-1]
    # Counts have no gradient: the mean probability of an expert falls as its share grows.
    share_J = F.one_hot(prob_BNJ.argmax(dim=-1), count).to(prob_BNJ.dtype).mean(dim=(0, 1))
    return count * (share_J * prob_BNJ.mean(dim=(0, 1))).sum()


def choice_cross_entropy(logit: Tensor, keep: Tensor, counted: Tensor | None = None) -> Tensor:
    """Return the cross-entropy of independent decisions against the choice in training, over some tokens or all."""
    loss = F.binary_cross_entropy_with_logits(logit, keep.to(logit.dtype), reduction="none")
    if counted is not None:
        loss = loss[counted]
    return loss.mean()


def computed(rows: ExpertRows, prob_BNJ: Tensor) -> Tensor:
    """Return which tokens experts compute (E, B, N); an empty slot computes a token with weight 0."""
    keep_EBN = prob_BNJ.new_zeros(len(rows.counts), *prob_BNJ.shape[:2], dtype=torch.bool)
    keep_EBN.flatten(1)[_experts_of(rows), rows.row_T] = True
    return keep_EBN


def expert_decisions(rows: ExpertRows, prob_BNJ: Tensor, logit_EBN: Tensor | None) -> list[Routing]:
    """Return the experts' decisions, with logits of the independent ones (E, B, N) if there are any."""
    experts = len(rows.counts)
    batch, tokens, _ = prob_BNJ.shape
    if prob_BNJ.is_meta:
        # FLOPs are counted on meta, where no number can be read: every slot counts as filled.
        index = torch.arange(rows.counts[0] // batch, device=prob_BNJ.device).expand(batch, -1)
        return [Routing(Kept(index), prob_BNJ[..., number]) for number in range(experts)]
    keep_EBN = computed(rows, prob_BNJ)
    gate = prob_BNJ.new_zeros(experts, batch * tokens)
    gate[_experts_of(rows), rows.row_T] = rows.gate_T
    decisions = []
    for number, (keep_BN, gate_BN) in enumerate(zip(keep_EBN, gate.view(experts, batch, tokens))):
        kept = kept_by_mask(keep_BN)
        predicted_BN = None if logit_EBN is None else logit_EBN[number]
        gate_BK = gate_BN.gather(1, kept.index_BK)
        decisions.append(Routing(kept, prob_BNJ[..., number], gate_BK, predicted_BN=predicted_BN))
    return decisions


def _experts_of(rows: ExpertRows) -> Tensor:
    device = rows.row_T.device
    counts = torch.tensor(rows.counts, device=device)
    return torch.arange(len(rows.counts), device=device).repeat_interleave(counts, output_size=rows.row_T.shape[0])
