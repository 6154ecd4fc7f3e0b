"""What image tokens get from the patches that they stand for: importance in the vision tower, or a score of pixels.

Axes: I images, P patches of an image with its prefix tokens, Q patches of all images, B samples, N tokens of a prompt,
T image tokens, D channels.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from math import isqrt
from typing import Any, cast

import torch
from torch import Tensor, nn

from mmod.adapters.base import NamedArguments
from mmod.adapters.tokens import remember
from mmod.adapters.transformers.images import KINDS, pixels_of
from mmod.adapters.transformers.vision import vision_part
from mmod.blocks import Arguments, ConvertedBlock, ModelHook, convert, is_converted
from mmod.blocks.branches import Inner
from mmod.blocks.record import recomputing
from mmod.threads import PerThread

# How many layouts of images a model remembers.
_LAYOUTS = 32


@dataclass
class Noted:
    """What one thread notes of a tower while a model runs.

    Attributes:
        calls: What calls of the tower's layer, or of its patch embedding, computed, until it is taken.
        runs: A call of the model runs, or was interrupted.
    """

    calls: list[Tensor] = field(default_factory=list)
    runs: bool = False

    def take(self) -> list[Tensor]:
        """Return what the calls computed, and drop it."""
        taken = self.calls
        self.calls = []
        return taken


@dataclass(eq=False)
class TowerState:
    """Plain state of the tower's layer that image features come from.

    Args:
        importance: What importance is, see `RoutingConfig.importance`.
    """

    call: NamedArguments
    importance: str
    noted: PerThread[Noted]
    inner: PerThread[Inner] = field(default_factory=lambda: PerThread(Inner))


class TowerLayer(ConvertedBlock):
    """Mixin that notes the importance of patches in a layer of a vision tower."""

    mod_state: TowerState

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Run the host's layer on patches (I, P, D)."""
        state = self.mod_state
        valid_IP = state.call.masks(state.call.bind(args, kwargs), x).valid_BN
        run = partial(super().forward, x, *args, **kwargs)
        y, importance_IP = self.observe(run, x, valid_IP, state.importance)
        if not recomputing():
            # Padding around images that the host runs as one sequence stands for nothing.
            is_padded = bool(state.call.boundaries) and valid_IP is not None
            state.noted.value.calls.append(importance_IP[valid_IP] if is_padded else importance_IP)
        return y


