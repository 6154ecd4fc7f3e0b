"""What all methods beside routing have in common: a description by plain values, conversion in place, its undoing.

See `mmod.methods.reduction` for those that leave fewer tokens.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from torch import nn

from mmod.adapters import BlockStack, find_stack
from mmod.blocks import is_converted, make_dense
from mmod.model import is_routed
from mmod.values import check_module

Model = TypeVar("Model", bound=nn.Module)


@dataclass(frozen=True)
class Method(ABC):
    """Another way than routing to spend less on a model, described by plain values.

    Attributes:
        kind: Its name in configs.
        routable: The changed model can be routed as well, by `mmod.route_` afterwards.
        adds_weights: The changed model has weights that the dense one has not, or other ones in their place.
        decoders: It changes language models of transformers, too.
        replaces: Part of the names of weights without which dense ones are of no use to the changed model; empty where
            a dense checkpoint holds all that is not added.
    """

    kind: ClassVar[str]
    routable: ClassVar[bool] = False
    adds_weights: ClassVar[bool] = True
    decoders: ClassVar[bool] = False
    replaces: ClassVar[str] = ""

    def apply_(self, model: Model) -> Model:
        """Change a model in place; `mmod.methods.undo_` takes it back.

        Args:
            model: A model made by `timm.create_model`, or one of transformers where `decoders` is set; neither routed
                nor wrapped nor compiled.

        Returns:
            The same model.

        Raises:
            ValueError: The model is routed or changed already, or cannot be changed so. It is then as it was.
        """
        if method_of(model) is not None or any(is_converted(module) for module in model.modules()):
            raise ValueError(f"this {type(model).__name__} is routed or changed already: undo that first")
        stack = self.find(model)
        self.check(model, stack)
        self.change(model, stack)
        model.mod_method = self  # type: ignore[assignment]  # plain, so that no registry of the module sees it
        return model

    def replaced_in(self, names: Iterable[str]) -> bool:
        """Return whether some weights of a checkpoint took the place of dense ones.

        Args:
            names: Names of its weights.
        """
        return bool(self.replaces) and any(self.replaces in name for name in names)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values that `mmod.methods.read_method` makes the same from."""
        fields = {
            name: list(value) if isinstance(value, tuple) else value for name, value in dataclasses.asdict(self).items()
        }
        return {"kind": self.kind, **fields}

    @property
    def starts_anew(self) -> bool:
        """Whether dense weights are of no use to a changed model, so that it is trained from scratch."""
        return bool(self.replaces)

    @property
    def has_loss(self) -> bool:
        """Whether a changed model has a loss of its own in training, see `mmod.auxiliary_loss`."""
        return False

    def find(self, model: nn.Module) -> Any:
        """Return the blocks of a model: those that tokens pass, as a rule."""
        stack = find_stack(model)
        if stack.library != "timm" and not (self.decoders and stack.language):
            raise ValueError(f"methods change models of timm, got a {type(model).__name__} of {stack.library}")
        return stack

    @abstractmethod
    def check(self, model: nn.Module, stack: Any) -> None:
        """Raise a ValueError that says why a model cannot be changed so."""

    def remove(self, model: nn.Module) -> None:
        """Remove the modules that the change added, none as a rule, before modules get their own classes back."""
        return

    @abstractmethod
    def change(self, model: nn.Module, stack: Any) -> None:
        """Change a model that was found to fit."""


def check_blocks(blocks: tuple[int, ...], stack: BlockStack) -> None:
    """Raise a ValueError unless numbers of blocks ascend and a stack has them all.

    Args:
        blocks: The numbers.
        stack: The stack.
    """
    depth = len(stack.blocks)
    if not blocks or list(blocks) != sorted(set(blocks)) or not 0 <= blocks[0] <= blocks[-1] < depth:
        raise ValueError(f"blocks must ascend within 0 to {depth - 1}, got {list(blocks)}")


def undo_(model: Model) -> Model:
    """Give a model that was changed by a method its own classes and keys back.

    Args:
        model: The model.

    Returns:
        The same model.

    Raises:
        ValueError: No method changed it, or it was routed afterwards.
    """
    method = method_of(model)
    if method is None:
        raise ValueError(f"no method changed this {type(model).__name__}")
    if is_routed(model):
        raise ValueError(f"this {type(model).__name__} was routed afterwards: call mmod.unroute_ first")
    method.remove(model)
    for module in list(model.modules()):
        if is_converted(module):
            make_dense(module)
    del model.mod_method
    return model


def method_of(model: nn.Module) -> Method | None:
    """Return the method that changed a model, None where none did.

    Args:
        model: Any model.
    """
    check_module(model)
    return vars(model).get("mod_method")
