"""What the first block of a model gets, read in a call of a copy that stops there.

Axes: B images, N tokens, D channels.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from mmod.adapters.base import Proof
from mmod.blocks import (
    GRIDS,
    Arguments,
    Segments,
    boundaries_of,
    copy_modules,
    host_class,
    map_rows,
    parameters_of,
    read_segments,
    split_rows,
)

Result = TypeVar("Result")
Model = TypeVar("Model", bound=nn.Module)
# How rows that differ by image are passed, see `CallForm`; the first is tried before the others.
LAYOUTS = ("heads", "batch", "flat")
# What the forward of a model takes: images, all arguments in order, or arguments by name.
Example = Tensor | tuple[object, ...] | Mapping[str, object]
# Arguments of models that read images or videos.
PIXELS = ("pixel_values", "pixel_values_videos")
# Sides of images that models without a setting may take, in pixels.
_SIDES = (224, 32, 64, 96, 112, 128, 160, 192, 256, 336, 384, 448, 512, 28)
_SIZES = ("image_size", "img_size", "crop_size", "input_size")
# Least rows and columns of patches in images that come as one sequence.
_GRID_SIDE = 16
# Tokens of each image that are kept of one sequence: trials need few.
_KEPT = 16


@dataclass(frozen=True)
class BlockInputs:
    """What a model passes to its blocks for two images that differ everywhere, as values that run on the CPU.

    Args:
        x_BND: The tokens (2, N, D); those of one sequence of all images are a batch here, as are its arguments.
        arguments: The block's further arguments, by name.
        seen: A `Proof` of what is known before a trial; its other fields have their defaults. `prefix` counts the
            leading tokens that are the same for both images, such as class and register tokens, and `suffix` those at
            the end, such as detection tokens.
    """

    x_BND: Tensor
    arguments: Arguments
    seen: Proof

    @property
    def patches(self) -> int:
        """Number of tokens that are patches."""
        return self.x_BND.shape[1] - self.seen.prefix - self.seen.suffix

    def with_seen(self, **changes: Any) -> BlockInputs:
        """Return the inputs with other fields of `seen`."""
        return dataclasses.replace(self, seen=dataclasses.replace(self.seen, **changes))


class _Reached(Exception):
    """Ends a call of a model at its first block."""


class _NoTokens(Exception):
    """Says what a block gets instead of tokens, or that it gets nothing."""


class _Call(NamedTuple):
    """What a block got in a call of its model.

    Args:
        x: What should be its tokens.
        arguments: Its further arguments, by name.
        tokens: See `CallForm`; so is `boundaries`.
    """

    x: Any
    arguments: dict[str, Any]
    tokens: str
    boundaries: str

    @property
    def segments(self) -> Segments:
        """The segments of one sequence within which the block attends."""
        return read_segments(self.arguments[self.boundaries].cpu())

    @property
    def two_images(self) -> Segments:
        """The segments of one sequence that are the two images."""
        return Segments((self.x.shape[-2] // 2,) * 2)


class _Watch(TorchFunctionMode):
    """Runs instead of the blocks of a copy, keeps what they get, and notes which outputs are read between them.

    The first block ends the call, unless all images come as one sequence: then every block passes the tokens on,
    because blocks may differ in where they see images begin.

    Args:
        block_list: The blocks of the copy, whose own forwards are never called.

    Attributes:
        calls: What each block got, in order.
        read: Numbers of the blocks whose outputs are read.
    """

    def __init__(self, block_list: nn.ModuleList) -> None:
        super().__init__()
        self.calls: list[_Call] = []
        self.read: set[int] = set()
        self._output: Tensor | None = None
        for block in block_list:
            for module in block.modules():
                # It runs only where its block was not called.
                vars(module)["forward"] = _refuse_inside
            signature = inspect.signature(host_class(block).forward)
            vars(block)["forward"] = functools.partial(self._run, signature, block is block_list[-1])

    def _run(self, signature: inspect.Signature, is_last: bool, *args: object, **kwargs: object) -> Tensor:
        """Keep the arguments of a block, and stop or pass the tokens on."""
        # What is read here is not read by the model.
        with torch._C.DisableTorchFunction():
            # The first one stands for `self`.
            _, (name, x), *further = signature.bind(None, *args, **kwargs).arguments.items()
            arguments: dict[str, object] = {}
            for further_name, value in further:
                if signature.parameters[further_name].kind is inspect.Parameter.VAR_KEYWORD:
                    arguments.update(value)
                else:
                    arguments[further_name] = value
            boundaries = ""
            if isinstance(x, Tensor):
                boundaries = boundaries_of(arguments, x)
            if args:
                # Tokens come by their place.
                name = ""
            self.calls.append(_Call(x, arguments, name, boundaries))
            if is_last or not boundaries:
                raise _Reached
            self._output = x.clone()
            return self._output

    def __torch_function__(
        self, func: Any, types: object, args: tuple[object, ...] = (), kwargs: Arguments | None = None
    ) -> object:
        """Note a function that reads the output of the last block."""
        if self._output is not None and any(value is self._output for value in tree_leaves((args, kwargs))):
            self.read.add(len(self.calls) - 1)
        return func(*args, **(kwargs or {}))


def _refuse_inside(*args: object, **kwargs: object) -> NoReturn:
    raise _NoTokens(
        "is not called: the model takes it apart and runs the modules in it, such as a pair of attention and MLP. "
        "Write a class of blocks whose forward(x) runs these modules, and let the model call each block with the "
        "tokens (images, tokens, channels)"
    )


def read_inputs(model: nn.Module, blocks: str, example: Example | None = None) -> BlockInputs:
    """Call a copy of a model on two images, up to its first block.

    The copy shares weights on the CPU in fp32; others are converted, and those on the meta device drawn at random. The
    model and its modes stay as they are.

    Args:
        blocks: Name of the list of blocks.
        example: What the model's forward takes, see `Tokens`; None tries what its settings say.

    Raises:
        ValueError: No input reached the first block, or what it got are no tokens.
    """
    title = host_class(model).__name__
    try:
        with torch.no_grad():
            torch.default_generator.manual_seed(0)
            read, reasons = first_that_runs(model, lambda inputs: inputs_of_call(model, blocks, inputs), example)
    except _NoTokens as refusal:
        advice = ""
        if title == "ResNet" and host_class(model).__module__.startswith("timm."):
            advice = ", and so does mmod.apply_(model, mmod.lab.Channels())"
        raise ValueError(f"cannot route {title}: the first of its {blocks} {refusal}{advice}") from None
    if read is not None:
        return read
    plain = [value.replace(annotation=inspect.Parameter.empty) for value in parameters_of(model).values()]
    advice = f"pass tokens=mmod.Tokens({blocks!r}, example=...) with these"
    if example is not None:
        advice = "the example must be these, in fp32 on a CPU too"
    raise ValueError(
        f"cannot route {title}: no input reached the first of its {blocks} ({reasons}). Its forward takes "
        f"{inspect.Signature(plain)}: {advice}, as a tensor, a tuple, or a mapping by name"
    )


def first_that_runs(
    model: nn.Module, run: Callable[[Arguments], Result], example: Example | None = None
) -> tuple[Result | None, str]:
    """Call a function with likely inputs of a model, one after the other, until a call succeeds.

    Args:
        model: The model whose inputs are guessed.
        run: Gets inputs by name. It may raise anything.
        example: Inputs to try alone, instead of guesses.

    Returns:
        The result of the call that succeeded and an empty text; or None and the errors of the first two calls.
    """
    reasons: list[str] = []
    for inputs in likely_inputs(model, example):
        try:
            return run(inputs), ""
        except _NoTokens:
            raise
        # A model may raise anything for an input that it was not made for.
        except Exception as error:
            shapes = []
            for name, value in inputs.items():
                if _is_positional(name):
                    name = "input"
                if isinstance(value, Tensor):
                    shapes.append(f"{name} {tuple(value.shape)}")
            reasons.append(f"{', '.join(shapes)}: {error}")
    return None, "; ".join(reasons[:2]) or "nothing that it takes is known"


def split_inputs(inputs: Arguments) -> tuple[tuple[object, ...], dict[str, object]]:
    """Return inputs as positional and named arguments of a model."""
    named = {name: value for name, value in inputs.items() if not _is_positional(name)}
    return tuple(value for name, value in inputs.items() if _is_positional(name)), named


def _is_positional(name: str) -> bool:
    return not name or name.isdigit()


def inputs_of_call(model: nn.Module, blocks: str, inputs: Arguments) -> BlockInputs:
    """Return what the first block gets in a call of a copy on two images.

    Args:
        inputs: Arguments by name, "" or numbers for those in order.

    Raises:
        ValueError: It gets no tokens.
    """
    dense = light_copy(model, model.get_submodule(blocks))
    watch = _Watch(dense.get_submodule(blocks))
    projections: dict[str, tuple[int, ...]] = {}
    for name, module in dense.named_modules():
        if isinstance(module, (nn.Conv2d, nn.Conv3d)):
            module.register_forward_hook(functools.partial(_keep_shape, projections, name))
    args, named = split_inputs(inputs)
    with contextlib.suppress(_Reached), watch:
        dense(*args, **named)
    if not watch.calls:
        raise ValueError("the first block was not called")
    first = _inputs_of(watch.calls[0], blocks)
    if first.seen.boundaries:
        # Blocks that attend within the two images see what a batch would show; others see windows of them.
        windows = [call.segments for call in watch.calls if call.segments != call.two_images]
        if windows:
            _check_windows(windows[0], watch.calls[0], model, blocks)
        return first.with_seen(windows=bool(windows), read=tuple(sorted(watch.read)))
    for name, shape in projections.items():
        # The feature map with a place for each patch shows the grid.
        if len(shape) == 4 and shape[2] * shape[3] == first.patches:
            return first.with_seen(projection=name)
    return first.with_seen(projection="")


def _inputs_of(call: _Call, blocks: str) -> BlockInputs:
    """Return what a block got: a batch of two images, or one sequence of two as a batch."""
    x = call.x
    arguments = call.arguments
    layout = LAYOUTS[0]
    if call.boundaries:
        layout = "bare" if x.ndim == 2 else "flat"
        x, arguments = _as_batch(call)
    if not isinstance(x, Tensor) or x.ndim != 3 or x.shape[0] != 2 or not x.is_floating_point():
        got = f"a {type(x).__name__}"
        if isinstance(x, Tensor):
            got = f"a tensor {tuple(x.shape)}"
        advice = ""
        if isinstance(x, Tensor) and x.ndim == 4:
            advice = ". Convolutions and windows read every place of a map: smaller images make such a model cheaper"
        raise _NoTokens(f"gets {got} for two images: blocks must get tokens (images, tokens, channels){advice}")
    same_N = (x[0] == x[1]).all(dim=-1)
    if bool(same_N.all()):
        raise _NoTokens("gets equal tokens for two different images: are the model's weights loaded?")
    # Tokens that depend on no image stand in front of the patches and behind them.
    changed = same_N.logical_not().nonzero().flatten()
    prefix = int(changed[0])
    suffix = x.shape[1] - 1 - int(changed[-1])
    seen = Proof(
        blocks=blocks,
        projection="",
        prefix=prefix,
        suffix=suffix,
        dim=x.shape[2],
        patches=x.shape[1] - prefix - suffix,
        boundaries=call.boundaries,
        layout=layout,
        tokens=call.tokens,
    )
    return BlockInputs(x.float(), tree_map_only(Tensor, runnable, dict(arguments)), seen)


def _check_windows(windows: Segments, call: _Call, model: nn.Module, blocks: str) -> None:
    """Refuse blocks with windows unless these are of images whose sizes the module that runs the blocks gets."""
    if "." in blocks or GRIDS not in parameters_of(model) or not windows.divides(call.two_images):
        raise _NoTokens(
            f"shares its tokens with blocks that attend within windows of {windows.longest}: these must lie within "
            f"images, and the module that runs the blocks must take {GRIDS}, which says where images begin"
        )


def _as_batch(call: _Call) -> tuple[Tensor, dict[str, object]]:
    """Return the first tokens of each image of one sequence as a batch, with its arguments."""
    tokens = call.x.shape[-2]
    images = call.two_images
    arguments = {name: value for name, value in call.arguments.items() if name != call.boundaries}
    for name, value in arguments.items():
        items = tree_leaves(value)
        if items and all(_has_rows(item, tokens) for item in items):
            arguments[name] = map_rows(lambda rows: rows[:, :, :_KEPT], split_rows(value, images))
    x_BND = images.split(call.x.flatten(0, -2))
    return x_BND[:, :_KEPT], arguments


def _has_rows(value: object, tokens: int) -> bool:
    """Return whether an argument has a row of each token, as rotary embeddings have."""
    return isinstance(value, Tensor) and value.ndim == 2 and len(value) == tokens


def _keep_shape(shapes: dict[str, tuple[int, ...]], name: str, module: nn.Module, args: object, output: Tensor) -> None:
    shapes[name] = tuple(output.shape)


def light_copy(model: nn.Module, block_list: nn.Module) -> Any:
    """Return a copy of a model in evaluation mode, without hooks, whose weights outside the blocks run on the CPU."""
    # Those of the blocks are never used.
    tensors: dict[int, object] = {id(tensor): tensor for tensor in (*block_list.parameters(), *block_list.buffers())}
    for tensor in (*model.parameters(), *model.buffers()):
        if id(tensor) not in tensors:
            tensors[id(tensor)] = runnable(tensor)
    return copy_with(model, tensors)


def copy_with(module: Model, tensors: dict[int, object]) -> Model:
    """Return a copy in evaluation mode, without hooks and replaced forwards.

    Args:
        tensors: What the copy has in the place of tensors, by their ids.
    """
    clone = copy_modules(module, tensors)
    for inner in clone.modules():
        vars(inner).pop("forward", None)
        for name, hooks in vars(inner).items():
            if name.endswith(("_hooks", "_hooks_with_kwargs", "_hooks_always_called")) and isinstance(hooks, dict):
                hooks.clear()
    return clone.eval()


def runnable(tensor: Tensor) -> Tensor:
    """Return a tensor on the CPU, in fp32 if it has fractions; random numbers instead of one on meta."""
    if tensor.is_meta:
        if not tensor.is_floating_point():
            return torch.zeros(tensor.shape, dtype=tensor.dtype)
        return torch.randn(tensor.shape, dtype=torch.float32)
    plain = tensor.detach().cpu()
    if plain.is_floating_point():
        return plain.float()
    return plain


def likely_inputs(model: nn.Module, example: Example | None = None) -> Iterator[dict[str, object]]:
    """Return inputs of two images that a model may take, the likeliest first; "" is the first argument."""
    names = parameters_of(model)
    pixels = next((name for name in PIXELS if name in names), "")
    if example is not None:
        if isinstance(example, (tuple, list)):
            example = {str(number): value for number, value in enumerate(example)}
        elif not isinstance(example, Mapping):
            example = {pixels: example}
        yield _for_two_images(example, [*names][:1])
        return
    if GRIDS in names:
        yield from _one_sequence(model, next(iter(names)))
        return
    if {"pixel_values", "spatial_shapes"} <= names.keys():
        yield _packed_patches(model)
        return
    if "image_sizes" in names:
        projection = next(module for module in model.modules() if isinstance(module, nn.Conv2d))
        height, width = projection.kernel_size
        # Small: the model takes any size.
        yield {pixels: _draw(projection.in_channels, 8 * height, 8 * width)}
        return
    channels = channels_of(model)
    for height, width in dict.fromkeys(_sides(model)):
        image = (channels, height, width)
        frames = _setting(model, ("num_frames", "frames_per_clip"), 0)
        if frames:
            yield {pixels: _draw(frames, *image)}
        yield {pixels: _draw(*image)}


def _for_two_images(example: Arguments, names: Sequence[str]) -> dict[str, object]:
    """Return an example for two images: other images, and what goes with those of the example.

    Args:
        names: The argument of the model's forward that takes the images, if the example has it.
    """
    first = next((name for name in (*names, *example) if isinstance(example.get(name), Tensor)), None)
    if first is None:
        return dict(example)
    images = example[first]
    batch = len(images) if images.ndim else 0

    def repeat(leaf: object) -> object:
        if not isinstance(leaf, Tensor):
            return leaf
        if batch and leaf.ndim > 0 and len(leaf) == batch:
            # The first two; an example of one image is both.
            leaf = leaf[torch.arange(2) % batch]
        return runnable(leaf)

    repeated = {name: tree_map(repeat, value) for name, value in example.items()}
    if images.ndim and images.is_floating_point():
        repeated[first] = _draw(*images.shape[1:])
    return repeated


def _draw(*shape: int) -> Tensor:
    """Return two random images; the default dtype may be another while a model is loaded."""
    return torch.randn(2, *shape, dtype=torch.float32)


def _one_sequence(model: nn.Module, name: str) -> Iterator[dict[str, object]]:
    """Return the patches of two images, one behind the other in an argument, as Qwen's towers take them."""
    # Twice the side of windows, so that blocks with windows show.
    window = getattr(model, "window_size", 0) // getattr(model, "patch_size", 1)
    side = max(_GRID_SIDE, 2 * window)
    grid = torch.tensor([[1, side, side]] * 2)
    merged = {}
    if "merge_sizes" in parameters_of(model):
        merged["merge_sizes"] = torch.ones(2, dtype=torch.long)
    projections = [module for module in model.modules() if isinstance(module, (nn.Conv2d, nn.Conv3d))]
    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    # The first layer projects patches, given as rows or as small images.
    shape = (projections or linear)[0].weight.shape[1:]
    for patch in ((shape.numel(),), tuple(shape)):
        yield {name: torch.randn(2 * side**2, *patch, dtype=torch.float32), GRIDS: grid, **merged}


