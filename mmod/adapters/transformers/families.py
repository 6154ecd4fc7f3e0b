"""Decoder layers and the models around them, recognised by signatures and modules instead of names of classes.

Axes: D channels.
"""

from __future__ import annotations

import inspect
from typing import Any

import transformers
from torch import nn

from mmod.adapters.projections import projections_of
from mmod.adapters.transformers.cache_base import CACHE, CACHE_NAMES
from mmod.blocks import host_class, parameters_of
from mmod.ops.context import ProjectionName

# Arguments of a layer that have a row for each token, and those whose value for kept tokens is known else.
BY_TOKEN = ("per_layer_input",)
_NARROWED = {"attention_mask", "position_ids", "position_embeddings", "use_cache", *BY_TOKEN, *CACHE_NAMES}
# Modules of a layer beside norms: branches, and a mixture of experts beside the MLP.
_BRANCHES = {"self_attn", "linear_attn", "mlp", "router", "experts"}
# Attributes of attention that passes keys and values to other layers, or gets them, as in Gemma 4.
_SHARING = ("store_full_length_kv", "is_kv_shared_layer")
# What attention calls that computes positions instead of getting them, as in Llama 4.
_COUNTING = {"arange", "get_seq_length"}
# Pairs of norms that end the two branches.
_ENDS = (
    ("post_self_attn_layernorm", "post_mlp_layernorm"),
    ("post_attention_layernorm", "post_feedforward_layernorm"),
    ("post_norm1", "post_norm2"),
)


def is_decoder_layer(layer: nn.Module) -> bool:
    """Return whether a module is a layer of a language model, with attention, an MLP and a cache."""
    names = list(parameters_of(layer))
    has_cache = any(name in names for name in CACHE_NAMES)
    is_layer = names[:1] == ["hidden_states"] and "attention_mask" in names and has_cache
    return is_layer and hasattr(layer, "mlp") and (hasattr(layer, "self_attn") or is_recurrent(layer))


def is_recurrent(layer: nn.Module) -> bool:
    """Return whether a layer has linear attention, which sums up earlier tokens in a state, instead of a cache."""
    return hasattr(layer, "linear_attn")


def number_of(layer: nn.Module) -> int:
    """Return the number of a layer's keys and values, or of its state, in a cache."""
    attention: Any = layer.linear_attn if is_recurrent(layer) else layer.self_attn
    return int(attention.layer_idx)


def reason_against(layer: nn.Module) -> str | None:
    """Return why a decoder layer cannot run on some of its tokens, or None if it can."""
    attention = layer._modules.get("self_attn")
    known = _NARROWED if shares_keys(attention) else {*_NARROWED, "shared_kv_states"}
    named = list(parameters_of(layer).items())[1:]
    if CACHE not in dict(named):
        return f"it takes no {CACHE!r}, the name of the cache in transformers {transformers.__version__}"
    others = [name for name, p in named if p.kind is p.POSITIONAL_OR_KEYWORD and name not in known]
    if others:
        return f"it takes {', '.join(others)}, whose part for kept tokens is unknown"
    for name, module in layer.named_children():
        if name not in _BRANCHES and not _treats_tokens_alone(module):
            return f"it has the module {name}, which may mix tokens"
    if attention is None:
        return None
    if not hasattr(attention, "config"):
        return "its attention has no config, which says how it is computed"
    if not _COUNTING.isdisjoint(inspect.unwrap(host_class(attention).forward).__code__.co_names):
        return "its attention counts positions itself, and would count among kept tokens"
    for name, module in attention.named_children():
        if not _treats_tokens_alone(module):
            return f"its attention has the module {name}, which may mix tokens"
    return None


def shares_keys(attention: nn.Module | None) -> bool:
    """Return whether attention passes keys and values to other layers, or gets theirs."""
    shared = getattr(getattr(attention, "config", None), "num_kv_shared_layers", 0)
    return bool(shared) and any(getattr(attention, name, False) for name in _SHARING)


def gets_keys(layer: nn.Module) -> bool:
    """Return whether a layer has no keys and values of its own in a cache, but gets those of another layer."""
    return bool(getattr(layer._modules.get("self_attn"), "is_kv_shared_layer", False))


def _treats_tokens_alone(module: nn.Module) -> bool:
    """Return whether a module is a linear layer, or a norm, scale or dropout, whose weights have at most one axis."""
    # Linear layers in 4 or 8 bits, or with LoRA, have classes of their own.
    linear = hasattr(module, "in_features") and hasattr(module, "out_features")
    return linear or all(weight.ndim <= 1 for weight in module.parameters())


def layer_projections(layer: nn.Module) -> tuple[ProjectionName, ...] | None:
    """Return the linear layers of the tokens that make queries, keys and values, apart or in one; None if others do."""
    attention = layer.get_submodule("self_attn")
    modules = {name for name, module in attention.named_children()}
    if "qkv_proj" not in modules and not {"q_proj", "k_proj", "v_proj"} <= modules:
        return None
    return projections_of("self_attn", attention)


def reads_positions(layer: nn.Module) -> bool:
    """Return whether attention gets the position of each token, besides rotary embeddings of it."""
    attention = layer._modules.get("self_attn")
    return attention is not None and "position_ids" in parameters_of(attention)


def branch_ends(layer: nn.Module) -> tuple[str, str] | None:
    """Return the norms after attention and MLP whose outputs are added to the tokens; None where branches end bare."""
    return next((ends for ends in _ENDS if all(name in layer._modules for name in ends)), None)


def modules_around(model: nn.Module, name: str) -> list[tuple[str, nn.Module]]:
    """Return the modules around one of a model, with their names, from the innermost on."""
    path = name.split(".") if name else []
    names = [".".join(path[:depth]) for depth in reversed(range(len(path)))]
    return [(outer, model.get_submodule(outer)) for outer in names]


def entry_of(model: nn.Module, name: str) -> nn.Module:
    """Return the innermost module around a language model that inserts images, or the language model itself.

    Args:
        model: The full model.
        name: Name of the language model in it.
    """
    for _, outer in modules_around(model, name):
        names = parameters_of(outer)
        if "input_ids" in names and any("pixel_values" in name or "image_patches" in name for name in names):
            return outer
    return model.get_submodule(name)


def labelled_modules(model: nn.Module, name: str) -> list[nn.Module]:
    """Return the modules around a language model, or itself, that take labels, from the outermost on."""
    modules = [model.get_submodule(name), *[outer for _, outer in modules_around(model, name)]]
    return [module for module in reversed(modules) if "labels" in parameters_of(module)]


def passes_keywords(module: nn.Module) -> bool:
    """Return whether a module's forward takes keywords that it does not name."""
    return any(p.kind is p.VAR_KEYWORD for p in parameters_of(module).values())


def has_plain_positions(text: nn.Module) -> bool:
    """Return whether positions are one number per token, with one rotary embedding for all layers."""
    rotary = text._modules.get("rotary_emb")
    if rotary is None or list(parameters_of(rotary)) != ["x", "position_ids"]:
        return False
    # Sections divide the channels among time, height and width.
    return not getattr(rotary, "mrope_section", None)
