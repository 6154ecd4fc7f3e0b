"""Reports of FLOPs, as values and as tables."""

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
        cached: Tokens whose keys and values it caches, in a language model.
    """

    name: str
    tokens: int
    kept: int
    dense: int
    routed: int
    router: int = 0
    importance: int = 0
    cached: int = 0


@dataclass(frozen=True)
class FlopCounts:
    """FLOPs of a model by block.

    Args:
        blocks: One row for each block, in order.
        rest: Everything outside the blocks: embedding, head, pooling.
    """

    blocks: tuple[BlockFlops, ...]
    rest: BlockFlops

    @property
    def dense(self) -> int:
        """FLOPs without routing."""
        return self.rest.dense + sum(row.dense for row in self.blocks)

    @property
    def routed(self) -> int:
        """FLOPs as routed, with routers and importance."""
        return self.rest.routed + sum(row.routed for row in self.blocks)

    @property
    def importance(self) -> int:
        """FLOPs spent on importance, contained in `routed`."""
        return sum(row.importance for row in self.blocks)

    @property
    def speedup(self) -> float:
        """FLOPs without routing over those with it."""
        return self.dense / self.routed

    @property
    def share(self) -> float:
        """Share of the dense model's FLOPs that is spent."""
        return self.routed / self.dense

    def table(self) -> str:
        """Return the counts as a table, in MFLOPs."""
        width = max(len(name) for name in ("everything else", *(row.name for row in self.blocks)))
        form = f"{{:<{width}}}  {{:>6}}  {{:>6}}  {{:>10}}  {{:>10}}  {{:>8}}  {{:>10}}"
        lines = [form.format("block", "tokens", "kept", "dense", "routed", "router", "importance")]
        for row in self.blocks:
            counts = (row.dense, row.routed, row.router, row.importance)
            lines.append(form.format(row.name, row.tokens, row.kept, *map(_mega, counts)))
        lines.append(form.format("everything else", "", "", _mega(self.rest.dense), _mega(self.rest.routed), "-", "-"))
        router = sum(row.router for row in self.blocks)
        totals = map(_mega, (self.dense, self.routed, router, self.importance))
        return "\n".join([*lines, form.format("total MFLOPs", "", "", *totals)])


@dataclass(frozen=True)
class FlopReport(FlopCounts):
    """The cost of a model for one image, one caption, or both; `print(report)` shows it as a table.

    Args:
        blocks: One row for each block, in order.
        rest: Everything outside the blocks: embedding, head, pooling.
        inputs: Shape of each input by name, such as channels, height and width of an image.
        parameters: Parameters, those that methods add included.
        added_parameters: Parameters beyond those of the dense model; below 0 where blocks are shared.
        dense_activation_bytes: Most activation memory held at once in inference, without routing.
        activation_bytes: The same as routed.
        dense_training_bytes: Activations held for the backward pass when the forward pass ends, without routing.
        training_bytes: The same as routed.
    """

    inputs: Mapping[str, tuple[int, ...]]
    parameters: int
    added_parameters: int
    dense_activation_bytes: int
    activation_bytes: int
    dense_training_bytes: int
    training_bytes: int

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain JSON values, totals included."""
        totals = {name: getattr(self, name) for name in ("dense", "routed", "importance", "speedup")}
        return {**asdict(self), **totals, "inputs": {name: list(shape) for name, shape in self.inputs.items()}}

    def __str__(self) -> str:
        """Return the report as a table, in MFLOPs."""
        inputs = ", ".join(f"{name} {' x '.join(map(str, shape))}" for name, shape in self.inputs.items())
        return "\n".join([
            self.table(),
            f"{self.speedup:.3f} times fewer FLOPs than dense (2 per multiply-add) for {inputs}",
            f"{self.parameters:,} parameters, {self.added_parameters:+,} against the dense model",
            f"activations held at once in inference: {_mebi(self.activation_bytes)} "
            f"(dense {_mebi(self.dense_activation_bytes)})",
            f"activations held for a backward pass: {_mebi(self.training_bytes)} "
            f"(dense {_mebi(self.dense_training_bytes)})",
        ])  # fmt: skip


@dataclass(frozen=True)
class PrefillFlops(FlopCounts):
    """The cost of reading one prompt; `print(report)` shows it as a table.

    Args:
        blocks: One row for each decoder layer, in order.
        rest: The logits of the last token.
        tokens: Tokens of the prompt.
        image_tokens: Image tokens among them.
        cache_bytes_per_token: Bytes of the keys and values of one token in one layer, in the model's own type.
    """

    tokens: int
    image_tokens: int
    cache_bytes_per_token: int

    @property
    def cache_bytes(self) -> int:
        """Bytes of the keys and values that all layers hold of the prompt."""
        return self.cache_bytes_per_token * sum(row.cached for row in self.blocks)

    @property
    def cache_share(self) -> float:
        """Share of the dense model's cache of keys and values that is held."""
        return sum(row.cached for row in self.blocks) / (self.tokens * len(self.blocks))

    def __str__(self) -> str:
        """Return the report as a table, in MFLOPs."""
        return (
            f"{self.table()}\na prompt of {self.tokens} tokens, {self.image_tokens} of images: {self.share:.3f} of the "
            f"FLOPs (2 per multiply-add), {self.cache_share:.3f} of the cache, {self.cache_bytes:,} bytes"
        )


def _mega(count: int) -> str:
    return f"{count / 1e6:,.2f}" if count else "-"


def _mebi(count: int) -> str:
    return f"{count / 2**20:.1f} MiB"
