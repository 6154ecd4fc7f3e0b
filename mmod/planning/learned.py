"""Capacities that are learned with the weights, one for each routed block, under a budget for all of them.

Letters: L routed blocks, G quarters.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from mmod.adapters import BlockStack, find_stacks
from mmod.analysis.flops import flops
from mmod.blocks.hook import ModelHook, attach, detach_hooks, model_hooks
from mmod.config import RoutingConfig, spelled
from mmod.model import capacities, routed_blocks, routing_configs, set_capacity, unroute_
from mmod.ops.select import kept_count
from mmod.planning.costs import Costs
from mmod.planning.knapsack import best_choices
from mmod.planning.settled import LearnedPlan
from mmod.planning.stopwatch import stopwatch
from mmod.routing import Router
from mmod.routing.partial import PartialSlots
from mmod.values import check_value, one_of

Model = TypeVar("Model", bound=nn.Module)

NAME = "learned_capacity"
COSTS = ("flops", "milliseconds")
# Tokens between two eighths run at a part of their weight.
STEPS = 8
# What costs are counted or measured at; in between they are close to linear.
QUARTERS = tuple(Fraction(each, 4) for each in range(5))
# Plans are made of capacities in hundredths.
HUNDREDTHS = tuple(Fraction(each, 100) for each in range(101))


class LearnedCapacity(nn.Module):
    """The capacities of a model's routed blocks as functions of one parameter for each; see `learn_capacity_`.

    Args:
        costs: Cost of each quarter in each block, as a share of the dense model's, rising (L, G). The first of four is
            that of the capacity 1/4, which then is the least there is; of five, that of 0.
        rest: That of everything else.
        budget: The share that all of it may have.
        rate: Factor of the parameters.

    Raises:
        ValueError: A budget out of reach.
    """

    def __init__(self, costs: Sequence[Sequence[float]], rest: float, budget: float, rate: float) -> None:
        super().__init__()
        self.rate = rate
        self.offsets = nn.Parameter(torch.zeros(len(costs)))
        # Measured costs go on in a run that is resumed.
        self.register_buffer("costs_LG", torch.tensor(costs))
        self.register_buffer("room", torch.tensor(budget - rest))
        # In hundredths, once they are settled.
        self.register_buffer("chosen_L", torch.full((len(costs),), -1))
        least, most = (sum(row[at] for row in costs) + rest for at in (0, -1))
        if not least < budget < most:
            raise ValueError(
                f"budget must be in ({least:.4f}, {most:.4f}) of the dense model's cost, what these blocks reach, got "
                f"{budget:.4g}"
            )

    costs_LG: Tensor
    room: Tensor
    chosen_L: Tensor

    @property
    def grid(self) -> list[Fraction]:
        """The capacities that costs are known of (G)."""
        return list(QUARTERS[-self.costs_LG.shape[1] :])

    @property
    def settled(self) -> bool:
        """Whether capacities are learned no more."""
        return int(self.chosen_L[0]) >= 0

    def forward(self) -> Tensor:
        """Return the capacities (L), which carry a gradient to the offsets."""
        offset_L = self.rate * self.offsets
        level = self._level(offset_L.detach().double().cpu().numpy())
        share_L = torch.sigmoid(offset_L + level)
        slope_L = self._slopes(share_L.detach())
        # What the level gives back when an offset rises, so that the sum of costs stays.
        rise_L = (slope_L * share_L * (1 - share_L)).detach()
        excess = (slope_L * share_L).sum()
        shift = (excess - excess.detach()) / rise_L.sum().clamp(min=1e-12)
        first = float(self.grid[0])
        return first + (1 - first) * torch.sigmoid(offset_L + level - shift)

    def _slopes(self, share_L: Tensor) -> Tensor:
        """Return how fast costs rise with capacity, up to a factor (L)."""
        steps = self.costs_LG.shape[1] - 1
        place_L1 = (share_L * steps).long().clamp(max=steps - 1)[:, None]
        return self.costs_LG.diff(dim=1).gather(1, place_L1)[:, 0]

    def _level(self, offset_L: np.ndarray[Any, Any]) -> float:
        """Return the level at which costs add up to the budget."""
        table, room = self.costs_LG.double().cpu().numpy(), float(self.room)
        grid = np.linspace(0, 1, table.shape[1])
        low, high = -40 - offset_L.max(), 40 - offset_L.min()
        for _ in range(60):
            middle = (low + high) / 2
            share_L = 1 / (1 + np.exp(-(offset_L + middle)))
            spent = sum(np.interp(share, grid, row) for share, row in zip(share_L, table))
            low, high = (middle, high) if spent < room else (low, middle)
        return float(low + high) / 2


class CapacityHook(ModelHook):
    """Tells routed blocks before every pass the capacities that are learned for them.

    Args:
        model: The model.
        module: Their capacities.
        names: Module names of the blocks.
        tokens: Tokens that enter each of them, of the image that costs were counted for.
        budget: See `learn_capacity_`.
        cost: See there.
    """

    def __init__(
        self, model: nn.Module, module: LearnedCapacity, names: Sequence[str], tokens: Sequence[int], budget: float,
        cost: str,
    ) -> None:  # fmt: skip
        self.model, self.module, self.names, self.tokens = model, module, tuple(names), tuple(tokens)
        self.budget, self.cost = budget, cost
        self._rounded: tuple[list[float], list[int]] | None = None

    @property
    def routers(self) -> list[Router]:
        """The routers of the blocks."""
        return [self.model.get_submodule(f"{name}.router") for name in self.names]  # type: ignore[misc]

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Set the capacities of a pass."""
        if self.module.offsets.is_meta:
            # A copy whose FLOPs are counted has no values, and runs at the capacities that it was given.
            return
        learned_L = self.module() if module.training and torch.is_grad_enabled() else None
        if learned_L is None or self.module.settled:
            lower = upper = self.chosen()
        else:
            places = [min(int(each * STEPS), STEPS - 1) for each in learned_L.tolist()]
            lower, upper = ([Fraction(place + step, STEPS) for place in places] for step in (0, 1))
        for at, router in enumerate(self.routers):
            router.capacity = upper[at]
            if learned_L is not None:
                router.partial = PartialSlots(lower[at], (learned_L[at] - float(lower[at])) * STEPS)

    def after(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> None:
        """Leave nothing of the pass in the routers."""
        for router in self.routers:
            router.partial = None

    def release(self) -> None:
        """Remove the parameters."""
        delattr(self.model, NAME)

    def hold(self, chosen: Sequence[Fraction]) -> None:
        """Train at some capacities from here on; what was learned stays as it is.

        Args:
            chosen: A capacity in hundredths for each block.
        """
        self.module.chosen_L.copy_(torch.tensor([int(100 * each) for each in chosen]))

    def chosen(self) -> list[Fraction]:
        """Return the capacities that are held, or else those of the plan that is nearest within the budget."""
        module = self.module
        if module.settled:
            return [HUNDREDTHS[each] for each in module.chosen_L.tolist()]
        offsets = module.offsets.tolist()
        if self._rounded is None or self._rounded[0] != offsets:
            # What is below the grid costs more than there is.
            room, first = float(module.room) + 1e-9, module.grid[0]
            costs = [
                [cost if each >= first else 2 * room for each, cost in zip(HUNDREDTHS, row)] for row in self.costs()
            ]
            losses = [[(float(each) - own) ** 2 for each in HUNDREDTHS] for own in self.learned()]
            self._rounded = offsets, best_choices(losses, costs, room)
        return [HUNDREDTHS[each] for each in self._rounded[1]]

    def learned(self) -> list[float]:
        """Return the capacities as learned."""
        with torch.no_grad():
            found: list[float] = self.module().tolist()
        return found

    def costs(self) -> list[list[float]]:
        """Return what each hundredth costs in each block, by how many tokens it keeps."""
        found = []
        for router, tokens, row in zip(self.routers, self.tokens, self.module.costs_LG.tolist()):
            counts = [
                [kept_count(tokens, each, router.prefix) for each in every] for every in (HUNDREDTHS, self.module.grid)
            ]
            found.append(np.interp(counts[0], counts[1], row).tolist())
        return found


def learn_capacity_(
    model: Model, budget: float, example: Tensor, *, cost: str = "flops", rate: float = 100.0
) -> Model:  # fmt: skip
    """Let the capacity of every routed block be learned with the weights, so that their total cost is the budget.

    Block l has the capacity `low + (1 - low) * sigmoid(rate * offset_l + level)`. Its offset is a parameter; the level
    is one number for all, found anew in every pass, at which their costs add up to the budget. A block gains what
    others lose, and the budget holds in every step without a penalty to be tuned. In training a block runs at the
    next eighth, and tokens that the eighth below leaves out run at a part of their weight: by how far the block's own
    capacity lies between the two. So the loss has an exact gradient by it. In
    evaluation mode, and without gradients, blocks run at the plan of hundredths that is nearest within the budget.

    All offsets begin at 0: at one capacity for all blocks that meets the budget. `settle_capacity_` ends it;
    `mmod.unroute_` ends it with the routing.

    Args:
        model: A routed model that takes images, with blocks that keep the top-k, called as a whole; without gradient
            checkpointing. It gets a parameter, so this comes before the optimiser is made.
        budget: Share of the dense model's FLOPs, in (0, 1), or milliseconds, see `cost`.
        example: A batch of images (B, C, H, W), on the model's device.
        cost: What the budget is of: "flops"; or "milliseconds", measured here, of one pass over the example.
        rate: How much faster than weights the offsets learn, under optimisers that divide by the gradient's size.

    Returns:
        The same model.

    Raises:
        ValueError: A model that is not routed, or so that capacities cannot be learned, or a budget out of reach.

    Source: rates of compression that get a gradient of the loss in each block, DiffRate, arXiv 2305.17997; shares of
        layers under one budget that are learned by gradient, DSA, arXiv 2004.02164. Weights of partial slots and the
        level that holds the budget are this library's.

    Example:
        >>> import timm, mmod
        >>> model = mmod.route_(timm.create_model("test_vit"), mmod.RoutingConfig(blocks="all", router="linear"))
        >>> model = learn_capacity_(model, 0.6, torch.randn(2, 3, 160, 160))
        >>> model(torch.randn(2, 3, 160, 160)).sum().backward()
        >>> found = settle_capacity_(model.eval())
        >>> 0.58 < found.share <= 0.6, found.plan.blocks == (0, 1, 2, 3, 4, 5)
        (True, True)
    """
    one_of("cost", cost, COSTS)
    check_value("budget", budget, float, "(0, 1)" if cost == "flops" else "(0, inf)")
    check_value("rate", rate, float, "(0, inf)")
    part, config, _ = _routed_part(model)
    _check(model, config)
    # Where nothing is always kept, a capacity of 0 would keep nothing.
    grid = QUARTERS[not all(block.router.always_keeps for block in routed_blocks(model).values()) :]
    costs, rest, tokens = _counted(model, example, grid)
    if cost == "milliseconds":
        measure = stopwatch(unroute_(copy.deepcopy(model)).eval(), part, example)
        with torch.no_grad():
            dense, shares = measure([config.replace(capacity=float(each)) for each in grid])
        costs, rest = costs.timed(dense, [share * dense for share in shares]), 0.0
    # Measured time may fall where there are more tokens.
    rising = (np.maximum.accumulate(costs.options, axis=1) / costs.total).tolist()
    share = budget / costs.total if cost == "milliseconds" else budget
    module = LearnedCapacity(rising, rest / costs.total, share, rate).to(example.device)
    setattr(model, NAME, module)
    attach(model, CapacityHook(model, module, tuple(routed_blocks(model)), tokens, share, cost))
    return model


def settle_capacity_(model: nn.Module) -> LearnedPlan:
    """End the learning of capacities: a model keeps the plan that is nearest to them within the budget.

    Args:
        model: A model that `learn_capacity_` changed. It stays routed, at the plan's capacities.

    Returns:
        What was learned, with the plan.

    Raises:
        ValueError: Its capacities are not being learned.
    """
    hook = capacity_hook(model)
    if hook is None:
        raise ValueError(f"this {type(model).__name__} learns no capacities: call mmod.learn_capacity_ first")
    _, config, stack = _routed_part(model)
    chosen, learned, room = hook.chosen(), tuple(hook.learned()), float(hook.module.room)
    shares = tuple(row[HUNDREDTHS.index(each)] for row, each in zip(hook.costs(), chosen))
    whole = config.replace(capacity=tuple(map(float, chosen)))
    detach_hooks(model, hook)
    set_capacity(model, list(map(float, chosen)))
    plan = whole.plan(len(stack.blocks))
    return LearnedPlan(hook.names, learned, plan, whole, shares, hook.budget - room, hook.budget, hook.cost)


def capacity_hook(model: nn.Module) -> CapacityHook | None:
    """Return what lets a model's capacities be learned, or None.

    Args:
        model: Any model.
    """
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
    if config.select != "topk" or config.skipped != "pass":
        raise ValueError(
            f"capacities are learned with select='topk' and skipped='pass', got {spelled(config.select)!r} "
            f"and {spelled(config.skipped)!r}"
        )
    for name, block in routed_blocks(model).items():
        router = block.router
        if type(router) is not Router:
            raise ValueError(f"capacities are learned in models of images, and {name} has a {type(router).__name__}")


def _counted(model: nn.Module, example: Tensor, grid: Sequence[Fraction]) -> tuple[Costs, float, list[int]]:
    """Return the FLOPs of each capacity in each block, of everything else, and the tokens that enter each block."""
    own, columns, rest = capacities(model), [], 0.0
    channels, height, width = example.shape[1:]
    try:
        for each in grid:
            set_capacity(model, float(each))
            report = flops(model, (channels, height, width))
            rows = [row for row in report.blocks if row.name in own]
            columns.append([float(row.routed) for row in rows])
            rest = float(report.routed - sum(row.routed for row in rows))
    finally:
        set_capacity(model, own)
    dense = tuple(float(row.dense) for row in rows)
    return Costs(tuple(zip(*columns)), dense, float(report.dense)), rest, [row.tokens for row in rows]
