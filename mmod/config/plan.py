"""Which blocks of a model are routed, each with its capacity."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from mmod.values import check_fields

OPERATORS = ("block", "attention", "mlp")
CONTEXTS = ("kept", "all")


def rational(capacity: float) -> Fraction:
    """Return a capacity as the exact fraction its decimal form stands for.

    Kept counts are computed as `N * numerator // denominator`, which stays symbolic under export and does not
    depend on how a binary float rounds.

    Args:
        capacity: Share of tokens kept, in [0, 1].

    Raises:
        TypeError: `capacity` is no number.
        ValueError: `capacity` lies outside [0, 1].

    Example:
        >>> rational(0.3)
        Fraction(3, 10)
    """
    if isinstance(capacity, bool) or not isinstance(capacity, (int, float, Fraction)):
        raise TypeError(f"capacity must be a number in [0, 1], got {capacity!r}")
    if not 0 <= capacity <= 1:
        raise ValueError(f"capacity must be in [0, 1], got {capacity!r}")
    exact = capacity if isinstance(capacity, Fraction) else Fraction(str(capacity))
    return exact.limit_denominator(1_000_000)


@dataclass(frozen=True)
class Plan:
    """Which blocks of a model are routed, each with its capacity.

    Args:
        blocks: Indices of the routed blocks, ascending.
        capacities: Share of tokens each of them keeps, in [0, 1].
        depth: Number of blocks of the model.
        operators: What tokens that are not kept miss in each of them, see `RoutingConfig.operator`; all of it if empty.
        contexts: What kept tokens attend to in each of them, see `RoutingConfig.context`; each other if empty.

    Raises:
        ValueError: No block, an index outside the model or named twice, counts that differ, or an operator or context
            that does not exist.

    Example:
        >>> Plan(blocks=(1, 3), capacities=(0.5, 0.25), depth=4).mean_capacity
        0.6875
    """

    blocks: tuple[int, ...]
    capacities: tuple[float, ...]
    depth: int
    operators: tuple[str, ...] = ()
    contexts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, usual in (("operators", OPERATORS[0]), ("contexts", CONTEXTS[0])):
            object.__setattr__(self, name, getattr(self, name) or (usual,) * len(self.blocks))
        check_fields(self, capacities="[0, 1]", depth="[1, inf)", operators=OPERATORS, contexts=CONTEXTS)
        if not self.blocks:
            raise ValueError(f"a plan must name at least one of the model's {self.depth} blocks")
        outside = [block for block in self.blocks if not 0 <= block < self.depth]
        if outside:
            raise ValueError(f"blocks {outside} do not exist: valid indices are 0 to {self.depth - 1}")
        if list(self.blocks) != sorted(set(self.blocks)):
            raise ValueError(f"blocks must be ascending and named once, got {list(self.blocks)}")
        for name in ("capacities", "operators", "contexts"):
            given = len(getattr(self, name))
            if given != len(self.blocks):
                raise ValueError(f"{len(self.blocks)} routed blocks need as many {name}, got {given}")
        for block, operator, context in zip(self.blocks, self.operators, self.contexts):
            if operator == "mlp" and context == "all":
                raise ValueError(f"operator='mlp' needs context='kept', got 'all' for block {block}")

    @property
    def mean_capacity(self) -> float:
        """Share of all block-token pairs that are computed."""
        return (self.depth - len(self.blocks) + sum(self.capacities)) / self.depth
