"""The definition of a routed model: one image at a time, one token set at a time, in float64, with Python's sort."""

from __future__ import annotations

import copy
import math
from contextlib import contextmanager

import torch
from torch import Tensor, nn

import mmod
from mmod.blocks import host_class


def kept_of(score: list[float], count: int, prefix: int) -> list[int]:
    """Indices of the prefix and the best other tokens; ties go to the lower index, NaN behind everything."""
    rest = sorted(range(prefix, len(score)), key=lambda token: (math.isnan(score[token]), -score[token], token))
    return sorted([*range(prefix), *rest[: count - prefix]])


@contextmanager
def attention_maps(block: nn.Module):
    """Collect a block's attention probabilities from the inputs of its attention dropout."""
    maps: list[Tensor] = []
    handles, fused = [], []
    for module in block.modules():
        if hasattr(module, "fused_attn"):
            fused.append((module, module.fused_attn))
            module.fused_attn = False
            handles.append(module.attn_drop.register_forward_pre_hook(lambda _, args: maps.append(args[0].detach())))
    yield maps
    for handle in handles:
        handle.remove()
    for module, value in fused:
        module.fused_attn = value


def reference_forward(model: nn.Module, images: Tensor) -> Tensor:
    """Run a routed model by the definition, one image after the other.

    Blocks are run by their host class on each image's kept tokens; everything between is the model's own.
    """
    return torch.cat([_reference_image(model, images[i : i + 1]) for i in range(len(images))])


def _reference_image(model: nn.Module, image: Tensor) -> Tensor:
    blocks = mmod.routed_blocks(model)
    originals = {}
    importance: dict[int, Tensor] = {}
    names = [name for name, module in model.named_modules() if name.rpartition(".")[0].endswith("blocks")]
    for position, name in enumerate(names):
        module = model.get_submodule(name)
        originals[name] = type(module)

        def forward(x, *args, module=module, position=position, routed=name in blocks, **kwargs):
            host = host_class(module)
            if not routed:
                with attention_maps(module) as maps:
                    host.forward(module, x, *args, **kwargs)
                if maps:
                    importance[position] = torch.stack([m.mean(dim=(1, 2)) for m in maps]).mean(0)
                return host.forward(module, x, *args, **kwargs)
            return _reference_block(module, host, importance, position, x, *args, **kwargs)

        module.forward = forward
    try:
        return model(image)
    finally:
        for name in names:
            del model.get_submodule(name).forward


def _reference_block(module, host, importance, position, x, *args, **kwargs):
    router, config = module.router, module.router.config
    tokens = x.shape[1]
    earlier = max((p for p in importance if p < position), default=None)
    score = importance[earlier][0] if config.router.name == "attention" else router.score(x)[0]
    if config.select == "topk":
        count = max(1, router.prefix, tokens * router.capacity.numerator // router.capacity.denominator)
        kept = kept_of(score.tolist(), count, router.prefix)
    else:
        level = torch.sigmoid(score) if config.router.learns else score / score.mean()
        kept = [t for t in range(tokens) if t < router.prefix or level[t] >= config.select.threshold]
    if not kept:
        return x
    index = torch.tensor(kept)
    z = x[:, index]
    if config.context == "all":
        y = host.forward(module, x, *args, **kwargs)[:, index]
    else:
        y = host.forward(module, z, **_reference_arguments(module, index, tokens, args, kwargs))
    gate = {
        "identity": lambda s: torch.ones_like(s),
        "linear": lambda s: config.gate.scale * s,
        "sigmoid": lambda s: config.gate.scale * torch.sigmoid(s),
        "tanh": lambda s: 1 + config.gate.scale * torch.tanh(s),
    }[config.gate.name](score).to(x.dtype)
    rows = list(x[0].unbind(0))
    for slot, token in enumerate(kept):
        rows[token] = z[0, slot] + gate[token] * (y[0, slot] - z[0, slot])
    if config.gate.reweight_skipped:
        rows = [row if token in kept else gate[token] * row for token, row in enumerate(rows)]
    return torch.stack(rows).unsqueeze(0)


def _reference_arguments(module, index, tokens, args, kwargs):
    named = {**dict(zip(module.mod_state.call.names, args)), **kwargs}
    narrowed = {}
    for name, value in named.items():
        if value is None or name == "is_causal":
            narrowed[name] = value
        elif name == "rope":
            prefix = module.mod_state.call.rope_prefix
            narrowed[name] = value[..., index[prefix:] - prefix, :]
        else:
            narrowed[name] = value[..., index, :][..., index] if value.shape[-2] > 1 else value[..., index]
    return narrowed


def as_double(model: nn.Module) -> nn.Module:
    """Return a float64 copy of a model."""
    return copy.deepcopy(model).double()
