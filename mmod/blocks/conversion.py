"""Turn a host's module into a converted one in place, and back: only the instance's class changes."""

from __future__ import annotations

import copy
import inspect
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, ClassVar, NamedTuple, TypeVar

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

Model = TypeVar("Model", bound=nn.Module)


class Mixin(nn.Module):
    """Base of the classes that a method puts in front of a host's class, or of modules that it puts into a model.

    `Method.apply_` tells each which method put it there. A method restores its own modules only, and asks those of
    others what matters to it.

    Attributes:
        mod_state: Plain state, invisible to state dicts and exports.
        mod_method: The method that put it there; None for none.
        mod_drawn: The weights that decide, as the method drew them.
        mod_told: What users were told of the modules that one application of the method put there, which share it.
        mod_keeps_name: The converted class has the name of the host's.
        mod_title: What stands in front of the host's name otherwise; empty for the mixin's own name.
        mod_added_modules: Names of submodules that the host's module may lack; they are removed with the mixin.
        mod_optional: Its method works without it too: a module whose `forward` stands on the instance stays as it is.
        mod_stacks: It may share a module with other mixins.
        mod_of_method: It is part of a method's change; the mixin that puts methods in place and takes them off is none.
        mod_state_name: Where its plain state is.
    """

    mod_state: Any
    mod_method: Any = None
    mod_drawn: tuple[Tensor, ...] = ()
    mod_told: set[str]
    mod_keeps_name: ClassVar[bool] = False
    mod_title: ClassVar[str] = ""
    mod_added_modules: ClassVar[tuple[str, ...]] = ()
    mod_optional: ClassVar[bool] = False
    mod_stacks: ClassVar[bool] = False
    mod_of_method: ClassVar[bool] = True
    mod_state_name: ClassVar[str] = "mod_state"

    @classmethod
    def mod_complete(cls, converted: type[nn.Module], host: type[nn.Module]) -> None:
        """Add to a converted class what depends on its host's class."""

    def mod_chooses_together(self, training: bool) -> bool:
        """Return whether a token's output depends on the other tokens of its image or text."""
        return True


class Container(Mixin):
    """Mixin of a host that may run its children in turn: the modules that a method added are none of them."""

    def _mod_children(self) -> list[object]:
        return [module for name, module in self._modules.items() if name not in self.mod_added_modules]

    def __iter__(self) -> Iterator[object]:
        """Return the host's children."""
        return iter(self._mod_children())

    def __len__(self) -> int:
        """Return the number of the host's children."""
        return len(self._mod_children())

    def __getitem__(self, index: int | slice) -> object:
        """Return a child of the host, or several as a container of torch's."""
        chosen = self._mod_children()[index]
        if not isinstance(chosen, list):
            return chosen
        if isinstance(self, nn.Sequential):
            return nn.Sequential(*chosen)
        return nn.ModuleList(chosen)


class Shell(NamedTuple):
    """Mixins around a method's mixin that adapt the interface of a host's block, for example one that returns a tuple.

    Args:
        outer: Stands in front of the method's mixin, and gives callers what the host's block would.
        inner: Stands between the method's mixin and the host's class, and gives the mixin what it expects.
    """

    outer: type[Mixin] | None = None
    inner: type[Mixin] | None = None


NO_SHELL = Shell()
Mixins = tuple[type[Mixin], ...]
_CLASSES: dict[tuple[Mixins, type[nn.Module], Shell], type[nn.Module]] = {}
_SHARDED: dict[tuple[type, type[nn.Module]], type[nn.Module]] = {}


def converted_class(mixins: Mixins, host: type[nn.Module], shell: Shell = NO_SHELL) -> type[nn.Module]:
    """Return the subclass of a host's class with mixins in front, created once for each combination."""
    if (mixins, host, shell) in _CLASSES:
        return _CLASSES[mixins, host, shell]

    def reduce(self: nn.Module, protocol: int) -> object:
        # A class created at run time cannot be pickled by name.
        reduced = host.__reduce_ex__(self, protocol)
        return (_instance, (mixins, host, shell), *reduced[2:])

    # `RoutedBlock` makes RoutedEncoderLayer of an EncoderLayer, and of timm's Block a class of its own name. Libraries
    # identify a model in a saved folder by the name of its class.
    titles = [mixin.mod_title or mixin.__name__.removesuffix("Block") for mixin in mixins if not mixin.mod_keeps_name]
    # The host's module and text, so that tools which tell a class by them still know it.
    members = {"__module__": host.__module__, "__doc__": host.__doc__, "__reduce_ex__": reduce}
    container = None
    if issubclass(host, (nn.Sequential, nn.ModuleList)):
        container = Container
    # They run from left to right, each calling the next by `super().forward`: the outer mixin translates the host's
    # call for the method's mixin, which decides what runs, and the inner one translates back for the host's class.
    bases = [base for base in (shell.outer, *mixins, shell.inner, container, host) if base is not None]
    name = "".join(titles) + host.__name__
    converted = type(name, tuple(bases), {**members, "mod_host": host, "mod_mixins": mixins})
    for mixin in mixins:
        mixin.mod_complete(converted, host)
    # Of two threads that make the class at once, both get the first one.
    return _CLASSES.setdefault((mixins, host, shell), converted)


