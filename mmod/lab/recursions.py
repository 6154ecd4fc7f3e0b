"""Mixture-of-Recursions: shared middle blocks run repeatedly, on fewer tokens at every recursion.

Axes: B images or samples, N tokens, K slots of an image, D channels, R recursions.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn

from mmod.adapters import BlockStack
from mmod.blocks import (
    BlockCall,
    BlockState,
    ConvertedBlock,
    ModelHook,
    ReadBlocks,
    Record,
    Shell,
    attach,
    convert,
    make_records,
)
from mmod.blocks.rows import write_kept
from mmod.lab.mixture import (
    Choosing,
    Mixture,
    TokenRouter,
    balance_loss,
    choice_cross_entropy,
    first_floating,
    numbered,
)
from mmod.methods.base import owner_of, register_method
from mmod.ops import gather_rows, select_topk
from mmod.ops.backend import exporting
from mmod.ops.gate import apply_gate
from mmod.ops.select import kept_count, select_threshold
from mmod.routing import Kept, LinearScore, Routing
from mmod.routing.decoder import Predictor
from mmod.routing.groups import kept_by_mask
from mmod.threads import PerThread

if TYPE_CHECKING:
    from mmod.lab.decoders import SharedLayer

# Factor of the sigmoid: the best value in Table 13 of the source.
GATE = 0.1


@register_method("recursions")
@dataclass(frozen=True, kw_only=True)
class Recursions(Mixture):
    """Recursion over shared middle blocks of a ViT or decoder (Mixture-of-Recursions, "Middle-Cycle").

    Of L blocks, the first and the last ones stay. The `(L - first - last) / R` blocks after the first ones are shared:
    they run on all tokens, then on fewer tokens at every further recursion. The remaining middle blocks are removed.
    Undoing the method restores them; in a model loaded from a folder, they have new weights. With f the shared blocks,
    H a token's state and H1 its state before the first recursion, a token that runs becomes, at recursion r,

        H + g f(H)            with g = 0.1 sigmoid(w_r . H), where recursions choose their tokens
        g f(H)                with g the r-th of softmax(W H1), where tokens choose their depth
        g f(H) + H1           where tokens choose, at their last recursion

    Args:
        recursions: R, the maximum number of recursions.
        choice: Who chooses:
            - "topk": recursion r keeps the (R - r + 1) / R of all tokens with top gates, among the tokens of recursion
              r - 1;
            - "tokens": every token chooses its depth once;
            - "score" and "predictor": for language models, as "topk" in training. In evaluation each token is decided
              alone: "score" takes those whose logit is at least 0, "predictor" asks a small network.
        keys: Keys that running tokens attend to: those of the "kept" tokens (recursion-wise caching), or the keys and
            values of all tokens from the "first" recursion (recursive sharing).
        adds: What g weighs: the blocks' "output", or the "change" that they make, which is added to H.
        first: Number of blocks before the shared ones.
        last: Number of blocks after the shared ones.

    Prefix tokens of an image run in all recursions.

    Source: Bae et al., arXiv 2507.10524; load balance as in Fedus et al., arXiv 2101.03961.

    Example:
        >>> import timm, mmod
        >>> model = mmod.apply_(timm.create_model("test_vit"), Recursions(recursions=2))
        >>> len(model.blocks), len(model.blocks[1].shared)
        (3, 2)
    """

    replaces: ClassVar[str] = ".shared."
    nested: ClassVar[bool] = True
    recursions: Annotated[int, "[1, inf)"] = 2
    keys: Literal["kept", "first"] = "kept"
    adds: Literal["output", "change"] = "output"
    first: Annotated[int, "[0, inf)"] = 1
    last: Annotated[int, "[0, inf)"] = 1
    membership: float = 0.001

    def check(self, model: nn.Module, stack: BlockStack) -> None:
        """Raise a ValueError unless the blocks can be shared and receive complete images or texts."""
        super().check(model, stack)
        middle = len(stack.blocks) - self.first - self.last
        if middle < self.recursions or middle % self.recursions:
            raise ValueError(
                f"{len(stack.blocks)} blocks without the first {self.first} and the last {self.last} are {middle}, "
                f"which recursions={self.recursions} must divide"
            )
        layer_types = getattr(getattr(model, "config", None), "layer_types", None) or ()
        if len(set(layer_types)) > 1 or getattr(model, "rope_mixed", False):
            raise ValueError(
                f"blocks of this {type(model).__name__} attend in different ways, or have different rotary positions, "
                "and cannot be shared"
            )
        for name, block in zip(stack.names, stack.blocks):
            if self.keys == "first" and "all" not in stack.call_of(block, None).contexts:
                raise ValueError(
                    f"keys='first' is not possible in {name}: it needs fused attention with known projections to keys "
                    "and values, as in timm and open_clip"
                )

    def change(self, model: nn.Module, stack: BlockStack) -> None:
        """Replace the middle blocks by a `Cycle`."""
        container: Any = model.get_submodule(stack.block_list)
        # A list that names its blocks would be numbered anew.
        keys = () if "0" in container._modules else tuple(container._modules)
        middle = list(container[self.first : len(container) - self.last])
        del container[self.first + 1 : len(container) - self.last]
        # One module takes the place of the first of them, and the blocks after it move up.
        cycle = Cycle(self, stack, middle, keys).train(container.training)
        shell = cycle.mod_state.call.shell
        if shell.outer is not None:
            convert(cycle, shell.outer, cycle.mod_state)
        container[self.first] = cycle
        if keys:
            container._modules = dict(zip((*keys[: self.first + 1], *keys[len(keys) - self.last :]), container))
        stack.watch_grid({stack.names[self.first]: cycle})
        if stack.language:
            from mmod.lab.decoders import check_texts

            attach(owner_of(model, stack), ModelHook(partial(check_texts, self.kind, False)))
        # Tokens that chose fewer recursions than others of their image are hidden as keys.
        if self.choice == "tokens" or (stack.proof is not None and stack.proof.rows):
            stack.refuse_divided(owner_of(model, stack))

    def restore(self, model: nn.Module) -> None:
        """Restore the removed blocks, on the model's current device and in its dtype."""
        cycles = {name: module for name, module in model.named_modules() if isinstance(module, Cycle)}
        for name, cycle in cycles.items():
            container: Any = model.get_submodule(name.rpartition(".")[0])
            # Removed layers of a loaded model are on meta until the model's initialisation fills them.
            restored = cycle.blocks(getattr(model, "_init_weights", None))
            blocks: list[nn.Module] = []
            for child in container:
                if child is cycle:
                    blocks += restored
                else:
                    blocks.append(child)
            del container[:]
            container.extend(blocks)
            if cycle.mod_state.keys:
                container._modules = dict(zip(cycle.mod_state.keys, container))
        super().restore(model)


