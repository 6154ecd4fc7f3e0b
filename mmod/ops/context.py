"""Attention of kept tokens over all tokens: queries are computed for kept rows, keys and values for every row.

The host's forward runs twice and is never copied. The first call takes all tokens, captures keys and values at the
attention, and stops there. The second takes the kept tokens, and their attention receives the captured keys and values.
Both compute only the slice of every projection that they need.
Axes: B images, H heads, N tokens, K slots per image, E channels of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmod.ops.backend import exporting
from mmod.ops.intercept import AttentionCall, AttentionIntercept, unseen_attention


class Projection(NamedTuple):
    """A linear layer before attention.

    Args:
        weight: The host's weight tensor (features, D), compared by identity.
        query_features: Leading features that are used for the token itself (query, gate, MLP); the remaining ones are
            keys and values.
    """

    weight: Tensor
    query_features: int


class ProjectionName(NamedTuple):
    """Name of a linear layer's weight in a module.

    Args:
        query_features: See `Projection`; None for all of them.
        features: All features of the layer; None if they are not cut.
    """

    weight: str
    query_features: int | None
    features: int | None = None


def known_projections(module: nn.Module, names: Iterable[ProjectionName]) -> list[Projection]:
    """Return the projections of a module that can be computed in part.

    A layer may have been exchanged since its name was found: for one that is factored, quantized or wrapped. Where it
    has no such weight, or does more than to multiply by it, it is called and computes all of its features.
    """
    projections: list[Projection] = []
    for name, query_features, features in names:
        *path, last = name.split(".")
        layer: object = module
        for part in path:
            layer = getattr(layer, part, None)
        # What its features become is not known, and the zeros that fill a slice would reach the others.
        if isinstance(layer, nn.Linear) and type(layer).forward is not nn.Linear.forward:
            continue
        weight = getattr(layer, last, None)
        # Torch's quantized layers have a method there.
        if not isinstance(weight, Tensor) or weight.ndim != 2:
            continue
        count = query_features
        if count is None:
            count = weight.shape[0]
        # One factor of a weight has other features, and quantized weights may have no slices.
        if features is None or (weight.shape[0] == features and _is_plain(weight)):
            projections.append(Projection(weight, count))
    return projections


def _is_plain(weight: Tensor) -> bool:
    """Return whether a weight is no tensor of a class of a library."""
    # Torch traces with classes of its own.
    kind = type(weight)
    return kind in (Tensor, nn.Parameter) or kind.__module__.startswith("torch._subclasses")


def keys_and_values(
    forward: Callable[[], object], projections: Sequence[Projection], calls: int = 1
) -> list[tuple[Tensor, Tensor]]:
    """Return the keys and values of a host's attention; queries and all later steps are not computed."""
    captured: list[tuple[Tensor, Tensor]] = []

    def capture(call: AttentionCall) -> Tensor:
        captured.append((call.key, call.value))
        # Export without dynamo keeps a stack of modules, which an exception would not unwind. There the forward runs
        # on as dead code, with its projections replaced by zeros so that it stays cheap if it is not removed.
        dynamo = torch.compiler.is_dynamo_compiling()
        if len(captured) == calls and (dynamo or not exporting()):
            raise Captured
        # Any tensor of the right shape: the host's further steps are dead code here.
        return call.value

    def project(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if len(captured) == calls:
            return _zeros(input, weight)
        return _project(projections, False, input, weight, bias)

    try:
        with AttentionIntercept(capture, other=(F.linear, project)):
            forward()
    # The host's forward ends by an exception as soon as its keys are known: no hook stands at this place.
    except Captured:
        pass
    if not captured:
        raise unseen_attention("context='all' has no keys and values", maps=False)
    if len(captured) != calls:
        raise RuntimeError(f"context='all' expects {calls} calls of fused attention in a block, saw {len(captured)}")
    return captured


class Captured(Exception):
    """Ends a host's forward once its keys and values are known."""


def project_part(
    projections: Sequence[Projection], queries: bool, attend: Callable[[AttentionCall], Tensor] = AttentionCall.run
) -> AttentionIntercept:
    """Return a context manager that computes one slice of each projection, and fills the other features with zeros.

    Args:
        projections: The projections before attention.
        queries: Compute the query features; False computes the keys and values.
        attend: Returns the result of a call of attention; as the host's by default.
    """
    return AttentionIntercept(attend, other=(F.linear, partial(_project, projections, queries)))


def _project(
    projections: Sequence[Projection], queries: bool, input: Tensor, weight: Tensor, bias: Tensor | None = None
) -> Tensor:
    for projection in projections:
        # Adapters and hosts call the layer as they like; its weight is the same tensor.
        if weight is projection.weight:
            return _slice_of(projection, queries, input, bias)
    return F.linear(input, weight, bias)


def _slice_of(projection: Projection, queries: bool, input: Tensor, bias: Tensor | None) -> Tensor:
    """Compute the slice that is needed, among zeros, so that the host finds the features where it expects them."""
    weight = projection.weight
    features = weight.shape[0]
    wanted = slice(projection.query_features, features)
    if queries:
        wanted = slice(0, projection.query_features)
    # A layer that has only queries, or none.
    if wanted.start == wanted.stop:
        return _zeros(input, weight)
    if wanted.stop - wanted.start == features:
        return F.linear(input, weight, bias)
    if bias is not None:
        bias = bias[wanted]
    projected = F.linear(input, weight[wanted], bias)
    return F.pad(projected, (wanted.start, features - wanted.stop))


def _zeros(input: Tensor, weight: Tensor) -> Tensor:
    """Return zeros in the shape of a projection, in the memory of one element."""
    return input.new_zeros(()).expand(*input.shape[:-1], weight.shape[0])


def attend_to_captured(
    projections: Sequence[Projection], captured: Sequence[tuple[Tensor, Tensor]]
) -> AttentionIntercept:
    """Return a context manager in which a host block on kept tokens attends to the keys and values of all tokens.

    Args:
        projections: The block's projections before attention.
        captured: Keys and values of each attention call, from `keys_and_values`.

    Example:
        >>> from torch import nn
        >>> qkv = nn.Linear(4, 12)
        >>> def block(x):
        ...     q, k, v = qkv(x).unsqueeze(1).chunk(3, dim=-1)
        ...     return F.scaled_dot_product_attention(q, k, v).squeeze(1)
        >>> x = torch.randn(1, 6, 4)
        >>> projections = [Projection(qkv.weight, query_features=4)]
        >>> with attend_to_captured(projections, keys_and_values(lambda: block(x), projections)):
        ...     kept = block(x[:, :2])
        >>> bool(torch.allclose(kept, block(x)[:, :2], atol=1e-6))
        True
    """
    remaining = list(captured)

    def attend(call: AttentionCall) -> Tensor:
        # A block may attend several times, in the order in which its keys were captured.
        key, value = remaining.pop(0)
        # The mask covers kept queries and all keys. It is causal where the host's call is: `is_causal` would align kept
        # queries with the first keys.
        return call._replace(key=key, value=value, is_causal=False).run()

    return project_part(projections, True, attend)
