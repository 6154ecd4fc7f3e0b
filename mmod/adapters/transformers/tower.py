"""The importance of image tokens in the vision tower, where a token stands for a fixed group of patches.

Axes: B samples, I images, P patches of an image with its prefix tokens, Q patches of all images, N tokens of a prompt,
T image tokens, D channels.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from math import isqrt
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mmod.adapters.tokens import remember
from mmod.adapters.transformers.images import KINDS, pixels_of
from mmod.adapters.transformers.vision import vision_part
from mmod.blocks import Arguments, BlockCall, ConvertedBlock, ModelHook, convert, is_converted
from mmod.blocks.inner import Inner
from mmod.blocks.passes import recomputing
from mmod.threads import PerThread

# How many layouts of images a model remembers.
_LAYOUTS = 32


class TowerCall(NamedTuple):
    """What a call of a tower's layer, or of its patch embedding, computed.

    Args:
        value_IP: A number for each patch (I, P), such as its importance.
        valid_IP: False at padding (I, P); None without.
    """

    value_IP: Tensor
    valid_IP: Tensor | None


class Noted:
    """What a tower's layer, or its patch embedding, notes in one thread.

    Attributes:
        calls: What its calls computed, until it is taken.
        changes: In a trial, the patches whose states each of the next calls changes (I, P); None outside.
    """

    def __init__(self) -> None:
        self.calls: list[TowerCall] = []
        self.changes: list[Tensor] | None = None

    def take(self) -> list[TowerCall]:
        """Return the calls and drop them."""
        taken = self.calls
        self.calls = []
        return taken


@dataclass(eq=False)
class TowerState:
    """Plain state of the tower's layer that image features come from.

    Args:
        importance: What importance is, see `RoutingConfig.importance`.
    """

    call: BlockCall
    importance: str
    noted: PerThread[Noted]
    inner: PerThread[Inner] = field(default_factory=lambda: PerThread(Inner))


class TowerLayer(ConvertedBlock):
    """Mixin that notes the importance of patches in a layer of a vision tower."""

    mod_state: TowerState

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Run the host's layer on patches (I, P, D)."""
        state = self.mod_state
        noted = state.noted.value
        run = partial(super().forward, x, *args, **kwargs)
        if noted.changes is not None:
            y: Tensor = run()
            # Not the same for all channels: a norm would take it away.
            change_D = torch.randn(y.shape[-1], generator=torch.Generator().manual_seed(0)).to(y)
            return y + noted.changes.pop(0).unsqueeze(-1).to(y) * change_D
        valid_IP = state.call.masks(state.call.bind(args, kwargs), x).valid_BN
        y, importance_IP = self.observe(run, x, valid_IP, state.importance)
        if not recomputing():
            noted.calls.append(TowerCall(importance_IP, valid_IP))
        return y


