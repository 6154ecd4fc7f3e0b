"""Capacities learned with the weights, one per routed block, under one budget.

Axes: L routed blocks, G quarters, B images, N tokens, K slots per image, D channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import register_constant

from mmod.adapters import BlockStack, find_stacks
from mmod.analysis import FlopReport, flops
from mmod.config import RoutingConfig, spelled
from mmod.methods.route import capacities, routed_blocks, routing_configs
from mmod.model import set_capacity_
from mmod.ops.select import kept_count, select_topk
from mmod.planning.plan_search import best_choices
from mmod.routing import Router, Routing, Rule, TokenGroups, TokenMasks
from mmod.values import check_value

# A capacity between two eighths weighs the tokens between them by a fraction.
STEPS = 8
# Costs are counted at quarters, and interpolated: they are close to linear.
QUARTERS = tuple(Fraction(number, 4) for number in range(5))
# Capacities of plans.
HUNDREDTHS = tuple(Fraction(number, 100) for number in range(101))


class LearnedCapacity(nn.Module):
    """Capacities of a model's routed blocks: the parameter `offsets` has one number for each block.

    Args:
        costs: Cost of every block at ascending quarters, as a share of the dense model's FLOPs (L, G). Five quarters
            start at capacity 0, four at 1/4.
        fixed: Share of everything outside these blocks.
        options: The same at every hundredth, from 0 to 1.
    """

    costs_LG: Tensor

    def __init__(
        self,
        costs: Sequence[Sequence[float]],
        fixed: float,
        budget: float,
        rate: float,
        options: Sequence[Sequence[float]],
    ) -> None:
        super().__init__()
        self.rate = rate
        self.options = options
        self.offsets = nn.Parameter(torch.zeros(len(costs)))
        self.register_buffer("costs_LG", torch.tensor(costs))
        self.room = budget - fixed
        self._solved: tuple[list[float], float] | None = None
        self._chosen: tuple[list[float], list[Fraction]] | None = None
        least = sum(row[0] for row in costs) + fixed
        most = sum(row[-1] for row in costs) + fixed
        if not least < budget < most:
            raise ValueError(
                f"budget must be in ({least:.4f}, {most:.4f}) of the dense model's FLOPs, the range of these "
                f"blocks, got {budget:.4g}"
            )

    @property
    def grid(self) -> list[Fraction]:
        """Capacities with known costs (G)."""
        return list(QUARTERS[-self.costs_LG.shape[1] :])

    def forward(self) -> Tensor:
        """Return the capacities (L), differentiable by the offsets."""
        offset_L = self.rate * self.offsets
        level = self._level()
        share_L = torch.sigmoid(offset_L + level)
        slope_L = self._slopes(share_L.detach())
        # The level falls as an offset rises, so the total cost is constant: `shift` is 0 and carries that gradient.
        rise_L = (slope_L * share_L * (1 - share_L)).detach()
        excess = (slope_L * share_L).sum()
        shift = (excess - excess.detach()) / rise_L.sum().clamp(min=1e-12)
        first = float(self.grid[0])
        return first + (1 - first) * torch.sigmoid(offset_L + level - shift)

    def chosen(self) -> list[Fraction]:
        """Return the capacities of the nearest plan within the budget, in hundredths."""
        if self.offsets.is_meta and self._chosen is not None:
            # A copy for counts of FLOPs, without values.
            return self._chosen[1]
        offsets = self.offsets.tolist()
        if self._chosen is None or self._chosen[0] != offsets:
            # The tolerance covers rounding: the budget is a share of a sum.
            room = self.room + 1e-9
            with torch.no_grad():
                learned: list[float] = self().tolist()
            # Capacities below the grid are made too expensive to be chosen.
            below = HUNDREDTHS.index(self.grid[0])
            costs = [[2 * room] * below + list(row[below:]) for row in self.options]
            losses = [[(float(capacity) - target) ** 2 for capacity in HUNDREDTHS] for target in learned]
            # The plan of least squared distance, by the solver that plans use.
            self._chosen = offsets, [HUNDREDTHS[index] for index in best_choices(losses, costs, room)]
        return self._chosen[1]

    def __getstate__(self) -> dict[str, object]:
        """Return what copies hold, with the plan of the offsets: copies on the meta device cannot choose one."""
        self.chosen()
        return vars(self)

    def _slopes(self, share_L: Tensor) -> Tensor:
        """Return the slope of cost over capacity, up to a factor (L)."""
        steps = self.costs_LG.shape[1] - 1
        # The last step ends at 1, which belongs to it.
        place_L1 = (share_L * steps).long().clamp(max=steps - 1)[:, None]
        return self.costs_LG.diff(dim=1).gather(1, place_L1)[:, 0]

    def _level(self) -> float:
        """Return the level at which the costs equal the budget; every block of a pass asks for it."""
        offsets = self.offsets.tolist()
        if self._solved is None or self._solved[0] != offsets:
            self._solved = offsets, self._solve(self.rate * np.array(offsets))
        return self._solved[1]

    def _solve(self, offset_L: np.ndarray) -> float:
        """Solve for the level by bisection."""
        table = self.costs_LG.double().cpu().numpy()
        grid = np.linspace(0, 1, table.shape[1])
        # Beyond 40 the sigmoid is 0 or 1 in float32, whatever the offset.
        low = -40 - offset_L.max()
        high = 40 - offset_L.min()
        # 60 halvings of this range reach the precision of float64.
        for _ in range(60):
            middle = (low + high) / 2
            share_L = 1 / (1 + np.exp(-(offset_L + middle)))
            spent = sum(np.interp(share, grid, row) for share, row in zip(share_L, table))
            if spent < self.room:
                low = middle
            else:
                high = middle
        return float(low + high) / 2


class _RuleOfOne(Rule):
    """The rule of one block: the weights of its decisions are those of its own capacity."""

    def matches(self, other: Rule | None) -> bool:
        """Return False, so that no block takes the decision of another."""
        return False


register_constant(_RuleOfOne)


class LearnedRouter(Router):
    """A router whose capacity is being learned, between multiples of an eighth.

    In training it runs as many tokens as the next higher eighth. The tokens beyond the next lower eighth get a weight:
    the position of the learned capacity between the two, which so has a gradient. Capacity 0.3 runs 3/8 of the tokens,
    of which the last eighth weighs 0.4. Without gradients it runs the nearest plan.

    Attributes:
        learning: The capacities of all blocks, and which of them is this router's. A tuple, so that the model does not
            hold the parameter.
    """

    learning: tuple[LearnedCapacity, int]

    @property
    def rule(self) -> Rule:
        """The rule of this thread's passes, which blocks with equal scores do not share."""
        rule = super().rule
        return _RuleOfOne(rule.config, rule.capacity)

    def forward(
        self,
        x_BND: Tensor,
        importance_BN: Tensor | None = None,
        tokens: TokenMasks | TokenGroups | None = None,
        earlier: Routing | None = None,
    ) -> Routing:
        """Decide for a batch of tokens, see `Router.forward`; the last slots run at a part of their weight."""
        module, block = self.learning
        learned = None
        if self.training and torch.is_grad_enabled():
            learned = module()[block]
        if learned is None:
            upper = module.chosen()[block]
        else:
            # The largest eighth below the capacity, and the one above.
            steps = int(float(learned.detach()) * STEPS)
            lower = Fraction(min(steps, STEPS - 1), STEPS)
            upper = lower + Fraction(1, STEPS)
        before = self.override(Rule(self.config, upper))
        try:
            routing = super().forward(x_BND, importance_BN, tokens, earlier)
        finally:
            self.override(before)
        if learned is None:
            return routing
        return self._weighed(routing, lower, (learned - float(lower)) * STEPS)

    def _weighed(self, routing: Routing, lower: Fraction, share: Tensor) -> Routing:
        """Return a decision in which tokens that a lower capacity drops weigh a share, which carries a gradient."""
        masks = routing.tokens
        assert isinstance(masks, TokenMasks)
        score_BN = routing.score_BN.detach()
        kept = select_topk(score_BN, lower, self.prefix, masks.valid_BN, masks.protect_BN)[0]
        whole_BK = kept.among(score_BN.shape[1]).gather(1, routing.kept.index_BK)
        # Every offset gets a gradient, even 0.
        weight_BK = torch.where(whole_BK, 1 + 0 * share, share)
        if routing.gate_BK is not None:
            weight_BK = routing.gate_BK * weight_BK
        return routing._replace(gate_BK=weight_BK)


