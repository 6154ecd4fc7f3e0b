"""Blocks of a ViT that are shared and applied several times, each time to fewer tokens (Mixture-of-Recursions).

Axes: B images, N tokens, K slots of an image, D channels, R recursions.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn

from mmod.adapters import BlockStack
from mmod.blocks import StandingModule
from mmod.blocks.forward_pass import PerThread, recomputing
from mmod.blocks.rows import leave_rows
from mmod.methods.base import Method, Model
from mmod.methods.experts import balance_loss, probabilities
from mmod.ops import gather_rows, select_topk
from mmod.ops.select import kept_count, select_threshold
from mmod.routing import Routing
from mmod.routing.score.linear import LinearScore
from mmod.values import check_fields

# Factor of the sigmoid, the best of those that the source compares (Table 13).
GATE = 0.1


@dataclass(frozen=True)
class Recursions(Method):
    """The middle blocks of a ViT become fewer, which are shared and applied up to R times (Middle-Cycle).

    Of L blocks, the first and the last ones stay. The `(L - first - last) / R` that follow the first ones are applied
    to all tokens, then to fewer of them at each recursion; the others go. With f the shared blocks, H a token's state
    and H1 what it was before all recursions, a token that runs becomes, at recursion r,

        H + g f(H)            with g = 0.1 sigmoid(w_r . H), where recursions choose their tokens
        g f(H)                with g the r-th of softmax(W H1), where tokens choose their depth
        g f(H) + H1           the same, at the last recursion of the token

    Args:
        recursions: R, how often the shared blocks are applied at most.
        choice: The "recursions" choose by the highest gates, the r-th so many of the tokens of the one before that
            (R - r + 1) / R of all run; or the "tokens" choose once, by their most likely depth, how often they run.
        keys: Tokens that run attend to the "kept" tokens (recursion-wise caching), or to keys and values that the
            "first" recursion computed of all tokens, which are computed no more (recursive sharing).
        adds: What is weighed by g: the blocks' "output", or the "change" that they make, which is added to H.
        first: Blocks before those that are shared.
        last: Blocks after them.
        balance: Weight of the load-balance loss, where tokens choose.

    Tokens before the patches run in all recursions.

    Source: Bae et al., arXiv 2507.10524; load balance as in Fedus et al., arXiv 2101.03961.
    """

    recursions: int = 2
    choice: Literal["recursions", "tokens"] = "recursions"
    keys: Literal["kept", "first"] = "kept"
    adds: Literal["output", "change"] = "output"
    first: int = 1
    last: int = 1
    balance: float = 0.01
    kind: ClassVar[str] = "recursions"
    replaces: ClassVar[str] = ".shared."

    def __post_init__(self) -> None:
        check_fields(self, "method", recursions="[1, inf)", first="[0, inf)", last="[0, inf)", balance="[0, inf)")

    def check(self, model: nn.Module, stack: BlockStack) -> None:
        """Raise a ValueError unless the blocks can be shared, and their tokens are all there."""
        middle = len(stack.blocks) - self.first - self.last
        if middle < self.recursions or middle % self.recursions:
            raise ValueError(
                f"{len(stack.blocks)} blocks without the first {self.first} and the last {self.last} are {middle}, "
                f"which recursions={self.recursions} must divide"
            )
        if type(model).__name__ == "NaFlexVit":
            raise ValueError("recursions take all tokens for those of an image, and some of a NaFlexVit may be padding")
        if getattr(model, "rope_mixed", False):
            raise ValueError(
                f"each block of this {type(model).__name__} has rotary positions of its own: none is shared"
            )
        for name, block in zip(stack.names, stack.blocks):
            if self.keys == "first" and "all" not in stack.call_of(block, None).contexts:
                raise ValueError(f"keys='first' is not possible in {name}, whose attention is not a fused one")

    @property
    def has_loss(self) -> bool:
        """Whether the loads of recursions are balanced by a loss."""
        return self.choice == "tokens" and self.balance > 0

    def change(self, model: nn.Module, stack: BlockStack) -> None:
        """Put a `Cycle` in the place of the middle blocks."""
        container: Any = model.get_submodule(stack.names[0].rpartition(".")[0])
        middle = list(container[self.first : len(container) - self.last])
        shared = len(middle) // self.recursions
        del container[self.first + 1 : len(container) - self.last]
        container[self.first] = Cycle(self, stack, middle[:shared], middle[shared:])

    def remove(self, model: nn.Module) -> None:
        """Give the blocks that were left out back, where the model is by then."""
        containers: list[Any] = [module for module in model.modules() if any(map(_is_cycle, module.children()))]
        for container in containers:
            blocks = [block for child in container for block in (child.blocks() if _is_cycle(child) else [child])]
            del container[:]
            container.extend(blocks)


def recursions_(model: Model, **options: Any) -> Model:
    """Share the middle blocks of a ViT and apply them several times, see `Recursions`; `mmod.methods.undo_` undoes it.

    The shared blocks keep their weights. Undoing it leaves them theirs, and gives those that were left out back; in a
    model that was loaded, these are new.

    Args:
        model: A ViT made by `timm.create_model`.
        options: Fields of `Recursions`.

    Returns:
        The same model.

    Raises:
        ValueError: A value out of range, or a model whose blocks cannot be shared so.

    Example:
        >>> import timm
        >>> model = recursions_(timm.create_model("test_vit"), recursions=2)
        >>> len(model.blocks), len(model.blocks[1].shared)
        (3, 2)
    """
    return Recursions(**options).apply_(model)


def _is_cycle(module: nn.Module) -> bool:
    return isinstance(module, Cycle)


class Depths(NamedTuple):
    """How many recursions tokens run in.

    Args:
        prob_BNR: How likely a token finds each depth (B, N, R).
        last_BN: Number, from 0, of its last recursion (B, N).
    """

    prob_BNR: Tensor
    last_BN: Tensor


class CycleState:
    """What a `Cycle` knows beside its modules.

    Args:
        config: How it works.
        stack: The blocks of the model, which say how they are called.
        shared: Those that are shared.
        others: Those that were left out.
    """

    def __init__(self, config: Recursions, stack: BlockStack, shared: list[nn.Module], others: list[nn.Module]) -> None:
        self.config = config
        self.prefix = stack.prefix
        self.calls: list[Any] = [stack.call_of(block, None) for block in shared]
        self.others = others
        self.records: PerThread[dict[str, Tensor]] = PerThread(dict)


class Cycle(StandingModule):
    """Shared blocks in the place of the middle ones, which call them as often as its routers say.

    Args:
        config: How it works.
        stack: The blocks of the model.
        shared: Those that are shared.
        others: Those that were left out.

    Attributes:
        shared: The blocks.
        routers: One for each recursion, or the one by which tokens choose their depth.
    """

    def __init__(self, config: Recursions, stack: BlockStack, shared: list[nn.Module], others: list[nn.Module]) -> None:
        super().__init__()
        self.mod_state = CycleState(config, stack, shared, others)
        weight = next(shared[0].parameters())
        given: dict[str, Any] = {"device": weight.device, "dtype": weight.dtype}
        self.shared = nn.ModuleList(shared)
        if config.choice == "tokens":
            chooser = nn.Linear(stack.dim, config.recursions, bias=False, **given)
            nn.init.normal_(chooser.weight, std=0.02)
            self.routers = nn.ModuleList([chooser])
        else:
            scores = [LinearScore(stack.dim, normalize=False, init_std=0.02, **given) for _ in range(config.recursions)]
            self.routers = nn.ModuleList(scores)

    def blocks(self) -> list[nn.Module]:
        """Return the blocks that it took the place of, on the device and of the type of those that are shared."""
        weight = next(self.shared.parameters())
        others = [block.to(weight.device, weight.dtype).train(self.training) for block in self.mod_state.others]
        return [*self.shared, *others]

    def forward(self, x_BND: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return all tokens after their recursions (B, N, D).

        Args:
            x_BND: Tokens.
            args: Further arguments of the shared blocks.
            kwargs: The same by name.
        """
        config, calls = self.mod_state.config, self.mod_state.calls
        arguments = [call.bind(args, kwargs) for call in calls]
        first_BND = x_BND
        # Keys and values of all tokens in each shared block, from the first recursion on.
        taken: list[list[tuple[Tensor, Tensor]]] = [[] for _ in calls]
        depths = self._depths(x_BND) if config.choice == "tokens" else None
        keep_BN: Tensor | None = None
        for recursion in range(config.recursions):
            routing = self._choose(x_BND, keep_BN, recursion) if depths is None else self._follow(depths, recursion)
            keep_BN = routing.keep_BN
            if not routing.index_BK.shape[1]:
                # Nor does any token run in the recursions that follow.
                break
            z = y = gather_rows(x_BND, routing.index_BK)
            for block, call, given, keys in zip(self.shared, calls, arguments, taken):
                if config.keys == "kept":
                    y = block(y, **call.select_tokens(given, x_BND, routing))
                else:
                    y = call.attend_to_all(block, block, given, x_BND if recursion else y, y, routing, keys)
            x_BND = self._leave(x_BND, z, y, first_BND, depths, routing, recursion)
        return x_BND

    def _choose(self, x_BND: Tensor, keep_BN: Tensor | None, recursion: int) -> Routing:
        """Choose among the tokens that the recursion before kept."""
        count = self.mod_state.config.recursions
        score_BN = self.routers[recursion](x_BND)
        among_BN = score_BN if keep_BN is None else score_BN.masked_fill(~keep_BN, -torch.inf)
        capacity = Fraction(count - recursion, count)
        index_BK, _, gate_BK, inverse_BN = select_topk(
            among_BN, capacity, self.mod_state.prefix, gate="sigmoid", scale=GATE
        )
        return Routing(score_BN, index_BK, gate_BK, inverse_BN=inverse_BN)

    def _depths(self, x_BND: Tensor) -> Depths:
        """Let tokens decide in how many recursions they run."""
        prefix = self.mod_state.prefix
        prob_BNR = probabilities(x_BND, self.routers[0])
        if self.training and not recomputing():
            self.mod_state.records.own["prob_BNR"] = prob_BNR[:, prefix:]
        last_BN = prob_BNR.argmax(dim=-1)
        return Depths(
            prob_BNR,
            torch.cat([torch.full_like(last_BN[:, :prefix], prob_BNR.shape[2] - 1), last_BN[:, prefix:]], dim=1),
        )

    def _follow(self, depths: Depths, recursion: int) -> Routing:
        """Take the tokens whose last recursion is not over."""
        batch, tokens, count = depths.prob_BNR.shape
        valid_BK = None
        if depths.last_BN.is_meta:
            # Costs are counted there, as if all depths were as frequent.
            slots = kept_count(tokens, Fraction(count - recursion, count), self.mod_state.prefix)
            index_BK = torch.arange(slots, device=depths.last_BN.device).expand(batch, slots)
        else:
            level_BN = depths.last_BN.to(depths.prob_BNR.dtype)
            index_BK, valid_BK, _ = select_threshold(level_BN, recursion, prefix=self.mod_state.prefix)
        prob_BN = depths.prob_BNR[..., recursion]
        return Routing(prob_BN, index_BK, prob_BN.gather(1, index_BK), valid_BK)

    def _leave(
        self, x_BND: Tensor, z: Tensor, y: Tensor, first_BND: Tensor, depths: Depths | None, routing: Routing,
        recursion: int,
    ) -> Tensor:  # fmt: skip
        """Return all tokens after a recursion, given its rows before (z) and after the shared blocks (y)."""
        assert routing.gate_BK is not None
        if self.mod_state.config.adds == "change":
            return leave_rows(x_BND, z, y, routing)
        y = routing.gate_BK.to(y.dtype).unsqueeze(-1) * y
        if depths is None:
            y = z + y
        else:
            ends_BK = depths.last_BN.gather(1, routing.index_BK) == recursion
            y = y + torch.where(ends_BK.unsqueeze(-1), gather_rows(first_BND, routing.index_BK), 0.0)
        return leave_rows(x_BND, z, y, routing._replace(gate_BK=None))

    def auxiliary_loss(self) -> Tensor | None:
        """Return the weighed load-balance loss of the last pass in training mode, once; None where there is none."""
        prob_BNR = self.mod_state.records.own.pop("prob_BNR", None)
        balance = self.mod_state.config.balance
        return None if prob_BNR is None or not balance else balance * balance_loss(prob_BNR)
