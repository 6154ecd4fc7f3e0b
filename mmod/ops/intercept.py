"""A function mode that reads or replaces a host's attention, the only call that mixes tokens.

The host's forward runs unchanged. Torch's function modes are traced by compile and export like other code, and leave no
state behind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from mmod.ops.multihead import multihead_attention

Result = TypeVar("Result")
SOFTMAX = (torch.softmax, Tensor.softmax, F.softmax)
# Torch's own function. Libraries put another one in its place for the process, which often calls this one inside.
SDPA = torch._C._nn.scaled_dot_product_attention


def unseen_attention(consequence: str, maps: bool = True) -> RuntimeError:
    """Return the error about a block in which no attention was seen.

    Args:
        consequence: What cannot be done without it.
        maps: A softmax over (B, H, N, N) would have done too.
    """
    current: Any = F.scaled_dot_product_attention
    fused = "scaled_dot_product_attention" if current is SDPA else "torch's own"
    why = f"it does not call {fused}"
    if maps:
        why = f"it calls neither {fused} nor softmax over (B, H, N, N)"
    remedy = ""
    if current is not SDPA:
        named = current
        if not hasattr(current, "__qualname__"):
            # An instance of a class or a partial has no name of its own.
            named = type(current)
        why = (
            "torch.nn.functional.scaled_dot_product_attention is replaced in this process by "
            f"{named.__module__}.{named.__qualname__}, and {why}"
        )
        remedy = ". Put torch's own back, or let the replacement call it"
    return RuntimeError(f"no attention was seen in this block: {why}, so {consequence}{remedy}")


class AttentionCall(NamedTuple):
    """The arguments of one call of `scaled_dot_product_attention`."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False

    def run(self) -> Tensor:
        """Make the call, of torch's own function: a replacement that led here would be applied twice."""
        return SDPA(
            self.query,
            self.key,
            self.value,
            attn_mask=self.attn_mask,
            dropout_p=self.dropout_p,
            is_causal=self.is_causal,
            scale=self.scale,
            enable_gqa=self.enable_gqa,
        )


class AttentionIntercept(TorchFunctionMode):
    """Context manager that hands every call of `scaled_dot_product_attention` inside it to a function.

    A subclass that keeps what it reads has `attend` and `observe` as methods.

    Args:
        by: Returns the result of a call.
        before_softmax: Returns what a host's own softmax over a map (B, H, N, N) gets in the place of its scores, or
            None to leave it alone.
        after_softmax: Gets such a map, before and after the softmax.
        other: Another function of torch's, and what runs in its place.
        unseen: What cannot be done where `run` sees no attention, which then raises; empty if that is no error.

    Attributes:
        cross: Numbers of the calls, or of softmaxes over maps, that are left alone: their keys are not the tokens.
        calls: Number of attentions that were handed to a function.
    """

    def __init__(
        self,
        by: Callable[[AttentionCall], Tensor] | None = None,
        before_softmax: Callable[[Tensor], Tensor | None] | None = None,
        after_softmax: Callable[[Tensor, Tensor], None] | None = None,
        other: tuple[Callable[..., object], Callable[..., object]] | None = None,
        unseen: str = "",
    ) -> None:
        super().__init__()
        self.by = by
        self.before_softmax = before_softmax
        self.after_softmax = after_softmax
        self.other = other
        self.unseen = unseen
        self.cross: tuple[int, ...] = ()
        self.calls = 0
        self._seen = 0

    def next_is_cross(self) -> bool:
        """Count one more call, and return whether it is left alone."""
        self._seen += 1
        return self._seen - 1 in self.cross

    def run(self, forward: Callable[..., Result], args: tuple[object, ...], kwargs: Mapping[str, object]) -> Result:
        """Call a function inside the mode.

        Raises:
            RuntimeError: No attention was seen, see `unseen`.
        """
        with self:
            result = forward(*args, **kwargs)
        if self.unseen and not self.calls:
            raise unseen_attention(self.unseen, maps=self.before_softmax is not None)
        return result

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Replace some calls, read the maps of a host's softmax, and pass all other calls through."""
        replacement = self.replace(func)
        if replacement is not None:
            return replacement(*args, **(kwargs or {}))
        result = func(*args, **kwargs) if kwargs else func(*args)
        # Four axes: a map by head. A softmax of logits has fewer.
        if func in SOFTMAX and result.ndim == 4 and not self.next_is_cross():
            self.observe(args[0], result)
        return result

    def _call(self, func: Callable[..., Tensor], *args: object, **kwargs: object) -> Tensor:
        # A mode is off while it handles a call. What stands in the place of torch's functions runs as in the host.
        with self:
            return func(*args, **kwargs)

    def replace(self, func: Callable[..., object]) -> Callable[..., object] | None:
        """Return the replacement of a function, or None to call the function itself."""
        if func is SDPA:
            return self._attend
        if self.other is not None and func is self.other[0]:
            return self.other[1]
        if self.before_softmax is not None and func in SOFTMAX:
            return partial(self._softmax, func)
        # A mode is off while it handles a call: what this function calls inside would not be seen.
        if func is F.multi_head_attention_forward:
            return partial(multihead_attention, self._call)
        return None

    def _attend(self, *args: Any, **kwargs: Any) -> Tensor:
        call = AttentionCall(*args, **kwargs)
        if self.next_is_cross():
            return call.run()
        return self.attend(call)

    def attend(self, call: AttentionCall) -> Tensor:
        """Return the result of a call of `scaled_dot_product_attention`."""
        assert self.by is not None
        self.calls += 1
        return self.by(call)

    def _softmax(self, func: Callable[..., Tensor], score: Tensor, *args: object, **kwargs: object) -> Tensor:
        # As above: a map by head.
        if self.before_softmax is not None and score.ndim == 4 and not self.next_is_cross():
            changed = self.before_softmax(score)
            if changed is not None:
                self.calls += 1
                score = changed
        return func(score, *args, **kwargs)

    def observe(self, score: Tensor, attention: Tensor) -> None:
        """Receive a map (B, H, N, N) that a host computes without the fused call, before and after its softmax."""
        if self.after_softmax is not None:
            self.after_softmax(score, attention)


@contextmanager
def inside(modes: Sequence[tuple[nn.Module, AttentionIntercept]]) -> Iterator[None]:
    """Run modules inside function modes, in forward passes within the context."""

    def enter(mode: AttentionIntercept, *_: object) -> None:
        # Returns nothing: what a hook returns would replace the module's input.
        mode.__enter__()

    def leave(mode: AttentionIntercept, *_: object) -> None:
        mode.__exit__(None, None, None)

    with ExitStack() as handles:
        for module, mode in modes:
            handles.enter_context(module.register_forward_pre_hook(partial(enter, mode)))
            # After a forward that failed too: a mode that stayed open would see all later calls.
            handles.enter_context(module.register_forward_hook(partial(leave, mode), always_call=True))
        yield
