"""Pictures of routed vision-language models: what they answer, and which image tokens they kept for a question."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from mmod import trace
from mmod.analysis.plots import draw_routing_maps
from mmod.analysis.style import FAINT, INK, new_figure
from mmod.data.readers.chat import ChatCollator
from mmod.data.readers.conversations import ChatSample
from mmod.data.records import IMAGE

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["draw_answers", "draw_kept"]

# Letters of a line of the question beside its picture.
_LINE = 18


def draw_kept(model: Any, collator: ChatCollator, talks: Sequence[ChatSample]) -> Figure | None:
    """Draw which image tokens each routed layer kept of questions about one image.

    Args:
        model: A routed model.
        collator: Encodes questions for it.
        talks: Conversations with one image each.

    Returns:
        The figure; None where an image's tokens are no square grid over its pixels, as in models that cut images into
        tiles.
    """
    prompts = collator.prompts(talks)
    pixels = prompts.get("pixel_values")
    image_BN = prompts["input_ids"] == collator.processor.image_token_id
    tokens = int(image_BN.sum()) // len(talks)
    side = math.isqrt(tokens)
    if pixels is None or pixels.ndim != 4 or side * side != tokens:
        return None
    low, high = pixels.amin(), pixels.amax()
    labels = [textwrap.fill(talk.messages[-2].text.replace(IMAGE, "").strip(), _LINE) for talk in talks]
    with torch.inference_mode(), trace(model) as decisions:
        model(**{key: value.to(model.device) for key, value in prompts.items()}, logits_to_keep=1)
    return draw_routing_maps((pixels - low) / (high - low), decisions, 0, (side, side), labels, image_BN)


def draw_answers(right: Mapping[str, Mapping[str, float]], shares: Mapping[str, float]) -> Figure:
    """Draw what each model answers right by kind of question, against the first model.

    Args:
        right: Name of each model to the percent of right answers of each kind; the first one is what others are
            compared with.
        shares: Share of the first model's FLOPs that each of them spends.

    Returns:
        A figure with a row for each model: percent for the first one, points more or less for all others.

    Example:
        >>> right = {"dense": {"count": 99.0, "read": 51.0}, "p-mod": {"count": 98.5, "read": 47.0}}
        >>> [text.get_text() for text in draw_answers(right, {"dense": 1.0, "p-mod": 0.57}).axes[0].texts]
        ['99.0 %', '51.0 %', '-0.5', '-4.0']
    """
    names, kinds = list(right), list(next(iter(right.values())))
    base = right[names[0]]
    changes = [[right[name][kind] - base[kind] for kind in kinds] for name in names]
    limit = max(5.0, *(abs(change) for row in changes for change in row))
    figure = new_figure(1.0 * len(kinds) + 2.4, 0.36 * len(names) + 0.7)
    axis = figure.subplots()
    axis.imshow(changes, cmap="RdBu", vmin=-limit, vmax=limit, aspect="auto")
    for row, differences in enumerate(changes):
        for column, change in enumerate(differences):
            text = f"{change:+.1f}" if row else f"{base[kinds[column]]:.1f} %"
            axis.text(column, row, text, ha="center", va="center", color="white" if abs(change) > 0.6 * limit else INK)
    axis.set_xticks(range(len(kinds)), kinds)
    axis.set_yticks(range(len(names)), [f"{name}  {shares[name]:.2f}" for name in names])
    axis.xaxis.tick_top()
    axis.tick_params(length=0)
    axis.set_xlabel(
        f"right answers: {names[0]}, then points more or less · beside the names: share of FLOPs", color=FAINT
    )
    for spine in axis.spines.values():
        spine.set_visible(False)
    return figure