class TowerReader(ModelHook):
    """What image tokens get from the patches that they stand for, as it was noted of these in the vision tower.

    As a hook of the module that runs the tower, it drops what no layer has read, as after a pass that failed.

    Which patches a token stands for is traced once for each layout of images, through tiles, windows and ends of lines:
    each image token has a number, and for each of its binary digits, the gradient of all features whose number has a 1
    there reaches the patches of these tokens. So the digits of a patch's gradients are the number of its token.

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
        # The token of each patch, and the number of tokens, by layout of the images.
        self._known: dict[tuple[object, ...], tuple[Tensor, int]] = {}

    @property
    def hooks(self) -> list[tuple[nn.Module, ModelHook]]:
        """All hooks that it needs, with their modules."""
        return [(self.entry, self)]

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Drop what an interrupted call left: torch calls no hook after a KeyboardInterrupt."""
        noted = self.noted.value
        if noted.runs:
            noted.take()
        noted.runs = True

    def after(self, module: nn.Module, args: tuple[Any, ...], kwargs: Arguments, output: Any) -> None:
        """Drop what was noted."""
        noted = self.noted.value
        noted.runs = False
        noted.take()

    @torch.compiler.disable
    def values_of(self, entry: nn.Module, kind_BN: Tensor, arguments: Arguments) -> Tensor:
        """Return the values of image tokens (B, N), the empty one at all other tokens.

        Args:
            kind_BN: The modality of every token that may be skipped, 0 of others (B, N).
            arguments: Arguments of the model that describe the images.

        Raises:
            ValueError: The tower did not process the images in this call, or what tokens stand for is not known.
        """
        calls = self.noted.value.take()
        names = [name for name in KINDS if pixels_of(arguments, name) is not None]
        if not names:
            raise ValueError(
                f"{self.option} needs the tower to process the images: pass pixel_values. A model that drafts for "
                "another one gets features alone, and is routed by another score"
            )
        if not calls:
            raise ValueError(f"{self.option} reads {self.stack.names[0]}, which did not process the {names[0]}s")
        if len(names) > 1:
            raise ValueError(f"{self.option} reads images or videos: this call has both")
        taken = inspect.signature(getattr(entry, f"get_{names[0]}_features")).parameters
        described = {key: arguments[key] for key in taken if arguments.get(key) is not None}
        token_Q, tokens = self._tokens(entry, names[0], described, calls)
        used_Q = token_Q >= 0
        most = int(token_Q[used_Q].bincount().amax())
        # The smallest square that holds the patches of any token: the root, rounded up.
        side = isqrt(most - 1) + 1
        # The tower may have run before, for another reason.
        value_Q = self._values(calls, side)[-len(token_Q) :]
        number_Q = token_Q[used_Q].to(value_Q.device)
        value_T = value_Q.new_full((tokens,), self.empty).scatter_reduce(
            0, number_Q, value_Q[used_Q.to(value_Q.device)], self.reduce, include_self=False
        )
        return scatter_values(value_T, kind_BN == KINDS[names[0]], self.empty)

    def _values(self, calls: list[Tensor], side: int) -> Tensor:
        """Return the value of each patch (Q) from what was noted.

        Args:
            side: Patches along a side of the square that a token stands for.
        """
        return torch.cat([value.flatten() for value in calls])

    def _tokens(self, entry: nn.Module, name: str, arguments: Arguments, calls: list[Tensor]) -> tuple[Tensor, int]:
        """Return the token of each patch in the calls of the tower for a layout of images (Q), -1 for none, and T."""
        shapes = tuple(value.shape for value in calls)
        layout = (name, shapes, *[(key, _layout(value)) for key, value in arguments.items()])
        if layout not in self._known:
            if len(self._known) == _LAYOUTS:
                self._known.clear()
            self._known[layout] = self._trace(entry, name, arguments)
        return self._known[layout]

    def _trace(self, entry: Any, name: str, arguments: Arguments) -> tuple[Tensor, int]:
        """Return what `_tokens` does, by a pass of the tower on the images."""
        # A layer that is checkpointed would recompute itself for what is saved here.
        plainly = torch.autograd.graph.saved_tensors_hooks(_unchanged, _unchanged)
        copied = {key: value.clone() if isinstance(value, Tensor) else value for key, value in arguments.items()}
        devices = {value.device for value in copied.values() if isinstance(value, Tensor) and value.is_cuda}
        starts: list[Tensor] = []
        # Dropout of the tower must not change what the user's next layer draws.
        drawn = torch.random.fork_rng(list(devices))
        with self._beginning(starts), drawn, torch.inference_mode(False), torch.no_grad(), plainly:
            output = getattr(entry, f"get_{name}_features")(**copied)
        features = getattr(output, "pooler_output", output)
        parts = [features] if isinstance(features, Tensor) else list(features)
        with torch.inference_mode(False), torch.enable_grad(), plainly:
            feature_TD = torch.cat([part.flatten(0, -2) for part in parts])
            if not starts or not feature_TD.requires_grad:
                raise ValueError(
                    f"{self.option} needs features with a gradient, those of this {type(entry).__name__} have none"
                )
            token_Q = _tokens_of(entry, feature_TD, starts, self.option)
        return token_Q.cpu(), len(feature_TD)

    @contextmanager
    def _beginning(self, starts: list[Tensor]) -> Iterator[None]:
        """Context in which the graph begins at the layer's outputs, which are noted; the layer may be routed."""
        thread = threading.get_ident()

        def begin(module: nn.Module, args: object, output: Any) -> Any:
            if threading.get_ident() != thread:
                return output
            first = output[0] if isinstance(output, tuple) else output
            start: Tensor = first.detach().requires_grad_()
            starts.append(start)
            # The layers before are traced without a graph; the caller's context ends this.
            torch.set_grad_enabled(True)
            return (start, *output[1:]) if isinstance(output, tuple) else start

        # Before the hook by which transformers collects hidden states.
        handle = self.layer.register_forward_hook(begin, prepend=True)
        try:
            yield
        finally:
            handle.remove()
            self.noted.value.take()


