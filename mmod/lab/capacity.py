"""Capacities learned with the weights, one per routed block, under one budget.

Axes: L routed blocks, G quarters, B images, N tokens, K slots per image, D channels.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from mmod.adapters import BlockStack, find_stacks
from mmod.analysis import flops
from mmod.blocks import ModelHook, attach, detach_hooks, model_hooks
from mmod.config import RoutingConfig, spelled
from mmod.io.tables import markdown_table
from mmod.lazy import name_missing_extra
from mmod.methods.route import capacities, routed_blocks, routing_configs
from mmod.model import set_capacity_, unroute_
from mmod.ops.select import kept_count
from mmod.planning.plan_search import BlockCosts, best_choices, stopwatch
from mmod.routing import Router, Routing, Rule, TokenGroups, TokenMasks
from mmod.threads import PerThread
from mmod.values import check_value, one_of

COSTS = ("flops", "milliseconds")
# A capacity between two eighths weighs the tokens between them by a fraction.
STEPS = 8
# Costs are counted or measured at quarters, and interpolated: they are close to linear.
QUARTERS = tuple(Fraction(number, 4) for number in range(5))
# Capacities of plans.
HUNDREDTHS = tuple(Fraction(number, 100) for number in range(101))


class LearnedCapacity(nn.Module):
    """Capacities of a model's routed blocks: the parameter `offsets` has one number for each block.

    Args:
        costs: Cost of every block at ascending quarters, as a share of the dense model's cost (L, G). Five quarters
            start at capacity 0, four at 1/4.
        fixed: Share of everything outside these blocks.
    """

    costs_LG: Tensor
    room: Tensor

    def __init__(self, costs: Sequence[Sequence[float]], fixed: float, budget: float, rate: float) -> None:
        super().__init__()
        self.rate = rate
        self.offsets = nn.Parameter(torch.zeros(len(costs)))
        self.register_buffer("costs_LG", torch.tensor(costs))
        self.register_buffer("room", torch.tensor(budget - fixed))
        least = sum(row[0] for row in costs) + fixed
        most = sum(row[-1] for row in costs) + fixed
        if not least < budget < most:
            raise ValueError(
                f"budget must be in ({least:.4f}, {most:.4f}) of the dense model's cost, the range of these "
                f"blocks, got {budget:.4g}"
            )

    @property
    def grid(self) -> list[Fraction]:
        """Capacities with known costs (G)."""
        return list(QUARTERS[-self.costs_LG.shape[1] :])

    def forward(self) -> Tensor:
        """Return the capacities (L), differentiable by the offsets."""
        offset_L = self.rate * self.offsets
        level = self._level(offset_L.detach().double().cpu().numpy())
        share_L = torch.sigmoid(offset_L + level)
        slope_L = self._slopes(share_L.detach())
        # The level falls as an offset rises, so the total cost is constant: `shift` is 0 and carries that gradient.
        rise_L = (slope_L * share_L * (1 - share_L)).detach()
        excess = (slope_L * share_L).sum()
        shift = (excess - excess.detach()) / rise_L.sum().clamp(min=1e-12)
        first = float(self.grid[0])
        return first + (1 - first) * torch.sigmoid(offset_L + level - shift)

    def _slopes(self, share_L: Tensor) -> Tensor:
        """Return the slope of cost over capacity, up to a factor (L)."""
        steps = self.costs_LG.shape[1] - 1
        # The last step ends at 1, which belongs to it.
        place_L1 = (share_L * steps).long().clamp(max=steps - 1)[:, None]
        return self.costs_LG.diff(dim=1).gather(1, place_L1)[:, 0]

    def _level(self, offset_L: np.ndarray[Any, Any]) -> float:
        """Return the level at which the costs equal the budget, by bisection."""
        table = self.costs_LG.double().cpu().numpy()
        room = float(self.room)
        grid = np.linspace(0, 1, table.shape[1])
        # Beyond 40 the sigmoid is 0 or 1 in float32, whatever the offset.
        low = -40 - offset_L.max()
        high = 40 - offset_L.min()
        # 60 halvings of this range reach the precision of float64.
        for _ in range(60):
            middle = (low + high) / 2
            share_L = 1 / (1 + np.exp(-(offset_L + middle)))
            spent = sum(np.interp(share, grid, row) for share, row in zip(share_L, table))
            if spent < room:
                low = middle
            else:
                high = middle
        return float(low + high) / 2


class PartialSlots(NamedTuple):
    """A capacity between two others: tokens that only the larger one keeps run at reduced weight.

    Args:
        lower: The smaller capacity; the larger one is the router's.
        share: Weight of the tokens that the smaller one drops, in [0, 1]; a scalar that may carry a gradient.
    """

    lower: Fraction
    share: Tensor

    def weigh(self, routing: Routing, prefix: int) -> Routing:
        """Return a decision at the larger capacity with the weights of the capacity between."""
        score_BN = routing.score_BN
        kept = routing.kept
        tokens = routing.tokens
        assert isinstance(tokens, TokenMasks)
        level_BN = score_BN.detach().masked_fill(tokens.protected(score_BN, prefix), torch.inf)
        level_BK = level_BN.gather(1, kept.index_BK)
        if kept.valid_BK is not None:
            level_BK = level_BK.masked_fill(~kept.valid_BK, -torch.inf)
        # Sorted twice: the first gives the order, the second each slot's rank in it.
        rank_BK = level_BK.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
        if tokens.valid_BN is None:
            whole_BK = rank_BK < kept_count(score_BN.shape[1], self.lower, prefix)
        else:
            count_B1 = tokens.valid_BN.sum(1, keepdim=True) * self.lower.numerator // self.lower.denominator
            whole_BK = rank_BK < count_B1.clamp(min=max(1, prefix))
        # Every offset gets a gradient, even 0.
        weight_BK = torch.where(whole_BK, 1 + 0 * self.share, self.share)
        gate_BK = weight_BK if routing.gate_BK is None else routing.gate_BK * weight_BK
        # Torch 2.11 cannot rebuild what `_replace` makes, if the value outlives a compiled graph.
        return Routing(
            routing.kept,
            routing.score_BN,
            gate_BK,
            routing.skipped_BN,
            routing.joined,
            routing.tokens,
            routing.importance_BN,
            routing.predicted_BN,
            routing.rule,
        )


class LearnedRouter(Router):
    """A router while its capacity is learned, which weighs the slots between two eighths of the tokens.

    Attributes:
        partial: Weights of the last slots in this thread's pass; None where every slot runs in full.
    """

    partial: PerThread[PartialSlots | None]
    # The weights of a decision belong to one block.
    shares_decisions = False

    def forward(
        self,
        x_BND: Tensor,
        importance_BN: Tensor | None = None,
        tokens: TokenMasks | TokenGroups | None = None,
        earlier: Routing | None = None,
    ) -> Routing:
        """Decide for a batch of tokens, see `Router.forward`; the last slots run at a part of their weight."""
        routing = super().forward(x_BND, importance_BN, tokens, earlier)
        partial = self.partial.value
        return routing if partial is None else partial.weigh(routing, self.prefix)


def begin_learning(router: Any) -> None:
    """Turn a router into one whose capacity is learned."""
    # In place, because hooks and the optimiser hold this very module.
    router.__class__ = LearnedRouter
    router.partial = PerThread(type(None))


def end_learning(model: nn.Module) -> None:
    """Give all routers whose capacities are learned their class back."""
    # peft may have wrapped a router and made copies of it.
    routers: list[Any] = [module for module in model.modules() if isinstance(module, LearnedRouter)]
    for router in routers:
        router.__class__ = Router
        del router.partial


@dataclass(eq=False)
class CapacityHook(ModelHook):
    """Lets routed blocks decide by the learned capacities, in the thread of a forward pass."""

    # Undoing the routing removes it too.
    kind = "routing"
    model: nn.Module
    module: LearnedCapacity
    names: tuple[str, ...]
    tokens: Sequence[int]
    budget: float
    cost: str
    _rounded: tuple[list[float], list[int]] | None = None

    @property
    def routers(self) -> list[LearnedRouter]:
        """The routers of the blocks."""
        return [self.model.get_submodule(f"{name}.router") for name in self.names]  # type: ignore[misc]

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Set the capacities of a forward pass."""
        if self.module.offsets.is_meta:
            # A copy on the meta device, made to count FLOPs, has no values and keeps its capacities.
            return
        learned_L = self.module() if module.training and torch.is_grad_enabled() else None
        if learned_L is None:
            lower = upper = self.chosen()
        else:
            # The largest eighth below each capacity, and the one above.
            places = [min(int(capacity * STEPS), STEPS - 1) for capacity in learned_L.tolist()]
            lower = [Fraction(place, STEPS) for place in places]
            upper = [Fraction(place + 1, STEPS) for place in places]
        for at, router in enumerate(self.routers):
            partial = None
            if learned_L is not None:
                partial = PartialSlots(lower[at], (learned_L[at] - float(lower[at])) * STEPS)
            router.override(Rule(router.config, upper[at]))
            router.partial.value = partial

    def after(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> None:
        """End the capacities of the forward pass."""
        for router in self.routers:
            router.override(None)
            router.partial.value = None

    def chosen(self) -> list[Fraction]:
        """Return the capacities of the nearest plan within the budget."""
        module = self.module
        offsets = module.offsets.tolist()
        if self._rounded is None or self._rounded[0] != offsets:
            # The tolerance covers rounding: the budget is a share of a sum.
            room = float(module.room) + 1e-9
            minimum = module.grid[0]
            # Capacities below the grid are made too expensive to be chosen.
            costs = [
                [cost if capacity >= minimum else 2 * room for capacity, cost in zip(HUNDREDTHS, row)]
                for row in self.costs()
            ]
            losses = [[(float(capacity) - target) ** 2 for capacity in HUNDREDTHS] for target in self.learned()]
            # The plan of least squared distance, by the solver that plans use.
            self._rounded = offsets, best_choices(losses, costs, room)
        return [HUNDREDTHS[index] for index in self._rounded[1]]

    def learned(self) -> list[float]:
        """Return the learned capacities, not rounded."""
        with torch.no_grad():
            capacities: list[float] = self.module().tolist()
        return capacities

    def costs(self) -> list[list[float]]:
        """Return the cost of every hundredth by block, interpolated over the number of kept tokens."""
        table = []
        for router, tokens, row in zip(self.routers, self.tokens, self.module.costs_LG.tolist()):
            counts = [kept_count(tokens, capacity, router.prefix) for capacity in HUNDREDTHS]
            known = [kept_count(tokens, capacity, router.prefix) for capacity in self.module.grid]
            table.append(np.interp(counts, known, row).tolist())
        return table


@dataclass(frozen=True)
class LearnedPlan:
    """Learned capacities and the nearest plan within the budget; `print` shows both.

    Args:
        learned: Their learned capacities, whose total cost equals the budget.
        shares: Costs of the routed blocks with the plan, as shares of the dense model's cost.
        fixed: Share of everything outside these blocks.
        cost: Unit of the costs: "flops" or "milliseconds".
    """

    names: tuple[str, ...]
    learned: tuple[float, ...]
    plan: RoutingConfig
    shares: tuple[float, ...]
    fixed: float
    budget: float
    cost: str

    @property
    def share(self) -> float:
        """The plan's cost as a share of the dense model's; for milliseconds, an estimate from equal capacities."""
        return self.fixed + sum(self.shares)

    def __str__(self) -> str:
        kept = [row.capacity for row in self.plan.rows]
        rows = zip(self.names, self.learned, kept, self.shares)
        table = markdown_table(
            ["block", "learned", "capacity", "share of the cost"],
            [(name, f"{learned:.4f}", f"{capacity:g}", f"{share:.4f}") for name, learned, capacity, share in rows],
        )
        return (
            f"{table}\n\n{len(self.names)} of {self.plan.depth} blocks are routed, {self.share:.4f} of the "
            f"dense model's {self.cost} for a budget of {self.budget:.4g}"
        )

    @name_missing_extra()
    def plot(self, path: str | Path, overwrite: bool = False) -> None:
        """Draw learned and planned capacities over depth."""
        from mmod.analysis.style import new_figure, save_figure

        figure = new_figure(6, 3)
        axes = figure.subplots()
        axes.bar(self.plan.blocks, self.plan.capacity, label="plan")
        axes.plot(self.plan.blocks, self.learned, "k_", markersize=14, label="learned")
        axes.set(xlabel="block", ylabel="capacity", xlim=(-0.6, (self.plan.depth or 0) - 0.4), ylim=(0, 1))
        axes.legend(fontsize="small")
        save_figure(figure, path, overwrite)


def learn_capacity_(
    model: nn.Module,
    budget: float,
    example: Tensor,
    *,
    cost: str = "flops",
    rate: float = 100.0,
) -> LearnedCapacity:
    """Learn the capacity of every routed block of a model under a fixed total cost; return the parameter to train.

    Block l has the capacity `low + (1 - low) * sigmoid(rate * offset_l + level)`. Its offset is a parameter. The level
    is one number for all blocks: every forward pass solves for the level at which the total cost equals the budget. So
    the budget holds in every step, without a penalty term.

    - In training a block runs at the next higher eighth. Tokens beyond the next lower eighth are weighted by how far
      the capacity lies between the two, which gives the loss an exact gradient by the capacity.
    - In evaluation mode, and without gradients, blocks run at the nearest plan in hundredths within the budget.

    All offsets start at 0, that is, at equal capacities that meet the budget. Call `settle_capacity_` before the model
    is saved; `mmod.unroute_` ends the learning too.

    Args:
        model: A routed image model with top-k selection and without gradient checkpointing. The hook runs only when the
            model itself is called, not its blocks.
        budget: Share of the dense model's FLOPs in (0, 1), or milliseconds, see `cost`.
        example: A batch of images (B, C, H, W), on the model's device.
        cost: Unit of the budget: "flops", or "milliseconds" of one forward pass over the example, measured here.
        rate: Learning rate of the offsets relative to the weights', for optimizers that normalise gradients (Adam).

    Returns:
        The module with the offsets, on the device of the example. The model does not hold it: give its parameter to
        the optimizer.

    Source: DiffRate, arXiv 2305.17997 (compression rates per block by the gradient of the loss); DSA, arXiv 2004.02164
        (shares per layer under one budget by gradient). Partial weights and the budget level are this library's.

    Example:
        >>> import timm, mmod
        >>> model = mmod.route_(timm.create_model("test_vit"), mmod.RoutingConfig(blocks="all", router="linear"))
        >>> learned = learn_capacity_(model, 0.6, torch.randn(2, 3, 160, 160))
        >>> optimizer = torch.optim.AdamW([*model.parameters(), *learned.parameters()])
        >>> model(torch.randn(2, 3, 160, 160)).sum().backward()
        >>> optimizer.step()
        >>> result = settle_capacity_(model.eval())
        >>> 0.58 < result.share <= 0.6, result.plan.blocks == (0, 1, 2, 3, 4, 5)
        (True, True)
    """
    one_of("cost", cost, COSTS)
    check_value("budget", budget, float, "(0, 1)" if cost == "flops" else "(0, inf)")
    check_value("rate", rate, float, "(0, inf)")
    check_value("example", example, Tensor)
    if example.ndim != 4:
        raise ValueError(f"example must be a batch of images (B, C, H, W), got {tuple(example.shape)}")
    part, config, _ = _routed_part(model)
    _check(model, config)
    always_keep = all(block.router.always_keeps for block in routed_blocks(model).values())
    # Capacity 0 needs tokens that are always kept, such as a class token.
    grid = QUARTERS if always_keep else QUARTERS[1:]
    costs, fixed, tokens = _counted(model, example, grid)
    if cost == "milliseconds":
        measure = stopwatch(unroute_(copy.deepcopy(model)).eval(), part, example)
        with torch.no_grad():
            dense, shares = measure([config.replace(capacity=float(capacity)) for capacity in grid])
        costs = costs.timed(dense, shares)
        # A measured time is split over the blocks, so nothing is left outside them.
        fixed = 0.0
    # Measured times are noisy: more tokens must not cost less.
    rising = (np.maximum.accumulate(costs.options, axis=1) / costs.total).tolist()
    share = budget / costs.total if cost == "milliseconds" else budget
    module = LearnedCapacity(rising, fixed / costs.total, share, rate).to(example.device)
    hook = CapacityHook(model, module, tuple(routed_blocks(model)), tokens, share, cost)
    for block in routed_blocks(model).values():
        begin_learning(block.router)
    # Counts of FLOPs and printed capacities are then those of the budget.
    set_capacity_(model, list(map(float, hook.chosen())))
    attach(model, hook)
    return module


def settle_capacity_(model: nn.Module) -> LearnedPlan:
    """Return the nearest plan within the budget, route by it, and end the learning of capacities.

    Raises:
        ValueError: No capacities are learned, see `learn_capacity_`.
    """
    hook = capacity_hook(model)
    if hook is None:
        raise ValueError(f"this {type(model).__name__} learns no capacities: call mmod.lab.learn_capacity_ first")
    _, config, stack = _routed_part(model)
    chosen = hook.chosen()
    learned = tuple(hook.learned())
    room = float(hook.module.room)
    shares = tuple(row[HUNDREDTHS.index(capacity)] for row, capacity in zip(hook.costs(), chosen))
    plan = config.replace(capacity=tuple(map(float, chosen))).resolved(len(stack.blocks))
    detach_hooks(model, CapacityHook)
    end_learning(model)
    set_capacity_(model, list(map(float, chosen)))
    return LearnedPlan(hook.names, learned, plan, shares, hook.budget - room, hook.budget, hook.cost)


def capacity_hook(model: nn.Module) -> CapacityHook | None:
    """Return the hook by which a model learns its capacities, or None."""
    return next((hook for hook in model_hooks(model) if isinstance(hook, CapacityHook)), None)


def _routed_part(model: nn.Module) -> tuple[str, RoutingConfig, BlockStack]:
    configs = routing_configs(model)
    if len(configs) > 1:
        raise ValueError(f"capacities are learned in one part of a model; routed are {', '.join(configs)}")
    ((part, config),) = configs.items()
    return part, config, find_stacks(model)[part]


def _check(model: nn.Module, config: RoutingConfig) -> None:
    if capacity_hook(model) is not None:
        raise ValueError(f"the capacities of this {type(model).__name__} are being learned already")
    if config.select != "topk" or config.joins:
        raise ValueError(
            f"capacities are learned with select='topk' and skipped='pass', got {spelled(config.select)!r} "
            f"and {spelled(config.skipped)!r}"
        )
    for name, block in routed_blocks(model).items():
        router = block.router
        if type(router) is not Router:
            raise ValueError(f"capacities are learned in models of images, and {name} has a {type(router).__name__}")


def _counted(model: nn.Module, example: Tensor, grid: Sequence[Fraction]) -> tuple[BlockCosts, float, list[int]]:
    """Return FLOPs by block and capacity, FLOPs outside the blocks, and the tokens that enter a block, by block."""
    original = capacities(model)
    columns = []
    fixed = 0.0
    channels, height, width = example.shape[1:]
    try:
        # Counted with all blocks at one capacity: costs of a block hardly depend on the others.
        for capacity in grid:
            set_capacity_(model, dict.fromkeys(original, float(capacity)))
            report = flops(model, (channels, height, width))
            rows = [row for row in report.blocks if row.name in original]
            columns.append([float(row.routed) for row in rows])
            fixed = float(report.routed - sum(row.routed for row in rows))
    finally:
        set_capacity_(model, original)
    dense = tuple(float(row.dense) for row in rows)
    return BlockCosts(tuple(zip(*columns)), dense, float(report.dense)), fixed, [row.tokens for row in rows]
