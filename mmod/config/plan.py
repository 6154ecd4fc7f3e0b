"""Which blocks of a model are routed, with a capacity, operator and context for every block."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any

from mmod.config.parts import Gate, Score, WithImportance, plain, spelled
from mmod.config.registry import read_parts
from mmod.io.files import check_free, check_regular, parse_json, write_atomically
from mmod.io.tables import markdown_table
from mmod.values import check_fields, check_value, refuse_unknown

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


@dataclass(frozen=True, init=False)
class Plan:
    """Which blocks of a model are routed, at which capacities, and by which score.

    Args:
        blocks: Indices of the routed blocks, ascending.
        capacities: Share of tokens kept in each routed block, in [0, 1].
        operators: What skipped tokens miss in each routed block, see `RoutingConfig.operator`; "block" if empty.
        contexts: What kept tokens attend to in each routed block, see `RoutingConfig.context`; "kept" if empty.
        router: The score that chooses tokens, see `RoutingConfig.router`. None leaves it to `RoutingConfig.from_plan`,
            which needs one where a capacity lies strictly between 0 and 1.
        gate: How the score weighs the update, see `RoutingConfig.gate`; None means its default.
        protect_prefix: Always keep class, distillation and register tokens.

    Example:
        >>> plan = Plan((1, 2, 4), (0.5, 0.5, 0.25), depth=5, operators=("block", "block", "mlp"), router="norm")
        >>> print(plan)
        3 of 5 blocks are routed by norm, mean capacity of all blocks 0.65
        <BLANKLINE>
        | blocks | capacity | operator | context |
        | -----: | -------: | :------- | :------ |
        |    1-2 |      0.5 | block    | kept    |
        |      4 |     0.25 | mlp      | kept    |
        >>> Plan.from_dict(plan.to_dict()) == plan
        True
    """

    blocks: tuple[int, ...]
    capacities: Annotated[tuple[float, ...], "[0, 1]"]
    depth: Annotated[int, DEPTH]
    operators: Annotated[tuple[str, ...], OPERATORS]
    contexts: Annotated[tuple[str, ...], CONTEXTS]
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
        count = len(blocks) if isinstance(blocks, Sequence) else 0
        # A frozen dataclass refuses assignments.
        vars(self).update(
            blocks=blocks,
            capacities=capacities,
            depth=depth,
            operators=operators or (OPERATORS[0],) * count,
            contexts=contexts or (CONTEXTS[0],) * count,
            router=parts.get("router"),
            gate=parts.get("gate"),
            protect_prefix=protect_prefix,
        )
        check_fields(self)
        check_blocks(self.blocks, self.depth)
        for name in ("capacities", "operators", "contexts"):
            count = len(getattr(self, name))
            if count != len(self.blocks):
                raise ValueError(f"{len(self.blocks)} routed blocks need as many {name}, got {count}")
        for block, operator, context in zip(self.blocks, self.operators, self.contexts):
            if operator == "mlp" and context == "all":
                raise ValueError(f"operator='mlp' needs context='kept', got 'all' for block {block}")

    @property
    def rows(self) -> tuple[tuple[int, float, str, str], ...]:
        """Index, capacity, operator and context of each routed block."""
        return tuple(zip(self.blocks, self.capacities, self.operators, self.contexts))

    def __str__(self) -> str:
        """Return a sentence, and a table with a row for each run of consecutive blocks that are routed alike."""
        runs: list[list[tuple[int, float, str, str]]] = []
        for row in self.rows:
            block, *settings = row
            # The row that would continue the last run: the block before, with equal settings.
            if runs and runs[-1][-1] == (block - 1, *settings):
                runs[-1].append(row)
            else:
                runs.append([row])
        rows = []
        for (first, capacity, operator, context), *more in runs:
            blocks = f"{first}-{more[-1][0]}" if more else str(first)
            rows.append((blocks, f"{capacity:g}", operator, context))
        by = "" if self.router is None else f" by {self.router.name}"
        if isinstance(self.router, WithImportance) and self.router.reads_importance:
            by += f" ({self.router.importance})"
        mean = f"mean capacity of all blocks {self.mean_capacity:.3g}"
        sentence = f"{len(self.blocks)} of {self.depth} blocks are routed{by}, {mean}"
        return f"{sentence}\n\n{markdown_table(_HEADER, rows)}"

    _repr_markdown_ = __str__  # Notebooks show it.

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as plain JSON values."""
        if self.router is not None:
            # A score that JSON cannot hold raises here.
            self.router.to_dict()
        return {name: plain(value) for name, value in vars(self).items()}

    def __repr__(self) -> str:
        """Return the call that makes the plan, without fields that have their defaults."""
        always = ("blocks", "capacities", "depth")
        default = {**vars(Plan(self.blocks, self.capacities, self.depth, router=self.router)), "router": None}
        fields = {name: value for name, value in vars(self).items() if name in always or value != default[name]}
        return f"Plan({', '.join(f'{name}={spelled(value)!r}' for name, value in fields.items())})"

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Plan:
        """Build a plan from what `to_dict` returned."""
        check_value("a plan", values, Mapping)
        refuse_unknown("field of a plan", values, [item.name for item in dataclasses.fields(cls)])
        missing = [name for name in ("blocks", "capacities", "depth") if name not in values]
        if missing:
            raise ValueError(f"a plan needs {', '.join(missing)}")
        return cls(**values)

    def save(self, path: str | Path, overwrite: bool = False) -> None:
        """Write the plan as JSON."""
        check_free(path, overwrite)
        write_atomically(path, json.dumps(self.to_dict(), indent=2) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan that `save` wrote."""
        check_regular(path)
        values = parse_json(Path(path).read_bytes(), repr(str(path)))
        try:
            return cls.from_dict(values)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{str(path)!r} holds no plan: {error}") from error

    @property
    def mean_capacity(self) -> float:
        """Share of all block-token pairs that are computed."""
        return (self.depth - len(self.blocks) + sum(self.capacities)) / self.depth
