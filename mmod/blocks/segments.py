"""Blocks that run the tokens of all images as one sequence, which methods see as a batch.

An image may be cut into windows, in which some blocks attend; what a method decides is of images.

Axes: B images, N tokens of the largest image, T tokens of all images, K rows, D channels, E channels of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from mmod.blocks.call import Arguments, CallForm, name_arguments
from mmod.blocks.calls import StackCalls
from mmod.blocks.conversion import Mixin
from mmod.blocks.hook import ModelHook
from mmod.blocks.shell import KEY_BIAS, InterceptedBlock, run_inside
from mmod.ops import attend_by_image, attend_by_length
from mmod.ops.views import is_visible, mask_bias
from mmod.threads import PerThread

GRIDS = "grid_thw"
"""Argument that gives frames, rows and columns of the patches of each image or video, which come as one sequence."""
WINDOWS = "mmod_windows"
"""The keyword by which a block that attends within windows gets the number of each token's (T, 1), one of its rows."""
_IMAGES = "mmod_images"
"""Attribute of boundaries of windows that holds the images."""
MASKS = ("attention_mask", "attn_mask", "mask")
"""Arguments that hide keys or weigh them, in hosts' words."""


class Segments(NamedTuple):
    """The images in one sequence, or the windows of images.

    Args:
        lengths: Tokens of each.
    """

    lengths: tuple[int, ...]

    @property
    def longest(self) -> int:
        """Number of tokens of the largest image."""
        return max(self.lengths)

    @property
    def equal(self) -> bool:
        """Whether all images have the same number of tokens."""
        return len(set(self.lengths)) == 1

    def numbers(self, device: torch.device) -> Tensor:
        """Return the number of each token's segment (T)."""
        number_B = torch.arange(len(self.lengths), device=device)
        return number_B.repeat_interleave(torch.tensor(self.lengths, device=device), output_size=sum(self.lengths))

    def divides(self, other: Segments) -> bool:
        """Return whether each segment lies within one of the others."""
        return set(accumulate(other.lengths)) <= set(accumulate(self.lengths))

    def split(self, x_TE: Tensor) -> Tensor:
        """Return rows (T, E) as a batch (B, N, E), with zeros at the end of images that are not the largest."""
        if self.equal:
            return x_TE.unflatten(0, (len(self.lengths), -1))
        return pad_sequence(list(x_TE.split(self.lengths)), batch_first=True)

    def join(self, x_BNE: Tensor) -> Tensor:
        """Return a batch (B, N, E) as rows (T, E)."""
        if self.equal:
            return x_BNE.flatten(0, 1)
        return torch.cat([rows_NE[:length] for rows_NE, length in zip(x_BNE, self.lengths)])

    def valid(self, device: torch.device) -> Tensor | None:
        """Return which tokens of a batch are no padding (B, N); None for all."""
        if self.equal:
            return None
        position_N = torch.arange(self.longest, device=device)
        return position_N < torch.tensor(self.lengths, device=device).unsqueeze(1)


def read_segments(boundaries: Tensor) -> Segments:
    """Return the images in one sequence. Their lengths are read on the host, as transformers reads them in each layer.

    Args:
        boundaries: Cumulative lengths of the images (B + 1), or a block-diagonal mask (1, 1, T, T).

    Raises:
        ValueError: The mask is not block-diagonal.

    Example:
        >>> read_segments(torch.tensor([0, 2, 5])).lengths
        (2, 3)
    """
    if boundaries.ndim == 1:
        lengths: list[int] = boundaries.diff().tolist()
        return Segments(tuple(length for length in lengths if length))
    visible_TT = is_visible(boundaries)[0, 0]
    begins_T = torch.cat([visible_TT.new_ones(1), ~visible_TT.diagonal(-1)])
    image_T = begins_T.cumsum(0)
    if not bool((visible_TT == (image_T == image_T.unsqueeze(1))).all()):
        raise ValueError(
            "a routed block got a mask of one sequence that is not block-diagonal, so where images begin is unknown"
        )
    return Segments(tuple(image_T.unique_consecutive(return_counts=True)[1].tolist()))


def is_boundaries(value: object, tokens: int) -> bool:
    """Return whether an argument of a block says where images begin in one sequence of this many tokens."""
    if not isinstance(value, Tensor):
        return False
    if value.ndim == 1 and len(value) > 1 and not value.is_floating_point():
        return int(value[0]) == 0 and int(value[-1]) == tokens
    return value.shape == (1, 1, tokens, tokens)


