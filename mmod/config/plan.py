"""The blocks of a plan and their capacities: checks, scaling, a table, and the form of earlier versions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from mmod.config.parts import spelled
from mmod.io.tables import markdown_table
from mmod.values import check_value, refuse_unknown

OPERATORS = ("block", "attention", "mlp")
CONTEXTS = ("kept", "all")
DEPTH = "[1, 100000]"
_HEADER = ("blocks", "capacity", "operator", "context")
FORMER_NAMES = {"capacities": "capacity", "operators": "operator", "contexts": "context"}
"""Fields of a routing config by the names that plans of earlier versions had for them."""
_LISTS_OF_PLANS = {
    "blocks": tuple[int, ...],
    "capacities": tuple[float, ...],
    "operators": tuple[str, ...],
    "contexts": tuple[str, ...],
}


def rational(capacity: float) -> Fraction:
    """Return a capacity in [0, 1] as the exact fraction its decimal form stands for.

    Kept counts are computed as `N * numerator // denominator`, which stays symbolic under export and does not
    depend on how a binary float rounds.

    Example:
        >>> rational(0.3)
        Fraction(3, 10)
    """
    check_value("capacity", capacity, float, "[0, 1]")
    exact = capacity if isinstance(capacity, Fraction) else Fraction(str(capacity))
    return exact.limit_denominator(1_000_000)


def rescaled(capacities: Sequence[float], mean: float) -> tuple[float, ...]:
    """Return capacities with another mean, in the same order of size and in [0, 1].

    Below the present mean all capacities shrink by one factor; above it all skipped shares do.

    Example:
        >>> rescaled((0.8, 0.4), 0.3), rescaled((0.8, 0.4), 0.8), rescaled((0.8, 0.4), 1)
        ((0.4, 0.2), (0.9, 0.7), (1.0, 1.0))
    """
    check_value("capacity", mean, float, "[0, 1]")
    mean = float(mean)
    present = sum(capacities) / len(capacities)
    if mean <= present:
        factor = mean / present if present else 1.0
        return tuple(round(capacity * factor, 6) for capacity in capacities)
    factor = (1 - mean) / (1 - present)
    return tuple(round(1 - (1 - capacity) * factor, 6) for capacity in capacities)


def check_blocks(blocks: Sequence[int], depth: int) -> None:
    """Raise a ValueError unless blocks of a model are named in order, each once, and at least one."""
    if not blocks or list(blocks) != sorted(set(blocks)) or not 0 <= blocks[0] <= blocks[-1] < depth:
        raise ValueError(f"blocks must be ascending numbers from 0 to {depth - 1}, each once, got {list(blocks)}")


Row = tuple[int, float, str, str]
"""Index, capacity, operator and context of a routed block."""


def check_rows(rows: Sequence[Row]) -> None:
    """Raise a ValueError if operator and context of a routed block do not fit."""
    for block, _, operator, context in rows:
        if operator == "mlp" and context == "all":
            raise ValueError(f"operator='mlp' needs context='kept', got 'all' for block {block}")


def table_of(rows: Sequence[Row]) -> str:
    """Return a table with a row for each run of consecutive blocks that are routed alike.

    Example:
        >>> print(table_of([(1, 0.5, "block", "kept"), (2, 0.5, "block", "kept"), (4, 0.25, "mlp", "kept")]))
        | blocks | capacity | operator | context |
        | -----: | -------: | :------- | :------ |
        |    1-2 |      0.5 | block    | kept    |
        |      4 |     0.25 | mlp      | kept    |
    """
    runs: list[list[Row]] = []
    for row in rows:
        block, *settings = row
        # The row that would continue the last run: the block before, with equal settings.
        if runs and runs[-1][-1] == (block - 1, *settings):
            runs[-1].append(row)
        else:
            runs.append([row])
    shown = []
    for (first, capacity, operator, context), *more in runs:
        blocks = f"{first}-{more[-1][0]}" if more else str(first)
        shown.append((blocks, f"{capacity:g}", operator, context))
    return markdown_table(_HEADER, shown)


def fields_of_plan(plan: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a config from those of a plan, as earlier versions saved it.

    A plan may leave its router open, and has then the default, or "stride" where every capacity is 0 or 1.

    Example:
        >>> fields_of_plan({"blocks": [1], "capacities": [0.0], "depth": 2, "router": None})
        {'blocks': [1], 'capacity': [0.0], 'depth': 2, 'router': 'stride'}
    """
    check_value("a plan", plan, Mapping)
    known = ("blocks", "capacities", "depth", "operators", "contexts", "router", "gate", "protect_prefix")
    refuse_unknown("field of a plan", plan, known)
    missing = [name for name in known[:3] if name not in plan]
    if missing:
        raise ValueError(f"a plan needs {', '.join(missing)}")
    for name, kind in _LISTS_OF_PLANS.items():
        check_value(name, plan.get(name, ()), kind)
    if plan.get("router") is None and plan.get("gate") is not None:
        raise ValueError(f"gate={spelled(plan['gate'])!r} weighs by the score of a plan's router: pass router too")
    fields = {}
    for name, value in plan.items():
        # A plan leaves them empty where they have their defaults.
        is_open = (name in ("router", "gate") and value is None) or (name in ("operators", "contexts") and not value)
        if not is_open:
            fields[FORMER_NAMES.get(name, name)] = value
    if "router" not in fields and set(plan["capacities"]) <= {0, 1}:
        fields["router"] = "stride"
    return fields