def _packed_patches(model: Any) -> dict[str, object]:
    """Return patches in rows, with their grid beside them, as SigLIP 2 takes images of any shape."""
    config = getattr(model.config, "vision_config", model.config)
    side = int(config.num_patches**0.5)
    values = _draw(side * side, config.num_channels * config.patch_size**2)
    mask = torch.ones(2, side * side, dtype=torch.long)
    shapes = torch.tensor([[side, side]] * 2)
    arguments = {"pixel_values": values, "spatial_shapes": shapes}
    name = "attention_mask"
    if "pixel_attention_mask" in parameters_of(model):
        name = "pixel_attention_mask"
    return {**arguments, name: mask}


def _sides(model: nn.Module) -> Iterator[tuple[int, int]]:
    """Return heights and widths of images that a model may take, the likeliest first."""
    for holder in (getattr(model, "config", None), *model.modules()):
        for name in _SIZES:
            size = getattr(holder, name, None)
            if isinstance(size, int) and size:
                yield size, size
            if not isinstance(size, (tuple, list)) or len(size) < 2:
                continue
            # Of a video, the first is the number of frames.
            if all(isinstance(side, int) for side in size):
                yield size[-2], size[-1]
    for side in _SIDES:
        yield side, side


def channels_of(model: nn.Module) -> int:
    """Return the channels of images that a model takes, as far as its settings or its first convolution show."""
    return _setting(model, ("num_channels", "in_chans", "in_channels"), 3)


def _setting(model: nn.Module, names: tuple[str, ...], default: int) -> int:
    config = getattr(model, "config", None)
    values = [getattr(config, name, None) for name in names]
    found = [value for value in values if isinstance(value, int)]
    if found:
        return found[0]
    if "num_channels" in names:
        for module in model.modules():
            if isinstance(module, (nn.Conv2d, nn.Conv3d)):
                return module.in_channels
    return default
