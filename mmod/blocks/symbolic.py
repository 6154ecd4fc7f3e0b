"""Symbolic tracing by torch.fx: a converted block is one node, and what is inside it cannot be extracted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, fx, nn

from mmod.blocks.conversion import Mixin, host_class
from mmod.blocks.record import recomputing


def trace_as_node(block: nn.Module, x: object, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return the block as one node of torch.fx's graph, because decisions depend on values.

    Raises:
        ValueError: What stands in the place of tokens is no proxy of a tracer.
    """
    check_tokens(block, x)
    assert isinstance(x, fx.Proxy)
    tracer: Any = x.tracer
    path = tracer.path_of_module(block)
    names = getattr(tracer, "node_to_qualname", None)
    if names is not None:
        # A feature extractor takes the names that match a pattern, and would leave out this block without a word.
        # Nodes that nobody asks for are removed from its graph.
        known = set(names.values())
        for inside in (f"{path}.{name}" for name in _names_inside(block)):
            if inside not in known:
                proxy = tracer.create_proxy("call_function", refuse_inside, (x, path), {})
                names[proxy.node] = inside
    return tracer.create_proxy("call_module", path, (x, *args), dict(kwargs))


def check_tokens(block: nn.Module, x: object) -> None:
    """Raise a ValueError if a block gets anything but tokens, such as a list of batches of several sizes."""
    if not isinstance(x, (Tensor, fx.Proxy)):
        what = f"{type(x).__name__} of {len(x)}" if isinstance(x, (list, tuple)) else type(x).__name__
        raise ValueError(
            f"a changed {host_class(block).__name__} takes tokens (images, tokens, channels), got a {what}: call the "
            "model once for each batch of images of one size"
        )


def check_once(block: Mixin, x: object) -> None:
    """Raise an error if a block behind which rows are gone for good gets anything but tokens, or runs again."""
    check_tokens(block, x)
    if recomputing():
        raise RuntimeError(
            f"the method {block.mod_method.kind!r} does not support gradient checkpointing, which runs blocks twice: "
            "turn it off"
        )


def _names_inside(block: nn.Module) -> list[str]:
    """Return the names of the nodes that the dense block would have: its leaf modules, and the map of its attention."""
    modules = list(block.named_modules())[1:]
    leaves = [name for name, module in modules if not any(True for _ in module.children())]
    return [*leaves, *(f"{name}.softmax" for name, module in modules if hasattr(module, "fused_attn"))]


def refuse_inside(x: object, path: str) -> None:
    """Raise, where a node inside a converted block was asked for."""
    raise ValueError(
        f"{path} is converted by mmod and one node of this graph, from which nothing inside it can be extracted: "
        "register hooks, as AttentionExtract does by method='hook', and bring their values to all tokens by "
        "mmod.to_all_tokens"
    )
