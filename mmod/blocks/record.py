"""What deciding modules leave behind in a forward pass: decisions, and losses to be collected."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor, nn

from mmod.blocks.conversion import Mixin
from mmod.blocks.passes import recomputing
from mmod.routing import Routing
from mmod.threads import PerThread


class Record:
    """What one thread keeps of a deciding module.

    Attributes:
        traced: A trace records decisions, in evaluation too.
        together: Decide jointly as in training, in any mode.
        fresh: The losses of the last decision were not collected yet.
        losses: Weighted losses of the last pass in training mode.
    """

    def __init__(self) -> None:
        self.traced = False
        self.together = False
        self.decisions: dict[str, Routing] = {}
        self.fresh = False
        self.losses: list[Tensor] = []

    def keep(self, place: str, routing: Routing) -> None:
        """Record a decision, unless gradient checkpointing repeats it."""
        if recomputing():
            return
        if place:
            self.decisions[place] = routing
        else:
            # A module that decides once: a compiler that reads the old decisions would guard on their number.
            self.decisions = {"": routing}
        self.fresh = True


class Records(PerThread[Record]):
    """The `Record` of each thread."""

    def __init__(self, make: Callable[[], Record] = Record) -> None:
        super().__init__(make)


class Deciding(Mixin):
    """Mixin of a module that decides which tokens, images or channels run: what traces and FLOP counts read."""

    @property
    def record(self) -> Record:
        """This thread's record."""
        return self.mod_state.records.value

    def places(self) -> tuple[str, ...]:
        """Return the names of the decisions in a pass, in order; "" for a single one."""
        return ("",)

    @property
    def dense_blocks(self) -> int:
        """Number of consecutive dense blocks that the module replaces."""
        return 1

    @property
    def cost_follows_data(self) -> bool:
        """Whether FLOPs depend on the decisions, not on shapes alone."""
        return False

    def assume_kept(self, share: float) -> float:
        """Make a copy whose FLOPs are counted keep a share of its tokens.

        Returns:
            The factor of the module's FLOPs; 1 if the share shows in shapes.
        """
        return share

    def missed(self, flops: Mapping[str, int], name: str) -> int:
        """Return the FLOPs that a skipped image saves, from the FLOPs by module when none is skipped."""
        return flops[name]

    def auxiliary_loss(self) -> Tensor | None:
        """Return the weighted losses of the last pass in training mode, once; None without any."""
        record = self.record
        losses = record.losses
        record.losses = []
        return sum(losses[1:], losses[0]) if losses else None


def deciding_modules(model: nn.Module) -> dict[str, Deciding]:
    """Return the deciding modules of a model by name, without those inside a routed block."""
    modules: dict[str, Deciding] = {}
    enclosing = ""
    for name, module in model.named_modules():
        if isinstance(module, Deciding) and not (enclosing and name.startswith(enclosing)):
            modules[name] = module
            enclosing = f"{name}." if "" in module.places() else enclosing
    return modules
