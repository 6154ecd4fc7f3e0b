"""The information horizon: the layer of a vision-language model from which on image tokens do not matter."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from mmod.analysis.modes import in_mode
from mmod.config import RoutingConfig, Score
from mmod.io.progress import progress_bar
from mmod.io.tables import markdown_table
from mmod.lazy import name_missing_extra
from mmod.planning.divergence import check_batches, check_rows, kl_divergence, outputs, routed
from mmod.planning.search import dense_part
from mmod.values import check_value


@dataclass(frozen=True)
class Horizon:
    """How much the answers change if all image tokens leave a language model at a layer; `print` shows a table.

    Args:
        names: Names of the layers.
        divergences: Mean Kullback-Leibler divergence of the answers' tokens from those of the dense model, by the first
            layer without image tokens. The first is that of a model that sees no image.
        agreements: Share of the answers' tokens whose most probable token is the dense model's, likewise.
        rows: Number of tokens compared.
    """

    names: tuple[str, ...]
    divergences: tuple[float, ...]
    agreements: tuple[float, ...]
    rows: int

    def layer(self, tolerance: float = 0.05) -> int:
        """Return the first layer from which on image tokens do not matter; the number of layers if they always do.

        Args:
            tolerance: Divergence that does not matter, as a share of that without an image, in [0, 1].

        Example:
            >>> Horizon(("0", "1", "2", "3"), (2.0, 0.5, 0.05, 0.01), (0.1, 0.7, 1.0, 1.0), 20).layer(0.05)
            2
        """
        check_value("tolerance", tolerance, float, "[0, 1]")
        limit = tolerance * self.divergences[0]
        # A later layer may matter again.
        needed = [layer for layer, divergence in enumerate(self.divergences) if divergence > limit]
        return max(needed, default=-1) + 1

    def plan(
        self,
        tolerance: float = 0.05,
        *,
        capacity: float = 1.0,
        after: int = 1,
        router: str | Score | Mapping[str, object] = "stride",
    ) -> RoutingConfig:
        """Return the plan without image tokens behind the horizon, and with a share of them in front of it.

        Args:
            tolerance: See `layer`.
            capacity: Share of image tokens that layers in front of the horizon keep.
            after: Number of dense layers at the start.
            router: The score by which these layers choose.

        Raises:
            ValueError: Image tokens matter in the last layer, and all are kept in front of it.

        Example:
            >>> horizon = Horizon(("0", "1", "2", "3"), (2.0, 0.5, 0.05, 0.01), (0.1, 0.7, 1.0, 1.0), 20)
            >>> horizon.plan().blocks, horizon.plan(capacity=0.5).capacity
            ((2, 3), (0.5, 0.0, 0.0))
        """
        depth = len(self.names)
        horizon = self.layer(tolerance)
        check_value("capacity", capacity, float, "[0, 1]")
        check_value("after", after, int, f"[0, {depth}]")
        front = range(0)
        if capacity < 1:
            front = range(after, horizon)
        blocks = (*front, *range(max(horizon, after), depth))
        if not blocks:
            raise ValueError(
                f"image tokens matter in all {depth} layers at tolerance {tolerance:g}: allow a larger tolerance, or "
                "pass a capacity below 1 for the layers in front of the horizon"
            )
        capacities = (capacity,) * len(front) + (0.0,) * (len(blocks) - len(front))
        return RoutingConfig(blocks=blocks, capacity=capacities, depth=depth, router=router)

    def __str__(self) -> str:
        rows = [
            (name, f"{divergence:.4g}", f"{100 * agreement:.1f}")
            for name, divergence, agreement in zip(self.names, self.divergences, self.agreements)
        ]
        table = markdown_table(["no image tokens from", "divergence", "same answer %"], rows)
        return f"{table}\n\nmean over {self.rows} tokens"

    @name_missing_extra()
    def plot(self, path: str | Path, overwrite: bool = False) -> None:
        """Draw the divergence over depth, with the horizon at the default tolerance."""
        from mmod.analysis.style import FAINT, new_figure, save_figure, tidy

        figure = new_figure(8, 3)
        left, right = figure.subplots(1, 2)
        layers = range(len(self.names))
        left.plot(layers, self.divergences, ".-")
        right.plot(layers, [100 * agreement for agreement in self.agreements], ".-")
        for axes, title in ((left, "divergence"), (right, "same answer in %")):
            axes.axvline(self.layer(), linestyle=":", color=FAINT)
            axes.set(xlabel="first layer without image tokens", ylabel=title)
            tidy(axes)
        title = f"{self.rows} tokens; dotted: the horizon"
        figure.suptitle(title, fontsize=9, color=FAINT, x=0.99, ha="right")
        save_figure(figure, path, overwrite)


def horizon(model: nn.Module, prompts: Iterable[Mapping[str, object]]) -> Horizon:
    """Measure from which layer on the image tokens of a vision-language model do not matter for its answers.

    For every layer, all image tokens leave the model in front of it: that layer and those after it neither compute nor
    attend to them. Each batch takes a dense pass, and one for each layer.

    Args:
        model: A dense vision-language model; unchanged afterwards.
        prompts: Batches of the model's keyword arguments. With `labels` the answers are the labelled tokens, else all
            text.

    Raises:
        ValueError: The model is routed or has no language part that reads images, or there is nothing to compare.

    Source: the information horizon, arXiv 2512.07580.

    Example:
        >>> from transformers import LlavaConfig, LlavaForConditionalGeneration
        >>> vision = {"model_type": "clip_vision_model", "image_size": 8, "patch_size": 4, "num_hidden_layers": 2}
        >>> text = {"model_type": "llama", "vocab_size": 16, "hidden_size": 32, "num_hidden_layers": 3}
        >>> config = LlavaConfig(vision_config=vision, text_config=text, image_token_index=9)
        >>> model = LlavaForConditionalGeneration(config)
        >>> prompt = {"input_ids": torch.tensor([[1, 9, 9, 9, 9, 2]]), "pixel_values": torch.zeros(1, 3, 8, 8)}
        >>> curve = horizon(model, [prompt])
        >>> len(curve.divergences), curve.rows
        (3, 2)
    """
    check_batches(prompts)
    _, stack = dense_part(model, "language")
    if not stack.reads_images:
        raise ValueError(f"{stack.names[0]} reads text alone: a horizon is that of image tokens")
    depth = len(stack.blocks)
    divergences = [0.0] * depth
    agreements = [0.0] * depth
    rows = 0
    with in_mode(False, model), torch.no_grad():
        for batch in progress_bar(prompts, desc="horizon", leave=False):
            dense_RF = outputs(model, batch, "language")
            top_R = dense_RF.argmax(-1)
            for layer in range(depth):
                plan = RoutingConfig(blocks=tuple(range(layer, depth)), capacity=0.0, router="stride")
                with routed(model, "language", plan):
                    changed_RF = outputs(model, batch, "language")
                divergences[layer] += float(kl_divergence(dense_RF, changed_RF).double().sum())
                agreements[layer] += float((changed_RF.argmax(-1) == top_R).double().sum())
            rows += len(dense_RF)
    check_rows(rows)
    mean_divergences = tuple(total / rows for total in divergences)
    mean_agreements = tuple(total / rows for total in agreements)
    return Horizon(stack.names, mean_divergences, mean_agreements, rows)
