"""Turn a host's module into a converted one in place, and back: only the instance's class changes."""

from __future__ import annotations

from typing import Any, ClassVar, cast

from torch import nn

from mmod.blocks.branches import Branch
from mmod.blocks.call import DecoderCall
from mmod.blocks.routed import ImportanceBlock, ImportanceState, RoutedBlock, RoutedState
from mmod.blocks.rows import FusedNorm
from mmod.routing import Router


class StandingModule(nn.Module):
    """Base of mixins that are no part of routing: routing a model, and undoing that, leaves them in place.

    Attributes:
        added_modules: Names of the submodules that the host's module lacks.
    """

    added_modules: ClassVar[tuple[str, ...]] = ()

    def chooses_together(self, training: bool) -> bool:
        """Return whether what it makes of a token depends on the other tokens of the image or text that it is given.

        Args:
            training: In training mode, or in evaluation.
        """
        return True

    def rows_of(self, tokens: int) -> int:
        """Return how many rows the host's module and its copies run on.

        Args:
            tokens: Tokens that the module is given.
        """
        return tokens

    def choosing_modules(self) -> list[nn.Module]:
        """Return the modules that choose among the tokens, and run on all of them."""
        return []


_CLASSES: dict[tuple[type[nn.Module], type[nn.Module]], type[nn.Module]] = {}


def converted_class(mixin: type[nn.Module], host: type[nn.Module]) -> type[nn.Module]:
    """Return the subclass of `host` with `mixin` in front, made once for each pair.

    Args:
        mixin: `RoutedBlock`, `ImportanceBlock`, or an adapter's own for a module outside the blocks.
        host: The host library's class.
    """
    if (mixin, host) in _CLASSES:
        return _CLASSES[mixin, host]

    def reduce(self: nn.Module, protocol: Any) -> Any:
        # A class made at run time cannot be pickled by name, so it is named by what it is made of.
        reduced = host.__reduce_ex__(self, protocol)
        return (_instance, (mixin, host), *reduced[2:])

    # Libraries know a whole model by the name of its class, which says what is in a saved folder.
    prefix = "" if getattr(mixin, "keeps_name", False) else mixin.__name__.removesuffix("Block")
    members = {"__module__": host.__module__, "__doc__": host.__doc__, "__reduce_ex__": reduce}
    return _CLASSES.setdefault((mixin, host), type(prefix + host.__name__, (mixin, host), members))


def _instance(mixin: type[nn.Module], host: type[nn.Module]) -> nn.Module:
    converted = converted_class(mixin, host)
    return converted.__new__(converted)


def host_class(module: nn.Module) -> type[nn.Module]:
    """Return the host library's class of a module, converted or not."""
    return host_of(type(module))


def host_of(kind: type[nn.Module]) -> type[nn.Module]:
    """Return the host library's class that a class was made of, or the class itself where it was not made here."""
    mixins = tuple(mixin for mixin, _ in _CLASSES)
    # A mixin may derive from another, which stands among the bases of a converted class without being one of them.
    ours = {base for mixin in mixins for base in mixin.__mro__}
    for base in kind.__mro__:
        if issubclass(base, nn.Module) and base not in ours and not issubclass(base, mixins):
            return base
    raise AssertionError(kind)


def is_converted(module: nn.Module) -> bool:
    """Return whether a module's class was changed."""
    return type(module) in _CLASSES.values()


def convert(module: nn.Module, mixin: type[nn.Module], state: object) -> None:
    """Put a mixin in front of a module's host class, with the plain state it reads as `mod`."""
    module.__class__ = converted_class(mixin, host_class(module))
    module.mod_state = state  # type: ignore[assignment]  # plain, so that no registry of the module sees it


def make_routed(block: nn.Module, router: Router, state: RoutedState, mixin: type[RoutedBlock] = RoutedBlock) -> None:
    """Convert a dense block into a routed one."""
    convert(block, mixin, state)
    block.router = router
    if state.call.fused_norm:
        convert(block.get_submodule(state.call.fused_norm), FusedNorm, state.tracker)
    config = router.config
    # That of one block is not several.
    operator = str(config.operator)
    if operator != "block":
        convert(block.get_submodule(state.call.operators[operator]), Branch, state.tracker)
    if config.language.gate_on != "update":
        for branch in cast(DecoderCall, state.call).branches(block, config.language.gate_on):
            convert(branch, Branch, state.tracker)


def make_important(block: nn.Module, state: ImportanceState, mixin: type[ImportanceBlock] = ImportanceBlock) -> None:
    """Convert a dense block into one that shares its importance."""
    convert(block, mixin, state)


def make_dense(module: nn.Module) -> None:
    """Give a converted module its own class back and remove what was added."""
    if isinstance(module, RoutedBlock):
        del module.router
        if module.mod_state.call.fused_norm:
            make_dense(module.get_submodule(module.mod_state.call.fused_norm))
    module.__class__ = host_class(module)
    del module.mod_state
