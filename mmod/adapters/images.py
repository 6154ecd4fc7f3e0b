"""What a model of any host library returns for images, and what it says and shows of them and of their patches.

It is the one place that tells hosts apart. Axes: B images, N patches, C channels.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from mmod.adapters.base import BlockStack
from mmod.adapters.find import adapted_model, find_library, find_stacks
from mmod.blocks import host_class, parameters_of
from mmod.config import Grid

Sides = tuple[int, int]
"""Height and width in pixels."""


@dataclass(frozen=True)
class ImageFacts:
    """What a model says of its images and classes.

    Attributes:
        classes: Number of classes; 0 for a model without a classifier, None where the model does not say.
        names: Number of each class by name; None where only the number of classes is known.
        head: Prefixes of the classifier's weights.
        channels: Channels of an image; None where unknown.
        size: The only size of images that the model takes; None for any, or where unknown.
        usual: The size that it is made for, where it takes others too; None where unknown.
        patch: Size of a patch; None where unknown.
        pads: Images that patches do not divide are padded.
    """

    classes: int | None = None
    names: Mapping[str, int] | None = None
    head: tuple[str, ...] = ("head.",)
    channels: int | None = None
    size: Sides | None = None
    usual: Sides | None = None
    patch: Sides | None = None
    pads: bool = False


def image_facts(model: nn.Module) -> ImageFacts:
    """Return what a model says of its images and classes.

    Example:
        >>> import timm
        >>> facts = image_facts(timm.create_model("test_vit", num_classes=5))
        >>> facts.classes, facts.channels, facts.patch
        (5, 3, (16, 16))
    """
    host = adapted_model(model)
    if find_library(host) == "transformers" and hasattr(host, "config"):
        return _facts_of_transformers(host)
    return _facts_of_timm(host)


def _facts_of_timm(model: nn.Module) -> ImageFacts:
    """Return the facts of a timm model, or of a class that names its attributes as timm does."""
    classes = getattr(model, "num_classes", None)
    described = getattr(model, "pretrained_cfg", None) or {}
    heads = described.get("classifier") or "head"
    # Distilled models have two.
    if isinstance(heads, str):
        heads = (heads,)
    patch_embed = getattr(model, "patch_embed", None)
    projection = getattr(patch_embed, "proj", None)
    usual = getattr(patch_embed, "img_size", None)
    size = None
    if isinstance(usual, tuple) and getattr(patch_embed, "strict_img_size", True):
        size = usual
    channels = None
    if isinstance(projection, nn.Conv2d):
        channels = projection.in_channels
    return ImageFacts(
        classes=classes,
        names=_numbered(described.get("label_names"), classes),
        head=tuple(f"{name}." for name in heads),
        channels=channels,
        size=size,
        usual=_sides(usual),
        patch=_sides(getattr(patch_embed, "patch_size", None)),
        pads=bool(getattr(patch_embed, "dynamic_img_pad", False)),
    )


def _numbered(names: Any, classes: int | None) -> dict[str, int] | None:
    if isinstance(names, Mapping):
        return {name: int(number) for number, name in names.items()}
    if names and len(names) == classes:
        return {name: number for number, name in enumerate(names)}
    return None


def _facts_of_transformers(model: Any) -> ImageFacts:
    config = model.config
    classes = 0
    known: Mapping[int, str] = {}
    if "ForImageClassification" in host_class(model).__name__:
        classes = config.num_labels
        known = config.id2label
    # Names that transformers made up are numbers.
    is_named = bool(known) and any(name != f"LABEL_{number}" for number, name in known.items())
    names = None
    if is_named:
        names = {name: int(number) for number, name in known.items()}
    wrapped = getattr(model, "timm_model", None)
    if wrapped is not None:
        inner = _facts_of_timm(wrapped)
        head = tuple(f"timm_model.{name}" for name in inner.head)
        return dataclasses.replace(inner, classes=classes, names=names, head=head)
    vision = getattr(config, "vision_config", config)
    usual = _sides(getattr(vision, "image_size", None))
    size = None
    # Embeddings without this argument interpolate their positions for any size.
    if any("interpolate_pos_encoding" in parameters_of(module) for module in model.modules()):
        size = usual
    return ImageFacts(
        classes=classes,
        names=names,
        head=tuple(f"{name}." for name, _ in model.named_children() if "classifier" in name),
        channels=getattr(vision, "num_channels", None),
        size=size,
        usual=usual,
        patch=_sides(getattr(vision, "patch_size", None)),
    )


def _sides(value: object) -> Sides | None:
    if isinstance(value, int):
        return value, value
    if isinstance(value, (tuple, list)) and len(value) == 2:
        return int(value[0]), int(value[1])
    return None


def image_output(model: nn.Module, images: Tensor, part: str = "image") -> Tensor:
    """Return a model's output for images (B, C, H, W): logits if it has a head, otherwise features per image or token.

    Example:
        >>> import torch, transformers
        >>> sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_labels": 5}
        >>> model = transformers.ViTForImageClassification(transformers.ViTConfig(**sizes))
        >>> image_output(model, torch.randn(2, 3, 224, 224)).shape
        torch.Size([2, 5])
    """
    # A model that reads images and text has a function for images alone.
    read = getattr(model, "get_image_features", model)
    return tensor_of(model, read(images), part)


def tensor_of(model: nn.Module, output: object, part: str) -> Tensor:
    """Return the part of a model's output by which it is evaluated: logits, or features of one of its parts."""
    value = output
    if isinstance(output, (tuple, list)):
        # open_clip returns features of images, then those of texts.
        value = output[int(part == "text")]
    elif isinstance(output, Mapping):
        features = (f"{part}_embeds", f"{part}_features", "pooler_output", "last_hidden_state")
        held = [output[name] for name in ("logits", *features) if isinstance(output.get(name), Tensor)]
        value = next(iter(held), output)
    if not isinstance(value, Tensor):
        raise TypeError(f"the output of this {type(model).__name__} must be a tensor, got {type(value).__name__}")
    return value


