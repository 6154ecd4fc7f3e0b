"""The contract of a method: a frozen value that makes a model cheaper, and can restore the dense model.

A method is a frozen dataclass of plain values, registered under its `kind`. Other packages use only the members of
`Method`. Modules that decide which tokens run derive from `mmod.blocks.Deciding`, for traces and FLOP counts.
"""

from __future__ import annotations

import dataclasses
import json
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any, ClassVar, TypeVar

from torch import nn
from typing_extensions import Self

from mmod.adapters import BlockStack, find_library, find_stack, find_stacks, load_adapter
from mmod.adapters.tokens import forget, remember
from mmod.blocks import (
    Deciding,
    HiddenClass,
    Mixin,
    attach,
    convert,
    detach_hooks,
    has_replaced_forward,
    is_converted,
    make_dense,
    mixins_of,
    model_hooks,
    modules_of,
    remove,
    watch_first_call,
)
from mmod.config.registry import Registry, check_frozen
from mmod.methods.state import watch_state
from mmod.values import Checked, check_module

Model = TypeVar("Model", bound=nn.Module)
AnyMethod = TypeVar("AnyMethod", bound="type[Method]")

METHODS: Registry[type[Method]] = Registry(
    "method.kind",
    # Configs and saved folders name methods of the lab too.
    ("mmod.methods.read", "mmod.lab.experts", "mmod.lab.recursions", "mmod.lab.channels"),
    "methods.register_method",
)
"""The registered methods by kind; see `register_method`."""


def register_method(kind: str) -> Callable[[AnyMethod], AnyMethod]:
    """Return a decorator that lets configs and saved folders name a method, a frozen dataclass derived from `Method`.

    Raises:
        TypeError: The class is no such dataclass.
        ValueError: Another class is registered under that name.
    """

    def register(method: AnyMethod) -> AnyMethod:
        check_frozen(method, Method, "mmod.methods.Method")
        METHODS.add(kind, method, method)
        method.kind = kind
        return method

    return register


