"""Mixtures of experts in the place of MLPs, with idle experts (MoDE).

Axes: B images or texts, N tokens, E experts, J experts including idle ones, T rows of all experts, D channels.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import Annotated, Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from mmod.adapters import BlockStack
from mmod.blocks import MASKS, Arguments, ModelHook, Record, attach, convert, make_records, positional_names
from mmod.config.plan import check_blocks
from mmod.lab.mixture import (
    Choosing,
    ExpertRows,
    Mixture,
    TokenRouter,
    all_of,
    balance_loss,
    choice_cross_entropy,
    choose_tokens,
    chosen_expert,
    computed,
    expert_decisions,
    first_floating,
    numbered,
)
from mmod.methods.base import owner_of, register_method
from mmod.ops.backend import check_counts
from mmod.ops.select import kept_count
from mmod.ops.views import is_visible
from mmod.routing.decoder import Predictor
from mmod.threads import PerThread


@register_method("experts")
@dataclass(frozen=True, kw_only=True)
class Experts(Mixture):
    """A mixture of experts replaces every MLP; all experts start as copies of it.

    An expert has `floor(capacity * N / experts)` slots for N tokens, at least one, so active FLOPs depend on `capacity`
    only. With routing by `mmod.route_` on top, this is staged MoDE, in which experts share the kept tokens. With `idle`
    experts it is integrated MoDE.

    Slots are assigned among all tokens of a text, but generation sees one token at a time. In a language model, either
    tokens choose without a limit (`capacity=None`), or experts choose by "score" or "predictor".

    Args:
        choice: Who chooses:
            - "topk": each expert takes its top tokens, among all tokens of an image or text (expert choice);
            - "tokens": every token takes its most likely expert, and the most likely tokens get the slots;
            - "score" and "predictor": for language models, as "topk" in training. In evaluation each token is decided
              alone: "score" takes those whose logit is at least 0, "predictor" asks a small network for each expert.
        experts: Number of active experts.
        idle: Number of experts that do nothing: a token that chooses one keeps its state.
        capacity: Slots of all experts together, per token. None sets no limit for token choice; the balance loss then
            pulls the share of computed tokens to `experts / (experts + idle)`.
        normalize: Make the weights of a token's experts sum to 1, so a pretrained model starts from its function on
            chosen tokens. Under token choice the weight is then 1, without a gradient.
        blocks: Numbers of the blocks; None for all.

    Source: MoDE, Raposo et al., arXiv 2404.02258, section 4.4; "score" and "predictor" as in section 3.5; expert
    choice, Zhou et al., arXiv 2202.09368; token choice and its loss, Switch Transformer, Fedus et al., arXiv
    2101.03961; tokens served by probability, Riquelme et al., arXiv 2106.05974; without a limit, Gale et al., arXiv
    2211.15841; copies as a start, Komatsuzaki et al., arXiv 2212.05055.

    Example:
        >>> import timm, torch, mmod
        >>> model = mmod.apply_(timm.create_model("test_vit"), Experts(experts=2, idle=1, capacity=0.5))
        >>> model(torch.randn(1, 3, 160, 160)).shape
        torch.Size([1, 1000])
        >>> staged = mmod.route_(model, mmod.RoutingConfig(capacity=0.5))
    """

    experts: Annotated[int, "[1, inf)"] = 4
    idle: Annotated[int, "[0, inf)"] = 0
    capacity: Annotated[float | None, "(0, inf)"] = 1.0
    normalize: bool = False
    blocks: Annotated[tuple[int, ...] | None, "[0, inf)"] = None
    added: ClassVar[tuple[str, ...]] = (".router.", ".others.", ".predictors.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.capacity is not None and self.capacity > self.experts:
            raise ValueError(f"method.capacity={self.capacity:g} must be at most the number of experts, {self.experts}")
        if self.capacity is None and self.choice != "tokens":
            raise ValueError("method.capacity=None, no limit, is for choice='tokens': experts fill all of their slots")

    def precedes(self, kind: str) -> bool:
        """Return whether a method of a kind can follow, as routing does for staged MoDE."""
        return kind == "routing" or super().precedes(kind)

    def chooses_together(self, training: bool) -> bool:
        """Return whether an expert's choice of a token depends on other tokens."""
        if self.choice == "tokens":
            return self.capacity is not None
        return super().chooses_together(training)

    def slots_of(self, tokens: int) -> int:
        """Return the slots per expert; without a limit, the number that the balance loss aims at."""
        return kept_count(tokens, self._share)

    def slots_among(self, tokens_B: Tensor) -> Tensor:
        """Return the slots per expert for numbers of tokens (B), as `slots_of` does."""
        return (tokens_B * self._share.numerator // self._share.denominator).clamp(min=1)

    @property
    def _share(self) -> Fraction:
        """Slots of an expert per token."""
        if self.capacity is None:
            return Fraction(1, self.experts + self.idle)
        # From its text, a capacity of 0.1 is a tenth exactly.
        return Fraction(str(self.capacity)) / self.experts

    def check(self, model: nn.Module, stack: BlockStack) -> None:
        """Raise a ValueError unless the blocks exist and have MLPs that receive complete images or texts."""
        super().check(model, stack)
        if stack.language and self.choice == "tokens" and self.capacity is not None:
            raise ValueError(
                f"capacity={self.capacity:g} gives slots to the likeliest tokens, and a language model does not know "
                "future tokens: set capacity=None, which sets no limit, or choice='score' or 'predictor'"
            )
        if self.blocks is not None:
            check_blocks(self.blocks, len(stack.blocks))
        for index in self._blocks(stack):
            if self._mlp(stack, index) is None:
                raise ValueError(
                    f"{stack.names[index]} has no module that computes its MLP alone, which the mixture of experts "
                    "replaces"
                )

    def change(self, model: nn.Module, stack: BlockStack) -> None:
        """Add a router and further experts to the MLPs."""
        for index in self._blocks(stack):
            block = stack.blocks[index]
            mlp: Any = self._mlp(stack, index)
            weight = first_floating(block)
            others = nn.ModuleList(copy.deepcopy(mlp) for _ in range(self.experts - 1))
            # Copies were made before the MLP is converted, so that they are plain modules of the host.
            router = TokenRouter(stack.dim, self.experts + self.idle, weight)
            convert(mlp, ExpertMlp, ExpertState(self, make_records(ExpertRecord)))
            mlp.router = router
            mlp.others = others
            attention = stack.call_of(block, None).operators.get("attention")
            if attention and not stack.language:
                reader = ModelHook(partial(read_mask, mlp.mod_state.records))
                attach(block.get_submodule(attention), reader)
            if self.choice == "predictor":
                predictors = [Predictor(stack.dim, weight.device, weight.dtype) for _ in range(self.experts)]
                mlp.predictors = nn.ModuleList(predictors)
        if stack.language:
            from mmod.lab.decoders import check_texts

            attach(owner_of(model, stack), ModelHook(partial(check_texts, self.kind, True)))

    def _mlp(self, stack: BlockStack, index: int) -> nn.Module | None:
        """Return the MLP of a block; None if no module computes it alone."""
        block = stack.blocks[index]
        # timm's blocks with a norm behind the MLP have one that cannot be skipped.
        name = stack.call_of(block, None).operators.get("mlp", "mlp")
        return dict(block.named_modules()).get(name)

    def _blocks(self, stack: BlockStack) -> range | tuple[int, ...]:
        if self.blocks is None:
            return range(len(stack.blocks))
        return self.blocks


class ExpertRecord(Record):
    """What one thread keeps of an `ExpertMlp`.

    Attributes:
        valid_BN: Which tokens the attention before the MLP let others see (B, N), until the MLP reads it; None for all.
    """

    def __init__(self) -> None:
        super().__init__()
        self.valid_BN: Tensor | None = None


def read_mask(records: PerThread[ExpertRecord], module: nn.Module, arguments: Arguments) -> None:
    """Read the mask of an attention, after which an MLP of experts runs on the same tokens."""
    mask = next((arguments[name] for name in MASKS if name in arguments), None)
    record = records.value
    if mask is not None and mask.ndim == 4:
        # The first parameter of an attention, whatever the caller passes first.
        x_BND = next((arguments.get(name) for name in positional_names(module)[:1]), None)
        if x_BND is not None and x_BND.shape[1] != mask.shape[-1]:
            raise ValueError(
                "experts choose among kept tokens, and which of them are masked is unknown where these attend to "
                "all tokens: route with context='kept', or pass no attn_mask"
            )
        record.valid_BN = is_visible(mask).any(dim=1).any(dim=1)
    elif record.valid_BN is not None:
        # Left by a pass that failed.
        record.valid_BN = None


class ExpertState(NamedTuple):
    """Plain state of an `ExpertMlp`."""

    config: Experts
    records: PerThread[Record]


class ExpertMlp(Choosing):
    """Mixin that makes an MLP the first of several experts; a router, or a predictor for each, chooses among them."""

    router: TokenRouter
    others: nn.ModuleList
    predictors: nn.ModuleList
    mod_state: ExpertState
    mod_added_modules = ("router", "others", "predictors")

    def mod_scorers(self) -> dict[str, nn.Module]:
        """Return the router and the predictors; the experts begin as copies."""
        return {"router": self.router, **numbered(self, "predictors")}

    def forward(self, x_BND: Tensor) -> Tensor:
        """Return the weighted sum of the experts' outputs (B, N, D); zero for tokens without an expert."""
        config = self.mod_state.config
        logit_BNJ = self.router(x_BND)
        prob_BNJ = logit_BNJ.softmax(dim=-1)
        valid_BN = self._mod_take_valid(x_BND)
        logit_EBN = None
        if config.two_ways:
            # In training too: there they learn to predict the choice that experts make together.
            logit_EBN = self._mod_alone(x_BND, logit_BNJ)
        if x_BND.is_meta or self.mod_chooses_together(self.training):
            slots = config.slots_of(x_BND.shape[1])
            slots_B = None
            if valid_BN is not None:
                slots_B = config.slots_among(valid_BN.sum(dim=1))
            rows = choose_tokens(prob_BNJ, config.experts, slots, config.choice, config.normalize, valid_BN, slots_B)
        else:
            check_counts("experts without slots", "the number of their tokens")
            if logit_EBN is None:
                keep_EBN = chosen_expert(prob_BNJ, config.experts)
            else:
                keep_EBN = logit_EBN >= 0
            # No limit of slots: a token is decided by itself, so that text can be generated.
            rows = all_of(keep_EBN, prob_BNJ, config.normalize)
        record = self.mod_record
        if record.traced:
            for name, decision in zip(self.mod_decision_names(), expert_decisions(rows, prob_BNJ, logit_EBN)):
                record.keep(name, decision)
        if self.training:
            self.mod_tell_of_frozen()
            if self.mod_has_loss:
                self.mod_keep_loss([self._mod_loss(prob_BNJ, logit_EBN, rows, valid_BN)], x_BND, logit_BNJ)
        return self._mod_compute(x_BND, rows)

    def mod_fill(self, device: torch.device) -> None:
        """Make the other experts copies of the first one again, which has the dense weights."""
        weights = self.state_dict()
        for other in self.others:
            first = {name: weights[name] for name in other.state_dict()}
            # Another file may bring the weights of the first one.
            if not any(weight.is_meta for weight in first.values()):
                other.to_empty(device=device).load_state_dict(first)
        self.mod_emptied = False

    def mod_decision_names(self) -> tuple[str, ...]:
        """Return the names of the experts, which decide separately."""
        return tuple(f"expert{number + 1}" for number in range(self.mod_state.config.experts))

    def _mod_alone(self, x_BND: Tensor, logit_BNJ: Tensor) -> Tensor:
        """Return the logits of the experts' independent decisions (E, B, N)."""
        if self.mod_state.config.choice == "score":
            return logit_BNJ[..., : self.mod_state.config.experts].permute(2, 0, 1)
        return torch.stack([predictor(x_BND) for predictor in self.predictors])

    def _mod_compute(self, x_BND: Tensor, rows: ExpertRows) -> Tensor:
        flat = x_BND.reshape(-1, x_BND.shape[-1])
        inputs = flat.index_select(0, rows.row_T).unsqueeze(0).split(rows.counts, dim=1)
        outputs = []
        for expert, x in zip((super().forward, *self.others), inputs):
            # In training, experts without tokens run too, so that all weights get a gradient.
            if x.shape[1] or self.training:
                outputs.append(expert(x))
            else:
                outputs.append(x)
        y_TD = torch.cat(outputs, dim=1)[0]
        y_TD = y_TD * rows.gate_T.unsqueeze(1).to(y_TD.dtype)
        sums = y_TD.new_zeros(flat.shape[0], y_TD.shape[1]).index_add(0, rows.row_T, y_TD)
        return sums.view(*x_BND.shape[:2], -1)

    def _mod_take_valid(self, x_BND: Tensor) -> Tensor | None:
        """Return which tokens others may see (B, N); None for all."""
        record: Any = self.mod_record
        if record.valid_BN is None:
            return None
        # Read once: the mask must not serve another call of the MLP.
        valid_BN: Tensor = record.valid_BN
        record.valid_BN = None
        return valid_BN.expand(x_BND.shape[0], -1)

    def _mod_loss(
        self, prob_BNJ: Tensor, logit_EBN: Tensor | None, rows: ExpertRows, valid_BN: Tensor | None
    ) -> Tensor:
        config = self.mod_state.config
        if config.choice == "tokens":
            if valid_BN is not None:
                # As those of one long image.
                prob_BNJ = prob_BNJ[valid_BN].unsqueeze(0)
            return config.balance * balance_loss(prob_BNJ)
        assert logit_EBN is not None
        return config.membership * choice_cross_entropy(logit_EBN, computed(rows, prob_BNJ))
