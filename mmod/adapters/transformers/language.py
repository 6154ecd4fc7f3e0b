"""Language models: their decoder layers, and how these are called."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from torch import nn

from mmod.adapters.base import BlockStack
from mmod.adapters.transformers.families import (
    BY_TOKEN,
    branch_ends,
    entry_of,
    has_plain_positions,
    is_recurrent,
    labelled_modules,
    layer_projections,
    passes_keywords,
    reads_positions,
    reason_against,
)
from mmod.adapters.transformers.groups import GroupReader, mark_pairs
from mmod.adapters.transformers.images import ImageTokens
from mmod.adapters.transformers.layers import CompactRotary, DecoderLayerCall, RecurrentLayerCall
from mmod.blocks import Mixin, ModelHook, host_class, parameters_of_block
from mmod.config import RoutingConfig


def find_language(model: nn.Module, name: str, layers: nn.ModuleList) -> BlockStack:
    """Return the decoder layers of a language model, by name of their list."""
    owner = name.rpartition(".")[0]
    text: Any = model.get_submodule(owner)
    attending = [index for index, layer in enumerate(layers) if not is_recurrent(layer)]
    entry = _keyword_entry(model, owner)
    rotary = _compact_rotary(text, layers)
    return BlockStack(
        block_list=name,
        blocks=tuple(layers),
        prefix=0,
        dim=int(text.config.hidden_size),
        call_of=functools.partial(_call_of, rotary=rotary, attending=attending),
        language=True,
        reads_images=entry is not text or bool(ImageTokens(text.config).ids),
        hooks=functools.partial(_hooks, model, name, entry, rotary is not None),
    )


def _keyword_entry(model: nn.Module, owner: str) -> nn.Module:
    """Return the module whose call every layer gets keywords of: the one that inserts images, or the language model."""
    entry = entry_of(model, owner)
    if not passes_keywords(entry):
        raise ValueError(
            f"cannot route the language model of a {type(entry).__name__}: its forward passes no keywords on, by which "
            "layers learn which tokens are an image's"
        )
    return entry


def _compact_rotary(text: nn.Module, layers: nn.ModuleList) -> CompactRotary | None:
    """Return what embeds compact positions; None unless a position is one number, which only it reads."""
    if not has_plain_positions(text) or any(map(reads_positions, layers)):
        return None
    return CompactRotary(text.get_submodule("rotary_emb"))


def _hooks(
    model: nn.Module, name: str, entry: nn.Module, is_plain: bool, routing: RoutingConfig
) -> list[tuple[nn.Module, ModelHook]]:
    """Return the hooks of a config, with their modules.

    Args:
        name: Name of the list of layers.
        is_plain: Positions can be compact, see `_compact_rotary`.
    """
    owner, _, layers = name.rpartition(".")
    text = model.get_submodule(owner)
    groups = GroupReader(entry, text, layers, routing, is_plain)
    needed: list[tuple[nn.Module, ModelHook]] = []
    if groups.tokens == "image" and routing.reads_attention(training=True):
        # Labels say where the answer begins, whose attention generation could not know.
        labelled = labelled_modules(model, owner)
        needed += [(module, groups.label_hook(module is labelled[0])) for module in labelled]
    needed.append((entry, ModelHook(groups.add_groups)))
    if entry is not text:
        needed.append((text, ModelHook(mark_pairs)))
    if groups.image_reader is None:
        return needed
    return [*needed, *groups.image_reader.hooks]


def _call_of(
    layer: nn.Module, config: RoutingConfig | None, rotary: CompactRotary | None, attending: Sequence[int]
) -> DecoderLayerCall:
    """Return how transformers calls a layer.

    Args:
        rotary: See `_compact_rotary`.
        attending: Indices of the layers that have attention instead of a recurrent state.
    """
    kind = host_class(layer).__name__
    reason = None if isinstance(layer, Mixin) else reason_against(layer)
    if reason is not None:
        raise ValueError(f"cannot route a {kind}: {reason}")
    if config is not None:
        _check_config(layer, config, kind, attending)
    names = tuple(parameters_of_block(layer))
    if is_recurrent(layer):
        return RecurrentLayerCall(names, layer.linear_attn)
    attention: Any = layer.self_attn
    compact = None
    if config is not None and config.language.positions == "compact":
        compact = rotary
    whole = config is None or config.operator == "block"
    return DecoderLayerCall(
        names,
        attention,
        compact,
        window=getattr(attention.config, "sliding_window", None),
        reads_positions=reads_positions(layer),
        projections=layer_projections(layer),
        by_token=tuple(name for name in BY_TOKEN if whole and name in names),
    )


def _check_config(layer: nn.Module, config: RoutingConfig, kind: str, attending: Sequence[int]) -> None:
    """Raise a ValueError if a layer cannot do what a config says.

    Args:
        kind: Name of the layer's class.
        attending: See `_call_of`.
    """
    if is_recurrent(layer):
        if config.operator != "mlp":
            raise ValueError(
                f"operator={config.operator!r} is not possible in a {kind} with linear attention: skipped tokens would "
                f"be missing in its state. Route its MLP by operator='mlp', or layers with attention, which are "
                f"blocks={tuple(attending)}"
            )
        return
    weighs_branch = config.operator != "block" and config.gate.name != "identity"
    if weighs_branch and branch_ends(layer) is not None:
        raise ValueError(
            f"operator={config.operator!r} needs gate='identity' in a {kind}: a norm after the branch takes its "
            "weight away"
        )
    if config.language.scored == "norm" and "input_layernorm" not in layer._modules:
        raise ValueError(f"language.scored='norm' is not possible in a {kind}, which begins with no norm: use 'input'")