def learn_capacity_(model: nn.Module, budget: float, example: Tensor, *, rate: float = 100.0) -> LearnedCapacity:
    """Learn the capacity of every routed block of a model under a fixed total cost; return the parameter to train.

    Block l has the capacity `low + (1 - low) * sigmoid(rate * offset_l + level)`. Its offset is a parameter. The level
    is one number for all blocks: every forward pass solves for the level at which the total cost equals the budget. So
    the budget holds in every step, without a penalty term.

    - In training a block runs at the next higher eighth. The tokens beyond the next lower eighth are weighted by the
      capacity's position between the two, so the loss has an exact gradient by the capacity.
    - In evaluation mode, and without gradients, blocks run at the nearest plan in hundredths within the budget.

    All offsets start at 0, that is, at equal capacities that meet the budget. Call `settle_capacity_` before the model
    is saved; `mmod.unroute_` ends the learning too.

    Args:
        model: A routed image model with top-k selection and without gradient checkpointing.
        budget: Share of the dense model's FLOPs, in (0, 1).
        example: A batch of images (B, C, H, W), on the model's device.
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
        >>> plan = settle_capacity_(model.eval())
        >>> 0.58 < mmod.flops(model, 160).share <= 0.6, plan.blocks == (0, 1, 2, 3, 4, 5)
        (True, True)
    """
    check_value("budget", budget, float, "(0, 1)")
    check_value("rate", rate, float, "(0, inf)")
    check_value("example", example, Tensor)
    if example.ndim != 4:
        raise ValueError(f"example must be a batch of images (B, C, H, W), got {tuple(example.shape)}")
    config, _ = _routed_part(model)
    routers = _routers(model, config)
    grid = QUARTERS
    if not all(router.always_keeps for router in routers):
        # Capacity 0 needs tokens that are always kept, such as a class token.
        grid = QUARTERS[1:]
    reports = _reports(model, example, grid)
    total = float(reports[0].dense)
    names = routed_blocks(model)
    # By capacity, and then by block.
    rows = [[row for row in report.blocks if row.name in names] for report in reports]
    costs = [[row.routed / total for row in block] for block in zip(*rows)]
    in_blocks = sum(block[-1] for block in costs)
    fixed = reports[-1].routed / total - in_blocks
    options = []
    for router, row, known in zip(routers, rows[0], costs):
        # By the number of kept tokens, which is rounded.
        counts = [kept_count(row.tokens, share, router.prefix) for share in HUNDREDTHS]
        grid_counts = [kept_count(row.tokens, share, router.prefix) for share in grid]
        options.append(np.interp(counts, grid_counts, known).tolist())
    module = LearnedCapacity(costs, fixed, budget, rate, options).to(example.device)
    for block, router in enumerate(routers):
        # In place, because the model's hooks and the optimiser hold this very module.
        router.__class__ = LearnedRouter
        router.learning = module, block
    # Counts of FLOPs and printed capacities are then those of the budget.
    set_capacity_(model, list(map(float, module.chosen())))
    return module


