"""Vision towers: supported encoders, how their layers are called, and the importance of image tokens in them.

Axes: B images or samples, I images, N tokens, K slots per image, H heads, E channels of a head.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils.output_capturing import _active_collector

from mmod.adapters.base import BlockStack
from mmod.adapters.probe import GRIDS
from mmod.adapters.tokens import find_blocks
from mmod.blocks import ModelHook, host_class
from mmod.blocks.passes import recomputing
from mmod.ops import attention_with_importance, class_token_importance
from mmod.threads import PerThread

# Arguments of models that read images or videos, and of those that read text too.
_PIXELS = ("pixel_values", "pixel_values_videos", GRIDS)
_TEXT = ("input_ids",)


def find_tower(model: nn.Module, name: str) -> tuple[str, nn.Module] | None:
    """Return the innermost model around a list of layers that takes images, by its name; None if it reads text too."""
    path = name
    while path:
        path = path.rpartition(".")[0]
        module = model.get_submodule(path)
        arguments = inspect.signature(host_class(module).forward).parameters
        if any(argument in arguments for argument in _TEXT):
            return None
        if any(argument in arguments for argument in _PIXELS):
            return path, module
    return None


def find_vision(path: str, tower: nn.Module) -> BlockStack:
    """Return the layers of a vision tower, with their names in the model around it."""
    stack = find_blocks(tower, "transformers", "transformers")
    names = tuple(f"{path}.{name}" for name in stack.names) if path else stack.names
    read = stack.proof.read if stack.proof is not None else ()
    return dataclasses.replace(stack, names=names, read_blocks=functools.partial(read_blocks, frozenset(read)))


def read_blocks(always: frozenset[int]) -> Collection[int] | None:
    """Return the numbers of the layers whose output the running call collects; None for all.

    transformers collects hidden states by hooks: those of all layers, or of some that a model reads features from.

    Args:
        always: Numbers of the layers whose output the model reads in every call.
    """
    compiles = torch.compiler.is_compiling()
    collected = _active_collector.global_var if compiles else _active_collector.get()
    if not collected or "hidden_states" not in collected:
        return always
    selected = collected.get("_hidden_states_layers")
    # The first hidden state is the embedding in most models, so that number i is the output of layer i - 1.
    return None if selected is None else always | set(selected) | {index - 1 for index in selected}


def find_wrapped(path: str, inner: nn.Module) -> BlockStack:
    """Return the blocks of a timm model that a model of transformers wraps."""
    from mmod.adapters import timm

    stack = timm.find_blocks(inner)
    return dataclasses.replace(stack, library="transformers", names=tuple(f"{path}.{name}" for name in stack.names))


class Projected(ModelHook):
    """Hook that stores a projection's last output of each thread, until it is taken."""

    def __init__(self) -> None:
        self._last: PerThread[Tensor | None] = PerThread(type(None))

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Do nothing before the call."""

    def after(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> None:
        """Store the output."""
        if isinstance(output, Tensor) and not recomputing():
            self._last.value = output.detach()

    def take(self) -> Tensor | None:
        """Return the last output and drop it."""
        last = self._last.value
        self._last.value = None
        return last


class TowerEnd(ModelHook):
    """Hook of the module that runs the tower: drops outputs that no layer has read, as after a pass that failed."""

    def __init__(self, *projections: Projected) -> None:
        self.projections = projections
        # Whether a call runs in a thread.
        self._runs: PerThread[bool] = PerThread(bool)

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Drop what an interrupted call left: torch calls no hook after a KeyboardInterrupt."""
        if self._runs.value:
            self._drop()
        self._runs.value = True

    def after(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> None:
        """Drop the outputs."""
        self._runs.value = False
        self._drop()

    def _drop(self) -> None:
        for projection in self.projections:
            projection.take()


class TowerImportance:
    """Reads the class token's attention to patches in the layer of the vision tower that provides the features.

    In a tower without a class token, it is the mean attention of all patches. `entry` inserts image features into the
    embedded tokens.

    Source: VisionZip, Yang et al., arXiv 2412.04467, section 3.2: its dominant tokens.
    """

    def __init__(self, entry: nn.Module) -> None:
        config: Any = getattr(entry, "config", None)
        lists = [name for name, item in entry.named_modules() if isinstance(item, nn.ModuleList) and len(item)]
        tower = next(filter(None, (find_tower(entry, name) for name in lists)), None)
        if type(entry).__name__ != "LlavaModel" or tower is None:
            raise ValueError(
                "router.importance='vision_tower' needs a LLaVA whose image tokens are the patches of its tower: this "
                f"is a {type(entry).__name__}"
            )
        chosen = config.vision_feature_layer
        last = chosen if isinstance(chosen, int) else chosen[-1]
        # Hidden states begin with the embeddings, before the first layer.
        stack = find_vision(*tower)
        attention = _attention_of(stack.blocks[last if last < 0 else max(last - 1, 0)])
        self.class_token = stack.class_token
        self.dropped = int(config.vision_feature_select_strategy == "default")
        self.heads = attention.q_proj.out_features // attention.head_dim
        self.scale = attention.head_dim**-0.5
        self.query = Projected()
        self.key = Projected()
        self.hooks: list[tuple[nn.Module, ModelHook]] = [
            (attention.q_proj, self.query),
            (attention.k_proj, self.key),
            (entry, TowerEnd(self.query, self.key)),
        ]

    def of(self, image_BN: Tensor) -> Tensor:
        """Return the importance of image tokens (B, N), 0 at all other tokens."""
        query, key = self.query.take(), self.key.take()
        if query is None or key is None:
            raise ValueError(
                "router.importance='vision_tower' needs the tower to process the images: pass pixel_values"
            )
        importance_IN = self._importance(query, key)[:, self.dropped :]
        tokens = int(image_BN.sum())
        values = importance_IN.numel()
        if values and tokens % values == 0 and tokens // values * importance_IN.shape[0] == image_BN.shape[0]:
            # generate() repeats prompts with one image each, whose features it computed once.
            importance_IN = importance_IN.repeat_interleave(tokens // values, dim=0)
        if importance_IN.numel() != tokens:
            raise ValueError(f"the vision tower processed {values} patches, the prompts have {tokens} image tokens")
        score_BN = torch.zeros(image_BN.shape, dtype=importance_IN.dtype, device=image_BN.device)
        return score_BN.masked_scatter(image_BN, importance_IN.to(image_BN.device))

    def _importance(self, query_IND: Tensor, key_IND: Tensor) -> Tensor:
        q_IHNE, k_IHNE = (rows.unflatten(-1, (self.heads, -1)).transpose(1, 2) for rows in (query_IND, key_IND))
        if self.class_token:
            return class_token_importance(q_IHNE, k_IHNE, scale=self.scale)
        with torch.no_grad():
            return attention_with_importance(q_IHNE, k_IHNE, k_IHNE, scale=self.scale)[1]


def _attention_of(layer: nn.Module) -> Any:
    """Return the attention of a layer, whose map follows from the outputs of its projections of queries and keys."""
    projected = [module for module in layer.modules() if hasattr(module, "q_proj") and hasattr(module, "k_proj")]
    if len(projected) != 1 or not hasattr(projected[0], "head_dim"):
        raise ValueError(
            "router.importance='vision_tower' needs one attention with q_proj, k_proj and head_dim in a layer of the "
            f"tower, got {len(projected)} in a {host_class(layer).__name__}"
        )
    attention = projected[0]
    changed = [name for name in ("q_norm", "k_norm") if hasattr(attention, name)]
    changed += {"position_embeddings", "rotary_pos_emb"} & set(inspect.signature(attention.forward).parameters)
    if changed:
        raise ValueError(
            "router.importance='vision_tower' reads queries and keys as they are projected, and this "
            f"{type(attention).__name__} changes them by {', '.join(changed)}"
        )
    return attention
