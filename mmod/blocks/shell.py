"""Mixins around a method's mixin that give a host's block the interface that methods expect, see `Shell`."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mmod.blocks.conversion import Mixin
from mmod.ops import add_key_bias, attend_by_image

KEY_BIAS = "mmod_key_bias"
"""The keyword by which methods pass a bias of keys (B, 1 or H, 1 or K, K) to a block whose forward takes no mask."""


class InterceptedBlock(Mixin):
    """Inner mixin of a block that takes no mask: a bias of keys is added in its attention, which is intercepted."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run the host's block."""
        bias = kwargs.pop(KEY_BIAS, None)
        if bias is None:
            return super().forward(x, *args, **kwargs)
        return add_key_bias(bias).run(super().forward, (x, *args), kwargs)


class UntupledBlock(InterceptedBlock):
    """Inner mixin of a block that returns a tuple: the method's mixin gets its first element, the tokens."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return the tokens alone."""
        return super().forward(x, *args, **kwargs)[0]


class FlatBlock(InterceptedBlock):
    """Inner mixin of a block that takes one set of rows for all images, such as rotary embeddings (N, E).

    Where images keep different tokens, all images run as one sequence, and attention is split by image again.
    """

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run the host's block."""
        rows = self.mod_state.call.rows
        flat = {name: _flat(value) for name, value in kwargs.items() if name in rows and _differs(value)}
        if not flat:
            return super().forward(x, *args, **kwargs)
        run = attend_by_image(len(x), kwargs.pop(KEY_BIAS, None)).run
        y = run(super().forward, (x.flatten(0, 1).unsqueeze(0), *args), {**kwargs, **flat})
        if isinstance(y, tuple):
            return (y[0].view_as(x), *y[1:])
        return y.view_as(x)


def _differs(value: Any) -> bool:
    """Return whether rows differ by image (B, K, E)."""
    first = value[0] if isinstance(value, tuple) else value
    return isinstance(first, Tensor) and first.ndim == 3


def _flat(value: Any) -> Any:
    return tuple(item.flatten(0, 1) for item in value) if isinstance(value, tuple) else value.flatten(0, 1)


class TupleBlock(Mixin):
    """Outer mixin of a block that returns a tuple of the tokens and an attention map.

    There is no map of all tokens where only some run, so callers get None in its place.
    """

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return the tokens in a tuple."""
        return super().forward(x, *args, **kwargs), None


class SuffixBlock(Mixin):
    """Outer mixin of a block whose last tokens are no patches: the method's mixin gets them in front of all others.

    Blocks do not depend on the order of tokens, so that such tokens need no other treatment than class tokens.
    """

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return all tokens in the host's order."""
        count = self.mod_state.call.suffix
        y = super().forward(x.roll(count, dims=1), *args, **kwargs)
        return y.roll(-count, dims=1)
