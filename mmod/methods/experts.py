"""MLPs that become mixtures of experts, some of which may do nothing (MoDE)."""

from __future__ import annotations

import copy
import importlib
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar, Literal

from torch import nn

from mmod.adapters import BlockStack, find_stack
from mmod.blocks import convert
from mmod.methods.base import Method, Model, check_blocks
from mmod.methods.mixture import ExpertMlp, ExpertState
from mmod.ops.select import kept_count
from mmod.values import Limit, check_fields


@dataclass(frozen=True)
class Experts(Method):
    """A mixture of experts in the place of each MLP; every expert starts as a copy of it.

    An expert has `floor(capacity * N / experts)` slots for the N tokens that the MLP is given, at least one, so active
    FLOPs follow from `capacity` whatever is chosen. Routing the model as well, by `mmod.route_`, is staged MoDE, in
    which experts share the kept tokens. Experts that do nothing, `idle`, are integrated MoDE.

    A language model is told token by token, and slots are dealt out among all of a text. There, tokens choose without a
    limit; or experts choose in training, as the source's routers do, and by `sampling` in evaluation.

    Args:
        experts: Experts that compute.
        idle: Experts that do nothing, by whose probability a token can keep its state.
        capacity: Slots of all experts together for each token. None sets no limit to what "tokens" choose: the balance
            loss then draws the share that computes to `experts / (experts + idle)`.
        choice: Each of the "experts" chooses the tokens of an image or text that it has the highest probability for; or
            the "tokens" choose the one expert, idle ones among them, with the highest probability, and of too many
            those with the highest have a slot.
        normalize: Divide the weights of a token's experts by their sum, with which a trained model starts from its own
            function on the tokens that are chosen. Tokens that choose then have the weight 1, without a gradient.
        balance: Weight of the load-balance loss, where tokens choose.
        blocks: Numbers of the blocks; None for all.
        sampling: How experts of a language model choose in evaluation, where each token is decided alone: by their own
            "score", from a logit of 0 on, or by what a "predictor" of each makes of the token without a gradient to it.
            Either learns by a loss what was chosen in training. None chooses together in evaluation too, which
            generation cannot.
        membership: Weight of that loss.

    Source: MoDE, Raposo et al., arXiv 2404.02258, section 4.4; `sampling` as in section 3.5; expert choice, Zhou et
    al., arXiv 2202.09368; token choice and its loss, Switch Transformer, Fedus et al., arXiv 2101.03961; tokens served
    by probability, Riquelme et al., arXiv 2106.05974; without a limit, Gale et al., arXiv 2211.15841; copies as a
    start, Komatsuzaki et al., arXiv 2212.05055.
    """

    experts: int = 4
    idle: int = 0
    capacity: float | None = 1.0
    choice: Literal["experts", "tokens"] = "experts"
    normalize: bool = False
    balance: float = 0.01
    blocks: tuple[int, ...] | None = None
    sampling: Literal["score", "predictor"] | None = None
    membership: float = 0.01
    kind: ClassVar[str] = "experts"
    routable: ClassVar[bool] = True
    decoders: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.blocks is not None:
            object.__setattr__(self, "blocks", tuple(self.blocks))
        limits: dict[str, Limit] = {"balance": "[0, inf)", "membership": "[0, inf)", "blocks": "[0, inf)"}
        check_fields(self, "method", experts="[1, inf)", idle="[0, inf)", capacity="(0, inf)", **limits)
        if self.capacity is not None and self.capacity > self.experts:
            raise ValueError(f"method.capacity={self.capacity:g} must be at most the number of experts, {self.experts}")
        if self.capacity is None and self.choice == "experts":
            raise ValueError("method.capacity=None, no limit, is for choice='tokens': experts fill all of their slots")
        if self.sampling is not None and self.choice == "tokens":
            raise ValueError(f"sampling={self.sampling!r} is for choice='experts': tokens decide alone as it is")

    @property
    def has_loss(self) -> bool:
        """Whether the loads of experts are balanced by a loss, or what they choose is learned."""
        if self.choice == "tokens":
            return self.balance > 0
        return self.sampling is not None and self.membership > 0

    def chooses_together(self, training: bool) -> bool:
        """Return whether which tokens an expert computes depends on the other tokens.

        Args:
            training: In training mode, or in evaluation.
        """
        return self.capacity is not None if self.choice == "tokens" else training or self.sampling is None

    def slots_of(self, tokens: int) -> int:
        """Return the slots of each expert; where there is no limit, what the balance loss draws the mean to.

        Args:
            tokens: Tokens that the MLP is given of an image or text.
        """
        share = Fraction(self.experts, self.experts + self.idle) if self.capacity is None else str(self.capacity)
        return kept_count(tokens, Fraction(share) / self.experts)

    def check(self, model: nn.Module, stack: BlockStack) -> None:
        """Raise a ValueError unless the blocks are there and each has an MLP whose tokens are all there."""
        if type(model).__name__ == "NaFlexVit":
            raise ValueError("experts choose among the tokens of an image, and those of a NaFlexVit may be padding")
        if self.sampling is not None and not stack.language:
            raise ValueError(f"sampling={self.sampling!r} is for decoders: an image is there as a whole")
        if stack.language and self.choice == "tokens" and self.capacity is not None:
            raise ValueError(
                f"capacity={self.capacity:g} gives slots to the likeliest of the tokens that choose, and in a language "
                "model some are to come: set capacity=None, which sets no limit, or choice='experts' with `sampling`"
            )
        if self.blocks is not None:
            check_blocks(self.blocks, stack)
        for index in self._blocks(stack):
            if not isinstance(getattr(stack.blocks[index], "mlp", None), nn.Module):
                raise ValueError(f"{stack.names[index]} has no `mlp` that could become a mixture of experts")

    def change(self, model: nn.Module, stack: BlockStack) -> None:
        """Give MLPs a router and further experts, and say so in the config of a language model."""
        for index in self._blocks(stack):
            mlp: Any = stack.blocks[index].mlp
            weight = next(mlp.parameters())
            given: dict[str, Any] = {"device": weight.device, "dtype": weight.dtype}
            others = nn.ModuleList(copy.deepcopy(mlp) for _ in range(self.experts - 1))
            router = nn.Linear(stack.dim, self.experts + self.idle, bias=False, **given)
            nn.init.normal_(router.weight, std=0.02)
            convert(mlp, ExpertMlp, ExpertState(self))
            mlp.router, mlp.others = router, others
            if self.sampling == "predictor":
                mlp.predictors = decoders().predictors(self.experts, stack.dim, **given)
        if stack.language:
            decoders().describe(model, self, [stack.names[index] for index in self._blocks(stack)])

    def remove(self, model: nn.Module) -> None:
        """Leave each MLP its first expert."""
        if find_stack(model).language:
            decoders().release(model)
        mixtures: list[Any] = [module for module in model.modules() if isinstance(module, ExpertMlp)]
        for mlp in mixtures:
            for name in {"router", "others", "predictors"} & set(mlp._modules):
                delattr(mlp, name)

    def _blocks(self, stack: BlockStack) -> range | tuple[int, ...]:
        return range(len(stack.blocks)) if self.blocks is None else self.blocks


def experts_(model: Model, **options: Any) -> Model:
    """Make the MLPs of a model mixtures of experts, in place, see `Experts`; `mmod.methods.undo_` takes it back.

    Keys of the dense state dict keep their names, those of the first experts. Undoing it leaves these alone.

    Args:
        model: A ViT made by `timm.create_model`, or a causal language model of transformers. Not routed: routing comes
            afterwards.
        options: Fields of `Experts`.

    Returns:
        The same model.

    Raises:
        ValueError: A value out of range, or a model whose MLPs cannot be replaced.

    Example:
        >>> import timm, torch, mmod
        >>> model = experts_(timm.create_model("test_vit"), experts=2, idle=1, capacity=0.5)
        >>> model(torch.randn(1, 3, 160, 160)).shape
        torch.Size([1, 1000])
        >>> staged = mmod.route_(experts_(timm.create_model("test_vit")), mmod.RoutingConfig(capacity=0.5))
    """
    return Experts(**options).apply_(model)


def decoders() -> Any:
    """Return the module that knows decoders, which needs transformers."""
    return importlib.import_module("mmod.methods.decoder_experts")
