"""MLPs that are mixtures of experts, some of which may do nothing (MoDE).

Axes: B images, N tokens, E experts, J experts with those that do nothing, K slots of an expert in an image, D channels.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmod.adapters import BlockStack
from mmod.blocks import StandingModule, convert
from mmod.blocks.forward_pass import PerThread, recomputing
from mmod.methods.base import Method, Model, check_blocks
from mmod.ops.select import kept_count
from mmod.values import check_fields


@dataclass(frozen=True)
class Experts(Method):
    """A mixture of experts in the place of each MLP; every expert starts as a copy of it.

    An expert has `floor(capacity * N / experts)` slots for the N tokens that the MLP is given, at least one, so active
    FLOPs follow from `capacity` whatever is chosen. Routing the model as well, by `mmod.route_`, is staged MoDE, in
    which experts share the kept tokens. Experts that do nothing, `idle`, are integrated MoDE.

    Args:
        experts: Experts that compute.
        idle: Experts that do nothing, by whose probability a token can keep its state.
        capacity: Slots of all experts together for each token.
        choice: Each of the "experts" chooses the tokens of an image that it has the highest probability for; or the
            "tokens" choose the one expert, idle ones among them, with the highest probability, and of too many those
            with the highest have a slot.
        normalize: Divide the weights of a token's experts by their sum, with which a trained model starts from its own
            function on the tokens that are chosen. Tokens that choose then have the weight 1, without a gradient.
        balance: Weight of the load-balance loss, where tokens choose.
        blocks: Numbers of the blocks; None for all.

    Source: MoDE, Raposo et al., arXiv 2404.02258, section 4.4; expert choice, Zhou et al., arXiv 2202.09368; token
    choice and its loss, Switch Transformer, Fedus et al., arXiv 2101.03961; tokens served by probability, Riquelme et
    al., arXiv 2106.05974; copies as a start, Komatsuzaki et al., arXiv 2212.05055.
    """

    experts: int = 4
    idle: int = 0
    capacity: float = 1.0
    choice: Literal["experts", "tokens"] = "experts"
    normalize: bool = False
    balance: float = 0.01
    blocks: tuple[int, ...] | None = None
    kind: ClassVar[str] = "experts"
    routable: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.blocks is not None:
            object.__setattr__(self, "blocks", tuple(self.blocks))
        limits = {"experts": "[1, inf)", "idle": "[0, inf)", "capacity": "(0, inf)", "balance": "[0, inf)"}
        check_fields(self, "method", **limits, blocks="[0, inf)")
        if self.capacity > self.experts:
            raise ValueError(f"method.capacity={self.capacity:g} must be at most the number of experts, {self.experts}")

    @property
    def has_loss(self) -> bool:
        """Whether the loads of experts are balanced by a loss."""
        return self.choice == "tokens" and self.balance > 0

    def check(self, model: nn.Module, stack: BlockStack) -> None:
        """Raise a ValueError unless the blocks are there and each has an MLP whose tokens are all there."""
        if type(model).__name__ == "NaFlexVit":
            raise ValueError("experts choose among the tokens of an image, and those of a NaFlexVit may be padding")
        if self.blocks is not None:
            check_blocks(self.blocks, stack)
        for index in self._blocks(stack):
            if not isinstance(getattr(stack.blocks[index], "mlp", None), nn.Module):
                raise ValueError(f"{stack.names[index]} has no `mlp` that could become a mixture of experts")

    def change(self, model: nn.Module, stack: BlockStack) -> None:
        """Give MLPs a router and further experts."""
        for index in self._blocks(stack):
            mlp: Any = stack.blocks[index].mlp
            weight = next(mlp.parameters())
            others = nn.ModuleList(copy.deepcopy(mlp) for _ in range(self.experts - 1))
            router = nn.Linear(
                stack.dim, self.experts + self.idle, bias=False, device=weight.device, dtype=weight.dtype
            )
            nn.init.normal_(router.weight, std=0.02)
            convert(mlp, ExpertMlp, ExpertState(self))
            mlp.router, mlp.others = router, others

    def remove(self, model: nn.Module) -> None:
        """Leave each MLP its first expert."""
        for module in model.modules():
            if {"router", "others"} <= set(module._modules):
                del module.router, module.others

    def _blocks(self, stack: BlockStack) -> range | tuple[int, ...]:
        return range(len(stack.blocks)) if self.blocks is None else self.blocks


def experts_(model: Model, **options: Any) -> Model:
    """Make the MLPs of a timm model mixtures of experts, in place, see `Experts`; `mmod.methods.undo_` takes it back.

    Keys of the dense state dict keep their names, those of the first experts. Undoing it leaves these alone.

    Args:
        model: A model made by `timm.create_model`, not routed: routing comes afterwards.
        options: Fields of `Experts`.

    Returns:
        The same model.

    Raises:
        ValueError: A value out of range, or a model whose MLPs cannot be replaced.

    Example:
        >>> import timm, mmod
        >>> model = experts_(timm.create_model("test_vit"), experts=2, idle=1, capacity=0.5)
        >>> model(torch.randn(1, 3, 160, 160)).shape
        torch.Size([1, 1000])
        >>> staged = mmod.route_(experts_(timm.create_model("test_vit")), mmod.RoutingConfig(capacity=0.5))
    """
    return Experts(**options).apply_(model)


class Choice(NamedTuple):
    """Which tokens each expert computes.

    Args:
        index_EBK: The tokens (E, B, K).
        gate_EBK: Weight of what the expert makes of each, 0 in empty slots (E, B, K).
    """

    index_EBK: Tensor
    gate_EBK: Tensor


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
        expert_E11 = torch.arange(experts, device=prob_BNJ.device)[:, None, None]
        # What another expert is for ranks last and weighs nothing.
        own_EBN = torch.where(prob_BNJ.argmax(dim=-1) == expert_E11, own_EBN, 0.0)
    index_EBK = torch.sort(-own_EBN.detach(), dim=-1, stable=True).indices[..., :slots]
    gate_EBK = own_EBN.gather(-1, index_EBK)
    if normalize:
        total_EBN = torch.zeros_like(own_EBN).scatter(-1, index_EBK, gate_EBK).sum(dim=0, keepdim=True)
        gate_EBK = gate_EBK / total_EBN.expand_as(own_EBN).gather(-1, index_EBK).clamp_min(1e-9)
    return Choice(index_EBK, gate_EBK)


def probabilities(x_BND: Tensor, router: Any) -> Tensor:
    """Return the softmax of a linear router's logits (B, N, J), in fp32 under autocast too.

    Args:
        x_BND: Tokens.
        router: The linear layer, without a bias.
    """
    x_BND = x_BND.to(torch.promote_types(x_BND.dtype, torch.float32))
    weight, device = router.weight.to(x_BND.dtype), x_BND.device.type
    # Torch has no answer for meta, where shapes are followed and nothing is rounded.
    if device != "meta" and torch.is_autocast_enabled(device):
        with torch.autocast(device, enabled=False):
            return F.linear(x_BND, weight).softmax(dim=-1)
    return F.linear(x_BND, weight).softmax(dim=-1)


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


class _Record:
    def __init__(self) -> None:
        self.prob_BNJ: Tensor | None = None


class ExpertState:
    """What an `ExpertMlp` knows beside its modules.

    Args:
        config: How its experts work.
    """

    def __init__(self, config: Experts) -> None:
        self.config = config
        self.records = PerThread(_Record)


class ExpertMlp(StandingModule):
    """Mixin that makes an MLP the first of several experts.

    Attributes:
        router: From tokens to logits over the experts.
        others: The other experts that compute.
        mod_state: Plain state, see `ExpertState`.
    """

    router: nn.Linear
    others: nn.ModuleList
    mod_state: ExpertState

    def forward(self, x_BND: Tensor) -> Tensor:
        """Return the weighed sum of what experts make of the tokens (B, N, D); zero for those without an expert."""
        config, prob_BNJ = self.mod_state.config, probabilities(x_BND, self.router)
        if self.training and not recomputing():
            self.mod_state.records.own.prob_BNJ = prob_BNJ
        batch, tokens, channels = x_BND.shape
        slots = kept_count(tokens, Fraction(str(config.capacity)) / config.experts)
        index_EBK, gate_EBK = choose_tokens(prob_BNJ, config.experts, slots, config.choice, config.normalize)
        first_B1 = tokens * torch.arange(batch, device=x_BND.device).unsqueeze(1)
        row_EBK, flat = index_EBK + first_B1, x_BND.reshape(-1, channels)
        outputs = [
            expert(flat.index_select(0, row_BK.flatten()).view(batch, slots, channels)).flatten(0, 1)
            for expert, row_BK in zip((super().forward, *self.others), row_EBK)
        ]
        y = torch.cat(outputs)
        y = y * gate_EBK.flatten().unsqueeze(1).to(y.dtype)
        return y.new_zeros(flat.shape[0], y.shape[1]).index_add(0, row_EBK.flatten(), y).view(batch, tokens, -1)

    def auxiliary_loss(self) -> Tensor | None:
        """Return the weighed load-balance loss of the last pass in training mode, once; None where there is none."""
        record, config = self.mod_state.records.own, self.mod_state.config
        prob_BNJ, record.prob_BNJ = record.prob_BNJ, None
        if prob_BNJ is None or config.choice == "experts" or not config.balance:
            return None
        return config.balance * balance_loss(prob_BNJ)
