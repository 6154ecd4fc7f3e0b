"""The importance of image tokens in the vision tower, whatever stands between the tower and the language model.

Axes: B samples, I images, P patches of an image with its prefix tokens, Q patches of all images, N tokens of a prompt,
T image tokens, D channels.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mmod.adapters.base import BlockStack
from mmod.adapters.tokens import remember
from mmod.adapters.transformers.images import KINDS, pixels_of
from mmod.adapters.transformers.vision import vision_part
from mmod.blocks import BlockCall, ConvertedBlock, ModelHook, convert, is_converted
from mmod.blocks.inner import Inner
from mmod.blocks.passes import recomputing
from mmod.threads import PerThread

# How many layouts of images a model remembers.
_LAYOUTS = 32
_OPTION = "router.importance='vision_tower'"


class Seen:
    """What a tower's layer has seen in one thread.

    Attributes:
        importances: Importance of the patches in its calls, until it is taken (I, P).
        starts: Its outputs while origins are traced: the graph of the features begins there. None otherwise.
    """

    def __init__(self) -> None:
        self.importances: list[Tensor] = []
        self.starts: list[Tensor] | None = None

    def take(self) -> list[Tensor]:
        """Return the importances and drop them."""
        taken = self.importances
        self.importances = []
        return taken


@dataclass(eq=False)
class TowerState:
    """Plain state of the tower's layer that image features come from.

    Args:
        importance: What importance is, see `RoutingConfig.importance`.
    """

    call: BlockCall
    importance: str
    inner: PerThread[Inner] = field(default_factory=lambda: PerThread(Inner))
    seen: PerThread[Seen] = field(default_factory=lambda: PerThread(Seen))


class TowerLayer(ConvertedBlock):
    """Mixin that notes the importance of patches in a layer of a vision tower."""

    mod_state: TowerState

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Run the host's layer on patches (I, P, D)."""
        state = self.mod_state
        seen = state.seen.value
        run = partial(super().forward, x, *args, **kwargs)
        if seen.starts is not None:
            start: Tensor = run().detach().requires_grad_()
            seen.starts.append(start)
            # The layers before are traced without a graph; the caller's context ends this.
            torch.set_grad_enabled(True)
            return start
        valid_IP = state.call.masks(state.call.bind(args, kwargs), x).valid_BN
        y, importance_IP = self.observe(run, x, valid_IP, state.importance)
        if not recomputing():
            seen.importances.append(importance_IP)
        return y


class TowerEnd(ModelHook):
    """Hook of the module that runs the tower: drops importance that no layer has read, as after a pass that failed.

    Args:
        entry: The module that runs the tower.
        stack: The tower's layers, with their names in this module.
        layer: The one that image features come from.
    """

    def __init__(self, entry: nn.Module, stack: BlockStack, layer: nn.Module, state: TowerState) -> None:
        self.entry = entry
        self.stack = stack
        self.reads: nn.Module = layer
        self.state = state
        # Whether a call runs in a thread.
        self._runs: PerThread[bool] = PerThread(bool)

    def install(self) -> None:
        """Let the layer note the importance of patches."""
        convert(self.reads, TowerLayer, self.state, self.state.call.shell)
        remember(self.entry, self.stack)

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Drop what an interrupted call left: torch calls no hook after a KeyboardInterrupt."""
        if self._runs.value:
            self.state.seen.value.take()
        self._runs.value = True

    def after(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> None:
        """Drop the importance."""
        self._runs.value = False
        self.state.seen.value.take()


class Origins(NamedTuple):
    """The patches that image tokens are made of.

    Args:
        token_IP: Number of the image token that each patch belongs to, -1 for none, in each call of the tower.
        tokens: Number of image tokens T.
    """

    token_IP: list[Tensor]
    tokens: int

    def mean_over_patches(self, importances: list[Tensor]) -> Tensor:
        """Return the mean importance of each token's patches (T); 0 without patches, as of the ends of lines."""
        token_Q = torch.cat([token_IP.flatten() for token_IP in self.token_IP])
        value_Q = torch.cat([value_IP.flatten() for value_IP in importances])
        used_Q = token_Q >= 0
        total_T, count_T = value_Q.new_zeros(2, self.tokens)
        total_T.index_add_(0, token_Q[used_Q], value_Q[used_Q])
        count_T.index_add_(0, token_Q[used_Q], torch.ones_like(value_Q[used_Q]))
        return total_T / count_T.clamp(min=1)