def _instance(mixins: Mixins, host: type[nn.Module], shell: Shell = NO_SHELL) -> nn.Module:
    converted = converted_class(mixins, host, shell)
    return converted.__new__(converted)


def mixins_of(module: nn.Module) -> Mixins:
    """Return the mixins in front of a module's host class; none for a dense module."""
    return getattr(type(module), "mod_mixins", ())


def host_class(module: nn.Module) -> type[nn.Module]:
    """Return the host library's class of a module, converted or not."""
    return host_of(type(module))


def copy_modules(model: Model, memo: dict[int, object]) -> Model:
    """Return a deep copy of a model.

    Args:
        memo: What the copy has in the place of objects, by their ids.
    """
    # Most of what modules hold are tables of hooks without entries, which `deepcopy` takes apart one by one.
    for module in model.modules():
        for table in vars(module).values():
            # One with attributes, as what `state_dict` returns, is left to `deepcopy`.
            if type(table) in (OrderedDict, dict, set) and not table and not getattr(table, "__dict__", None):
                memo.setdefault(id(table), type(table)())
        for value in tree_leaves(vars(module)):
            # What a pass with gradients left, such as an attention map, which `deepcopy` refuses.
            if isinstance(value, Tensor) and not value.is_leaf:
                memo.setdefault(id(value), value.detach())
    return copy.deepcopy(model, memo)


def parameters_of(module: nn.Module) -> dict[str, inspect.Parameter]:
    """Return the parameters of the forward of a module's host, by name, without `self`."""
    return dict(list(inspect.signature(host_class(module).forward).parameters.items())[1:])


def parameters_of_block(block: nn.Module) -> dict[str, object]:
    """Return what a block's forward takes after the tokens: each argument's default, `Parameter.empty` for none."""
    after_tokens = list(parameters_of(block).values())[1:]
    return {value.name: value.default for value in after_tokens if value.kind is value.POSITIONAL_OR_KEYWORD}


def positional_names(module: nn.Module) -> tuple[str, ...]:
    """Return what the arguments in order of a host's forward are called, "*args" where it takes any number of them."""
    titles = {
        inspect.Parameter.POSITIONAL_ONLY: "{}",
        inspect.Parameter.POSITIONAL_OR_KEYWORD: "{}",
        inspect.Parameter.VAR_POSITIONAL: "*{}",
    }
    named = parameters_of(module)
    return tuple(titles[one.kind].format(name) for name, one in named.items() if one.kind in titles)


def host_of(module_class: type[nn.Module]) -> type[nn.Module]:
    """Return the host library's class of a converted class, or the class itself."""
    host: type[nn.Module] = getattr(module_class, "mod_host", module_class)
    while _is_sharded(host):
        host = host.__bases__[1]
    return host


def _is_sharded(module_class: type[nn.Module]) -> bool:
    """Return whether FSDP2 put a class of its own in front of a module's, as mixins do."""
    return len(module_class.__bases__) == 2 and module_class.__bases__[0].__name__ == "FSDPModule"


def _put_class(module: nn.Module, target: type[nn.Module]) -> None:
    """Give a module another class in place; the one that FSDP2 put in front stays there."""
    present = type(module)
    if _is_sharded(present):
        front = present.__bases__[0]
        sharded = type(f"FSDP{target.__name__}", (front, target), {"__deepcopy__": vars(present)["__deepcopy__"]})
        target = _SHARDED.setdefault((front, target), sharded)
    module.__class__ = target


def is_converted(module: nn.Module) -> bool:
    """Return whether a module's class was changed."""
    return hasattr(type(module), "mod_host")


