"""Turn a host's block into a routed one in place, and back: only the instance's class changes."""

from __future__ import annotations

from typing import Any

from torch import nn

from mmod.blocks.routed import ImportanceBlock, ImportanceState, RoutedBlock
from mmod.blocks.state import RoutedState
from mmod.routing import Router

_CLASSES: dict[tuple[type[nn.Module], type[nn.Module]], type[nn.Module]] = {}


def converted_class(mixin: type[nn.Module], host: type[nn.Module]) -> type[nn.Module]:
    """Return the subclass of `host` with `mixin` in front, made once for each pair.

    Args:
        mixin: `RoutedBlock` or `ImportanceBlock`.
        host: The host library's block class.
    """
    if (mixin, host) in _CLASSES:
        return _CLASSES[mixin, host]

    def reduce(self: nn.Module, protocol: Any) -> Any:
        # A class made at run time cannot be pickled by name, so it is named by what it is made of.
        reduced = host.__reduce_ex__(self, protocol)
        return (_instance, (mixin, host), *reduced[2:])

    name = mixin.__name__.removesuffix("Block") + host.__name__
    members = {"__module__": host.__module__, "__doc__": host.__doc__, "__reduce_ex__": reduce}
    return _CLASSES.setdefault((mixin, host), type(name, (mixin, host), members))


def _instance(mixin: type[nn.Module], host: type[nn.Module]) -> nn.Module:
    converted = converted_class(mixin, host)
    return converted.__new__(converted)


def host_class(block: nn.Module) -> type[nn.Module]:
    """Return the host library's class of a block, converted or not."""
    for base in type(block).__mro__:
        if issubclass(base, nn.Module) and not issubclass(base, (RoutedBlock, ImportanceBlock)):
            return base
    raise AssertionError(type(block))


def convert(block: nn.Module, mixin: type[nn.Module], state: object) -> None:
    """Put a mixin in front of a block's host class, with the plain state it reads as `mod`."""
    block.__class__ = converted_class(mixin, host_class(block))
    block.mod = state  # type: ignore[assignment]  # a plain object, kept out of the module's registries on purpose


def make_routed(block: nn.Module, router: Router, state: RoutedState) -> None:
    """Convert a dense block into a routed one."""
    convert(block, RoutedBlock, state)
    block.router = router


def make_important(block: nn.Module, state: ImportanceState) -> None:
    """Convert a dense block into one that hands its importance over."""
    convert(block, ImportanceBlock, state)


def make_dense(block: nn.Module) -> None:
    """Give a converted block its own class back and remove what was added."""
    block.__class__ = host_class(block)
    del block.mod
    if hasattr(block, "router"):
        del block.router