class TowerReader(ModelHook):
    """What image tokens get from the patches that they stand for, as it was noted of these in the vision tower.

    As a hook of the module that runs the tower, it drops what no layer has read, as after a pass that failed.

    Args:
        entry: The module that puts image features among the embedded tokens.
        option: The option that asks for it.
        reduce: How the value of a token follows from those of its patches: "mean" or "amax".
        empty: The value of tokens without patches.

    Raises:
        ValueError: The model has no tower.
    """

    def __init__(self, entry: Any, option: str, reduce: str, empty: float) -> None:
        part = vision_part(entry)
        if part is None or not hasattr(entry, "get_image_features"):
            raise ValueError(
                f"{option} needs a model with a vision tower and a method get_image_features: this is a "
                f"{type(entry).__name__}"
            )
        self.entry: nn.Module = entry
        self.option = option
        self.reduce = reduce
        self.empty = empty
        self.stack = part()
        self.layer = self.stack.blocks[_last_used(entry.config, len(self.stack.blocks))]
        self.noted: PerThread[Noted] = PerThread(Noted)
        # Whether a call runs in a thread.
        self._runs: PerThread[bool] = PerThread(bool)
        # The token of each patch, and the number of tokens, by layout of the images.
        self._known: dict[tuple[object, ...], tuple[Tensor, int]] = {}

    @property
    def hooks(self) -> list[tuple[nn.Module, ModelHook]]:
        """All hooks that it needs, with their modules."""
        return [(self.entry, self)]

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Drop what an interrupted call left: torch calls no hook after a KeyboardInterrupt."""
        if self._runs.value:
            self.noted.value.take()
        self._runs.value = True

    def after(self, module: nn.Module, args: tuple[Any, ...], kwargs: Arguments, output: Any) -> None:
        """Drop what was noted."""
        self._runs.value = False
        self.noted.value.take()

    @torch.compiler.disable
    def of(self, entry: nn.Module, kind_BN: Tensor, arguments: Arguments, copies: int) -> Tensor:
        """Return the values of image tokens (B, N), the empty one at all other tokens.

        Args:
            kind_BN: The modality of every token that may be skipped, 0 of others (B, N).
            arguments: Arguments of the model that describe the images.
            copies: How many samples in a row are copies of one that the arguments describe.

        Raises:
            ValueError: The tower did not process the images in this call, or what tokens stand for is not known.
        """
        calls = self.noted.value.take()
        names = [name for name in KINDS if pixels_of(arguments, name) is not None]
        if not names:
            raise ValueError(f"{self.option} needs the tower to process the images: pass pixel_values")
        if not calls:
            raise ValueError(f"{self.option} reads {self.stack.names[0]}, which did not process the {names[0]}s")
        if len(names) > 1:
            raise ValueError(f"{self.option} reads images or videos: this call has both")
        token_Q, tokens = self._tokens(entry, names[0], _arguments_of(entry, names[0], arguments), calls)
        # The tower may have run before, for another reason.
        value_Q = torch.cat([call.value_IP.flatten() for call in calls])[-len(token_Q) :]
        used_Q = (token_Q >= 0).to(value_Q.device)
        number_Q = token_Q.to(value_Q.device)[used_Q]
        value_T = value_Q.new_full((tokens,), self.empty).scatter_reduce(
            0, number_Q, value_Q[used_Q], self.reduce, include_self=False
        )
        return place_values(value_T, kind_BN == KINDS[names[0]], copies, self.empty)

    def _tokens(self, entry: nn.Module, name: str, arguments: Arguments, calls: list[TowerCall]) -> tuple[Tensor, int]:
        """Return the token of each patch in the calls of the tower for a layout of images (Q), -1 for none, and T."""
        shapes = tuple(call.value_IP.shape for call in calls)
        layout = (name, shapes, *[(key, _layout(value)) for key, value in arguments.items()])
        if layout not in self._known:
            if len(self._known) == _LAYOUTS:
                self._known.clear()
            self._known[layout] = self._try(entry, name, arguments, calls)
        return self._known[layout]

    def _try(self, entry: nn.Module, name: str, arguments: Arguments, calls: list[TowerCall]) -> tuple[Tensor, int]:
        """Return what `_tokens` does, by a pass of the tower on the images."""
        raise NotImplementedError


def place_values(value_T: Tensor, image_BN: Tensor, copies: int, empty: float) -> Tensor:
    """Return the values of image tokens at their places (B, N).

    Args:
        value_T: Values of the tokens of all images.
        image_BN: True at image tokens.
        copies: How many samples in a row are copies of one that the values describe.
        empty: The value of all other tokens.
    """
    counts = image_BN[::copies].sum(1).tolist()
    if sum(counts) != len(value_T):
        raise ValueError(f"the images of this call have {len(value_T)} image tokens, the prompts have {sum(counts)}")
    if copies > 1:
        repeated: list[Tensor] = []
        for part_T in value_T.split(counts):
            repeated += [part_T] * copies
        value_T = torch.cat(repeated)
    value_BN = torch.full(image_BN.shape, empty, dtype=value_T.dtype, device=image_BN.device)
    return value_BN.masked_scatter(image_BN, value_T.to(image_BN.device))


class TowerImportance(TowerReader):
    """The attention that image tokens receive in the layer of the vision tower that provides the features.

    It is the attention of the class token, or in a tower without one the mean over patches. A token that stands for a
    fixed group of patches has their mean: for one patch, a square of the grid, or successive patches. Which of these it
    is follows from the numbers of patches and tokens, and is tried once for each layout of images.

    Raises:
        ValueError: The model has no tower, or another method has changed the layer.

    Source: VisionZip, Yang et al., arXiv 2412.04467, section 3.2: its dominant tokens.
    """

    def __init__(self, entry: Any) -> None:
        super().__init__(entry, "router.importance='vision_tower'", "mean", 0.0)
        if is_converted(self.layer):
            raise ValueError(
                f"{self.option} reads the attention of all patches in the tower's last layer that is used, which "
                "another method has changed: leave that layer dense"
            )
        self.reads: nn.Module = self.layer
        importance = "class_token" if self.stack.class_token else "mean"
        self.state = TowerState(self.stack.call_of(self.layer, None), importance, self.noted)

    def install(self) -> None:
        """Let the layer note the importance of patches."""
        convert(self.reads, TowerLayer, self.state, self.state.call.shell)
        remember(self.entry, self.stack)

    def _try(self, entry: nn.Module, name: str, arguments: Arguments, calls: list[TowerCall]) -> tuple[Tensor, int]:
        """Return the token of each patch (Q): where the patches of some tokens change, just these tokens do."""
        changes = [torch.zeros(1, 1)] * len(calls)
        before_TD = self._features(entry, name, arguments, changes)
        calls = calls[len(changes) :]
        tokens = before_TD.shape[0]
        chosen_T = torch.rand(tokens, generator=torch.Generator().manual_seed(0)) < 0.5
        chosen_T[0] = True
        for token_Q in _groupings(self._patches(calls), self.stack.prefix, tokens):
            change_Q = (token_Q >= 0) & chosen_T[token_Q.clamp(min=0)]
            parts = change_Q.split([call.value_IP.numel() for call in calls])
            changes = [part_Q.view(call.value_IP.shape) for part_Q, call in zip(parts, calls)]
            after_TD = self._features(entry, name, arguments, changes)
            if torch.equal((after_TD != before_TD).any(-1).cpu(), chosen_T):
                return token_Q, tokens
        raise ValueError(
            f"{self.option} needs image tokens that stand for one patch, a square of patches or successive patches "
            f"each: those of this {type(entry).__name__} do not. Choose another importance, or router='stride', which "
            "keeps evenly spread tokens"
        )

    def _patches(self, calls: list[TowerCall]) -> list[Tensor]:
        """Return which positions of the tower's calls are patches, or in front of them (I, P)."""
        # Padding that was added around the images of one sequence stands for nothing.
        added = self.stack.proof is not None and bool(self.stack.proof.boundaries)
        masks = []
        for call in calls:
            valid_IP = call.valid_IP if added else None
            everywhere_IP = torch.ones(call.value_IP.shape, dtype=torch.bool)
            masks.append(everywhere_IP if valid_IP is None else valid_IP.cpu())
        return masks

    @torch.no_grad()
    def _features(self, entry: nn.Module, name: str, arguments: Arguments, changes: list[Tensor]) -> Tensor:
        """Return the features of all images (T, D), where each call of the tower takes the next of some changes."""
        noted = self.noted.value
        copied = {key: value.clone() if isinstance(value, Tensor) else value for key, value in arguments.items()}
        devices = {value.device for value in copied.values() if isinstance(value, Tensor) and value.is_cuda}
        noted.changes = changes
        try:
            # Dropout of the tower must be the same in all trials, and not change what the user draws next.
            with torch.random.fork_rng(list(devices)):
                torch.manual_seed(0)
                output = getattr(entry, f"get_{name}_features")(**copied)
        finally:
            noted.changes = None
        features = getattr(output, "pooler_output", output)
        parts = [features] if isinstance(features, Tensor) else features
        return torch.cat([part.flatten(0, -2) for part in parts])


