"""Mixture-of-Recursions: middle blocks that are shared and applied several times, each time to fewer tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
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
    """The middle blocks of a ViT or decoder become fewer, which are shared and applied several times.

    Fields are those of `CycleOptions`. The shared blocks keep their weights. Undoing the method leaves them theirs and
    gives the blocks that were left out back; in a model that was loaded, these are new.

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
        """Raise a ValueError unless the blocks can be shared, and their tokens are all there."""
        middle = len(stack.blocks) - self.first - self.last
        if middle < self.recursions or middle % self.recursions:
            raise ValueError(
                f"{len(stack.blocks)} blocks without the first {self.first} and the last {self.last} are {middle}, "
                f"which recursions={self.recursions} must divide"
            )
        if self.sampling is not None and not stack.language:
            raise ValueError(f"sampling={self.sampling!r} is for decoders: an image is there as a whole")
        kinds = getattr(getattr(model, "config", None), "layer_types", None) or ()
        if len(set(kinds)) > 1:
            raise ValueError(f"layers of this {type(model).__name__} attend in different ways, {', '.join(set(kinds))}")
        if type(model).__name__ == "NaFlexVit":
            raise ValueError("recursions take all tokens for those of an image, and some of a NaFlexVit may be padding")
        if getattr(model, "rope_mixed", False):
            raise ValueError(
                f"each block of this {type(model).__name__} has rotary positions of its own: none is shared"
            )
        for name, block in zip(stack.names, stack.blocks):
            if self.keys == "first" and "all" not in stack.call_of(block, None).contexts:
                raise ValueError(f"keys='first' is not possible in {name}, whose attention is not a fused one")

    @property
    def has_loss(self) -> bool:
        """Whether the loads of recursions are balanced by a loss, or what they choose is learned."""
        if self.choice == "tokens":
            return self.balance > 0
        return self.sampling is not None and self.membership > 0

    @property
    def two_ways(self) -> bool:
        """Whether recursions take the highest gates in training and decide of each token alone in evaluation."""
        return self.sampling is not None

    @property
    def causal(self) -> bool:
        """Whether evaluation decides of each token alone."""
        return self.two_ways or self.choice == "tokens"

    @contextmanager
    def deciding_together(self, model: nn.Module) -> Iterator[None]:
        """Let recursions take the highest gates of whole texts in evaluation too."""
        records = [cycle.record for cycle in _cycles(model).values()]
        for record in records:
            record.together = True
        try:
            yield
        finally:
            for record in records:
                record.together = False

    def decided_alone(self, model: nn.Module, decisions: Mapping[str, Routing]) -> dict[str, Tensor]:
        """Return which tokens have a logit of 0 or more, among those that ran before (B, N), by recursion."""
        alone: dict[str, Tensor] = {}
        for name, cycle in _cycles(model).items() if self.two_ways else ():
            before_BN = None
            for place in cycle.places():
                routing = decisions[f"{name}.{place}"]
                logit_BN = routing.score_BN if routing.predicted_BN is None else routing.predicted_BN
                alone[f"{name}.{place}"] = logit_BN >= 0 if before_BN is None else (logit_BN >= 0) & before_BN
                before_BN = routing.keep_BN
        return alone

    def change(self, model: nn.Module, stack: BlockStack) -> None:
        """Put a `Cycle` in the place of the middle blocks."""
        container: Any = model.get_submodule(stack.names[0].rpartition(".")[0])
        middle = list(container[self.first : len(container) - self.last])
        shared = len(middle) // self.recursions
        del container[self.first + 1 : len(container) - self.last]
        container[self.first] = Cycle(self, stack, middle[:shared], middle[shared:]).train(container.training)

    def remove(self, model: nn.Module) -> None:
        """Give the blocks that were left out back, where the model is by then."""
        for name, cycle in _cycles(model).items():
            container: Any = model.get_submodule(name.rpartition(".")[0])
            # Layers of a loaded model have no weights until its own initialisation gives them some.
            restored = cycle.blocks(getattr(model, "_init_weights", None))
            blocks = [block for child in container for block in (restored if child is cycle else [child])]
            del container[:]
            container.extend(blocks)


def _cycles(model: nn.Module) -> dict[str, Cycle]:
    return {name: module for name, module in model.named_modules() if isinstance(module, Cycle)}
