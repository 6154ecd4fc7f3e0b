"""What a model costs, as values and as a table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

REST = ""


@dataclass(frozen=True)
class BlockFlops:
    """The cost of one block for one image.

    Args:
        name: Module name; empty for everything outside the blocks.
        tokens: Tokens that enter it (N).
        kept: Tokens it computes (K).
        dense: FLOPs without routing.
        routed: FLOPs as routed, with `router` and `importance`.
        router: FLOPs of its router.
        importance: FLOPs of the importance it computes for others.
    """

    name: str
    tokens: int
    kept: int
    dense: int
    routed: int
    router: int = 0
    importance: int = 0


@dataclass(frozen=True)
class FlopReport:
    """The cost of a model for one image, one caption, or both; `print(report)` shows it as a table.

    Args:
        inputs: Shape of each input by name, such as channels, height and width of an image.
        blocks: One row for each block, in order.
        rest: Everything outside the blocks: embedding, head, pooling.
        parameters: Parameters, routers included.
        router_parameters: Parameters of routers alone.
        dense_activation_bytes: Most activation memory held at once in inference, without routing.
        activation_bytes: The same as routed.
        dense_training_bytes: Activations held for the backward pass when the forward pass ends, without routing.
        training_bytes: The same as routed.
    """

    inputs: Mapping[str, tuple[int, ...]]
    blocks: tuple[BlockFlops, ...]
    rest: BlockFlops
    parameters: int
    router_parameters: int
    dense_activation_bytes: int
    activation_bytes: int
    dense_training_bytes: int
    training_bytes: int

    @property
    def dense(self) -> int:
        """FLOPs of the model without routing."""
        return self.rest.dense + sum(row.dense for row in self.blocks)

    @property
    def routed(self) -> int:
        """FLOPs of the model as routed, with routers and importance."""
        return self.rest.routed + sum(row.routed for row in self.blocks)

    @property
    def importance(self) -> int:
        """FLOPs spent on importance, contained in `routed`."""
        return sum(row.importance for row in self.blocks)

    @property
    def speedup(self) -> float:
        """How many times fewer FLOPs the routed model needs."""
        return self.dense / self.routed

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain JSON values, totals included."""
        totals = {"dense": self.dense, "routed": self.routed, "importance": self.importance, "speedup": self.speedup}
        return {
            **asdict(self),
            **totals,
            "inputs": {name: list(shape) for name, shape in self.inputs.items()},
            "blocks": [asdict(b) for b in self.blocks],
        }

    def __str__(self) -> str:
        """Return the report as a table, in MFLOPs."""
        name_width = max(len(row.name) for row in (*self.blocks, BlockFlops("everything else", 0, 0, 0, 0)))
        form = f"{{:<{name_width}}}  {{:>6}}  {{:>6}}  {{:>10}}  {{:>10}}  {{:>8}}  {{:>10}}"
        lines = [form.format("block", "tokens", "kept", "dense", "routed", "router", "importance")]
        for row in self.blocks:
            counts = (row.dense, row.routed, row.router, row.importance)
            lines.append(form.format(row.name, row.tokens, row.kept, *map(_mega, counts)))
        lines.append(form.format("everything else", "", "", _mega(self.rest.dense), _mega(self.rest.routed), "-", "-"))
        router = sum(row.router for row in self.blocks)
        totals = map(_mega, (self.dense, self.routed, router, self.importance))
        lines.append(form.format("total MFLOPs", "", "", *totals))
        inputs = ", ".join(f"{name} {' x '.join(map(str, shape))}" for name, shape in self.inputs.items())
        lines += [
            f"{self.speedup:.3f} times fewer FLOPs than dense (2 per multiply-add) for {inputs}",
            f"{self.parameters:,} parameters, {self.router_parameters:,} of them in routers",
            f"activations held at once in inference: {_mebi(self.activation_bytes)} "
            f"(dense {_mebi(self.dense_activation_bytes)})",
            f"activations held for a backward pass: {_mebi(self.training_bytes)} "
            f"(dense {_mebi(self.dense_training_bytes)})",
        ]
        return "\n".join(lines)


def _mega(count: int) -> str:
    return f"{count / 1e6:,.2f}" if count else "-"


def _mebi(count: int) -> str:
    return f"{count / 2**20:.1f} MiB"
