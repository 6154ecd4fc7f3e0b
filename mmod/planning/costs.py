"""What each choice for each block costs: FLOPs, or tokens in the cache of a language model, and what time follows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn

from mmod.adapters import BlockStack
from mmod.analysis.flop_report import BlockFlops
from mmod.analysis.flops import flops
from mmod.analysis.prefill import prefill_flops
from mmod.config import RoutingConfig, Score
from mmod.model import route_, unroute_
from mmod.values import check_value

COSTS = ("flops", "image_flops", "cache", "milliseconds")


class Chooser(NamedTuple):
    """Which tokens a capacity above 0 keeps.

    Args:
        router: Scores tokens.
    """

    router: str | Score | Mapping[str, Any] = "stride"

    @property
    def first(self) -> int:
        """The first block that can be routed: importance may be read in a dense block before."""
        return int(self.config.reads_importance(training=False))

    @property
    def config(self) -> RoutingConfig:
        """The config with other settings at their defaults."""
        return RoutingConfig(router=self.router)


class Option(NamedTuple):
    """What may be done to a block.

    Args:
        capacity: Share of tokens kept.
        operator: What the others miss, see `RoutingConfig.operator`.
        context: What kept tokens attend to, see `RoutingConfig.context`.
    """

    capacity: float
    operator: str = "block"
    context: str = "kept"

    def __str__(self) -> str:
        """Return a short name."""
        return f"{self.operator}@{self.capacity:g}" + (" all" if self.context == "all" else "")

    def config(self, blocks: Iterable[int], chooser: Chooser) -> RoutingConfig:
        """Return the config that does it to some blocks.

        Args:
            blocks: Their indices.
            chooser: Chooses tokens.
        """
        own = {"capacity": self.capacity, "operator": self.operator, "context": self.context}
        return RoutingConfig(blocks=tuple(blocks), **chooser._asdict(), **own)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Costs:
    """What blocks cost.

    Args:
        options: Cost of each option for each block.
        dense: Cost of each block as it is.
        total: Cost of the model as it is, what is outside the blocks included.
    """

    options: tuple[tuple[float, ...], ...]
    dense: tuple[float, ...]
    total: float

    @property
    def least_share(self) -> float:
        """The least share of the dense model's cost that choices can have."""
        return 1 - sum(own - min(own, *row) for own, row in zip(self.dense, self.options)) / self.total

    def check(self, budget: float) -> None:
        """Raise a ValueError unless choices can have a share of the dense model's cost.

        Args:
            budget: The share.
        """
        check_value("budget", budget, float)
        if not self.least_share <= budget < 1:
            raise ValueError(
                f"budget must lie in [{self.least_share:.4f}, 1) of the dense model's {self.total:.4g}, what these "
                f"options reach, got {budget!r}"
            )

    def timed(self, dense: float, routed: Sequence[float]) -> Costs:
        """Return these FLOPs as milliseconds: what an option saves is dealt out to blocks by the FLOPs that it saves.

        Args:
            dense: Milliseconds of the dense model.
            routed: Those with each option in every block.
        """
        own = [dense * flops / sum(self.dense) for flops in self.dense]
        columns = []
        for item, time in enumerate(routed):
            saved = [flops - row[item] for flops, row in zip(self.dense, self.options)]
            shares = [each / sum(saved) for each in saved] if sum(saved) else [1 / len(saved)] * len(saved)
            columns.append([each - (dense - time) * share for each, share in zip(own, shares)])
        return Costs(tuple(zip(*columns)), tuple(own), dense)


class PromptLengths:
    """Mean text and image tokens of a prompt, over the batches that are added.

    Args:
        image_token: The id of image tokens, or None where there are none.
    """

    def __init__(self, image_token: int | None) -> None:
        self.image_token = image_token
        self.samples = self.tokens = self.images = 0

    def add(self, batch: Mapping[str, Any]) -> None:
        """Count the prompts of a batch, without padding."""
        ids_BN: Tensor = batch["input_ids"]
        mask_BN = batch.get("attention_mask")
        self.samples += len(ids_BN)
        self.tokens += int(mask_BN.sum()) if isinstance(mask_BN, Tensor) and mask_BN.ndim == 2 else ids_BN.numel()
        self.images += 0 if self.image_token is None else int((ids_BN == self.image_token).sum())

    @property
    def means(self) -> tuple[int, int]:
        """Text and image tokens of a prompt, rounded."""
        images = round(self.images / self.samples)
        return round(self.tokens / self.samples) - images, images


def block_costs(
    model: nn.Module, stack: BlockStack, part: str, options: Sequence[Option], chooser: Chooser, cost: str,
    lengths: PromptLengths, batch: Any,
) -> Costs:  # fmt: skip
    """Count what every option costs in every block: a count of the whole model for each option.

    What reading importance costs is not counted: a plan has some blocks that read it, as many as it has spans.

    Args:
        model: The dense model; dense again at the end.
        stack: The blocks of the part.
        part: Name of the part.
        options: What may be done to a block.
        chooser: Chooses tokens.
        cost: "cache", "image_flops", or what other FLOPs are counted for.
        lengths: Lengths of prompts, for a language model.
        batch: A batch, for other models.
    """
    read = _read_prefill if stack.language else _read_flops
    columns: list[list[float]] = []
    dense: tuple[float, ...] = ()
    total = 0.0
    for option in options:
        route_(model, **{part: option.config(range(chooser.first, len(stack.blocks)), chooser)})
        try:
            rows, rest = read(model, lengths, batch)
        finally:
            unroute_(model)
        own = [row for row in rows if row.name in stack.names]
        columns.append([float(row.cached if cost == "cache" else row.routed - row.importance) for row in own])
        dense = tuple(float(row.tokens if cost == "cache" else row.dense) for row in own)
        total = sum(dense) if cost == "cache" else float(rest.dense + sum(row.dense for row in rows))
    costs = Costs(tuple(zip(*columns)), dense, total)
    return _less_text(costs, model, lengths) if cost == "image_flops" else costs


def _less_text(costs: Costs, model: nn.Module, lengths: PromptLengths) -> Costs:
    """Return costs without those of the same prompt's text alone."""
    text = prefill_flops(model, lengths.means[0])
    own = [row.dense for row in text.blocks]
    options = tuple(tuple(cost - less for cost in row) for row, less in zip(costs.options, own))
    return Costs(options, tuple(cost - less for cost, less in zip(costs.dense, own)), costs.total - text.dense)


def _read_prefill(model: nn.Module, lengths: PromptLengths, batch: Any) -> tuple[Sequence[BlockFlops], BlockFlops]:
    text, images = lengths.means
    report = prefill_flops(model, text, images)
    return report.blocks, report.rest


def _read_flops(model: nn.Module, lengths: PromptLengths, batch: Any) -> tuple[Sequence[BlockFlops], BlockFlops]:
    if isinstance(batch, Mapping):
        report = flops(model, {name: value[:1] for name, value in batch.items() if isinstance(value, Tensor)})
    else:
        channels, height, width = batch.shape[1:]
        report = flops(model, (channels, height, width))
    return report.blocks, report.rest
