"""Which blocks of a model are routed, each with its capacity, operator and context."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from mmod.config.parts import Gate, spelled
from mmod.config.reading import read_parts
from mmod.config.score import Score, WithImportance
from mmod.io.files import check_regular, parse_json, write_atomically
from mmod.values import check_fields, check_value, refuse_unknown

OPERATORS = ("block", "attention", "mlp")
CONTEXTS = ("kept", "all")
DEPTH = "[1, 100000]"
_ROW = "{:>5}  {:>8}  {:<9}  {}"


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


@dataclass(frozen=True, init=False)
class Plan:
    """Which blocks of a model are routed, each with its capacity, and by which score.

    Args:
        blocks: Indices of the routed blocks, ascending.
        capacities: Share of tokens each of them keeps, in [0, 1].
        depth: Number of blocks of the model.
        operators: What tokens that are not kept miss in each of them, see `RoutingConfig.operator`; all of it if empty.
        contexts: What kept tokens attend to in each of them, see `RoutingConfig.context`; each other if empty.
        router: The score that chooses tokens, see `RoutingConfig.router`. None leaves it to `RoutingConfig.from_plan`,
            which needs one where a capacity lies strictly between 0 and 1.
        gate: How the score weighs the update, see `RoutingConfig.gate`; None means its default.
        protect_prefix: Always keep class, distillation and register tokens.

    Raises:
        TypeError: A value of the wrong type.
        ValueError: No block, an index outside the model or named twice, counts that differ, or an operator, context or
            score that does not exist.

    Example:
        >>> plan = Plan(blocks=(1, 3), capacities=(0.5, 0.25), depth=4, operators=("block", "mlp"), router="norm")
        >>> print(plan)
        block  capacity  operator   context
            1       0.5  block      kept
            3      0.25  mlp        kept
        2 of 4 blocks are routed by norm
        >>> plan.to_dict()["operators"], "contexts" in plan.to_dict()
        (['block', 'mlp'], False)
        >>> Plan.from_dict(plan.to_dict()) == plan, plan.mean_capacity
        (True, 0.6875)
    """

    blocks: tuple[int, ...]
    capacities: tuple[float, ...]
    depth: int
    operators: tuple[str, ...]
    contexts: tuple[str, ...]
    router: Score | None
    gate: Gate | None
    protect_prefix: bool

    def __init__(
        self,
        blocks: tuple[int, ...],
        capacities: tuple[float, ...],
        depth: int,
        operators: tuple[str, ...] = (),
        contexts: tuple[str, ...] = (),
        router: str | Score | Mapping[str, Any] | None = None,
        gate: str | Gate | Mapping[str, Any] | None = None,
        protect_prefix: bool = True,
    ) -> None:
        if router is None and gate is not None:
            raise ValueError(f"gate={spelled(gate)!r} weighs by the score of a plan's router: pass router too")
        parts = {} if router is None else read_parts({"router": router, "gate": gate})
        values = {
            "blocks": blocks,
            "capacities": capacities,
            "depth": depth,
            "operators": operators or (OPERATORS[0],) * len(blocks),
            "contexts": contexts or (CONTEXTS[0],) * len(blocks),
            "router": parts.get("router"),
            "gate": parts.get("gate"),
            "protect_prefix": protect_prefix,
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)
        self._check()

    def _check(self) -> None:
        check_fields(self, capacities="[0, 1]", depth=DEPTH, operators=OPERATORS, contexts=CONTEXTS)
        if not self.blocks:
            raise ValueError(f"a plan must name at least one of the model's {self.depth} blocks")
        outside = [block for block in self.blocks if not 0 <= block < self.depth]
        if outside:
            raise ValueError(f"blocks {outside} do not exist: valid indices are 0 to {self.depth - 1}")
        if list(self.blocks) != sorted(set(self.blocks)):
            raise ValueError(f"blocks must be ascending and named once, got {list(self.blocks)}")
        for name in ("capacities", "operators", "contexts"):
            count = len(getattr(self, name))
            if count != len(self.blocks):
                raise ValueError(f"{len(self.blocks)} routed blocks need as many {name}, got {count}")
        for block, operator, context in zip(self.blocks, self.operators, self.contexts):
            if operator == "mlp" and context == "all":
                raise ValueError(f"operator='mlp' needs context='kept', got 'all' for block {block}")

    @property
    def rows(self) -> tuple[tuple[int, float, str, str], ...]:
        """Index, capacity, operator and context of every routed block."""
        return tuple(zip(self.blocks, self.capacities, self.operators, self.contexts))

    def __str__(self) -> str:
        """Return the plan as a table; blocks that it leaves out are dense."""
        lines = [_ROW.format("block", "capacity", "operator", "context")]
        lines += [_ROW.format(block, f"{capacity:g}", *rest) for block, capacity, *rest in self.rows]
        by = "" if self.router is None else f" by {self.router.name}"
        if isinstance(self.router, WithImportance) and self.router.reads_importance:
            by += f" ({self.router.importance})"
        return "\n".join([*lines, f"{len(self.blocks)} of {self.depth} blocks are routed{by}"])

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain JSON values: the fields that differ from their defaults.

        Raises:
            ValueError: The router is a function, which JSON cannot hold.
        """
        plain = {name: spelled(value) for name, value in self._differing().items()}
        if self.router is not None:
            plain["router"] = self.router.to_dict()
        return {name: list(value) if isinstance(value, tuple) else value for name, value in plain.items()}

    def _differing(self) -> dict[str, Any]:
        """Return the fields that differ from what a plan of the same blocks, capacities and router has."""
        always = ("blocks", "capacities", "depth")
        default = {**vars(Plan(self.blocks, self.capacities, self.depth, router=self.router)), "router": None}
        return {name: value for name, value in vars(self).items() if name in always or value != default[name]}

    def __repr__(self) -> str:
        """Return the call that makes the plan, without fields that have their defaults."""
        return f"Plan({', '.join(f'{name}={spelled(value)!r}' for name, value in self._differing().items())})"

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Plan:
        """Build a plan from plain values.

        Args:
            values: What `to_dict` returned.

        Raises:
            TypeError: A value of the wrong type.
            ValueError: A field that is not known or missing, or a value that is not valid.
        """
        check_value("a plan", values, Mapping)
        names = [item.name for item in dataclasses.fields(cls)]
        refuse_unknown("field of a plan", values, names)
        missing = [name for name in ("blocks", "capacities", "depth") if name not in values]
        if missing:
            raise ValueError(f"a plan needs {', '.join(missing)}")
        plain: dict[str, Any] = {n: tuple(value) if isinstance(value, list) else value for n, value in values.items()}
        return cls(**plain)

    def save(self, path: str | Path, overwrite: bool = False) -> None:
        """Write the plan as JSON.

        Args:
            path: The file.
            overwrite: Replace it if it is there.

        Raises:
            FileExistsError: It is there and `overwrite` is not set.
        """
        if Path(path).exists() and not overwrite:
            raise FileExistsError(f"{str(path)!r} is there already; pass overwrite=True to replace it")
        write_atomically(path, json.dumps(self.to_dict(), indent=2) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan that `save` wrote.

        Args:
            path: The file.

        Raises:
            FileNotFoundError: It is not there.
            ValueError: It holds no plan, see `from_dict`.
        """
        check_regular(path)
        values = parse_json(Path(path).read_bytes(), repr(str(path)))
        if not isinstance(values, dict):
            raise ValueError(f"{str(path)!r} holds no plan")
        return cls.from_dict(values)

    @property
    def mean_capacity(self) -> float:
        """Share of all block-token pairs that are computed."""
        return (self.depth - len(self.blocks) + sum(self.capacities)) / self.depth
