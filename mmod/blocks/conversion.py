"""Turn a host's module into a converted one in place, and back: only the instance's class changes."""

from __future__ import annotations

from typing import Any, cast

from torch import nn

from mmod.blocks.branches import Branch
from mmod.blocks.call import DecoderCall
from mmod.blocks.record import Deciding
from mmod.blocks.routed import RoutedBlock, RoutedState
from mmod.blocks.rows import FusedNorm
from mmod.routing import Router


class StandingModule(nn.Module):
    """Base of mixins of other methods than routing, which routing and unrouting leave in place."""

    def chooses_together(self, training: bool) -> bool:
        """Return whether a token's output depends on the other tokens of its image or text."""
        return True

    def rows_of(self, tokens: int) -> int:
        """Return how many rows the host's module and its copies run on, for a number of tokens."""
        return tokens

    def choosing_modules(self) -> list[nn.Module]:
        """Return the modules that choose among tokens, and run on all of them."""
        return []


_CLASSES: dict[tuple[type[nn.Module], type[nn.Module]], type[nn.Module]] = {}


def converted_class(mixin: type[nn.Module], host: type[nn.Module]) -> type[nn.Module]:
    """Return the subclass of a host's class with a mixin in front, created once per pair."""
    if (mixin, host) in _CLASSES:
        return _CLASSES[mixin, host]

    def reduce(self: nn.Module, protocol: Any) -> Any:
        # A class created at run time cannot be pickled by name.
        reduced = host.__reduce_ex__(self, protocol)
        return (_instance, (mixin, host), *reduced[2:])

    # Libraries identify a model in a saved folder by the name of its class.
    prefix = "" if getattr(mixin, "keeps_name", False) else mixin.__name__.removesuffix("Block")
    members = {"__module__": host.__module__, "__doc__": host.__doc__, "__reduce_ex__": reduce, "mod_host": host}
    return _CLASSES.setdefault((mixin, host), type(prefix + host.__name__, (mixin, host), members))


def _instance(mixin: type[nn.Module], host: type[nn.Module]) -> nn.Module:
    converted = converted_class(mixin, host)
    return converted.__new__(converted)


def host_class(module: nn.Module) -> type[nn.Module]:
    """Return the host library's class of a module, converted or not."""
    return host_of(type(module))


def host_of(module_class: type[nn.Module]) -> type[nn.Module]:
    """Return the host library's class of a converted class, or the class itself."""
    return getattr(module_class, "mod_host", module_class)


def is_converted(module: nn.Module) -> bool:
    """Return whether a module's class was changed."""
    return type(module) in _CLASSES.values()


def convert(module: nn.Module, mixin: type[nn.Module], state: object) -> None:
    """Put a mixin in front of a module's host class; the mixin reads its plain state as `mod_state`."""
    module.__class__ = converted_class(mixin, host_class(module))
    module.mod_state = state  # type: ignore[assignment]


def make_routed(block: nn.Module, router: Router, state: RoutedState, mixin: type[RoutedBlock] = RoutedBlock) -> None:
    """Convert a dense block into a routed one."""
    convert(block, mixin, state)
    block.router = router
    if state.call.fused_norm:
        convert(block.get_submodule(state.call.fused_norm), FusedNorm, state.inner)
    config = router.config
    operator = str(config.operator)
    if operator != "block":
        convert(block.get_submodule(state.call.operators[operator]), Branch, state.inner)
    if config.language.gate_on != "update":
        for branch in cast(DecoderCall, state.call).branches(block, config.language.gate_on):
            convert(branch, Branch, state.inner)


def make_dense(module: nn.Module) -> None:
    """Give a converted module its own class back and remove what was added."""
    if isinstance(module, RoutedBlock) and module.mod_state.call.fused_norm:
        make_dense(module.get_submodule(module.mod_state.call.fused_norm))
    for name in module.added_modules if isinstance(module, Deciding) else ():
        module._modules.pop(name, None)
    module.__class__ = host_class(module)
    del module.mod_state