class TowerImportance:
    """The attention that image tokens receive in the layer of the vision tower that provides the features.

    It is the attention of the class token, or in a tower without one the mean over patches. A token that is made of
    several patches has their mean. Which patches those are is traced by gradients through all that stands between the
    tower and the language model. This takes one more pass of the tower for each layout of images.

    Args:
        entry: The module that puts image features among the embedded tokens.

    Raises:
        ValueError: The model has no tower, or another method has changed the layer.

    Source: VisionZip, Yang et al., arXiv 2412.04467, section 3.2: its dominant tokens.
    """

    def __init__(self, entry: Any) -> None:
        part = vision_part(entry)
        if part is None or not hasattr(entry, "get_image_features"):
            raise ValueError(
                f"{_OPTION} needs a model with a vision tower and a method get_image_features: this is a "
                f"{type(entry).__name__}"
            )
        stack = part()
        layer = stack.blocks[_last_used(entry.config, len(stack.blocks))]
        if is_converted(layer):
            raise ValueError(
                f"{_OPTION} reads the attention of all patches in the tower's last layer that is used, which another "
                "method has changed: leave that layer dense"
            )
        importance = "class_token" if stack.class_token else "mean"
        self.state = TowerState(stack.call_of(layer, None), importance)
        self.hook = TowerEnd(entry, stack, layer, self.state)
        self._known: dict[Any, Origins] = {}

    @torch.compiler.disable
    def of(self, entry: nn.Module, kind_BN: Tensor, arguments: Mapping[str, Any], copies: int) -> Tensor:
        """Return the importance of image tokens (B, N), 0 at all other tokens.

        Args:
            kind_BN: The modality of every token that may be skipped, 0 of others (B, N).
            arguments: Arguments of the model that describe the images.
            copies: How many samples in a row are copies of one that the arguments describe.

        Raises:
            ValueError: The tower did not process the images in this call, or a patch reaches several image tokens.
        """
        noted = self.state.seen.value.take()
        names = [name for name in KINDS if pixels_of(arguments, name) is not None]
        if not names:
            raise ValueError(f"{_OPTION} needs the tower to process the images: pass pixel_values")
        if not noted:
            raise ValueError(f"{_OPTION} reads {self.hook.stack.names[0]}, which did not process the {names[0]}s")
        if len(names) > 1:
            raise ValueError(f"{_OPTION} reads images or videos: this call has both")
        given = _arguments_of(entry, names[0], arguments)
        origins = self._origins(entry, names[0], given, noted)
        image_BN = kind_BN == KINDS[names[0]]
        counts = image_BN[::copies].sum(1).tolist()
        if sum(counts) != origins.tokens:
            raise ValueError(
                f"the images of this call have {origins.tokens} image tokens, the prompts have {sum(counts)}"
            )
        # The tower may have run before, for another reason.
        importance_T = origins.mean_over_patches(noted[-len(origins.token_IP) :])
        if copies > 1:
            repeated: list[Tensor] = []
            for part_T in importance_T.split(counts):
                repeated += [part_T] * copies
            importance_T = torch.cat(repeated)
        score_BN = torch.zeros(kind_BN.shape, dtype=importance_T.dtype, device=kind_BN.device)
        return score_BN.masked_scatter(image_BN, importance_T.to(kind_BN.device))

    def _origins(self, entry: nn.Module, name: str, given: Mapping[str, Any], noted: list[Tensor]) -> Origins:
        key = (name, tuple(value_IP.shape for value_IP in noted), tuple((k, _layout(v)) for k, v in given.items()))
        known = self._known.pop(key, None)
        if known is None:
            known = trace_origins(entry, name, given, self.state)
        # The layout that was used last stands last.
        self._known[key] = known
        for old in list(self._known)[:-_LAYOUTS]:
            self._known.pop(old, None)
        return known