@dataclass(frozen=True)
class Method(Checked, ABC, group="method"):
    """A change that makes a model cheaper, as plain values.

    Attributes:
        kind: Its name in configs, set by `register_method`.
        follows: Kinds of methods that may be applied before it.
        added: Name fragments of the added weights.
        decoders: It supports language models of transformers too.
        recomputes: Gradient checkpointing may run its modules twice.
        replaces: Name fragment of weights that replace dense ones, which a dense checkpoint lacks. Empty
            if a dense checkpoint has all weights but the added ones.
    """

    kind: ClassVar[str]
    follows: ClassVar[tuple[str, ...]] = ()
    added: ClassVar[tuple[str, ...]] = ()
    decoders: ClassVar[bool] = False
    recomputes: ClassVar[bool] = False
    replaces: ClassVar[str] = ""

    @property
    def training_only(self) -> bool:
        """Whether the method changes a model in training mode alone; a method offers it by a field of this name."""
        return False

    def apply_(self, model: Model) -> Model:
        """Apply the method to a model in place, see `mmod.apply_`."""
        method = self.fitted(model)
        if method.training_only:
            return _apply_in_training(model, method)
        if isinstance(model, TrainingOnly):
            kinds = ", ".join(method.kind for method in model.mod_training)
            raise ValueError(
                f"this {type(model).__name__} has methods for training alone ({kinds}), which come last: call "
                f"mmod.undo_, apply {self.kind!r}, and then those"
            )
        return method.put_(model)

    def fitted(self, model: nn.Module) -> Method:
        """Return the method with what it takes from the model that it is applied to, such as a depth."""
        return self

    def put_(self, model: Model) -> Model:
        """Change a model in place and note the method there, until it is undone."""
        present = methods_of(model)
        conflicts = [method.kind for method in present if not method.precedes(self.kind)]
        converted = [module for module in model.modules() if is_converted(module) and not _is_free(module)]
        unknown = not present and self.kind not in self.follows and converted
        if conflicts or unknown:
            raise ValueError(
                f"this {type(model).__name__} is already changed by {', '.join(conflicts) or 'another method'}, which "
                f"{self.kind!r} cannot follow: call mmod.undo_ first"
            )
        target = self.find(model)
        self.check(model, target)
        hooks = model_hooks(model)
        earlier = {module for module in model.modules() if isinstance(module, Mixin) and not _is_free(module)}
        # A method finds a stack, one for each of its parts, or what else it changes.
        parts = target.values() if isinstance(target, Mapping) else (target,)
        stacks = [stack for stack in parts if isinstance(stack, BlockStack)]
        with _unchanged_on_error(model):
            try:
                self.change(model, target)
            finally:
                # Also where the change fails at a module that stands twice: this says which, and what to do.
                for stack in stacks:
                    _refuse_repeated(stack)
            for stack in stacks:
                stack.watch_losses(model)
        # One warning for all modules of this application.
        told: set[str] = set()
        for module in model.modules():
            if isinstance(module, Mixin) and module not in earlier:
                module.mod_method = self
                module.mod_told = told
                if isinstance(module, Deciding):
                    module.mod_remember_drawn()
        for stack in stacks:
            remember(model, stack)
            if stack.windows is not None:
                attach(owner_of(model, stack), stack.windows.hook)
        for owner in [owner_of(model, stack) for stack in stacks] or [model]:
            watch_first_call(owner)
        for hook in model_hooks(model):
            if not any(hook is other for other in hooks):
                hook.kind = self.kind
        _record(model, self.joined(own_methods(model)))
        return model

    def caution(self, model: nn.Module) -> str:
        """Return a warning about a changed model that is hardly what the user means; empty for none."""
        return ""

    def joined(self, earlier: tuple[Method, ...]) -> tuple[Method, ...]:
        """Return the methods of a model, in order, after this one was applied to it."""
        return (*earlier, self)

    def precedes(self, kind: str) -> bool:
        """Return whether a method of a registered kind can be applied after this one; by default if it `follows` it."""
        return self.kind in METHODS[kind].follows

    def replaced_in(self, names: Iterable[str]) -> bool:
        """Return whether any of a checkpoint's weights, by name, replaces a dense one."""
        return bool(self.replaces) and any(self.replaces in name for name in names)

    def to_dict(self) -> dict[str, object]:
        """Return plain values from which `mmod.methods.read_method` rebuilds the method."""
        fields = dataclasses.asdict(self)
        for name, value in fields.items():
            # JSON and YAML have no tuples.
            if isinstance(value, tuple):
                fields[name] = list(value)
        return {"kind": self.kind, **fields}

    def with_settings_of(self, model: nn.Module) -> Method:
        """Return the method with the current settings of a changed model, for saving."""
        return self

    def card(self, model: nn.Module) -> str:
        """Return the method's section of a hub card, in Markdown."""
        return f"```json\n{json.dumps(self.to_dict(), indent=2)}\n```"

    @property
    def adds_weights(self) -> bool:
        """Whether a changed model has weights that the dense one lacks."""
        return bool(self.added or self.replaces)

    @property
    def has_loss(self) -> bool:
        """Whether a changed model has an auxiliary loss in training, see `mmod.auxiliary_loss`."""
        return False

    @property
    def two_ways(self) -> bool:
        """Whether tokens are decided jointly in training and independently in evaluation."""
        return False

    @property
    def causal(self) -> bool:
        """Whether evaluation decides a token from itself and earlier tokens only, as generation requires."""
        return False

    @contextmanager
    def deciding_together(self, model: nn.Module) -> Iterator[None]:
        """Context in which a changed model decides in evaluation as in training."""
        records = [module.mod_record for module in model.modules() if isinstance(module, Deciding)]
        before = [record.together for record in records]
        for record in records:
            record.together = True
        try:
            yield
        finally:
            for record, together in zip(records, before):
                record.together = together

    def find(self, model: nn.Module) -> Any:
        """Return what the method changes in a model: by default its only stack of blocks, or that of its images."""
        if self.decoders:
            return find_stack(model)
        stacks = [stack for stack in find_stacks(model).values() if not stack.language and stack.sequence is None]
        if len(stacks) != 1:
            found = "one that takes none"
            if stacks:
                found = f"one with {len(stacks)} parts that take images"
            raise ValueError(f"method {self.kind!r} supports models of images, got the {type(model).__name__}, {found}")
        return stacks[0]

    @abstractmethod
    def check(self, model: nn.Module, stack: Any) -> None:
        """Raise a ValueError that says why the method does not support a model."""

    @abstractmethod
    def change(self, model: nn.Module, stack: Any) -> None:
        """Change a model that passed `check`."""

    def restore(self, model: nn.Module) -> None:
        """Undo the method alone: by default, remove its hooks and restore the host's classes that it changed."""
        detach_hooks(model, kind=self.kind)
        for module in modules_of(model, self.kind):
            if is_converted(module):
                make_dense(module)


