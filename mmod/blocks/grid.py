"""What the patch embedding tells a forward pass: rows and columns of patches, and what a score sees of their pixels.

Axes: B images or frames, R rows and C columns of patches, N patches of an image, P of all, H channels, E pixels of a
patch, F numbers of a patch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mmod.blocks.call import Arguments
from mmod.blocks.calls import StackCalls
from mmod.blocks.hook import ModelHook
from mmod.config import Grid, Patches, Score
from mmod.threads import PerThread

See = Callable[[Tensor], tuple[Tensor, ...]]
"""Returns what a score needs of the pixels of patches (B, R, C, H, E); whole numbers are indices of patches."""
# Of an image with transparency; a convolution of more reads features.
_CHANNELS = 4


def grid_of_map(output: object) -> Grid | None:
    """Return the grid of a feature map (B, C, rows, columns), which the projection to patches of most hosts returns."""
    if isinstance(output, Tensor) and output.ndim == 4:
        return output.shape[2], output.shape[3]
    return None


class GridSource(NamedTuple):
    """Where a host shows its grid.

    Args:
        module: The module that makes the patches of an image.
        read: Returns the grid from the module's output; None where a batch has no common one.
        std: What each channel of an image was divided by when it was normalised; None where the host does not say.
    """

    module: nn.Module
    read: Callable[[Any], Grid | None]
    std: tuple[float, ...] | None = None

    def check(self, score: Score, first: str) -> None:
        """Raise a ValueError unless a score can read the pixels of each patch before a block, by its name."""
        module = self.module
        if not isinstance(module, nn.Conv2d) or not _cuts(module):
            raise ValueError(
                f"router {score.name!r} needs patches of pixels of their own, before {first}, made by a convolution of "
                f"at most {_CHANNELS} channels whose stride is its kernel, without padding and dilation; they are made "
                f"by a {type(module).__name__}({module.extra_repr()})"
            )
        # An option that does not fit these images is told of now and not in the first pass.
        score.see(torch.zeros(1, 1, 1, module.in_channels, 1), self.std)

    def pictures(self, arguments: Arguments) -> list[tuple[Tensor, int]]:
        """Return the pixels of patches by row and column (B, R, C, H, E); 0 for the side of tokens, which may vary."""
        (image_BHYX,) = arguments.values()
        return [(cut_patches(self.module, image_BHYX.detach()), 0)]  # type: ignore[arg-type]

    def hook(self, calls: PerThread[StackCalls], score: Score) -> ModelHook:
        """Return the hook of the module that tells passes what a score reads of patches."""
        see = None
        if score.reads_pixels:
            see = partial(score.see, std=self.std)
        return ModelHook(after=partial(self.show, calls, see))

    def show(
        self, calls: PerThread[StackCalls], see: See | None, module: nn.Module, arguments: Arguments, output: object
    ) -> None:
        """Tell the forward pass that begins after the patch embedding what is known of the images' patches."""
        # There is no output of a call that failed.
        if output is None:
            return
        seen = None
        if see is not None:
            ((pixels, _),) = self.pictures(arguments)
            with torch.no_grad():
                seen = see(pixels)
        calls.value.show_patches(Patches(self.read(output), seen))


def _cuts(module: nn.Conv2d) -> bool:
    """Return whether a convolution makes each patch of pixels of its own."""
    unpadded = module.padding in ((0, 0), "valid") and module.dilation == (1, 1)
    return unpadded and module.stride == module.kernel_size and module.in_channels <= _CHANNELS


class PictureSize(NamedTuple):
    """Frames, rows and columns of the patches of an image or a video.

    Args:
        side: Patches along a side of a token of the language model.
    """

    frames: int
    rows: int
    columns: int
    side: int

    @property
    def patches(self) -> int:
        """Number of patches in all frames."""
        return self.frames * self.rows * self.columns


def picture_sizes(arguments: Arguments, side: int | None, prefix: str = "") -> list[PictureSize]:
    """Return the sizes of pictures whose patches come as rows, from a host's `grid_thw`.

    Args:
        side: That of tokens, unless `merge_sizes` says it of each picture, as in VideoLLaMA 3.
        prefix: What the names of both arguments begin with, "image_" or "video_".
    """
    grids: list[list[int]] = arguments[f"{prefix}grid_thw"].tolist()
    sides: list[Any] = [side] * len(grids)
    merged: Tensor | None = arguments.get(f"{prefix}merge_sizes")
    if merged is not None:
        sides = merged.tolist()
    sizes = []
    for (frames, rows, columns), own in zip(grids, sides, strict=True):
        sizes.append(PictureSize(frames, rows, columns, own))
    return sizes