class SequenceImages:
    """Tells all blocks of a tower the images of the running call, if some blocks attend within windows.

    A block finds the images by the boundaries of windows that it gets, also where a backward pass recomputes it alone.

    Args:
        calls: The calls of the tower's blocks, by thread.
    """

    def __init__(self, calls: PerThread[StackCalls]) -> None:
        self.calls = calls

    @property
    def hook(self) -> ModelHook:
        """The hook of the tower, whose forward gets `GRIDS`. Each frame is an image."""
        return ModelHook(self.read, self.forget)

    def read(self, module: nn.Module, arguments: Arguments) -> None:
        """Read the grids."""
        grids: Tensor = arguments[GRIDS]
        # Blocks read the lengths outside graphs too.
        _outside_graphs(self._begin)(grids)

    def _begin(self, grids: Tensor) -> None:
        lengths: list[int] = []
        for frames, rows, columns in grids.tolist():
            lengths += [rows * columns] * frames
        self.calls.value.lengths.append(tuple(lengths))

    def forget(self, module: nn.Module, arguments: Arguments, output: object) -> None:
        """Forget the call."""
        _outside_graphs(self._end)()

    def _end(self) -> None:
        # There are none of a call that got no grids.
        del self.calls.value.lengths[-1:]

    def of(self, boundaries: Tensor, windows: Segments) -> Segments:
        """Return the images of boundaries of windows.

        Raises:
            ValueError: The windows are not those of the running call.
        """
        # The tensor remembers them for a block that is recomputed outside the call.
        known: Segments | None = getattr(boundaries, _IMAGES, None)
        if known is not None:
            return known
        lengths = self.calls.value.lengths
        images = Segments(lengths[-1] if lengths else ())
        if sum(images.lengths) != sum(windows.lengths) or not windows.divides(images):
            raise ValueError(
                f"a routed block got {len(windows.lengths)} windows of {sum(windows.lengths)} tokens, and the images "
                f"that they are of are unknown: run the whole tower with {GRIDS}; a backward pass that recomputes "
                "blocks needs use_reentrant=False"
            )
        setattr(boundaries, _IMAGES, images)
        return images


def _outside_graphs(function: Callable[..., object]) -> Callable[..., object]:
    if torch.compiler.is_compiling():
        return torch.compiler.disable(function)
    return function


def split_rows(value: object, segments: Segments) -> object:
    """Return a batch of rows (B, 1, N, E) from those of one sequence (T, E), or from a tuple of them."""
    return map_rows(lambda rows_TE: segments.split(rows_TE).unsqueeze(1), value)


def as_one_sequence(
    call: CallForm, x_BND: Tensor, arguments: Mapping[str, object], filled_BK: Tensor | None = None
) -> tuple[Tensor, dict[str, object]]:
    """Return a batch and its arguments as one sequence in the host's form; only attention tells images apart.

    Args:
        filled_BK: The rows of the batch that the sequence has (B, K); None for all.
    """
    every_row: slice | Tensor = slice(None)
    if filled_BK is not None:
        every_row = filled_BK.flatten()
    z_TD = x_BND.flatten(0, 1)[every_row]
    attended = len(z_TD)
    named = dict(arguments)

    def in_sequence(rows: Tensor) -> Tensor:
        return rows.reshape(-1, rows.shape[-1])[every_row]

    for name in call.rows:
        if named.get(name) is not None:
            named[name] = map_rows(in_sequence, named[name])
            # Attention alone may run on fewer tokens.
            attended = len(_first(named[name]))
    if call.boundaries in MASKS:
        named[call.boundaries] = None
    elif call.boundaries:
        # On the CPU, where the host reads it without a synchronisation.
        named[call.boundaries] = torch.tensor([0, attended], dtype=torch.int32)
    return _in_layout(call, z_TD), named


def _in_layout(call: CallForm, x_TD: Tensor) -> Tensor:
    """Return the tokens of one sequence as the host takes and returns them, mostly as a batch of one."""
    if call.layout == "bare":
        return x_TD
    return x_TD.unsqueeze(0)


def map_rows(change: Callable[..., object], value: object, *args: object) -> object:
    """Apply a function to a tensor of rows, or to each of a tuple of them; further arguments are passed on."""
    if isinstance(value, (tuple, list)):
        return tuple(change(item, *args) for item in value)
    return change(value, *args)


def _first(value: object) -> Any:
    if isinstance(value, (tuple, list)):
        return value[0]
    return value