class TrainingOnly(Mixin):
    """Mixin of a model with methods for training alone: `train()` puts them in place, and `eval()` takes them off.

    Taken off, they leave the host's classes, so that nothing has to tell such a model from a dense one.

    Attributes:
        mod_training: The methods, in order.
    """

    mod_keeps_name = True
    mod_stacks = True
    mod_of_method = False
    mod_state_name = "mod_training"
    mod_training: tuple[Method, ...]

    def train(self, mode: bool = True) -> Self:
        """Set the mode of all modules, and put the methods in place or take them off."""
        super().train(mode)
        self.mod_follow_mode()
        return self

    def mod_follow_mode(self) -> None:
        """Put the methods in place in training mode, and take them off in evaluation mode, unless they are already."""
        if not self.training:
            self.mod_take_off()
        elif not _in_training(self):
            for method in self.mod_training:
                method.put_(self)

    def mod_take_off(self) -> None:
        """Take the methods off, unless they are; capacities that were set since are kept for the next time."""
        present = _in_training(self)
        if present:
            self.mod_training = tuple(method.with_settings_of(self) for method in present)
            _take_off(self, len(present))


def _in_training(model: nn.Module) -> tuple[Method, ...]:
    """Return the methods for training alone that change a model now."""
    return tuple(method for method in own_methods(model) if method.training_only)


def _refuse_repeated(stack: BlockStack) -> None:
    """Raise a ValueError if a changed module stands twice in a list of blocks, as it is changed in both places."""
    first: dict[nn.Module, str] = {}
    for name, block in zip(stack.names, stack.blocks):
        if block in first and is_converted(block):
            raise ValueError(
                f"{first[block]} and {name} are one module, and a method changes either alone: put a copy into the "
                "list, copy.deepcopy(block)"
            )
        first[block] = name


def _is_free(module: nn.Module) -> bool:
    """Return whether no method changes a module itself, which may belong to a model with methods for training alone."""
    mixins = mixins_of(module)
    return bool(mixins) and not any(mixin.mod_of_method for mixin in mixins)


def _apply_in_training(model: Model, method: Method) -> Model:
    """Apply a method for training alone, and take it off at once from a model in evaluation mode."""
    if method.adds_weights:
        raise ValueError(f"training_only: {method.kind!r} adds weights, which the dense model cannot keep")
    if not isinstance(model, TrainingOnly):
        convert(model, TrainingOnly, ())
    changed: Any = model
    try:
        # It follows those that are there, which are off in evaluation mode.
        if not _in_training(model):
            for earlier in changed.mod_training:
                earlier.put_(model)
        method.put_(model)
        changed.mod_training = _in_training(model)
    finally:
        if not changed.mod_training:
            remove(model, TrainingOnly)
        elif not model.training:
            changed.mod_follow_mode()
    return model


@contextmanager
def as_evaluated(model: nn.Module) -> Iterator[None]:
    """Context in which a model has no method for training alone, in training mode either.

    This holds for models inside it too. Afterwards the methods are back.
    """
    held = {module: _release(module) for module in training_only_models(model)}
    try:
        yield
    finally:
        for module, methods in held.items():
            for method in methods:
                _apply_in_training(module, method)


def _release(model: TrainingOnly) -> tuple[Method, ...]:
    """Take methods for training alone off a model for good, and return them."""
    model.mod_take_off()
    methods = model.mod_training
    remove(model, TrainingOnly)
    _record(model, own_methods(model))
    return methods


@contextmanager
def _unchanged_on_error(model: nn.Module) -> Iterator[None]:
    """Context that gives the modules of a model their classes and attributes back if a change of it fails."""
    names = {module: name for name, module in model.named_modules()}
    earlier = [(module, type(module), vars(module).copy()) for module in names]
    # Tables of submodules and hooks, which stay the same objects: handles of hooks refer to them.
    tables: list[dict[object, object]] = []
    for _, _, attributes in earlier:
        # Torch's own are of these two classes; one of another class, such as a cache, is the model's own matter.
        tables += [table for table in attributes.values() if type(table) in (dict, OrderedDict)]
    # Most tables of hooks are empty.
    filled = [(table, table.copy()) for table in tables if table]
    try:
        yield
    except BaseException as error:
        for module, module_class, attributes in earlier:
            module.__class__ = module_class
            vars(module).clear()
            vars(module).update(attributes)
        for table in tables:
            table.clear()
        for table, entries in filled:
            table.update(entries)
        if isinstance(error, HiddenClass):
            raise ValueError(f"{names.get(error.module) or 'the model'} {error}") from None
        raise


def check_changed(model: nn.Module) -> None:
    """Raise a ValueError unless a method changed a model, or one inside it."""
    if not methods_inside(model):
        refuse_evaluated(model)
        raise ValueError(f"no method changed this {type(model).__name__}: call mmod.route_ or mmod.apply_ first")


def refuse_evaluated(model: nn.Module) -> None:
    """Raise a ValueError if a model has methods for training alone, which its evaluation mode took off."""
    methods = chain.from_iterable(module.mod_training for module in training_only_models(model))
    kinds = [method.kind for method in methods]
    if kinds:
        raise ValueError(
            f"this {type(model).__name__} is dense in evaluation: {', '.join(kinds)} is for training alone, call "
            "model.train() first"
        )