def settle_capacity_(model: nn.Module) -> RoutingConfig:
    """End the learning of capacities: route the model by the nearest plan within the budget, and return the plan.

    Returns:
        A config with a capacity for each block, in hundredths, which `mmod.route_` takes.

    Raises:
        ValueError: No capacities are learned, see `learn_capacity_`.

    Example:
        >>> import timm, mmod
        >>> model = mmod.route_(timm.create_model("test_vit"), mmod.RoutingConfig(router="linear"))
        >>> _ = learn_capacity_(model, 0.75, torch.randn(2, 3, 160, 160))
        >>> settle_capacity_(model).capacity
        (0.49, 0.48, 0.48)
    """
    # Also those that peft has wrapped, and their copies.
    learning: list[Any] = [module for module in model.modules() if isinstance(module, LearnedRouter)]
    if not learning:
        raise ValueError(f"this {type(model).__name__} learns no capacities: call mmod.lab.learn_capacity_ first")
    chosen = list(map(float, learning[0].learning[0].chosen()))
    for router in learning:
        router.__class__ = Router
        del router.learning
    set_capacity_(model, chosen)
    config, stack = _routed_part(model)
    return config.replace(capacity=tuple(chosen)).resolved(len(stack.blocks))


def _routed_part(model: nn.Module) -> tuple[RoutingConfig, BlockStack]:
    configs = routing_configs(model)
    if len(configs) > 1:
        raise ValueError(f"capacities are learned in one part of a model; routed are {', '.join(configs)}")
    ((part, config),) = configs.items()
    return config, find_stacks(model)[part]


def _routers(model: nn.Module, config: RoutingConfig) -> list[Any]:
    """Return the routers of a model; raise unless their capacities can be learned."""
    if config.select != "topk" or config.joins:
        raise ValueError(
            f"capacities are learned with select='topk' and skipped='pass', got {spelled(config.select)!r} "
            f"and {spelled(config.skipped)!r}"
        )
    for name, block in routed_blocks(model).items():
        router = block.router
        if type(router) is not Router:
            raise ValueError(
                f"capacities are learned once, in models of images, and {name} has a {type(router).__name__}"
            )
    return [block.router for block in routed_blocks(model).values()]


def _reports(model: nn.Module, example: Tensor, grid: Sequence[Fraction]) -> list[FlopReport]:
    """Count the FLOPs with all blocks at each of some capacities: costs of a block hardly depend on the others."""
    original = capacities(model)
    channels, height, width = example.shape[1:]
    reports = []
    try:
        for capacity in grid:
            set_capacity_(model, dict.fromkeys(original, float(capacity)))
            reports.append(flops(model, (channels, height, width)))
    finally:
        set_capacity_(model, original)
    return reports
