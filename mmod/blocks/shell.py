"""Mixins around a method's mixin that give a host's block the interface that methods expect, see `Shell`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from mmod.blocks.branches import running
from mmod.blocks.conversion import Mixin
from mmod.ops import add_key_bias
from mmod.ops.intercept import AttentionIntercept, Result

KEY_BIAS = "mmod_key_bias"
"""The keyword by which methods pass a bias of keys (B, 1 or H, 1 or K, K) to a block whose forward takes no mask."""


def run_inside(
    block: Mixin,
    change: AttentionIntercept,
    forward: Callable[..., Result],
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
) -> Result:
    """Run a host's forward inside a mode that changes its attention; what reads the attention sees it changed."""
    state = block.mod_state
    inner = state.inner
    name = state.call.operators.get("attention", "")
    # Only the method of a mode reads the attention; any other runner narrows the branch.
    watch = getattr(inner.value.runners.get(name), "__self__", None)
    if not isinstance(watch, AttentionIntercept):
        change.cross = state.call.cross
        return change.run(forward, args, kwargs)

    def run_watched(attend: Callable[..., object], inputs: tuple[object, ...], options: Mapping[str, object]) -> object:
        def run_changed(*args: object, **kwargs: object) -> object:
            return change.run(attend, args, kwargs)

        return watch.run(run_changed, inputs, options)

    with running(inner, {name: run_watched}):
        return forward(*args, **kwargs)


class InterceptedBlock(Mixin):
    """Inner mixin of a block that takes no mask: a bias of keys is added in its attention, which is intercepted."""

    @property
    def activation_relu_or_gelu(self) -> int:
        """By 0, `nn.TransformerEncoderLayer` calls its modules, which may run otherwise, instead of one kernel."""
        if "activation_relu_or_gelu" not in vars(self):
            raise AttributeError("only nn.TransformerEncoderLayer has activation_relu_or_gelu")
        if torch.compiler.is_compiling() or self.mod_state.inner.value.runners:
            return 0
        return int(vars(self)["activation_relu_or_gelu"])

    def forward(self, x: Tensor, *args: object, **kwargs: Any) -> Any:
        """Return the tokens after the host's block."""
        bias = kwargs.pop(KEY_BIAS, None)
        if bias is None:
            y = super().forward(x, *args, **kwargs)
        else:
            y = run_inside(self, add_key_bias(bias), super().forward, (x, *args), kwargs)
        # The method's mixin gets the tokens alone, around which `FormBlock` makes the tuple again.
        if self.mod_state.call.in_tuple:
            return y[0]
        return y


class FormBlock(Mixin):
    """Outer mixin of a block that gets or returns its tokens in another form than methods expect.

    - They come by name.
    - The last ones are no patches: the method's mixin gets these in front of all others. Blocks do not depend on the
      order of tokens, so that such tokens need no other treatment than class tokens.
    - They return in a tuple with an attention map. There is no map of all tokens where only some run, so callers get
      None in its place.
    """

    def forward(self, x: Tensor | None = None, *args: object, **kwargs: Any) -> object:
        """Return all tokens in the host's form."""
        call = self.mod_state.call
        tokens: Tensor = kwargs.pop(call.tokens) if x is None else x
        if call.suffix:
            tokens = tokens.roll(call.suffix, dims=1)
        y = super().forward(tokens, *args, **kwargs)
        if call.suffix:
            y = y.roll(-call.suffix, dims=1)
        if call.in_tuple:
            return y, None
        return y
