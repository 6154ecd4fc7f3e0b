"""Decoder layers and the models around them, told by their signatures and modules instead of names of classes.

Axes: D channels.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from torch import nn

from mmod.adapters.transformers.cache_base import CACHE_NAMES
from mmod.blocks import host_class

# Arguments of a layer whose values for kept tokens are known, or that are the same for all tokens.
_NARROWED = {"attention_mask", "position_ids", "position_embeddings", "use_cache", *CACHE_NAMES}
# Modules of attention that treat each token alone: projections, gates, and norms of heads.
_PROJECTIONS = {"q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj", "g_proj", "gate_proj"}
# Pairs of norms that end the two branches.
_ENDS = (
    ("post_self_attn_layernorm", "post_mlp_layernorm"),
    ("post_attention_layernorm", "post_feedforward_layernorm"),
    ("post_norm1", "post_norm2"),
)


def parameters_of(module: nn.Module) -> dict[str, inspect.Parameter]:
    """Return the parameters of a module's forward, without `self`."""
    named = inspect.signature(host_class(module).forward).parameters
    return dict(list(named.items())[1:])


def is_decoder_layer(layer: nn.Module) -> bool:
    """Return whether a module is a layer of a language model, with a cache and a gated MLP."""
    names = list(parameters_of(layer))
    cached = names[0] == "hidden_states" and "attention_mask" in names and any(name in names for name in CACHE_NAMES)
    return cached and hasattr(layer, "mlp") and (hasattr(layer, "self_attn") or is_recurrent(layer))


def is_recurrent(layer: nn.Module) -> bool:
    """Return whether a layer has linear attention, which sums up earlier tokens in a state, instead of a cache."""
    return hasattr(layer, "linear_attn")


def reason_against(layer: nn.Module) -> str | None:
    """Return why a decoder layer cannot run on some of its tokens, or None if it can."""
    return next(_reasons(layer), None)


def _reasons(layer: nn.Module) -> Iterator[str]:
    named = list(parameters_of(layer).items())[1:]
    others = [name for name, p in named if p.kind is p.POSITIONAL_OR_KEYWORD and name not in _NARROWED]
    if others:
        yield f"it takes {', '.join(others)}, whose part for kept tokens is unknown"
    for name, module in layer.named_children():
        if name not in ("self_attn", "linear_attn", "mlp") and not _treats_tokens_alone(module):
            yield f"it has the module {name}, which may mix tokens"
    attention = layer._modules.get("self_attn")
    if attention is None:
        return
    for name, module in attention.named_children():
        if name not in _PROJECTIONS and not _treats_tokens_alone(module):
            yield f"its attention has the module {name}, which may mix tokens"


def _treats_tokens_alone(module: nn.Module) -> bool:
    """Return whether a module is a norm, a scale or a dropout, whose weights have at most one axis."""
    return all(weight.ndim <= 1 for weight in module.parameters())


def branch_ends(layer: nn.Module) -> tuple[str, str] | None:
    """Return the norms after attention and MLP whose outputs are added to the tokens; None where branches end bare."""
    return next((ends for ends in _ENDS if all(name in layer._modules for name in ends)), None)


def inserts_images(module: nn.Module) -> bool:
    """Return whether a model takes ids and pixels, which it inserts as features into the embedded tokens."""
    names = parameters_of(module)
    return "input_ids" in names and any("pixel_values" in name for name in names)


def entry_of(model: nn.Module, name: str) -> nn.Module:
    """Return the innermost module around a language model that inserts images, or the language model itself.

    Args:
        model: The full model.
        name: Name of the language model in it.
    """
    outer = name
    while outer:
        outer = outer.rpartition(".")[0]
        if inserts_images(model.get_submodule(outer)):
            return model.get_submodule(outer)
    return model.get_submodule(name)


def passes_keywords(module: nn.Module) -> bool:
    """Return whether a module's forward takes keywords that it does not name."""
    return any(p.kind is p.VAR_KEYWORD for p in parameters_of(module).values())


def has_plain_positions(text: nn.Module) -> bool:
    """Return whether positions are one number per token, with one rotary embedding for all layers."""
    rotary: Any = text._modules.get("rotary_emb")
    return rotary is not None and list(parameters_of(rotary)) == ["x", "position_ids"] and not _sections(rotary)


def _sections(rotary: Any) -> Any:
    """Return how a rotary embedding divides its channels among time, height and width."""
    return getattr(rotary, "mrope_section", None)