@dataclass
class SeenGrid:
    """The grid of a model's last forward pass.

    Attributes:
        grid: Rows and columns of an image's patches; None before a pass, or where the images had no common grid.
    """

    grid: Grid | None = None


def image_stack(model: nn.Module) -> BlockStack | None:
    """Return the blocks of the part that sees images; None for a model without one that can be routed."""
    try:
        return find_stacks(model).get("image")
    except ValueError:
        return None


def patch_grid(model: nn.Module, image_size: tuple[int, int]) -> Grid:
    """Return rows and columns of the patches that a model, possibly wrapped, makes of images of a size.

    Args:
        image_size: Height and width in pixels.

    Raises:
        ValueError: No module of the model makes patches as timm's do, and no config names their size.

    Example:
        >>> import timm
        >>> patch_grid(timm.create_model("test_vit"), (128, 288))
        (8, 18)
    """
    embed: Any = next((module for module in model.modules() if hasattr(module, "dynamic_feat_size")), None)
    if embed is not None:
        rows, columns = embed.dynamic_feat_size(image_size)
        return rows, columns
    patch = image_facts(model).patch
    if patch is None:
        raise ValueError(f"this {type(model).__name__} has no patch embedding of timm, so its grid is unknown")
    return image_size[0] // patch[0], image_size[1] // patch[1]


@contextmanager
def watch_grid(model: nn.Module) -> Iterator[SeenGrid]:
    """Watch the grid of patches in the forward passes within the context.

    Example:
        >>> import timm, torch
        >>> model = timm.create_model("test_vit", dynamic_img_size=True).eval()
        >>> with watch_grid(model) as seen:
        ...     _ = model(torch.zeros(1, 3, 128, 288))
        >>> seen.grid
        (8, 18)
    """
    seen = SeenGrid()
    stack = image_stack(model)
    if stack is None or stack.grid is None:
        yield seen
        return
    source = stack.grid

    def keep(module: nn.Module, args: tuple[object, ...], output: object) -> None:
        seen.grid = source.read(output)

    handle = source.module.register_forward_hook(keep)
    try:
        yield seen
    finally:
        handle.remove()


def resized(x_BNC: Tensor, grid: tuple[int, int], target: tuple[int, int]) -> Tensor:
    """Interpolate a grid of logits or features (B, N, C), row by row, to other rows and columns.

    Raises:
        ValueError: The grid has another number of patches.

    Example:
        >>> import torch
        >>> resized(torch.arange(8.0).view(1, 8, 1), (2, 4), (4, 8)).shape
        torch.Size([1, 32, 1])
    """
    if grid == target:
        return x_BNC
    if math.prod(grid) != x_BNC.shape[1]:
        raise ValueError(f"{x_BNC.shape[1]} outputs are no grid of {grid[0]} x {grid[1]} patches")
    x_BCHW = x_BNC.transpose(1, 2).unflatten(2, grid)
    return F.interpolate(x_BCHW, size=target, mode="bilinear").flatten(2).transpose(1, 2)


def resized_to_labels(model: nn.Module, x_BNC: Tensor, images: Tensor, labels: int) -> Tensor:
    """Interpolate a model's outputs for the patches of images (B, C, H, W) to the patches that have labels.

    Args:
        labels: Number of labels per image, one for each square of pixels.
    """
    outputs = x_BNC.shape[1]
    if outputs == labels:
        return x_BNC
    height, width = images.shape[-2:]
    target = grid_of_squares(labels, height, width)
    if any(hasattr(module, "dynamic_feat_size") for module in model.modules()):
        grid: Grid | None = patch_grid(model, (height, width))
    else:
        # A model that shows no patches has square ones, as labels do.
        grid = grid_of_squares(outputs, height, width)
    if target is None or grid is None:
        raise ValueError(
            f"{outputs} outputs for {labels} patches: grids that differ must both be of squares that tile images of "
            f"{height} x {width} pixels"
        )
    return resized(x_BNC, grid, target)


def grid_of_squares(count: int, height: int, width: int) -> Grid | None:
    """Return rows and columns of squares that tile an image; None if this number does not."""
    rows = math.isqrt(count * height // width)
    columns = count // max(rows, 1)
    if rows * columns == count and rows * width == columns * height:
        return rows, columns
    return None