def _last_used(config: Any, layers: int) -> int:
    """Return the index of the last of a tower's layers that features come from."""
    chosen = getattr(config, "vision_feature_layer", None)
    if chosen is None:
        return layers - 1
    # Hidden states begin with the embeddings, before the first layer.
    last = max(state % (layers + 1) for state in ([chosen] if isinstance(chosen, int) else chosen))
    return max(last - 1, 0)


def _arguments_of(entry: Any, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a model that its function of features takes."""
    parameters = inspect.signature(getattr(entry, f"get_{name}_features")).parameters
    return {key: arguments[key] for key in parameters if arguments.get(key) is not None}


def _layout(value: Any) -> Any:
    """Return what of an argument says how patches become tokens: the shape of pixels, and the values of sizes."""
    if not isinstance(value, Tensor):
        return str(value)
    return value.shape if value.is_floating_point() or value.dtype == torch.bool else str(value.tolist())


def _unchanged(value: Tensor) -> Tensor:
    return value


def trace_origins(entry: Any, name: str, given: Mapping[str, Any], state: TowerState) -> Origins:
    """Return the patches that image tokens are made of, from the gradients of the features.

    Each image token has a number. For each of its binary digits, the gradient of all features whose number has a 1
    there reaches the patches of these tokens, and so the digits of a patch's gradients are the number of its token.

    Args:
        name: "image" or "video".
        given: Arguments of the model's function of features.
        state: The state of the tower's layer that the features come from.
    """
    # A layer that is checkpointed would recompute itself for what is saved here.
    plainly = torch.autograd.graph.saved_tensors_hooks(_unchanged, _unchanged)
    copied = {key: value.clone() if isinstance(value, Tensor) else value for key, value in given.items()}
    devices = {value.device for value in copied.values() if isinstance(value, Tensor) and value.is_cuda}
    seen = state.seen.value
    starts: list[Tensor] = []
    seen.starts = starts
    try:
        # Dropout of the tower must not change what the user's next layer draws.
        with torch.random.fork_rng(list(devices)), torch.inference_mode(False), torch.no_grad(), plainly:
            output = getattr(entry, f"get_{name}_features")(**copied)
    finally:
        seen.starts = None
    features = getattr(output, "pooler_output", output)
    parts = [features] if isinstance(features, Tensor) else list(features)
    with torch.inference_mode(False), torch.enable_grad(), plainly:
        feature_TD = torch.cat([part.flatten(0, -2) for part in parts])
        if not starts or not feature_TD.requires_grad:
            raise ValueError(
                f"{_OPTION} needs features with a gradient, those of this {type(entry).__name__} have none"
            )
        return Origins(_tokens_of(entry, feature_TD, starts), len(feature_TD))


def _tokens_of(entry: nn.Module, feature_TD: Tensor, starts: list[Tensor]) -> list[Tensor]:
    """Return the number of the image token that each patch belongs to, -1 for none (I, P), see `trace_origins`."""
    weight_TD = torch.randn(feature_TD.shape, generator=torch.Generator().manual_seed(0)).to(feature_TD)

    def reached_by(chosen_T: Tensor) -> list[Tensor]:
        """Return which patches (I, P) some tokens are made of."""
        weights = weight_TD * chosen_T.unsqueeze(1)
        gradients = torch.autograd.grad(feature_TD, starts, weights, retain_graph=True, materialize_grads=True)
        return [(gradient != 0).any(-1) for gradient in gradients]

    number_T = torch.arange(len(feature_TD), device=feature_TD.device)
    found = [torch.zeros(start.shape[:-1], dtype=torch.long, device=start.device) for start in starts]
    used = reached_by(torch.ones_like(number_T))
    for digit in range((len(feature_TD) - 1).bit_length()):
        has_one_T = number_T >> digit & 1
        for token_IP, one_IP, zero_IP in zip(found, reached_by(has_one_T), reached_by(1 - has_one_T)):
            if bool((one_IP & zero_IP).any()):
                raise ValueError(
                    f"{_OPTION} needs image tokens that are made of patches of their own: in this "
                    f"{type(entry).__name__} a patch reaches several image tokens"
                )
            token_IP += one_IP.long() << digit
    return [token_IP.masked_fill(~reached_IP, -1) for token_IP, reached_IP in zip(found, used)]
