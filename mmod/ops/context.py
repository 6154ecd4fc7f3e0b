"""Attention of kept tokens over all tokens: queries are computed for kept rows, keys and values for every row.

The host's forward is called twice and never copied: once on all tokens up to its attention, where keys and values are
taken and the call ends, and once on the kept ones, whose attention is given those. Each call computes only its part of
every projection.
Axes: B images, H heads, N tokens, K slots per image, E channels of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mmod.ops.backend import exporting
from mmod.ops.intercept import AttentionCall, AttentionIntercept


class Projection(NamedTuple):
    """A linear map in front of attention.

    Args:
        weight: Its weight (features, D), the very tensor the host uses.
        own: How many leading features serve the token itself (query, gate, MLP); the others serve as key and value.
    """

    weight: Tensor
    own: int


def keys_and_values(
    forward: Callable[[], object], projections: Sequence[Projection], calls: int = 1
) -> list[tuple[Tensor, Tensor]]:
    """Return what a host's attention would take as keys and values, without computing queries or anything after them.

    Args:
        forward: Runs the host block on all tokens.
        projections: The block's projections in front of attention.
        calls: Attention calls the block makes.

    Returns:
        Keys and values (B, H, N, E) of each call.

    Raises:
        RuntimeError: The block made fewer attention calls.
    """
    capture = _KeysAndValues(projections, calls)
    try:
        with capture:
            forward()
    except _Taken:
        pass
    if len(capture.taken) != calls:
        raise RuntimeError(
            f"context='all' expects {calls} calls of fused attention in a block, saw {len(capture.taken)}"
        )
    return capture.taken


class _Taken(Exception):
    """Ends a host's forward once its keys and values are known."""


class PartialProjections(AttentionIntercept):
    """Context manager that computes one part of each projection and fills the other with zeros.

    Args:
        projections: The projections in front of attention.
        own: Whether the part is what serves the token itself, or what serves as key and value.
    """

    def __init__(self, projections: Sequence[Projection], own: bool) -> None:
        super().__init__()
        self.projections = projections
        self.own = own

    def replace(self, func: Callable[..., Any]) -> Callable[..., Any] | None:
        """Replace the projections as well."""
        return self._linear if func is F.linear else super().replace(func)

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        for projection in self.projections:
            if weight is projection.weight:
                start, stop = self.part(projection)
                rest = (start, weight.shape[0] - stop)
                if start == stop:
                    return _zeros(input, weight)
                part = F.linear(input, weight[start:stop], None if bias is None else bias[start:stop])
                return F.pad(part, rest) if any(rest) else part
        return F.linear(input, weight, bias)

    def part(self, projection: Projection) -> tuple[int, int]:
        """Return the range of features to compute."""
        return (0, projection.own) if self.own else (projection.own, projection.weight.shape[0])

    def attend(self, call: AttentionCall) -> Tensor:
        """Attend as the host does."""
        return call.run()


def _zeros(input: Tensor, weight: Tensor) -> Tensor:
    """Return zeros in the shape of a projection, in the memory of a single one."""
    return input.new_zeros(()).expand(*input.shape[:-1], weight.shape[0])


class _KeysAndValues(PartialProjections):
    def __init__(self, projections: Sequence[Projection], calls: int) -> None:
        super().__init__(projections, own=False)
        self.calls = calls
        self.taken: list[tuple[Tensor, Tensor]] = []

    def attend(self, call: AttentionCall) -> Tensor:
        self.taken.append((call.key, call.value))
        # Export without dynamo keeps a stack of modules that an exception would not unwind. What follows is dead code
        # there, and its projections are cut so that it costs little where nobody removes it.
        dynamo = torch.compiler.is_dynamo_compiling()
        if len(self.taken) == self.calls and (dynamo or not exporting()):
            raise _Taken
        return call.value

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if len(self.taken) == self.calls:
            return _zeros(input, weight)
        return super()._linear(input, weight, bias)


class attend_to_all(PartialProjections):
    """Context manager in which a host block on kept tokens attends to the keys and values of all tokens.

    Args:
        projections: The block's projections in front of attention.
        taken: Keys and values of each attention call, from `keys_and_values`.

    Example:
        >>> from torch import nn
        >>> qkv = nn.Linear(4, 12)
        >>> def block(x):
        ...     q, k, v = qkv(x).unsqueeze(1).chunk(3, dim=-1)
        ...     return F.scaled_dot_product_attention(q, k, v).squeeze(1)
        >>> x = torch.randn(1, 6, 4)
        >>> projections = [Projection(qkv.weight, own=4)]
        >>> with attend_to_all(projections, keys_and_values(lambda: block(x), projections)):
        ...     kept = block(x[:, :2])
        >>> bool(torch.allclose(kept, block(x)[:, :2], atol=1e-6))
        True
    """

    def __init__(self, projections: Sequence[Projection], taken: Sequence[tuple[Tensor, Tensor]]) -> None:
        super().__init__(projections, own=True)
        self.remaining = list(taken)

    def attend(self, call: AttentionCall) -> Tensor:
        """Attend to all tokens; the mask is one of kept queries over all keys."""
        key, value = self.remaining.pop(0)
        # The mask says what a causal call would: kept queries are not counted from the first key.
        return call._replace(key=key, value=value, is_causal=False).run()
