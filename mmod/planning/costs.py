"""Cost of each option in each block: FLOPs, tokens in the KV cache of a language model, or milliseconds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn

from mmod.adapters import BlockStack
from mmod.analysis.flop_report import FlopCounts
from mmod.analysis.flops import flops
from mmod.analysis.prefill import prefill_flops
from mmod.config import RoutingConfig, Score
from mmod.model import route_, unroute_
from mmod.values import check_value

COSTS = ("flops", "image_flops", "cache", "milliseconds")


class SelectionRule(NamedTuple):
    """How a capacity above 0 selects tokens."""

    router: str | Score | Mapping[str, Any] = "stride"

    @property
    def first(self) -> int:
        """Index of the first block that can be routed: importance is read in the dense block before it."""
        return int(self.config.reads_importance(training=False))

    @property
    def config(self) -> RoutingConfig:
        """A config with this rule and default settings."""
        return RoutingConfig(router=self.router)


class Option(NamedTuple):
    """One way to route a block.

    Args:
        capacity: Share of tokens kept.
        operator: What skipped tokens miss, see `RoutingConfig.operator`.
        context: What kept tokens attend to, see `RoutingConfig.context`.
    """

    capacity: float
    operator: str = "block"
    context: str = "kept"

    def __str__(self) -> str:
        """Return a short name."""
        return f"{self.operator}@{self.capacity:g}" + (" all" if self.context == "all" else "")

    def config(self, blocks: Iterable[int], rule: SelectionRule) -> RoutingConfig:
        """Return the config that routes some blocks this way."""
        return RoutingConfig(blocks=tuple(blocks), **rule._asdict(), **self._asdict())


@dataclass(frozen=True)
class BlockCosts:
    """Cost of each block.

    Args:
        options: Cost of each option, by block.
        dense: Cost of each dense block.
        total: Cost of the dense model, including everything outside the blocks.
    """

    options: tuple[tuple[float, ...], ...]
    dense: tuple[float, ...]
    total: float

    @property
    def least_share(self) -> float:
        """Minimum share of the dense model's cost: the cheapest option in every block."""
        return 1 - sum(dense - min(dense, *row) for dense, row in zip(self.dense, self.options)) / self.total

    def check(self, budget: float) -> None:
        """Raise a ValueError unless some plan has this share of the dense model's cost, or less."""
        check_value("budget", budget, float)
        if not self.least_share <= budget < 1:
            raise ValueError(
                f"budget must lie in [{self.least_share:.4f}, 1) of the dense model's {self.total:.4g}, the range of "
                f"these options, got {budget!r}"
            )

    def timed(self, dense: float, routed: Sequence[float]) -> BlockCosts:
        """Return FLOPs as milliseconds: the time that an option saves is split over blocks by the FLOPs that it saves.

        Args:
            dense: Milliseconds of the dense model.
            routed: Milliseconds with each option in every block.
        """
        block_times = [dense * flops / sum(self.dense) for flops in self.dense]
        columns = []
        for item, time in enumerate(routed):
            saved = [flops - row[item] for flops, row in zip(self.dense, self.options)]
            # An option that saves no FLOPs may still save time, which is then split evenly.
            shares = [flops / sum(saved) for flops in saved] if sum(saved) else [1 / len(saved)] * len(saved)
            columns.append([block - (dense - time) * share for block, share in zip(block_times, shares)])
        return BlockCosts(tuple(zip(*columns)), tuple(block_times), dense)


class PromptLengths:
    """Mean number of text and image tokens per prompt, over the batches added so far."""

    def __init__(self, image_token: int | None) -> None:
        self.image_token = image_token
        self.samples = self.tokens = self.images = 0

    def add(self, batch: Mapping[str, Any]) -> None:
        """Count the tokens of a batch, except padding."""
        ids_BN: Tensor = batch["input_ids"]
        mask_BN = batch.get("attention_mask")
        self.samples += len(ids_BN)
        self.tokens += int(mask_BN.sum()) if isinstance(mask_BN, Tensor) and mask_BN.ndim == 2 else ids_BN.numel()
        self.images += 0 if self.image_token is None else int((ids_BN == self.image_token).sum())

    @property
    def means(self) -> tuple[int, int]:
        """Mean text and image tokens, rounded."""
        images = round(self.images / self.samples)
        return round(self.tokens / self.samples) - images, images


def block_costs(
    model: nn.Module, stack: BlockStack, part: str, options: Sequence[Option], rule: SelectionRule, cost: str,
    lengths: PromptLengths, batch: Any,
) -> BlockCosts:  # fmt: skip
    """Return the cost of every option in every block, from one count of the model per option.

    The cost of reading importance is left out: how many blocks read it depends on the plan.
    """
    columns: list[list[float]] = []
    dense: tuple[float, ...] = ()
    total = 0.0
    for option in options:
        route_(model, **{part: option.config(range(rule.first, len(stack.blocks)), rule)})
        try:
            report = _count(model, stack.language, lengths, batch)
        finally:
            unroute_(model)
        blocks = [row for row in report.blocks if row.name in stack.names]
        columns.append([float(row.cached if cost == "cache" else row.routed - row.importance) for row in blocks])
        dense = tuple(float(row.tokens if cost == "cache" else row.dense) for row in blocks)
        total = sum(dense) if cost == "cache" else float(report.dense)
    costs = BlockCosts(tuple(zip(*columns)), dense, total)
    if cost != "image_flops":
        return costs
    # What image tokens add is the cost minus that of the prompt's text alone.
    text = prefill_flops(model, lengths.means[0])
    text_costs = [row.dense for row in text.blocks]
    added = tuple(tuple(share - less for share in row) for row, less in zip(costs.options, text_costs))
    dense = tuple(share - less for share, less in zip(costs.dense, text_costs))
    return BlockCosts(added, dense, costs.total - text.dense)


def _count(model: nn.Module, language: bool, lengths: PromptLengths, batch: Any) -> FlopCounts:
    if language:
        return prefill_flops(model, *lengths.means)
    if isinstance(batch, Mapping):
        return flops(model, {name: value[:1] for name, value in batch.items() if isinstance(value, Tensor)})
    channels, height, width = batch.shape[1:]
    return flops(model, (channels, height, width))
