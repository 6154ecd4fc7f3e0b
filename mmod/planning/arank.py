"""ARank: route the layers whose attention maps have the lowest rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from mmod.adapters import find_part
from mmod.config import RoutingConfig
from mmod.io.progress import progress_bar
from mmod.io.tables import markdown_table
from mmod.lazy import name_missing_extra
from mmod.ops.intercept import AttentionCall, AttentionIntercept, inside
from mmod.planning.divergence import check_batch, check_batches, check_rows
from mmod.values import check_value


@dataclass(frozen=True)
class LayerRanks:
    """Rank of each layer's attention maps; `print` shows a table, lowest first.

    Args:
        ranks: Mean rank of a layer's maps, over heads and samples.
        tokens: Mean number of tokens per map, the maximum rank.
        tolerance: Singular values below this share of the largest do not count; None means fp32 epsilon times tokens.
    """

    names: tuple[str, ...]
    ranks: tuple[float, ...]
    tokens: float
    samples: int
    tolerance: float | None

    def plan(self, capacity: float, *, below: float | None = None, budget: float | None = None) -> RoutingConfig:
        """Return the plan that routes layers of low rank.

        Args:
            capacity: Share of tokens that a routed layer keeps, in (0, 1].
            below: Route the layers with a rank below this.
            budget: Route layers, lowest rank first, until the mean capacity of all layers is at most this.

        Example:
            >>> ranks = LayerRanks(("0", "1", "2", "3"), (9.0, 3.0, 5.0, 8.0), 10.0, 4, None)
            >>> ranks.plan(0.5, below=6).blocks, ranks.plan(0.5, budget=0.8).blocks
            ((1, 2), (1, 2))
        """
        if (below is None) == (budget is None):
            raise ValueError("give either below (a rank) or budget (a mean capacity)")
        check_value("capacity", capacity, float, "(0, 1]")
        check_value("below", below, float | None)
        check_value("budget", budget, float | None, "(0, 1)")
        depth = len(self.ranks)
        order = sorted(range(depth), key=lambda layer: (self.ranks[layer], layer))
        if below is not None:
            chosen = [layer for layer in order if self.ranks[layer] < below]
            if not chosen:
                raise ValueError(f"no layer has a rank below {below}; the lowest is {min(self.ranks):.1f}")
        else:
            assert budget is not None
            # Layers that keep all tokens save nothing, however many there are.
            number = depth + 1
            if capacity < 1:
                # Rounded before: an error of the last bit would route a layer more.
                number = math.ceil(round(depth * (1 - budget) / (1 - capacity), 9))
            if not 0 < number <= depth:
                raise ValueError(
                    f"a mean capacity of {budget} is out of reach with layers that keep {capacity}: it must lie "
                    f"between {capacity} and {1 - (1 - capacity) / depth:.4f}"
                )
            chosen = order[:number]
        return RoutingConfig(blocks=tuple(sorted(chosen)), capacity=(capacity,) * len(chosen), depth=depth)

    def __str__(self) -> str:
        ranked = sorted(zip(self.names, self.ranks), key=lambda row: row[1])
        rows = [(name, f"{rank:.1f}", f"{rank / self.tokens:.3f}") for name, rank in ranked]
        table = markdown_table(["layer", "rank", "share"], rows)
        tolerance = "fp32 epsilon times tokens" if self.tolerance is None else f"{self.tolerance:g}"
        return (
            f"{table}\n\nmean over heads and {self.samples} samples of {self.tokens:.1f} tokens on average; singular "
            f"values below {tolerance} of the largest do not count"
        )

    @name_missing_extra()
    def plot(self, path: str | Path, overwrite: bool = False) -> None:
        """Draw the rank over depth."""
        from mmod.analysis.style import new_figure, save_figure

        figure = new_figure(6, 3)
        axes = figure.subplots()
        axes.bar(range(len(self.ranks)), self.ranks)
        title = f"{self.samples} samples, {self.tokens:.0f} tokens on average"
        axes.set(xlabel="layer", ylabel="rank of attention", title=title)
        save_figure(figure, path, overwrite)


def attention_ranks(
    model: nn.Module,
    batches: Iterable[Mapping[str, object] | Tensor],
    *,
    part: str | None = None,
    tolerance: float | None = None,
) -> LayerRanks:
    """Return the rank of every layer's attention maps on calibration samples.

    Memory holds one map (one head of one sample) at a time, in fp32. The time for its singular values grows with the
    cube of the tokens: for a thousand tokens use a GPU or few samples.

    Args:
        model: A dense model of a supported library, with sdpa or eager attention.
        batches: The model's keyword arguments, or its only argument. `attention_mask` excludes padding.
        part: The part to measure, for models with several: "language", "image", "text".
        tolerance: Singular values below this share of the largest do not count; None means fp32 epsilon times tokens.

    Source: gamma-MoD, arXiv 2410.13859, section 3 (mean over heads and samples). The released code takes the first
    sample only, and leaves the tolerance to torch, as `tolerance=None` does. As there, the diagonal does not count:
    with it, every causal map has full rank.

    Example:
        >>> import timm
        >>> ranks = attention_ranks(timm.create_model("test_vit").eval(), [torch.randn(2, 3, 160, 160)], tolerance=0.01)
        >>> len(ranks.ranks), ranks.samples
        (6, 2)
    """
    check_batches(batches)
    _, stack = find_part(model, part)
    totals = [0.0] * len(stack.blocks)
    maps = tokens = samples = 0
    for batch in progress_bar(batches, desc="attention ranks", leave=False):
        check_batch(batch)
        mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
        # One pass serves all layers.
        modes = [_Ranks(mask, tolerance) for _ in stack.blocks]
        with inside(list(zip(stack.blocks, modes))), torch.no_grad():
            if isinstance(batch, Mapping):
                model(**batch)
            else:
                model(batch)
        for number, mode in enumerate(modes):
            if not mode.ranks:
                raise ValueError(f"{stack.names[number]} ran no attention over all tokens: use sdpa or eager attention")
            totals[number] += sum(mode.ranks) / len(mode.ranks) * mode.samples
        samples += modes[0].samples
        tokens += sum(modes[0].tokens)
        maps += len(modes[0].tokens)
    check_rows(samples)
    ranks = tuple(total / samples for total in totals)
    return LayerRanks(stack.names, ranks, tokens / maps, samples, tolerance)


class _Ranks(AttentionIntercept):
    def __init__(self, mask: Tensor | None, tolerance: float | None) -> None:
        super().__init__()
        self.mask_BN = mask
        self.tolerance = tolerance
        self.ranks: list[float] = []
        self.tokens: list[int] = []
        self.samples = 0

    def attend(self, call: AttentionCall) -> Tensor:
        query = call.query
        key = call.key
        mask = call.attn_mask
        group = query.shape[1] // key.shape[1]
        scale = call.scale
        if scale is None:
            scale = 1 / math.sqrt(query.shape[-1])

        def attention_map(sample: int, head: int) -> Tensor:
            score = (query[sample, head].float() * scale) @ key[sample, head // group].float().T
            if call.is_causal:
                score = score.masked_fill(torch.ones_like(score, dtype=torch.bool).triu(1), -torch.inf)
            if mask is not None:
                # Hosts pass masks of booleans, or of numbers that are added.
                pairs = mask.expand(len(query), query.shape[1], *score.shape)[sample, head]
                if pairs.dtype == torch.bool:
                    score = score.masked_fill(~pairs, -torch.inf)
                else:
                    score = score + pairs
            return torch.softmax(score, dim=-1)

        self._take(query.shape[0], query.shape[1], attention_map)
        return call.run()

    def observe(self, score: Tensor, attention: Tensor) -> None:
        self._take(len(attention), attention.shape[1], lambda sample, head: attention[sample, head].float())

    def _take(self, samples: int, heads: int, attention_map: Callable[[int, int], Tensor]) -> None:
        self.samples = samples
        for sample in range(samples):
            for head in range(heads):
                attention = attention_map(sample, head)
                if self.mask_BN is not None and self.mask_BN.shape[-1] == attention.shape[-1]:
                    real = self.mask_BN[sample].to(attention.device).bool()
                    attention = attention[real][:, real]
                # A causal map is triangular: with its diagonal, which is positive, its rank is full.
                attention = attention - torch.diag_embed(attention.diagonal())
                self.tokens.append(attention.shape[0])
                self.ranks.append(float(torch.linalg.matrix_rank(attention, rtol=self.tolerance)))