def convert(module: nn.Module, mixin: type[Mixin], state: object, shell: Shell = NO_SHELL) -> None:
    """Put a mixin in front of a module's host class; the mixin reads its plain state as `mod_state`.

    Raises:
        TypeError: The mixin derives from no `Mixin`.
        ValueError: Another mixin stands there, which would be lost; or a `forward` on the instance hides the class.
    """
    if not issubclass(mixin, Mixin):
        raise TypeError(f"{mixin.__name__} must derive from mmod.blocks.Mixin to stand in front of a host's class")
    present = mixins_of(module)
    if mixin in present:
        mixins = present
    elif mixin.mod_stacks:
        # Mixins that stack watch calls, so they stand around the one that changes what the module computes.
        mixins = (mixin, *present)
    else:
        mixins = (*present, mixin)
    converted = converted_class(mixins, host_class(module), shell)
    apart = [other for other in mixins if not other.mod_stacks]
    if len(apart) > 1 or (mixin in present and not isinstance(module, converted)):
        by = f" by the method {_kind(module)!r}" if _kind(module) else ""
        raise ValueError(
            f"this {type(module).__name__} was converted{by}, so {mixin.__name__} cannot convert it: call mmod.undo_ "
            "first"
        )
    taken = [name for name in mixin.mod_added_modules if _has(module, name)]
    if taken and not present:
        title = type(module).__name__
        raise ValueError(
            f"this {title} has an attribute {taken[0]!r} of its own, and the method adds a module of that name: give "
            f"it another name in {title}"
        )
    if "forward" in vars(module) and not present and mixin_forwards(converted):
        if mixin.mod_optional:
            return
        raise HiddenClass(module)
    # Nothing is wrapped: parameters keep their names, and hooks and all who hold the module their object.
    _put_class(module, converted)
    setattr(module, mixin.mod_state_name, state)


def _has(module: nn.Module, name: str) -> bool:
    """Return whether a module has an attribute of any kind, without running a property."""
    tables = (vars(module), module._modules, module._parameters, module._buffers)
    return hasattr(type(module), name) or any(name in table for table in tables)


class HiddenClass(ValueError):
    """Says that a `forward` on the instance hides a module's class, which alone a method changes.

    Args:
        module: The module.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__(
            f"({host_class(module).__name__}) has a `forward` on the instance: accelerate puts one there "
            "(device_map=, dispatch_model, offloading), and so do adapters and profilers. It hides the class, so the "
            "method would have no effect. Route first, then dispatch: load the model without device_map, call "
            "mmod.route_ or mmod.apply_, then accelerate.dispatch_model; or remove it first "
            "(accelerate.hooks.remove_hook_from_module(model, recurse=True), or `del module.forward`)"
        )
        self.module = module


def mixin_forwards(module_class: type[nn.Module]) -> list[object]:
    """Return the forwards of the mixins in a class, without those of its host and those that `complete` may add."""
    mixins = [base for base in module_class.__mro__ if issubclass(base, Mixin) and "forward" in vars(base)]
    return [vars(mixin)["forward"] for mixin in mixins if "mod_host" not in vars(mixin) or not mixin.mod_optional]


def _kind(module: Any) -> str:
    if module.mod_method is None:
        return ""
    return str(module.mod_method.kind)


def modules_of(model: nn.Module, method: str) -> list[Mixin]:
    """Return the modules that a method of a kind put into a model, or in front of its classes."""
    return [module for module in model.modules() if isinstance(module, Mixin) and _kind(module) == method]


def make_dense(module: nn.Module) -> None:
    """Remove the mixins of methods from a module, so that it runs as its host's class does.

    Mixins that belong to no method, such as those that only observe, stay.
    """
    for mixin in mixins_of(module):
        if mixin.mod_of_method:
            remove(module, mixin)


def remove(module: nn.Module, mixin: type[Mixin]) -> None:
    """Remove a mixin from a module, with what it added; another one on the module stays."""
    for name in mixin.mod_added_modules:
        module._modules.pop(name, None)
    vars(module).pop(mixin.mod_state_name, None)
    others = tuple(other for other in mixins_of(module) if other is not mixin)
    host = host_class(module)
    _put_class(module, converted_class(others, host) if others else host)
    # What the method noted goes with its last mixin.
    if not any(other.mod_of_method for other in others):
        for name in ("mod_method", "mod_drawn", "mod_told"):
            vars(module).pop(name, None)