def _unchanged(value: Tensor) -> Tensor:
    return value


def _tokens_of(entry: nn.Module, feature_TD: Tensor, starts: list[Tensor], option: str) -> Tensor:
    """Return the number of the image token that each patch belongs to, -1 for none (Q), see `TowerReader`."""
    weight_TD = torch.randn(feature_TD.shape, generator=torch.Generator().manual_seed(0)).to(feature_TD)

    def reached_by(chosen_T: Tensor) -> Tensor:
        """Return which patches (Q) some tokens are made of."""
        weights = weight_TD * chosen_T.unsqueeze(1)
        gradients = torch.autograd.grad(feature_TD, starts, weights, retain_graph=True, materialize_grads=True)
        return torch.cat([(gradient != 0).any(-1).flatten() for gradient in gradients])

    number_T = torch.arange(len(feature_TD), device=feature_TD.device)
    used_Q = reached_by(torch.ones_like(number_T))
    if not bool(used_Q.any()):
        raise ValueError(
            f"{option} follows image tokens to the tower's last layer that is used, and the features of this "
            f"{type(entry).__name__} come from elsewhere"
        )
    token_Q = torch.zeros_like(used_Q, dtype=torch.long)
    for digit in range((len(feature_TD) - 1).bit_length()):
        has_one_T = number_T >> digit & 1
        one_Q = reached_by(has_one_T)
        if bool((one_Q & reached_by(1 - has_one_T)).any()):
            raise ValueError(
                f"{option} needs image tokens that are made of patches of their own: in this {type(entry).__name__} a "
                "patch reaches several image tokens. Choose another score, such as router='stride', which keeps evenly "
                "spread tokens"
            )
        token_Q += one_Q.long() << digit
    return token_Q.masked_fill(~used_Q, -1)


def scatter_values(value_T: Tensor, image_BN: Tensor, empty: float) -> Tensor:
    """Return the values of image tokens at the indices of these (B, N).

    Args:
        value_T: Values of the tokens of all images.
        image_BN: True at image tokens.
        empty: The value of all other tokens.
    """
    count = int(image_BN.sum())
    if count != len(value_T):
        raise ValueError(f"the images of this call have {len(value_T)} image tokens, the prompts have {count}")
    value_BN = torch.full(image_BN.shape, empty, dtype=value_T.dtype, device=image_BN.device)
    return value_BN.masked_scatter(image_BN, value_T.to(image_BN.device))


class TowerImportance(TowerReader):
    """The attention that image tokens receive in the layer of the vision tower that provides the features.

    It is the attention of the class token, or in a tower without one the mean over patches. A token that is made of
    several patches has their mean.

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
        self.state = TowerState(cast(NamedArguments, self.stack.call_of(self.layer, None)), importance, self.noted)

    @property
    def hooks(self) -> list[tuple[nn.Module, ModelHook]]:
        """All hooks that it needs, with their modules."""
        windows = self.stack.windows
        if windows is None:
            return super().hooks
        return [*super().hooks, (self.entry.get_submodule(self.stack.owner), windows)]

    def install(self) -> None:
        """Let the layer note the importance of patches."""
        convert(self.reads, TowerLayer, self.state, self.state.call.shell)
        remember(self.entry, self.stack)


def _last_used(config: Any, layers: int) -> int:
    """Return the index of the last of a tower's layers that features come from."""
    chosen = getattr(config, "vision_feature_layer", None)
    if chosen is None:
        return layers - 1
    # Hidden states begin with the embeddings, before the first layer.
    last = max(state % (layers + 1) for state in ([chosen] if isinstance(chosen, int) else chosen))
    return max(last - 1, 0)


def _layout(value: object) -> object:
    """Return what of an argument says how patches become tokens: the shape of pixels, and the values of sizes."""
    if not isinstance(value, Tensor):
        return str(value)
    return value.shape if value.is_floating_point() or value.dtype == torch.bool else str(value.tolist())