def _groupings(masks: list[Tensor], prefix: int, tokens: int) -> Iterator[Tensor]:
    """Return ways in which patches may become so many tokens: the token of each (Q), -1 for none.

    Args:
        masks: False at padding of the images, in each call of the tower (I, P).
    """
    # Some models make tokens of the prefix too.
    for first in dict.fromkeys((prefix, 0)):
        inside = [mask_IP & (torch.arange(mask_IP.shape[1]) >= first) for mask_IP in masks]
        counts = torch.cat([inside_IP.sum(1) for inside_IP in inside]).tolist()
        size, remainder = divmod(sum(counts), tokens)
        if not size or remainder or any(count % size for count in counts):
            continue
        inside_Q = torch.cat([inside_IP.flatten() for inside_IP in inside])
        for number_Q in (_squares(counts, isqrt(size)), torch.arange(sum(counts)) // size):
            if len(number_Q) and int(number_Q[-1]) == tokens - 1:
                yield torch.full(inside_Q.shape, -1).masked_scatter(inside_Q, number_Q)


def _squares(counts: list[int], side: int) -> Tensor:
    """Return the square that each patch of square images belongs to, in order; nothing if some have no squares.

    Args:
        counts: Number of patches of each image.
        side: Patches along a side of a square.

    Example:
        >>> _squares([16], 2).tolist()
        [0, 0, 1, 1, 0, 0, 1, 1, 2, 2, 3, 3, 2, 2, 3, 3]
    """
    numbers = [torch.zeros(0, dtype=torch.long)]
    start = 0
    for count in counts:
        width = isqrt(count)
        if width**2 != count or width % side:
            return numbers[0]
        index = torch.arange(count)
        numbers.append(start + index // width // side * (width // side) + index % width // side)
        start += count // side**2
    return torch.cat(numbers)


def _last_used(config: Any, layers: int) -> int:
    """Return the index of the last of a tower's layers that features come from."""
    chosen = getattr(config, "vision_feature_layer", None)
    if chosen is None:
        return layers - 1
    # Hidden states begin with the embeddings, before the first layer.
    last = max(state % (layers + 1) for state in ([chosen] if isinstance(chosen, int) else chosen))
    return max(last - 1, 0)


def _arguments_of(entry: Any, name: str, arguments: Arguments) -> dict[str, Any]:
    """Return the arguments of a model that its function of features takes."""
    parameters = inspect.signature(getattr(entry, f"get_{name}_features")).parameters
    return {key: arguments[key] for key in parameters if arguments.get(key) is not None}


def _layout(value: Any) -> Any:
    """Return what of an argument says how patches become tokens: the shape of pixels, and the values of sizes."""
    if not isinstance(value, Tensor):
        return str(value)
    return value.shape if value.is_floating_point() or value.dtype == torch.bool else str(value.tolist())