class RowSource(NamedTuple):
    """Where a host gets each patch as a row of pixels; the patches of one language-model token are consecutive rows.

    Args:
        module: The module that gets the rows, with `grid_thw`.
        argument: Name of its argument that gets them.
        side: Patches along a side of a token; None where `merge_sizes` says it of each picture.
        channels: Channels of a pixel.
        order: Returns which row of a frame comes at each place in the blocks. It gets the module, and the frame's rows
            and columns of patches. None where blocks get the rows as they come.
    """

    module: nn.Module
    argument: str
    side: int | None
    channels: int
    order: Callable[[nn.Module, Grid], Tensor] | None = None

    def check(self, score: Score, first: str) -> None:
        """Raise a ValueError unless a score can read the pixels of each patch, see `GridSource`."""
        score.see(torch.zeros(1, 1, 1, self.channels, 1), None)

    def pictures(self, arguments: Arguments) -> list[tuple[Tensor, int]]:
        """Return the pixels of patches by row and column (B, R, C, H, E), and the side of tokens, of each picture."""
        rows: Tensor = arguments[self.argument].detach()
        sizes = picture_sizes(arguments, self.side)
        parts = rows.flatten(1).split([size.patches for size in sizes])
        return [(spread_rows(part, size, self.channels), size.side) for part, size in zip(parts, sizes)]

    def hook(self, calls: PerThread[StackCalls], score: Score) -> ModelHook:
        """Return the hook of the module that tells passes what a score reads of pixels."""
        return ModelHook(partial(self.show, calls, partial(score.see, std=None)))

    @torch.no_grad()
    def show(self, calls: PerThread[StackCalls], see: See, module: nn.Module, arguments: Arguments) -> None:
        """Tell the forward pass of a tower that gets patches as rows what a score sees of their pixels."""
        parts = []
        for pixels, side in self.pictures(arguments):
            frames, rows, columns, *_ = pixels.shape
            size = PictureSize(frames, rows, columns, side)
            parts.append(_in_rows(see(pixels), self.positions(size, pixels.device)))
        longest = max(difference_BN.shape[1] for difference_BN, *_ in parts)
        seen = tuple(torch.cat([_padded(part, longest) for part in values]) for values in zip(*parts))
        calls.value.show_patches(Patches(None, seen))

    def positions(self, size: PictureSize, device: torch.device) -> Tensor:
        """Return the position of each patch of a frame (N) among the rows that blocks get."""
        numbers = torch.arange(size.rows * size.columns, device=device)
        row_N = spread_rows(numbers.unsqueeze(1), size._replace(frames=1), 1).flatten()
        if self.order is None:
            return row_N
        # It says which row comes at each position; asked for is the position of each row.
        comes_N = self.order(self.module, (size.rows, size.columns)).to(device)
        return comes_N.argsort()[row_N]

    def by_position(self, value_P: Tensor, size: PictureSize) -> Tensor:
        """Return what blocks say of each patch of a picture (P) by its row and column (B, R, C)."""
        value_BN = value_P.unflatten(0, (size.frames, -1))[:, self.positions(size, value_P.device)]
        return value_BN.unflatten(1, (size.rows, size.columns))


def spread_rows(rows_PF: Tensor, size: PictureSize, channels: int) -> Tensor:
    """Return the pixels of patches by their row and column in the picture.

    Some towers of vision-language models get patches as rows, in which the `side` x `side` patches of one image token
    follow each other. This puts them back on the grid.

    Args:
        rows_PF: Pixels of each patch, channel by channel.
        size: Frames, rows and columns of patches, and the side of a token's square.
        channels: Channels of a pixel.

    Returns:
        Pixels (B, R, C, H, E): frames, rows, columns, channels, and pixels of a patch.

    Example:
        >>> rows = torch.arange(8.0).unsqueeze(1)
        >>> spread_rows(rows, PictureSize(1, 2, 4, side=2), 1).flatten(2).squeeze(0).tolist()
        [[0.0, 1.0, 4.0, 5.0], [2.0, 3.0, 6.0, 7.0]]
    """
    frames, rows, columns, side = size
    pixels = rows_PF.reshape(frames, rows // side, columns // side, side, side, channels, -1)
    return pixels.transpose(2, 3).reshape(frames, rows, columns, channels, -1)


def cut_patches(module: nn.Conv2d, image_BHYX: Tensor) -> Tensor:
    """Return the pixels of each patch (B, R, C, H, E) that a convolution makes which `GridSource.check` takes.

    Example:
        >>> cut_patches(nn.Conv2d(3, 8, 4, 4), torch.zeros(2, 3, 8, 13)).shape
        torch.Size([2, 2, 3, 3, 16])
    """
    height, width = module.kernel_size
    rows = image_BHYX.shape[2] // height
    columns = image_BHYX.shape[3] // width
    # A convolution reads no patch that the image has in part.
    image_BHYX = image_BHYX[:, :, : rows * height, : columns * width]
    cut = image_BHYX.unflatten(3, (columns, width)).unflatten(2, (rows, height))
    return cut.permute(0, 2, 4, 1, 3, 5).flatten(4)


def _in_rows(values: tuple[Tensor, ...], row_N: Tensor) -> list[Tensor]:
    """Return what a score sees of patches (B, N) in the order of a host's rows, from that of the grid.

    Args:
        row_N: The row of each patch.
    """
    index_N = row_N.argsort()
    in_order = []
    for value_BN in values:
        moved_BN = value_BN[:, index_N]
        if not moved_BN.is_floating_point():
            # Indices of patches, which have moved too.
            moved_BN = row_N[moved_BN]
        in_order.append(moved_BN)
    return in_order


def _padded(value_BN: Tensor, longest: int) -> Tensor:
    """Return values of patches with zeros behind them, or indices with those of the padding itself."""
    pictures, patches = value_BN.shape
    behind = torch.arange(patches, longest, device=value_BN.device).expand(pictures, -1)
    if value_BN.is_floating_point():
        behind = torch.zeros_like(behind)
    return torch.cat([value_BN, behind], dim=1)


def patches_of_pass(calls: PerThread[StackCalls]) -> Patches:
    """Return the patches of this thread's current forward pass: the one that entered a block last.

    Outside of a pass, the result says that nothing is known of them.
    """
    entered = calls.value.entered
    if entered is None:
        return Patches()
    return entered.patches
