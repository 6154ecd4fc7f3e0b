"""The blocks of a plan and their capacities: checks, scaling and a table."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

from mmod.io.tables import markdown_table
from mmod.values import check_value

OPERATORS = ("block", "attention", "mlp")
CONTEXTS = ("kept", "all")
DEPTH = "[1, 100000]"
_HEADER = ("blocks", "capacity", "operator", "context")


def rational(capacity: float) -> Fraction:
    """Return a capacity in [0, 1] as the exact fraction its decimal form stands for.

    Kept counts are computed as `N * numerator // denominator`, which stays symbolic under export and does not
    depend on how a binary float rounds.

    Example:
        >>> rational(0.3)
        Fraction(3, 10)
    """
    check_value("capacity", capacity, float, "[0, 1]")
    # Through its decimal form, because 0.1 is no tenth in binary.
    return _exact(str(capacity))


# Blocks compare their capacities in every pass, which takes no time for one object.
@functools.lru_cache(maxsize=1024)
def _exact(capacity: str) -> Fraction:
    return Fraction(capacity).limit_denominator(1_000_000)


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
        # Downwards all are scaled; upwards their distances to 1, so that none exceeds it.
        factor = mean / present if present else 1.0
        return tuple(round(capacity * factor, 6) for capacity in capacities)
    factor = (1 - mean) / (1 - present)
    return tuple(round(1 - (1 - capacity) * factor, 6) for capacity in capacities)


def check_blocks(blocks: Sequence[int], depth: int) -> None:
    """Raise a ValueError unless blocks of a model are named in order, each once, and at least one."""
    if not blocks:
        raise ValueError(f"no block is left to route among {depth}: name some in blocks, or take a deeper model")
    ascend = list(blocks) == sorted(set(blocks))
    if not ascend or blocks[0] < 0 or blocks[-1] >= depth:
        raise ValueError(f"blocks must be ascending numbers from 0 to {depth - 1}, each once, got {list(blocks)}")


def blocks_or_quarters(blocks: tuple[int, ...] | None, depth: int) -> tuple[int, ...]:
    """Return checked blocks of a model; None is those after each quarter of its depth.

    Example:
        >>> blocks_or_quarters(None, 12), blocks_or_quarters(None, 6), blocks_or_quarters((2, 4), 6)
        ((3, 6, 9), (1, 3, 4), (2, 4))
    """
    if blocks is None:
        blocks = tuple(sorted({max(1, depth * quarter // 4) for quarter in (1, 2, 3)}))
    check_blocks(blocks, depth)
    return blocks


class PlannedBlock(NamedTuple):
    """How a plan routes a block.

    Args:
        block: Its index in the model.
    """

    block: int
    capacity: float
    operator: str
    context: str


def check_context(operator: object, context: object, block: int | None = None) -> None:
    """Raise a ValueError if operator and context, of a block or of all, do not fit."""
    if operator == "mlp" and context == "all":
        where = ""
        if block is not None:
            where = f" for block {block}"
        raise ValueError(f"operator='mlp' needs context='kept', got 'all'{where}: attention runs on all tokens anyway")


def table_of(rows: Sequence[PlannedBlock]) -> str:
    """Return a table with a row for each run of consecutive blocks that are routed alike.

    Example:
        >>> first = PlannedBlock(1, 0.5, "block", "kept")
        >>> print(table_of([first, first._replace(block=2), PlannedBlock(4, 0.25, "mlp", "kept")]))
        | blocks | capacity | operator | context |
        | -----: | -------: | :------- | :------ |
        |    1-2 |      0.5 | block    | kept    |
        |      4 |     0.25 | mlp      | kept    |
    """
    runs: list[list[PlannedBlock]] = []
    for row in rows:
        # It continues the last run if the block before has equal settings.
        if runs and runs[-1][-1] == row._replace(block=row.block - 1):
            runs[-1].append(row)
        else:
            runs.append([row])
    shown = []
    for first, *more in runs:
        blocks = str(first.block)
        if more:
            blocks += f"-{more[-1].block}"
        shown.append((blocks, f"{first.capacity:g}", first.operator, first.context))
    return markdown_table(_HEADER, shown)
