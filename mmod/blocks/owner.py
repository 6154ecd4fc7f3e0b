"""The module that owns a stack of blocks: it begins and ends the calls in which they run."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import nn

from mmod.blocks.calls import ReadBlocks, StackCall, StackCalls
from mmod.blocks.conversion import Mixin, is_converted
from mmod.blocks.hook import ModelHook, runs_code_of
from mmod.blocks.record import Deciding, PassLoss, Record
from mmod.threads import PerThread

HostMethod = Callable[..., object]


@dataclass(eq=False)
class OwnerState:
    """Plain state of a module that owns a stack of blocks, made after these were converted.

    Args:
        calls: The calls of the stack, by thread.
        name: Name of the list of blocks in the module.
        host: Package whose code may run blocks that pass on rows; empty for none.
        read_blocks: See `StackCall`.

    Attributes:
        in_front: The blocks before the first changed one, and the modules inside them.
        losing: The modules whose passes in training leave losses, which go with a call that fails.
    """

    calls: PerThread[StackCalls] = field(repr=False)
    name: str
    blocks: tuple[nn.Module, ...]
    host: str = ""
    read_blocks: ReadBlocks | None = None
    in_front: tuple[nn.Module, ...] = ()
    losing: tuple[Deciding, ...] = ()

    def __post_init__(self) -> None:
        for block in itertools.takewhile(lambda block: not is_converted(block), self.blocks):
            self.in_front += tuple(block.modules())


class BlockOwner(Mixin):
    """Mixin of a module that owns a stack of blocks: each call of a method that runs them is a `StackCall`.

    Nothing reads the tokens between blocks if the host library's code runs exactly the routed blocks in sequence,
    without hooks or gradient checkpointing. Any other caller (a subclass with another forward, `forward_intermediates`,
    extracted features, a user's loop) gets all tokens from each block.
    """

    mod_keeps_name = True
    mod_stacks = True
    # Where a `forward` on the module hides it, blocks hand on all tokens.
    mod_optional = True
    mod_state_name = "mod_owner"
    mod_owner: OwnerState
    mod_running: ClassVar[tuple[str, ...]] = (
        "forward",
        "forward_features",
        "forward_intermediates",
        "get_intermediate_layers",
        "encode_text",
    )
    """Methods of hosts that run the blocks."""

    @classmethod
    def mod_complete(cls, converted: type[nn.Module], host: type[nn.Module]) -> None:
        """Let each method of the host that runs the blocks be a call."""
        for name in cls.mod_running:
            if hasattr(host, name):
                setattr(converted, name, _as_call(converted, name, getattr(host, name)))

    def mod_run_in_call(
        self, name: str, run: HostMethod, args: tuple[object, ...], kwargs: Mapping[str, object]
    ) -> object:
        """Run a method of the host in a call of the blocks, which ends with it, also after a KeyboardInterrupt."""
        calls = self.mod_owner.calls.value
        outer = calls.running
        if name == "forward_features" and outer.awaits_features:
            # The host's forward runs it: they are one call.
            outer.awaits_features = False
            return run(*args, **kwargs)
        losses = []
        if self.mod_owner.losing:
            losses = self.mod_uncollected()
        try:
            calls.running = self.mod_new_call(name, outer)
            return run(*args, **kwargs)
        except BaseException:
            # Those of a pass that did not end would be added to the next step's.
            for record, earlier in losses:
                record.losses = earlier
            raise
        finally:
            # First, as another interrupt may end this too.
            calls.running = outer
            calls.forget()

    def mod_uncollected(self) -> list[tuple[Record, list[PassLoss]]]:
        """Return the losses that passes before have left in this thread."""
        # A graph that fails has left none.
        if torch.compiler.is_compiling():
            return []
        # A method that was taken off has left dense modules.
        records = [module.mod_record for module in self.mod_owner.losing if isinstance(module, Deciding)]
        return [(record, record.losses) for record in records]

    def mod_new_call(self, name: str, outer: StackCall) -> StackCall:
        """Return a call of a method of the host within another one."""
        return StackCall(outer, self.mod_is_uninterrupted(name), self.mod_owner.read_blocks, name == "forward")

    def mod_is_uninterrupted(self, name: str) -> bool:
        """Return whether the host's code runs the blocks in order, and nothing reads the tokens between them."""
        if not self.mod_owner.host or name not in _IN_SEQUENCE:
            return False
        return not self._mod_recomputes() and self.mod_runs_in_order() and not self._mod_tokens_are_read()

    def _mod_recomputes(self) -> bool:
        """Return whether gradient checkpointing is on.

        A segment that is recomputed begins with what its first block got, and would not know what rows stand for.
        """
        if not torch.is_grad_enabled():
            return False
        # timm sets the flag on the model, transformers on each layer, where training counts.
        if getattr(self, "grad_checkpointing", False):
            return True
        return any(
            getattr(block, "gradient_checkpointing", False) and block.training for block in self.mod_owner.blocks
        )

    def mod_runs_in_order(self) -> bool:
        """Return whether the host's code runs the stack's blocks in order."""
        state = self.mod_owner
        for name in _IN_SEQUENCE:
            if hasattr(type(self), name) and not runs_code_of(state.host, self, name):
                return False
        blocks: Any = self._modules[state.name]
        # A subclass may run its blocks in another way.
        if type(blocks) not in (nn.Sequential, nn.ModuleList) or "forward" in vars(blocks):
            return False
        return list(blocks._modules.values()) == list(state.blocks)

    def _mod_tokens_are_read(self) -> bool:
        """Return whether a hook or a replaced forward reads the tokens between blocks."""
        hooks = torch.nn.modules.module
        if hooks._global_forward_hooks or hooks._global_forward_pre_hooks:
            return True
        if hooks._global_backward_hooks or hooks._global_backward_pre_hooks:
            return True
        known: type | None = None
        for block in self.mod_owner.blocks:
            # Asked without a call where there is no hook, as of every module below.
            if (block._forward_hooks or block._forward_pre_hooks) and _has_readers(block):
                return True
            if block._backward_hooks or block._backward_pre_hooks:
                return True
            if "mod_state" in block.__dict__:
                if "forward" in block.__dict__ or not (type(block) is known or runs_code_of("mmod", block, "forward")):
                    return True
                known = type(block)
        if torch.compiler.is_compiling():
            return False
        # Code inside the blocks in front may run the blocks by itself, before the host does.
        for inner in self.mod_owner.in_front:
            if (inner._forward_hooks or inner._forward_pre_hooks) and _has_readers(inner):
                return True
        return False


def _has_readers(module: nn.Module) -> bool:
    """Return whether an unknown hook reads what a module gets or returns."""
    return not all(map(_is_known, (*module._forward_hooks.values(), *module._forward_pre_hooks.values())))


def _is_known(hook: object) -> bool:
    """Return whether `StackCall.read_blocks` tells what a hook reads, or a hook of mmod's counts tokens alone.

    transformers keeps its collecting hooks.
    """
    if getattr(hook, "__module__", "") == "transformers.utils.output_capturing":
        return True
    ours = getattr(hook, "__self__", hook)
    return isinstance(ours, ModelHook) and ours.once


# The functions of hosts that run the blocks in sequence, and read nothing between them.
_IN_SEQUENCE = ("forward", "forward_features")


def _as_call(converted: type[nn.Module], name: str, host_method: HostMethod) -> HostMethod:
    """Return the host's method as one that runs in a call of the blocks."""

    @functools.wraps(host_method)
    def run(self: Any, *args: object, **kwargs: object) -> object:
        # Who holds the method may call it after the mixin was removed, or on a new object of the class.
        if "mod_owner" not in self.__dict__:
            return host_method(self, *args, **kwargs)
        return self.mod_run_in_call(name, getattr(super(converted, self), name), args, kwargs)

    return run
