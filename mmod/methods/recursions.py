"""Mixture-of-Recursions: shared middle blocks run repeatedly, on fewer tokens at every recursion."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from mmod.adapters import BlockStack
from mmod.methods.base import Method, register_method
from mmod.methods.cycle import Cycle, CycleOptions
from mmod.routing import Routing


@register_method("recursions")
@dataclass(frozen=True)
class Recursions(CycleOptions, Method):
    """Recursion over shared middle blocks of a ViT or decoder (Mixture-of-Recursions).

    Fields are those of `CycleOptions`. The shared blocks keep their weights. Undoing the method restores the removed
    blocks; in a model loaded from a folder, these have new weights.

    Source: Bae et al., arXiv 2507.10524, "Middle-Cycle".

    Example:
        >>> import timm, mmod
        >>> model = mmod.apply_(timm.create_model("test_vit"), Recursions(recursions=2))
        >>> len(model.blocks), len(model.blocks[1].shared)
        (3, 2)
    """

    decoders: ClassVar[bool] = True
    replaces: ClassVar[str] = ".shared."

    def check(self, model: nn.Module, stack: BlockStack) -> None:
        """Raise a ValueError unless the blocks can be shared and receive complete images or texts."""
        middle = len(stack.blocks) - self.first - self.last
        if middle < self.recursions or middle % self.recursions:
            raise ValueError(
                f"{len(stack.blocks)} blocks without the first {self.first} and the last {self.last} are {middle}, "
                f"which recursions={self.recursions} must divide"
            )
        if self.sampling is not None and not stack.language:
            raise ValueError(f"sampling={self.sampling!r} is for decoders: all tokens of an image are known at once")
        layer_types = getattr(getattr(model, "config", None), "layer_types", None) or ()
        if len(set(layer_types)) > 1:
            raise ValueError(
                f"layers of this {type(model).__name__} attend in different ways, {', '.join(set(layer_types))}"
            )
        if type(model).__name__ == "NaFlexVit":
            raise ValueError("recursions do not support padding, which a NaFlexVit may have")
        if getattr(model, "rope_mixed", False):
            raise ValueError(
                f"blocks of this {type(model).__name__} have different rotary positions and cannot be shared"
            )
        for name, block in zip(stack.names, stack.blocks):
            if self.keys == "first" and "all" not in stack.call_of(block, None).contexts:
                raise ValueError(f"keys='first' is not possible in {name}: it needs fused attention")

    @property
    def has_loss(self) -> bool:
        """Whether there is a load-balance loss or a membership loss."""
        if self.choice == "tokens":
            return self.balance > 0
        return self.sampling is not None and self.membership > 0

    @property
    def two_ways(self) -> bool:
        """Whether recursions choose by top-k gates in training and token by token in evaluation."""
        return self.sampling is not None

    @property
    def causal(self) -> bool:
        """Whether evaluation decides token by token."""
        return self.two_ways or self.choice == "tokens"

    def decided_alone(self, model: nn.Module, decisions: Mapping[str, Routing]) -> dict[str, Tensor]:
        """Return which tokens of the previous recursion have a logit of at least 0 (B, N), by recursion."""
        alone: dict[str, Tensor] = {}
        for name, cycle in _cycles(model).items() if self.two_ways else ():
            previous_BN = None
            for place in cycle.places():
                routing = decisions[f"{name}.{place}"]
                keep_BN = routing.evidence.logit_BN >= 0
                alone[f"{name}.{place}"] = keep_BN if previous_BN is None else keep_BN & previous_BN
                previous_BN = routing.keep_BN
        return alone

    def change(self, model: nn.Module, stack: BlockStack) -> None:
        """Replace the middle blocks by a `Cycle`."""
        container: Any = model.get_submodule(stack.names[0].rpartition(".")[0])
        middle = list(container[self.first : len(container) - self.last])
        shared = len(middle) // self.recursions
        del container[self.first + 1 : len(container) - self.last]
        container[self.first] = Cycle(self, stack, middle[:shared], middle[shared:]).train(container.training)

    def remove(self, model: nn.Module) -> None:
        """Restore the removed blocks, on the model's current device and in its dtype."""
        for name, cycle in _cycles(model).items():
            container: Any = model.get_submodule(name.rpartition(".")[0])
            # Removed layers of a loaded model are on meta until the model's initialisation fills them.
            restored = cycle.blocks(getattr(model, "_init_weights", None))
            blocks = [block for child in container for block in (restored if child is cycle else [child])]
            del container[:]
            container.extend(blocks)


def _cycles(model: nn.Module) -> dict[str, Cycle]:
    return {name: module for name, module in model.named_modules() if isinstance(module, Cycle)}
