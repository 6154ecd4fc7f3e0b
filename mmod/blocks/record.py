"""What deciding modules leave behind in a forward pass: decisions, and losses to be collected."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from itertools import chain

import torch
from torch import Tensor, nn

from mmod.blocks.conversion import Mixin
from mmod.routing import Routing
from mmod.threads import PerThread

UNCOLLECTED = 16
"""How many forward passes of a module keep a loss that nobody collects."""


def recomputing() -> bool:
    """Return whether this code runs inside a backward pass, that is, recomputes a checkpointed forward."""
    if torch.compiler.is_compiling():
        return False
    return torch._C._current_graph_task_id() != -1


def _while_tracing(method: Callable[..., object]) -> Callable[..., object]:
    """Let compilers call a method while they trace, with the module itself, and not put it into their graphs."""
    # As `torch.compiler.assume_constant_result`, without its import of the compiler.
    method._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return method


def _same(weight: Tensor, drawn: Tensor) -> bool:
    """Return whether a weight is what was drawn, on another device or in another dtype."""
    return weight.shape == drawn.shape and torch.equal(weight.detach(), drawn.to(weight))


class PassLoss:
    """The weighted losses of a module in one forward pass.

    Attributes:
        value: Their sum, with its graph; None for no pass, or one whose graph is gone.
        spent: A backward pass has freed the graph, without this loss.
    """

    def __init__(self, value: Tensor | None = None) -> None:
        self.value = value
        self.is_pass = value is not None
        self.spent = False


class Record:
    """What one thread keeps of a deciding module.

    Attributes:
        traced: A trace records decisions, in evaluation too.
        together: Decide jointly as in training, in any mode.
        decisions: The last decisions, by name.
        losses: The last passes in training mode whose losses were not collected, oldest first. Its length does not
            change: compilers guard on it.
    """

    def __init__(self) -> None:
        self.traced = False
        self.together = False
        self.decisions: dict[str, Routing] = {}
        self.losses: list[PassLoss] = [PassLoss() for _ in range(UNCOLLECTED)]

    def keep(self, name: str, routing: Routing) -> None:
        """Record a decision, unless gradient checkpointing repeats it."""
        if recomputing():
            return
        if name:
            self.decisions[name] = routing
        else:
            # A module that decides once: a compiler that reads the old decisions would guard on their number.
            self.decisions = {"": routing}

    def add(self, loss: PassLoss) -> None:
        """Record the loss of a pass in training mode; the oldest one goes."""
        if not torch.compiler.is_compiling():
            for earlier in self.losses:
                if earlier.spent:
                    earlier.value = None
        self.losses = [*self.losses[1:], loss]

    def collect(self) -> list[Tensor]:
        """Return the losses of the passes since the last call."""
        passes = [loss for loss in self.losses if loss.value is not None]
        # Where backward passes went on without their losses, only the last one can be told of.
        kept = [loss for loss in passes if not _is_spent(loss)] or passes[-1:]
        self.losses = [PassLoss() for _ in self.losses]
        return [loss.value for loss in kept if loss.value is not None]


def _is_spent(loss: PassLoss) -> bool:
    """Return whether a backward pass freed the graph of a loss."""
    if loss.spent or loss.value is None:
        return True
    try:
        # Only a compiled graph, of which the loss is an output, says so here.
        getattr(loss.value.grad_fn, "saved_tensors", None)
    except RuntimeError:
        return True
    return False


def _watch(loss: PassLoss, x: Tensor) -> None:
    """Note when a backward pass frees the graph that leads to tokens, and so that of the loss computed from them."""
    # The graph must not keep the loss, which keeps the graph.
    watched = weakref.ref(loss)

    def note(gradient: Tensor) -> None:
        found = watched()
        if found is not None and not torch._C._autograd._get_current_graph_task_keep_graph():
            found.spent = True

    x.register_hook(note)


def make_records(kind: type[Record] = Record) -> PerThread[Record]:
    """Return a record of each thread."""
    return PerThread(kind)


class Deciding(Mixin):
    """Mixin of a module that decides which tokens, images or channels run: what traces and FLOP counts read."""

    @property
    def mod_record(self) -> Record:
        """This thread's record."""
        return self.mod_state.records.value

    def mod_decision_names(self) -> tuple[str, ...]:
        """Return the names of the decisions in a pass, in order; "" for a single one."""
        return ("",)

    @property
    def mod_dense_blocks(self) -> int:
        """Number of consecutive dense blocks that the module replaces."""
        return 1

    @property
    def mod_cost_follows_data(self) -> bool:
        """Whether FLOPs depend on the decisions, not on shapes alone."""
        return False

    def mod_assume_kept(self, share: float) -> float:
        """Make a copy whose FLOPs are counted keep a share of its tokens.

        Returns:
            The factor of the module's FLOPs; 1 if the share shows in shapes.
        """
        return share

    def mod_missed(self, flops: Mapping[str, int], name: str) -> int:
        """Return the FLOPs that a skipped image saves, from the FLOPs by module when none is skipped."""
        return flops[name]

    @property
    def mod_has_loss(self) -> bool:
        """Whether a pass in training mode leaves a loss."""
        return False

    def mod_decided_alone(self, decisions: Mapping[str, Routing]) -> dict[str, Tensor]:
        """Return which tokens would run if decided independently (B, N), by name; none where evaluation decides so.

        Args:
            decisions: The decisions of a pass that decided jointly, by name.
        """
        return {}

    def mod_scorers(self) -> dict[str, nn.Module]:
        """Return the modules with learned weights that decide, by their names in this one."""
        return {}

    def mod_remember_drawn(self) -> None:
        """Remember the weights that decide, to tell later whether they were trained or loaded."""
        weights = chain.from_iterable(scorer.parameters() for scorer in self.mod_scorers().values())
        self.mod_drawn = tuple(weight.detach().clone() for weight in weights if weight.requires_grad)

    def mod_keep_loss(self, losses: Sequence[Tensor], *roots: Tensor) -> None:
        """Record the weighted losses of the running pass in training mode, until they are collected.

        Args:
            losses: Computed where gradient checkpointing repeats the pass too, so that it finds the same tensors.
            roots: What the losses were computed from. The first one with a graph tells when a backward pass frees it.
        """
        record = self.mod_record
        if recomputing():
            return
        value = sum(losses[1:], losses[0])
        if not value.requires_grad:
            return
        loss = PassLoss(value)
        if record.losses[0].is_pass:
            self.mod_tell_of_uncollected()
        record.add(loss)
        with_graph = [root for root in roots if root.requires_grad]
        if with_graph and not torch.compiler.is_compiling():
            _watch(loss, with_graph[0])

    @_while_tracing
    def mod_tell_of_uncollected(self) -> bool:
        """Warn once that the losses of the oldest passes go."""
        return self._mod_tell(
            "uncollected",
            f"the auxiliary losses of more than {UNCOLLECTED} forward passes in training mode were not collected, and "
            "the oldest go: add mmod.auxiliary_loss(model) to the loss of every step, or apply the method without "
            "losses. Passes that train nothing leave none under torch.no_grad() or in evaluation mode",
        )

    @_while_tracing
    def mod_tell_of_frozen(self) -> bool:
        """Warn once if weights that decide are frozen as they were drawn."""
        if not self.mod_drawn or not torch.is_grad_enabled():
            return False
        for name, scorer in self.mod_scorers().items():
            parameters = list(scorer.parameters())
            if not parameters or any(weight.requires_grad for weight in parameters):
                continue
            if any(weight.is_meta or type(weight.data) is not Tensor for weight in parameters):
                # Their values are elsewhere.
                continue
            drawn = self.mod_drawn
            # They will not change any more, so this is asked once.
            self.mod_drawn = ()
            if all(any(_same(weight, first) for first in drawn) for weight in parameters):
                return self._mod_tell(
                    "frozen",
                    f"{name} of the method {self.mod_method.kind!r} is frozen at the weights drawn for it, and "
                    "stays random: train it with requires_grad_(True) or, with peft, "
                    f"modules_to_save={list(self.mod_scorers())}, or load trained weights before",
                )
        return False

    def _mod_tell(self, about: str, message: str) -> bool:
        # The modules of one application share the set.
        told: set[str] = vars(self).setdefault("mod_told", set())
        if about not in told:
            told.add(about)
            warnings.warn(message, stacklevel=4)
        return True

    def mod_auxiliary_loss(self, name: str, training: bool) -> Tensor:
        """Return the weighted losses of the passes in training mode since the last call.

        Args:
            name: The module's name in the model.
            training: Whether the model as a whole is in training mode.

        Raises:
            RuntimeError: There was none, or its graph is gone.
        """
        losses = self.mod_record.collect()
        if losses:
            return sum(losses[1:], losses[0])
        if not self.training:
            advice = "write `if model.training: loss = loss + mmod.auxiliary_loss(model)`"
            if training:
                advice = f"the model is not, so call `model.get_submodule({name!r}).train()` before the forward pass"
            raise RuntimeError(f"{name} is in evaluation mode, in which no auxiliary loss is kept: {advice}")
        raise RuntimeError(
            f"no pass of {name} in training mode has left a loss with a gradient since its loss was last collected: "
            "call the model, then mmod.auxiliary_loss, once for each step. A pass leaves none under no_grad, with "
            "reentrant gradient checkpointing (pass use_reentrant=False), and where the router is frozen"
        )


def deciding_modules(model: nn.Module) -> dict[str, Deciding]:
    """Return the deciding modules of a model by name, without those inside a routed block."""
    modules: dict[str, Deciding] = {}
    enclosing = ""
    for name, module in model.named_modules():
        is_enclosed = bool(enclosing) and name.startswith(enclosing)
        if not isinstance(module, Deciding) or is_enclosed:
            continue
        modules[name] = module
        if "" in module.mod_decision_names():
            enclosing = f"{name}."
    return modules
