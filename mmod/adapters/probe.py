"""What the first block of a model gets, seen in a call of a copy that stops there.

Axes: B images, N tokens, D channels.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mmod.blocks import host_class

# Arguments of models that read images or videos.
PIXELS = ("pixel_values", "pixel_values_videos")
# Sides of images that models without a setting may take, in pixels.
_SIDES = (224, 32, 64, 96, 128, 256, 384, 512)
_SIZES = ("image_size", "img_size", "crop_size", "input_size")


@dataclass(frozen=True)
class Seen:
    """The first call of a model's blocks, for two images that differ everywhere.

    Args:
        x_BND: The tokens (2, N, D).
        arguments: The block's further arguments, by name.
        prefix: Leading tokens that no image changes: class and register tokens.
        suffix: Such tokens at the end: detection tokens.
        projection: Name of the module that shows the grid of patches as a feature map; empty for none.
    """

    x_BND: Tensor
    arguments: Mapping[str, Any]
    prefix: int
    suffix: int
    projection: str


class _Reached(Exception):
    """Ends a call of a model at its first block."""


class _FirstBlock(nn.Module):
    """Stands for a block, and keeps what it gets."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.parameters_of_forward = inspect.signature(host_class(block).forward)
        self.x: Any = None
        self.arguments: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        """Return None for attributes of the block that its model reads before it is called."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("_"):
                raise
            return None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Keep the arguments by name, and stop."""
        bound = self.parameters_of_forward.bind(self, *args, **kwargs).arguments
        _, *named = bound.items()
        (_, self.x), *further = named
        for name, value in further:
            if self.parameters_of_forward.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
                self.arguments.update(value)
            else:
                self.arguments[name] = value
        raise _Reached


def see(model: nn.Module, blocks: str, example: Tensor | None = None) -> Seen:
    """Call a copy of a model on two images, up to its first block.

    The copy shares weights on the CPU in fp32; others are converted, and those on the meta device drawn at random. The
    model, its modes and random number generators stay as they are.

    Args:
        blocks: Name of the list of blocks.
        example: Images that the model takes, of which the shape counts; None tries what its settings say.

    Raises:
        ValueError: No input reached the first block, or what it got are no tokens.
    """
    title = host_class(model).__name__
    reasons: list[str] = []
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        for inputs in inputs_of(model, example):
            try:
                return see_call(model, blocks, inputs)
            except _NoTokens as refusal:
                raise ValueError(f"cannot route {title}: the first of its {blocks} gets {refusal}") from None
            # A model may raise anything for an input that it was not made for.
            except Exception as error:
                reasons.append(f"{shapes_of(inputs)}: {error}")
    tried = "; ".join(reasons[:2]) or "nothing that it takes is known"
    raise ValueError(
        f"cannot route {title}: no input reached the first of its {blocks} ({tried}). Pass mmod.Tokens({blocks!r}, "
        "example=images) with a batch that the model takes"
    )


class _NoTokens(Exception):
    """Says what a block gets instead of tokens."""


def see_call(model: nn.Module, blocks: str, inputs: Mapping[str, Any]) -> Seen:
    """Return what the first block gets in a call of a copy on two images.

    Args:
        inputs: Arguments by name, "" for the first.

    Raises:
        ValueError: It gets no tokens.
    """
    block_list: Any = model.get_submodule(blocks)
    first = _FirstBlock(block_list[0])
    projections: dict[str, tuple[int, ...]] = {}
    dense = light_copy(model, {id(block_list[0]): first}, block_list)
    for name, module in dense.named_modules():
        if isinstance(module, (nn.Conv2d, nn.Conv3d)):
            module.register_forward_hook(_keep_shape(projections, name))
    positional = inputs.get("")
    named = {name: value for name, value in inputs.items() if name}
    with contextlib.suppress(_Reached):
        dense(*(() if positional is None else (positional,)), **named)
    x = first.x
    if x is None:
        raise ValueError("the first block was not called")
    if not isinstance(x, Tensor) or x.ndim != 3 or x.shape[0] != 2 or not x.is_floating_point():
        got = f"a tensor {tuple(x.shape)}" if isinstance(x, Tensor) else f"a {type(x).__name__}"
        raise _NoTokens(f"{got} for two images: blocks must get tokens (images, tokens, channels)")
    tokens = x.shape[1]
    same_N = (x[0] == x[1]).all(dim=-1)
    if bool(same_N.all()):
        raise _NoTokens("equal tokens for two different images: are the model's weights loaded?")
    changed = same_N.logical_not().nonzero().flatten()
    prefix = int(changed[0])
    suffix = tokens - 1 - int(changed[-1])
    patches = tokens - prefix - suffix
    projection = next(
        (name for name, shape in projections.items() if len(shape) == 4 and shape[2] * shape[3] == patches), ""
    )
    return Seen(x.float(), first.arguments, prefix, suffix, projection)