class Depths(NamedTuple):
    """Probability of every depth (B, N, R), and a token's last recursion, from 0 (B, N)."""

    prob_BNR: Tensor
    last_BN: Tensor


class CycleState(NamedTuple):
    """Plain state of a `Cycle`.

    Args:
        call: How the first shared block is called, and so the cycle.
        runs: How each shared block is called in each recursion: a block of images always by its `BlockCall`.
        removed: The blocks that are not shared.
        keys: Names of all blocks in their list; none where these are numbers.
    """

    config: Recursions
    prefix: int
    read_blocks: ReadBlocks | None
    call: BlockCall
    runs: Sequence[Sequence[BlockCall | SharedLayer]]
    removed: list[nn.Module]
    keys: tuple[str, ...]
    records: PerThread[Record]


class Cycle(Choosing):
    """Module that replaces the middle blocks and applies the shared blocks recursively.

    It keeps the removed blocks for undoing. There is one router per recursion, or one with which tokens choose their
    depth, and with choice="predictor" one predictor per recursion after the first.
    """

    def __init__(self, config: Recursions, stack: BlockStack, middle: list[nn.Module], keys: tuple[str, ...]) -> None:
        super().__init__()
        count = len(middle) // config.recursions
        shared = middle[:count]
        removed = middle[count:]
        calls = [stack.call_of(block, None) for block in shared]
        for block, call in zip(shared, calls):
            if call.shell.inner is not None:
                # The shell gives the block the interface that a cycle expects.
                convert(block, ConvertedBlock, BlockState(call=call), Shell(inner=call.shell.inner))
        runs: Sequence[Sequence[BlockCall | SharedLayer]] = [calls] * config.recursions
        if stack.language:
            from mmod.lab.decoders import SharedLayer

            runs = [[SharedLayer(call, count * recursion) for call in calls] for recursion in range(config.recursions)]
        state = CycleState(config, stack.prefix, stack.read_blocks, calls[0], runs, removed, keys, make_records())
        self.mod_state = state
        weight = first_floating(shared[0])
        like: dict[str, Any] = {"device": weight.device, "dtype": weight.dtype}
        self.shared = nn.ModuleList(shared)
        if config.choice == "tokens":
            self.routers = nn.ModuleList([TokenRouter(stack.dim, config.recursions, weight)])
        else:
            scores = [LinearScore(stack.dim, normalize=False, init_std=0.02, **like) for _ in range(config.recursions)]
            self.routers = nn.ModuleList(scores)
        if config.choice == "predictor":
            self.predictors = nn.ModuleList(Predictor(stack.dim, **like) for _ in self.mod_decision_names())

    def mod_decision_names(self) -> tuple[str, ...]:
        """Return the names of the recursions that choose; the first one runs on all tokens."""
        return tuple(f"recursion{number + 1}" for number in range(1, self.mod_state.config.recursions))

    def mod_scorers(self) -> dict[str, nn.Module]:
        """Return the routers and the predictors of the recursions."""
        return {**numbered(self, "routers"), **numbered(self, "predictors")}

    @property
    def mod_dense_blocks(self) -> int:
        """Number of dense blocks that the cycle replaces."""
        return len(self.shared) + len(self.mod_state.removed)

    def blocks(self, initialise: Callable[[nn.Module], None] | None) -> list[nn.Module]:
        """Return the replaced dense blocks; `initialise` fills those that are on the meta device."""
        weight = first_floating(self.shared)
        for block in self.mod_state.removed:
            if initialise is not None and next(block.parameters()).is_meta and not weight.is_meta:
                block.to_empty(device=weight.device).apply(initialise)
        removed = [block.to(weight.device, weight.dtype).train(self.training) for block in self.mod_state.removed]
        return [*self.shared, *removed]

    def forward(self, x_BND: Tensor, *args: object, **kwargs: object) -> Tensor:
        """Return all tokens after their recursions (B, N, D)."""
        config = self.mod_state.config
        record = self.mod_record
        read: Collection[int] | None = ()
        if self.mod_state.read_blocks is not None:
            read = self.mod_state.read_blocks()
        # None is all of them.
        if read is None or len(read):
            raise ValueError(
                "hidden states of layers are not defined where layers are shared and run on fewer tokens: call the "
                "model without output_hidden_states, and use no backbone that returns features of layers"
            )
        arguments = self.mod_state.call.bind(args, kwargs)
        valid_BN = self.mod_state.runs[0][0].valid(arguments, x_BND)
        learns = self.training and self.mod_has_loss
        losses: list[Tensor] = []
        if self.training:
            self.mod_tell_of_frozen()
        first_BND = x_BND
        # Keys and values of all tokens for every shared block, filled by the first recursion.
        cached: list[list[tuple[Tensor, Tensor]]] = [[] for _ in self.shared]
        depths = None
        if config.choice == "tokens":
            depths = self._depths(x_BND, valid_BN)
        if depths is not None and learns:
            losses.append(config.balance * self._balance(depths.prob_BNR, valid_BN))
        previous_BN = valid_BN
        for recursion in range(config.recursions):
            if depths is None:
                routing = self._choose(x_BND, previous_BN, valid_BN, recursion)
                if learns and recursion:
                    loss = choice_cross_entropy(routing.logit_BN, routing.keep_BN, previous_BN)
                    losses.append(config.membership * loss)
            else:
                routing = self._follow(depths, recursion)
            # The first recursion runs padding too, and later ones must not choose it.
            previous_BN = routing.keep_BN if recursion else valid_BN
            if recursion and record.traced:
                record.keep(f"recursion{recursion + 1}", routing)
            # z stays what the recursion began with: the change to it is what is weighed.
            z = y = gather_rows(x_BND, routing.kept.index_BK)
            for number, keys in enumerate(cached):
                y = self._run(number, recursion, arguments, x_BND, y, routing, keys)
            if y.shape[1]:
                x_BND = self._leave(x_BND, z, y, first_BND, depths, routing, recursion)
        if losses:
            self.mod_keep_loss(losses, first_BND, losses[0])
        return x_BND

    def _alone(self, x_BND: Tensor) -> bool:
        """Return whether tokens are decided independently; FLOPs, counted on meta, are those of training."""
        return self.mod_state.config.two_ways and not (x_BND.is_meta or self.mod_chooses_together(self.training))

    def _run(
        self,
        number: int,
        recursion: int,
        arguments: Mapping[str, object],
        x_BND: Tensor,
        y: Tensor,
        routing: Routing,
        keys: list[tuple[Tensor, Tensor]],
    ) -> Tensor:
        """Return the rows of a recursion after a shared block; hosts take no empty sequence."""
        block = self.shared[number]
        run = self.mod_state.runs[recursion][number]
        if self.mod_state.config.keys == "first":
            if not y.shape[1]:
                return y
            # In the first recursion, the rows are all tokens.
            tokens = x_BND if recursion else y
            return run.attend_to_all(block, block, arguments, tokens, y, routing, keys)
        # A cache hears of a run without rows too.
        selected = run.select_tokens(arguments, x_BND, routing)
        if not y.shape[1]:
            return y
        return block(y, **selected)

    def _choose(self, x_BND: Tensor, previous_BN: Tensor | None, valid_BN: Tensor | None, recursion: int) -> Routing:
        """Choose among the tokens of the previous recursion: by top-k gates, or independently by logits."""
        config = self.mod_state.config
        predicted_BN = None
        score_BN = self.routers[recursion](x_BND)
        gate_BN = apply_gate(score_BN, "sigmoid", GATE)
        if not recursion:
            return _all_tokens(score_BN, gate_BN)
        if config.choice == "predictor":
            predicted_BN = self.predictors[recursion - 1](x_BND)
        if self._alone(x_BND):
            if exporting():
                raise ValueError("recursions of single tokens cannot be exported: how many run depends on the data")
            logit_BN = score_BN if predicted_BN is None else predicted_BN
            keep_BN = logit_BN >= 0
            if previous_BN is not None:
                keep_BN = keep_BN & previous_BN
            kept = kept_by_mask(keep_BN)
            assert gate_BN is not None
            return Routing(kept, score_BN, gate_BN.gather(1, kept.index_BK), predicted_BN=predicted_BN)
        share = Fraction(config.recursions - recursion, config.recursions)
        candidate_BN = score_BN
        if previous_BN is not None:
            candidate_BN = score_BN.masked_fill(~previous_BN, -torch.inf)
        kept, weight_BK = select_topk(candidate_BN, share, self.mod_state.prefix, valid_BN, gate="sigmoid", scale=GATE)
        return Routing(kept, score_BN, weight_BK, predicted_BN=predicted_BN)

    def _balance(self, prob_BNR: Tensor, valid_BN: Tensor | None) -> Tensor:
        """Return the load-balance loss of tokens that choose their depth."""
        if valid_BN is not None:
            return balance_loss(prob_BNR[valid_BN].unsqueeze(0))
        return balance_loss(prob_BNR[:, self.mod_state.prefix :])

    def _depths(self, x_BND: Tensor, valid_BN: Tensor | None) -> Depths:
        prefix = self.mod_state.prefix
        prob_BNR = self.routers[0](x_BND).softmax(dim=-1)
        last_BN = prob_BNR.argmax(dim=-1)
        # Prefix tokens run in all recursions, whatever their depth.
        deepest = torch.full_like(last_BN[:, :prefix], prob_BNR.shape[2] - 1)
        last_BN = torch.cat([deepest, last_BN[:, prefix:]], dim=1)
        if valid_BN is not None:
            last_BN = last_BN.masked_fill(~valid_BN, -1)
        return Depths(prob_BNR, last_BN)

    def _follow(self, depths: Depths, recursion: int) -> Routing:
        """Return the decision of a recursion under token choice: tokens whose last recursion is not over."""
        batch, tokens, count = depths.prob_BNR.shape
        prob_BN = depths.prob_BNR[..., recursion]
        if not recursion:
            return _all_tokens(prob_BN, prob_BN)
        if depths.last_BN.is_meta:
            # On meta, FLOPs are counted as if all depths were equally frequent.
            slots = kept_count(tokens, Fraction(count - recursion, count), self.mod_state.prefix)
            kept = Kept(torch.arange(slots, device=depths.last_BN.device).expand(batch, slots))
        else:
            level_BN = depths.last_BN.to(depths.prob_BNR.dtype)
            if exporting():
                raise ValueError("depths of tokens cannot be exported: how many tokens run depends on the data")
            kept = select_threshold(level_BN, recursion, prefix=self.mod_state.prefix)
        return Routing(kept, prob_BN, prob_BN.gather(1, kept.index_BK))

    def _leave(
        self,
        x_BND: Tensor,
        z: Tensor,
        y: Tensor,
        first_BND: Tensor,
        depths: Depths | None,
        routing: Routing,
        recursion: int,
    ) -> Tensor:
        """Return all tokens after a recursion, from its rows before (z) and after the shared blocks (y)."""
        assert routing.gate_BK is not None
        if self.mod_state.config.adds == "change":
            return write_kept(x_BND, z, y, routing)
        y = routing.gate_BK.to(y.dtype).unsqueeze(-1) * y
        if depths is None:
            y = z + y
        else:
            index_BK = routing.kept.index_BK
            ends_BK = depths.last_BN.gather(1, index_BK) == recursion
            # A token gets back its state before the first recursion, where its last one ends.
            first_BKD = gather_rows(first_BND, index_BK)
            y = y + torch.where(ends_BK.unsqueeze(-1), first_BKD, 0.0)
        # The gate is part of y already.
        return write_kept(x_BND, z, y, routing._replace(gate_BK=None))


def _all_tokens(score_BN: Tensor, gate_BN: Tensor | None) -> Routing:
    index_BN = torch.arange(score_BN.shape[1], device=score_BN.device).expand_as(score_BN)
    return Routing(Kept(index_BN), score_BN, gate_BN)
