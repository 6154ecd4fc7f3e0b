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
    return tracer.create_proxy("call_module", tracer.path_of_module(block), (x, *args), dict(kwargs))


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
