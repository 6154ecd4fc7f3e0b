"""What a model of any host library returns for images, and what it says of them: the one place that tells hosts apart.

Axes: B images.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from mmod.adapters.find import adapted_model, find_library
from mmod.blocks import host_class, parameters_of

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
    host: Any = adapted_model(model)
    if find_library(host) == "transformers" and hasattr(host, "config"):
        return _facts_of_transformers(host)
    return _facts_of_timm(host)


def _facts_of_timm(model: Any) -> ImageFacts:
    """Return the facts of a timm model, or of a class that names its attributes as timm does."""
    classes = getattr(model, "num_classes", None)
    described: Any = getattr(model, "pretrained_cfg", None) or {}
    head: str | tuple[str, ...] = described.get("classifier") or "head"
    patch_embed: Any = getattr(model, "patch_embed", None)
    projection = getattr(patch_embed, "proj", None)
    usual = getattr(patch_embed, "img_size", None)
    is_strict = getattr(patch_embed, "strict_img_size", True)
    return ImageFacts(
        classes=classes,
        names=_numbered(described.get("label_names"), classes),
        head=tuple(f"{name}." for name in ([head] if isinstance(head, str) else head)),
        channels=projection.in_channels if isinstance(projection, nn.Conv2d) else None,
        size=usual if is_strict and isinstance(usual, tuple) else None,
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
    classifies = "ForImageClassification" in host_class(model).__name__
    classes = config.num_labels if classifies else 0
    known = config.id2label if classifies else {}
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
    # Embeddings without this argument interpolate their positions for any size.
    is_strict = any("interpolate_pos_encoding" in parameters_of(module) for module in model.modules())
    usual = _sides(getattr(vision, "image_size", None))
    return ImageFacts(
        classes=classes,
        names=names,
        head=tuple(f"{name}." for name, _ in model.named_children() if "classifier" in name),
        channels=getattr(vision, "num_channels", None),
        size=usual if is_strict else None,
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
    host: Any = model
    read = getattr(host, "get_image_features", host)
    return tensor_of(model, read(images), part)


def tensor_of(model: nn.Module, output: object, part: str) -> Tensor:
    """Return the part of a model's output by which it is evaluated: logits, or features of one of its parts."""
    value = output
    if isinstance(output, (tuple, list)):
        value = output[1 if part == "text" else 0]
    elif isinstance(output, Mapping):
        features = (f"{part}_embeds", f"{part}_features", "pooler_output", "last_hidden_state")
        held = [output[name] for name in ("logits", *features) if isinstance(output.get(name), Tensor)]
        value = next(iter(held), output)
    if not isinstance(value, Tensor):
        raise TypeError(f"the output of this {type(model).__name__} must be a tensor, got {type(value).__name__}")
    return value