class FlatBlock(InterceptedBlock):
    """Inner mixin of a block that takes one set of rows for all images, such as rotary embeddings (N, E).

    Where images keep different tokens, or the host knows no batch, all images run as one sequence, and attention is
    split by image again, or by window. The sequence has no empty rows, unless what runs inside the block, or reads its
    attention, expects a batch.
    """

    def forward(self, x: Tensor, *args: object, **kwargs: Any) -> object:
        """Run the host's block."""
        call: CallForm = self.mod_state.call
        windows = kwargs.pop(WINDOWS, None)
        window_BK = None
        if windows is not None:
            window_BK = windows.flatten(1)
        rows = [_first(kwargs[name]) for name in call.rows if kwargs.get(name) is not None]
        differ = [item for item in rows if item.ndim > 2]
        if not differ and not call.boundaries:
            return super().forward(x, *args, **kwargs)
        bias = kwargs.pop(KEY_BIAS, None)
        # Without values, nothing tells how many rows a window keeps.
        if self.mod_state.inner.value.expects_batch or (window_BK is not None and window_BK.is_meta):
            if window_BK is not None:
                bias = _within_windows(bias, window_BK, x.dtype)
        elif call.boundaries and (bias is not None or window_BK is not None):
            return self._mod_run_filled(x, args, kwargs, bias, window_BK)
        images = len(differ[0]) if differ else len(x)
        split = attend_by_image(images, bias)
        z, arguments = as_one_sequence(call, x, kwargs)
        y: Tensor = run_inside(self, split, super().forward, (z, *args), arguments)
        return y.view_as(x)

    def _mod_run_filled(
        self,
        x_BKD: Tensor,
        args: tuple[object, ...],
        kwargs: dict[str, object],
        bias: Tensor | None,
        window_BK: Tensor | None,
    ) -> Tensor:
        """Return the rows after the host's block, which gets those that a bias of keys (B, 1, 1, K) shows."""
        if bias is None:
            filled_BK = torch.ones_like(x_BKD[..., 0], dtype=torch.bool)
        else:
            filled_BK = is_visible(bias)[:, 0, 0]
        z, arguments = as_one_sequence(self.mod_state.call, x_BKD, kwargs, filled_BK)
        bias_T = None
        # What only hides empty rows says nothing of filled ones.
        if bias is not None and bias.dtype != torch.bool:
            bias_T = bias[:, 0, 0][filled_BK]
        # Images and windows may keep no row.
        if window_BK is None:
            lengths = [count for count in filled_BK.sum(1).tolist() if count]
        else:
            # Numbers ascend from image to image, and kept rows are in order.
            window_T = window_BK[filled_BK]
            lengths = window_T.unique_consecutive(return_counts=True)[1].tolist()
        attention = attend_by_length(lengths, bias_T)
        y: Tensor = attention.run(super().forward, (z, *args), arguments)
        return torch.zeros_like(x_BKD, dtype=y.dtype).index_put((filled_BK,), y.flatten(0, -2))


def _within_windows(bias: Tensor | None, window_BK: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a bias of keys as one of pairs (B, 1, K, K), which hides those of two windows."""
    lowest = torch.finfo(dtype).min
    if bias is None:
        bias = torch.zeros((), dtype=dtype, device=window_BK.device)
    elif bias.dtype == torch.bool:
        bias = mask_bias(bias, lowest, dtype)
    # Not -inf: an empty slot may be the only one of its window, and a softmax over no key is NaN.
    same_BKK = window_BK.unsqueeze(1) == window_BK.unsqueeze(2)
    return torch.where(same_BKK.unsqueeze(1), bias, lowest)


class SegmentsBlock(Mixin):
    """Outer mixin of a block that gets the tokens of all images in one sequence: the method's mixin gets a batch.

    Images of one size are a view. Others are padded: padding is hidden from attention, and never kept.
    """

    def forward(self, x: Tensor, *args: object, **kwargs: object) -> object:
        """Return the tokens in the host's form, or the rows (B, K, D) that the block passes on."""
        arguments = name_arguments(self.mod_state.call.names, args, kwargs)
        if torch.compiler.is_compiling():
            # The graph ends where lengths are read: before the block, not in the midst of its attention.
            return torch.compiler.disable(self._mod_run)(x, arguments)
        return self._mod_run(x, arguments)

    def _mod_run(self, x: Tensor, arguments: dict[str, Any]) -> Tensor:
        call: CallForm = self.mod_state.call
        boundaries = arguments.pop(call.boundaries)
        segments = read_segments(boundaries)
        # Where blocks see windows, something else knows the images.
        images: SequenceImages | None = self.mod_state.call.sequence
        if images is not None:
            windows = segments
            segments = images.of(boundaries, windows)
            if windows != segments:
                arguments[WINDOWS] = windows.numbers(x.device).unsqueeze(1)
        tokens = sum(segments.lengths)
        for name in call.rows:
            if arguments.get(name) is not None:
                arguments[name] = split_rows(arguments[name], segments)
        valid_BN = segments.valid(x.device)
        if valid_BN is not None:
            arguments[KEY_BIAS] = valid_BN[:, None, None, :]
        if tuple(x.shape[:-1]) not in ((tokens,), (1, tokens)):
            # Rows that the block before passed on.
            z = x
        else:
            z = segments.split(x.flatten(0, -2))
            self._mod_follow(x, z)
        y: Tensor = super().forward(z, **arguments)
        self._mod_follow(z, x)
        if y.shape[1] < segments.longest:
            return y
        joined = _in_layout(call, segments.join(y))
        self._mod_follow(y, joined)
        return joined

    def _mod_follow(self, x: Tensor, y: Tensor) -> None:
        """Let a tensor belong to the pass of another one."""
        # A module that a method puts in the place of blocks is in none.
        span = getattr(self.mod_state, "span", None)
        if span is not None:
            span.follow(x, y)


def boundaries_of(arguments: Mapping[str, object], x: Tensor) -> str:
    """Return the name of the argument that says where images begin in one sequence; empty where a batch tells it."""
    is_sequence = x.ndim == 2 or (x.ndim == 3 and len(x) == 1)
    if not is_sequence:
        return ""
    for name, value in arguments.items():
        if is_boundaries(value, x.shape[-2]):
            return name
    return ""