def _keep_shape(shapes: dict[str, tuple[int, ...]], name: str) -> Any:
    def keep(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        shapes[name] = tuple(output.shape)

    return keep


def light_copy(model: nn.Module, replaced: Mapping[int, nn.Module], block_list: nn.Module) -> Any:
    """Return a copy of a model in evaluation mode, without hooks, whose weights outside the blocks run on the CPU."""
    memo: dict[int, Any] = dict(replaced)
    inside = {id(tensor) for tensor in (*block_list.parameters(), *block_list.buffers())}
    for module in model.modules():
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None:
                # Those of the blocks are never used.
                memo[id(tensor)] = tensor if id(tensor) in inside else runnable(tensor)
    clone = copy.deepcopy(model, memo)
    without_hooks(clone)
    return clone.eval()


def runnable(tensor: Tensor) -> Tensor:
    """Return a tensor on the CPU, in fp32 if it has fractions; random numbers in the place of one on meta."""
    if tensor.is_meta:
        if not tensor.is_floating_point():
            return torch.zeros(tensor.shape, dtype=tensor.dtype)
        return torch.randn(tensor.shape, dtype=torch.float32)
    plain = tensor.detach().cpu()
    return plain.float() if plain.is_floating_point() else plain


def without_hooks(module: nn.Module) -> None:
    """Remove all hooks of a copy, and forwards that were replaced on instances."""
    for inner in module.modules():
        vars(inner).pop("forward", None)
        for name, hooks in vars(inner).items():
            if name.endswith(("_hooks", "_hooks_with_kwargs", "_hooks_always_called")) and isinstance(hooks, dict):
                hooks.clear()


def inputs_of(model: nn.Module, example: Tensor | None = None) -> Iterator[dict[str, Any]]:
    """Return inputs of two images that a model may take, the likeliest first; "" is the first argument."""
    names = inspect.signature(host_class(model).forward).parameters
    pixels = next((name for name in PIXELS if name in names), "")
    if example is not None:
        yield {pixels: _draw(*example.shape[1:])}
        return
    if {"pixel_values", "spatial_shapes"} <= names.keys():
        yield _packed_patches(model)
        return
    channels = _setting(model, ("num_channels", "in_chans", "in_channels"), 3)
    for height, width in dict.fromkeys(_sides(model)):
        image = (channels, height, width)
        frames = _setting(model, ("num_frames", "frames_per_clip"), 0)
        if frames:
            yield {pixels: _draw(frames, *image)}
        yield {pixels: _draw(*image)}


def _draw(*shape: int) -> Tensor:
    """Return two random images; the default dtype may be another while a model is loaded."""
    return torch.randn(2, *shape, dtype=torch.float32)


def _packed_patches(model: Any) -> dict[str, Any]:
    """Return patches in rows, with their grid beside them, as SigLIP 2 takes images of any shape."""
    config = getattr(model.config, "vision_config", model.config)
    side = int(config.num_patches**0.5)
    values = _draw(side * side, config.num_channels * config.patch_size**2)
    mask = torch.ones(2, side * side, dtype=torch.long)
    shapes = torch.tensor([[side, side]] * 2)
    arguments = {"pixel_values": values, "spatial_shapes": shapes}
    names = inspect.signature(host_class(model).forward).parameters
    name = "pixel_attention_mask" if "pixel_attention_mask" in names else "attention_mask"
    return {**arguments, name: mask}


def _sides(model: nn.Module) -> Iterator[tuple[int, int]]:
    """Return heights and widths of images that a model may take, the likeliest first."""
    for holder in (getattr(model, "config", None), *model.modules()):
        for name in _SIZES:
            size = getattr(holder, name, None)
            if isinstance(size, int) and size:
                yield size, size
            elif isinstance(size, (tuple, list)) and len(size) >= 2 and all(isinstance(side, int) for side in size):
                yield size[-2], size[-1]
    for side in _SIDES:
        yield side, side


def _setting(model: nn.Module, names: tuple[str, ...], default: int) -> int:
    config = getattr(model, "config", None)
    values = [getattr(config, name, None) for name in names]
    found = [value for value in values if isinstance(value, int)]
    if found:
        return found[0]
    convolution = next((module for module in model.modules() if isinstance(module, (nn.Conv2d, nn.Conv3d))), None)
    return convolution.in_channels if "num_channels" in names and convolution is not None else default


def shapes_of(inputs: Mapping[str, Any]) -> str:
    """Return the shapes of inputs as text."""
    return ", ".join(f"{name or 'input'} {tuple(value.shape)}" for name, value in inputs.items())
