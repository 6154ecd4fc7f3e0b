"""Forward pre-hooks that belong to a model's routing, and the one that lets blocks of a span pass on rows."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from types import FrameType
from typing import Any

import torch
from torch import nn

from mmod.blocks.conversion import host_class
from mmod.blocks.passes import ReadBlocks, StackCall, StackCalls
from mmod.threads import PerThread
from mmod.values import check_module


class ModelHook:
    """A forward pre-hook that gives routed blocks facts which only their model knows; adapters derive from it.

    Attributes:
        reads: A block of another part that `install` converts, because it knows some of the facts.
    """

    reads: nn.Module | None = None

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return changed arguments of the module's forward, or None."""
        raise NotImplementedError

    def after(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> None:
        """Run after a forward pass, also after an `Exception`, but not after a KeyboardInterrupt."""

    def install(self) -> None:
        """Convert the block that the hook reads; routing makes it dense again with all others."""


def attach(module: nn.Module, hook: ModelHook) -> None:
    """Call a hook before every forward pass of a module, and after it if it has an `after`."""
    hook.install()
    module.register_forward_pre_hook(hook, with_kwargs=True)
    if type(hook).after is not ModelHook.after:
        # A call that failed ends too: its passes must not stay open.
        module.register_forward_hook(hook.after, with_kwargs=True, always_call=True)


def model_hooks(model: nn.Module) -> list[ModelHook]:
    """Return the routing hooks of a model."""
    check_module(model)
    found: list[ModelHook] = []
    for module in model.modules():
        found += [hook for hook in module._forward_pre_hooks.values() if isinstance(hook, ModelHook)]
    return found


def detach_hooks(model: nn.Module, kind: type = ModelHook) -> None:
    """Remove the hooks of a class from a model, by default all of its routing."""
    for module in model.modules():
        for before in list(module._forward_pre_hooks.values()):
            if isinstance(before, kind):
                detach(module, before)


def detach(module: nn.Module, hook: object) -> None:
    """Remove one hook from a module; a call that runs may go on without it."""
    for key, before in list(module._forward_pre_hooks.items()):
        if before is hook:
            module._forward_pre_hooks.pop(key, None)
            # Torch notes in a table of its own which hooks take keywords.
            module._forward_pre_hooks_with_kwargs.pop(key, None)
    for key, after in list(module._forward_hooks.items()):
        if getattr(after, "__self__", None) is hook:
            for hooks in (
                module._forward_hooks,
                module._forward_hooks_with_kwargs,
                module._forward_hooks_always_called,
            ):
                hooks.pop(key, None)


class WholeBatchHook(ModelHook):
    """Refuses training where a method reads or narrows the branches of blocks that divide the batch there.

    Args:
        blocks: The blocks, by name.
    """

    def __init__(self, blocks: Mapping[str, nn.Module]) -> None:
        self.blocks = dict(blocks)

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Refuse a call in which a block trains."""
        for name, block in self.blocks.items():
            if block.training:
                raise ValueError(
                    f"{name} ({host_class(block).__name__}) runs its attention or its MLP on a part of the batch in "
                    "training, as DINOv2's stochastic depth does, and this method needs them for all images: set the "
                    "rate of stochastic depth to 0 before the method is applied, or use one that runs whole blocks "
                    "alone, such as mmod.RoutingConfig(router='linear', capacity=0.5)"
                )


@dataclass(eq=False, repr=False)
class SpanHook(ModelHook):
    """Begins and ends a `StackCall` with each call of the module that holds the blocks.

    Nothing reads the tokens between blocks if the host library's code runs exactly the routed blocks in sequence,
    without hooks or gradient checkpointing. Any other caller (a subclass with another forward, `forward_intermediates`,
    extracted features, a user's loop) gets all tokens from each block.

    Args:
        calls: The calls of the stack, by thread.
        name: Name of the list of blocks in the module.
        host: Package whose code may run blocks that pass on rows; empty for none.
        read_blocks: See `StackCall`.
    """

    calls: PerThread[StackCalls]
    name: str
    blocks: tuple[nn.Module, ...]
    host: str
    read_blocks: ReadBlocks | None = None

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Begin a call; decide whether blocks pass on rows in it."""
        calls = self.calls.value
        outer, _ = calls.current()
        # By its frame one tells later whether the call still runs, which an interrupt ends without a word.
        frame = None if torch.compiler.is_compiling() else sys._getframe(1)
        calls.begin(self.new_call(module, outer, frame))

    def new_call(self, module: nn.Module, outer: StackCall, frame: FrameType | None) -> StackCall:
        """Return a call of the module within another one."""
        return StackCall(outer, self.is_uninterrupted(module), self.host, frame, self.read_blocks)

    def is_uninterrupted(self, module: nn.Module) -> bool:
        """Return whether the host's code runs the blocks in order, and nothing reads the tokens between them."""
        return bool(self.host) and not self._recomputes(module) and self._runs(module) and not self._tokens_are_read()

    def _recomputes(self, module: nn.Module) -> bool:
        """Return whether gradient checkpointing is on.

        A segment that is recomputed begins with what its first block got, and would not know what rows stand for.
        """
        if not torch.is_grad_enabled():
            return False
        # timm sets the flag on the model, transformers on each layer, where training counts.
        in_layers = any(getattr(block, "gradient_checkpointing", False) and block.training for block in self.blocks)
        return in_layers or bool(getattr(module, "grad_checkpointing", False))

    def after(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> None:
        """End the call, also if it failed."""
        self.calls.value.end()

    def _runs(self, module: nn.Module) -> bool:
        """Return whether the host's code runs the routed blocks in order."""
        if not all(runs_code_of(self.host, module, name) for name in _RUNNING if hasattr(type(module), name)):
            return False
        blocks: Any = module.get_submodule(self.name)
        # A subclass may run its blocks in another way.
        if type(blocks) not in (nn.Sequential, nn.ModuleList) or "forward" in vars(blocks):
            return False
        return len(blocks) == len(self.blocks) and all(a is b for a, b in zip(blocks, self.blocks))

    def _tokens_are_read(self) -> bool:
        """Return whether a hook or a replaced forward reads the tokens between blocks."""
        hooks = torch.nn.modules.module
        names = ("forward_hooks", "forward_pre_hooks", "backward_hooks", "backward_pre_hooks")
        if any(getattr(hooks, f"_global_{name}") for name in names):
            return True
        for block in self.blocks:
            readers = chain.from_iterable(getattr(block, f"_{name}").values() for name in names)
            if any(not _is_known(hook) for hook in readers):
                return True
            if "mod_state" in vars(block) and not runs_code_of("mmod", block, "forward"):
                return True
        return False


def _is_known(hook: object) -> bool:
    """Return whether `StackCall.read_blocks` tells what a hook reads, or a hook of mmod's counts tokens alone.

    transformers keeps its collecting hooks.
    """
    return getattr(hook, "__module__", "") in ("transformers.utils.output_capturing", "mmod.blocks.first_call")


# The functions of hosts between a call of the module that holds the blocks and those of the blocks.
_RUNNING = ("forward", "forward_features")


def runs_code_of(package: str, module: nn.Module, name: str) -> bool:
    """Return whether a module's method is a package's code, not replaced by a subclass or on the instance."""
    if name in vars(module):
        return False
    # A mixin of mmod in front of a host's class calls the host's method.
    code = getattr(type(module) if package == "mmod" else host_class(module), name)
    if package == "mmod" and getattr(code, "__globals__", {}).get("__name__") == "transformers.modeling_layers":
        # Layers of transformers wrap the forward of every subclass, for gradient checkpointing.
        code = code.__wrapped__
    # A decorator copies `__module__`, but not the globals.
    return str(getattr(code, "__globals__", {}).get("__name__", "")).partition(".")[0] == package