def undo_(model: Model) -> Model:
    """Undo all methods of a model, possibly wrapped, the last one first: it has the host's classes and keys again.

    A dense model stays as it is.

    Raises:
        ValueError: The model is a part of a changed one.

    Example:
        >>> import timm, mmod
        >>> model = mmod.apply_(timm.create_model("test_vit"), mmod.methods.Merge(r=8))
        >>> type(undo_(model).blocks[1]).__name__
        'Block'
    """
    if methods_inside(model) and not (method_owners(model) or training_only_models(model)):
        raise ValueError(f"this {type(model).__name__} is a part of a changed model: call mmod.undo_ on that model")
    return restore_(model)


def restore_(model: Model) -> Model:
    """Restore the host's classes and keys in a model, or in a copy of a part of one; see `undo_`."""
    undo_training_only_(model)
    for owner in method_owners(model):
        undo_last_(owner, len(own_methods(owner)))
    for method in methods_inside(model):
        method.restore(model)
    return model


def undo_training_only_(model: nn.Module) -> None:
    """Undo the methods for training alone, if any, in a model and in models inside it; other methods stay."""
    for module in training_only_models(model):
        _release(module)


def training_only_models(model: nn.Module) -> list[TrainingOnly]:
    """Return the models, itself or inside a wrapper, that have methods for training alone."""
    check_module(model)
    return [module for module in model.modules() if isinstance(module, TrainingOnly)]


def undo_last_(model: nn.Module, count: int = 1) -> None:
    """Undo the last methods of a model itself, not of a wrapper."""
    for_training = len(_in_training(model))
    _take_off(model, count)
    if isinstance(model, TrainingOnly) and for_training:
        model.mod_training = _in_training(model)
        if not model.mod_training:
            _release(model)


def _take_off(model: nn.Module, count: int) -> None:
    replaced = [name for name, module in model.named_modules() if has_replaced_forward(module)]
    if replaced:
        raise ValueError(
            f"{replaced[0] or 'the model'} has a `forward` on the instance, put there since a method was applied, "
            "which may run that method's code: remove it before the method is undone "
            "(accelerate.hooks.remove_hook_from_module(model, recurse=True), or `del module.forward`)"
        )
    for _ in range(count):
        # Its own: a model inside it, such as a vision tower, may have methods too.
        *remaining, method = own_methods(model)
        method.restore(model)
        _record(model, tuple(remaining))


def owner_of(model: nn.Module, stack: BlockStack) -> nn.Module:
    """Return the module that holds a stack's list of blocks: the model, or a model inside it."""
    return model.get_submodule(stack.owner)


def _record(model: nn.Module, methods: tuple[Method, ...]) -> None:
    """Store the methods that changed a model, also where its host library saves them."""
    # A plain attribute, so it is no parameter, buffer or submodule.
    if methods:
        vars(model)["mod_methods"] = methods
    else:
        vars(model).pop("mod_methods", None)
        detach_hooks(model, once=True)
        if not isinstance(model, TrainingOnly):
            forget(model)
    # A model is saved and loaded without the others.
    methods = tuple(method for method in methods if not method.training_only)
    watch_state(model, bool(methods))
    library = find_library(model)
    if library is None:
        return
    describe = getattr(load_adapter(library), "describe_methods", None)
    if describe is not None:
        describe(model, methods)


def method_owners(model: nn.Module) -> list[nn.Module]:
    """Return the modules that methods were applied to: the model itself, or models inside a wrapper."""
    check_module(model)
    return [module for module in model.modules() if "mod_methods" in vars(module)]


def own_methods(module: nn.Module) -> tuple[Method, ...]:
    """Return the methods that were applied to a module itself, in order, without those of models inside it."""
    return vars(module).get("mod_methods", ())


def methods_of(model: nn.Module) -> tuple[Method, ...]:
    """Return the methods that changed a model, in order; empty for a dense one."""
    return tuple(chain.from_iterable(map(own_methods, method_owners(model))))


def methods_inside(model: nn.Module) -> tuple[Method, ...]:
    """Return a method of each kind that changed modules in a model, also if it is a part of the changed model."""
    applied = {method.kind: method for method in methods_of(model)}
    for module in model.modules():
        if isinstance(module, Mixin) and module.mod_method is not None:
            applied.setdefault(module.mod_method.kind, module.mod_method)
    return tuple(applied.values())


@contextmanager
def deciding_together(model: nn.Module) -> Iterator[None]:
    """Context in which a model's evaluation decides as training does."""
    with ExitStack() as contexts:
        for method in methods_of(model):
            if method.two_ways:
                contexts.enter_context(method.deciding_together(model))
        yield
