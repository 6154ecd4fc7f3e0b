"""What modules that decide leave behind in a forward pass: their decisions, and losses that were not collected yet."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from mmod.blocks.forward_pass import recomputing
from mmod.routing import Routing
from mmod.routing.rule import PerThread


class Record:
    """What one thread keeps of a module that decides.

    Attributes:
        traced: A trace wants the decisions, in evaluation too.
        together: Decide among all tokens as in training, whatever the mode.
        decisions: The last decision of each place in the module.
        fresh: The losses of that decision were not collected yet.
        losses: Weighted losses of the last pass in training mode.
    """

    def __init__(self) -> None:
        self.traced = False
        self.together = False
        self.decisions: dict[str, Routing] = {}
        self.fresh = False
        self.losses: list[Tensor] = []

    def keep(self, place: str, routing: Routing) -> None:
        """Record a decision; gradient checkpointing, which runs a module again, decides nothing new."""
        if not recomputing():
            self.decisions[place], self.fresh = routing, True


class Records(PerThread[Record]):
    """The `Record` of each thread."""

    def __init__(self) -> None:
        super().__init__(Record)

    def __reduce__(self) -> tuple[Any, ...]:
        """Make another in its place."""
        return type(self), ()


class Deciding(nn.Module):
    """Mixin of a module that decides which tokens, images or channels run.

    Attributes:
        mod_state: Plain state with `records`, a `Records`.
    """

    mod_state: Any

    @property
    def record(self) -> Record:
        """What this thread keeps of the module."""
        record: Record = self.mod_state.records.value
        return record

    def places(self) -> tuple[str, ...]:
        """Return the names of the decisions that the module makes in a pass, in order; empty for a single one."""
        return ("",)

    @property
    def dense_blocks(self) -> int:
        """Number of consecutive dense blocks in whose place the module stands."""
        return 1

    @property
    def cost_follows_data(self) -> bool:
        """Whether the FLOPs of a pass depend on what is decided, so that they cannot be told from shapes."""
        return False

    def assume_kept(self, share: float) -> float:
        """Make a copy that is counted cost what it would if it kept a share of what it chooses among.

        Args:
            share: The share, in [0, 1].

        Returns:
            The share of images by which FLOPs of the module are multiplied; 1 where the share shows in shapes.
        """
        return share

    def missed(self, flops: Mapping[str, int], name: str) -> int:
        """Return the FLOPs that an image misses which the module skips as a whole.

        Args:
            flops: Those of a pass that skipped none, by name of the module.
            name: The module's name.
        """
        return flops[name]

    def auxiliary_loss(self) -> Tensor | None:
        """Return the weighted losses of the last pass in training mode, once; None where there are none."""
        record = self.record
        losses, record.losses = record.losses, []
        return losses[0] if len(losses) == 1 else sum(losses[1:], losses[0]) if losses else None


def deciding_modules(model: nn.Module) -> dict[str, Deciding]:
    """Return the modules of a model that decide, by name.

    Modules inside a routed block choose among the tokens that the block keeps, and are left out.

    Args:
        model: Any model; a dense one has none.
    """
    modules: dict[str, Deciding] = {}
    enclosing = ""
    for name, module in model.named_modules():
        if isinstance(module, Deciding) and not (enclosing and name.startswith(enclosing)):
            modules[name] = module
            enclosing = f"{name}." if "" in module.places() else enclosing
    return modules
