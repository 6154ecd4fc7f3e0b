"""Spans of routed blocks, and state that belongs to the tensors of a forward pass.

A span is a run of consecutive routed blocks that share scores, with the dense block in front of it if they read that
block's importance. What the blocks of a span share in a forward pass is found by the tensor that one block returned and
the next one got. A thread may therefore have several batches between two blocks: a pipeline, or a user's own loop.

Axes: B images or samples, N tokens.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from fractions import Fraction
from typing import Any, Generic, NamedTuple, NoReturn, Protocol, TypeVar

import torch
from torch import Tensor

from mmod.blocks.rows import Rows, gather
from mmod.config import RoutingConfig
from mmod.routing import Router, Routing, TokenGroups, TokenMarks
from mmod.threads import PerThread

# Unfinished passes of a thread outside any call of the model that are remembered, to notice an ambiguous tensor.
UNFINISHED = 8


def recomputing() -> bool:
    """Return whether this code runs inside a backward pass, that is, recomputes a checkpointed forward."""
    if torch.compiler.is_compiling():
        return False
    return torch._C._current_graph_task_id() != -1


class StackCall:
    """A call of the module that holds a stack of blocks; one more stands for code outside such calls.

    Args:
        outer: The call around it in this thread, if any.
        unobserved: The host's own code runs the blocks in order, and nothing reads the tokens between them. Blocks may
            then pass on rows, and tensors are not remembered.

    Attributes:
        passes: Passes that began in it, oldest first; none where nothing is observed.
        latest: The pass that began last.
        begun: What has begun a pass in this call.
    """

    def __init__(self, outer: StackCall | None = None, unobserved: bool = False) -> None:
        self.outer = outer
        self.unobserved = unobserved
        self.passes: list[Pass] = []
        self.latest: Pass | None = None
        self.begun: list[object] = []


Grid = tuple[int, int]
"""Rows and columns of patches."""


class StackCalls:
    """The calls of a stack in one thread: the running one, inside those around it.

    Attributes:
        entered: The pass that entered a block last.
    """

    def __init__(self) -> None:
        self.running = StackCall()
        self.entered: Pass | None = None
        self._grids: list[Grid | None] = []
        self._began = False

    def begin(self, unobserved: bool) -> None:
        """Begin a call of the module that holds the blocks."""
        self.running = StackCall(self.running, unobserved)

    def end(self) -> None:
        """End the running call, and what passes left unfinished in it."""
        if self.running.outer is not None:
            self.running = self.running.outer
        self.entered = None
        self._grids = []

    def show_grid(self, grid: Grid | None) -> None:
        """Take the grid of patches that were made for the next pass."""
        if self._began:
            self._grids = []
        self._began = False
        self._grids = [*self._grids[1 - UNFINISHED :], grid]

    def take_grid(self) -> Grid | None:
        """Return the grid of a pass that begins; None where patches of several grids wait for their passes."""
        self._began = True
        if any(grid != self._grids[0] for grid in self._grids):
            return None
        return self._grids[0] if self._grids else None


class Pass:
    """What the modules of a run share in one forward pass; what they share in particular derives from it.

    Attributes:
        place: Place of the last module that the pass entered.
        owner: The run that it is a pass of.
        shape: Shape of the first module's input (B, N).
        grid: Rows and columns of the images' patches, where a score reads them; else None.
        unobserved: See `StackCall`.
        busy: A module was entered and not left: it runs, or it failed.
    """

    def __init__(self) -> None:
        self.place = 0
        self.owner: object = None
        self.shape: tuple[int, ...] = ()
        self.grid: Grid | None = None
        self.unobserved = False
        self.busy = False


AnyPass = TypeVar("AnyPass", bound=Pass)


class _Remembered(NamedTuple):
    """A tensor between two modules, how often its values were changed in place, and the pass that it belongs to."""

    tensor: weakref.ref[Tensor]
    version: int
    found: Any


class Passes(Generic[AnyPass]):
    """Finds the forward pass that an input of one of several consecutive modules belongs to.

    - The first module begins a pass. A later one finds it by its input: the tensor that the module before returned.
    - Code between two modules may make a new tensor (a hook, a move to another device), and compilers cannot compare
      tensors. The input then belongs to the only unfinished pass of the running call, or outside calls to the only
      one of the thread. If there are several, the module raises instead of guessing.
    - A pass ends when its last module is entered, and with the call of the model in which it runs. One that failed in
      a module is not continued but from that module's input.
    - Gradient checkpointing recomputes modules in a backward pass, perhaps in another thread. The first module of a
      segment finds the pass by its input, which is the same tensor; those after it also by the running backward pass.

    Copies and pickles know no pass.

    Args:
        calls: The calls of the stack, by thread.
        make: Makes the state of a pass.
        last: Place of the last module.
    """

    def __init__(self, calls: PerThread[StackCalls], make: Callable[[], AnyPass], last: int) -> None:
        self.calls = calls
        self.make = make
        self.last = last
        self._by_address: dict[int, _Remembered] = {}
        # The pass that a backward pass recomputes in a thread, with the number of that backward pass.
        self._recomputed: PerThread[list[tuple[int, AnyPass]]] = PerThread(list)

    def __getstate__(self) -> dict[str, Any]:
        """Leave the passes out of copies and pickles."""
        return {**vars(self), "_by_address": {}}

    def begin(self, x: Tensor) -> AnyPass:
        """Begin a pass with the input of the first module."""
        started = self.make()
        started.owner = self
        started.shape = tuple(x.shape[:2])
        calls = self.calls.value
        started.grid = calls.take_grid()
        call = calls.running
        if recomputing() and call.outer is None:
            # A part of the model; the model as a whole is recomputed by a call of it.
            self._recomputed.value[:] = [(torch._C._current_graph_task_id(), started)]
            match = self._by_address.get(_address(x)[0])
            if match is not None:
                started.grid = match.found.grid
            return started
        if any(run is self for run in call.begun):
            # The host's code runs each block once, so an interrupted call was left open, and this is other code.
            call.unobserved = False
        started.unobserved = call.unobserved
        call.latest = started
        if call.outer is None:
            # Nothing says when code outside calls ends.
            del call.passes[: 1 - UNFINISHED]
        else:
            call.begun.append(self)
        if not call.unobserved and self.last > 0:
            call.passes.append(started)
        if not call.unobserved and started.grid is not None:
            # A recomputed first block finds the grid by its input.
            self.hand_on(started, x)
        return started

    def find(self, x: Tensor, place: int) -> AnyPass | None:
        """Return the pass that the input of a later module belongs to; None if no pass reached it.

        Raises:
            RuntimeError: The input may belong to several passes, or is recomputed and was never seen.
        """
        found = None
        if not torch.compiler.is_compiling():
            address, version = _address(x)
            match = self._by_address.get(address)
            # A buffer may hold another batch by now.
            if match is not None and match.version == version and match.found.shape == x.shape[:2]:
                found = match.found
            if torch._C._current_graph_task_id() != -1:
                return self._find_recomputed(found)
        call = self.calls.value.running
        if found is None:
            found = self._only_unfinished(x, place, call)
            if found is None:
                return None
            self.hand_on(found, x)
        found.place = place
        if place >= self.last and call.outer is None:
            call.passes = [other for other in call.passes if other is not found]
        return found

    def hand_on(self, current: AnyPass, y: Tensor) -> None:
        """Remember that a tensor between two modules belongs to a pass."""
        if torch.compiler.is_compiling():
            return
        address, version = _address(y)
        if not address:
            return
        remembered = self._by_address

        def forget(tensor: weakref.ref[Tensor]) -> None:
            # Another tensor may lie there by now.
            if address in remembered and remembered[address].tensor is tensor:
                del remembered[address]

        # FSDP2 gives a block a view of the tensor that checkpointing keeps.
        kept = y if y._base is None else y._base
        remembered[address] = _Remembered(weakref.ref(kept, forget), version, current)

    def _only_unfinished(self, x: Tensor, place: int, call: StackCall) -> Any:
        """Return the only unfinished pass that can go on at a place: of the running call, or of one around it."""
        level: StackCall | None = call
        while level is not None:
            reachable = [
                other for other in level.passes if other.owner is self and other.place < place and not other.busy
            ]
            if len(reachable) > 1:
                reachable = [other for other in reachable if other.shape == x.shape[:2]]
            if len(reachable) > 1:
                # So that passes that were aborted are in the way only once.
                level.passes = [other for other in level.passes if all(other is not item for item in reachable)]
                raise RuntimeError(
                    f"{len(reachable)} forward passes are unfinished at this routed block, and its input is none of "
                    "the tensors that the block before returned, so the pass that it belongs to is unknown: pass the "
                    "tensors on unchanged, or run one batch after the other, or call the whole model. The unfinished "
                    "passes are forgotten now"
                )
            if reachable:
                found = reachable[0]
                if level is not call:
                    # The embedding of captions, for one, stands in front of the module that holds the blocks.
                    level.passes = [other for other in level.passes if other is not found]
                    call.passes.append(found)
                return found
            level = level.outer
        return None

    def _find_recomputed(self, found: AnyPass | None) -> AnyPass | None:
        task = torch._C._current_graph_task_id()
        if found is not None:
            self._recomputed.value[:] = [(task, found)]
            return found
        for number, current in self._recomputed.value:
            if number == task:
                return current
        raise RuntimeError(
            "gradient checkpointing runs a routed block again on an input that it never had: checkpointing that "
            "moves or copies inputs in between cannot be combined with this router"
        )


def _address(x: Tensor) -> tuple[int, int]:
    """Return where a tensor's values lie, 0 if it has none of its own, and how often they were changed in place."""
    if type(x) is not Tensor or x.is_meta or torch._C._functorch.is_functorch_wrapped_tensor(x):
        return 0, 0
    # Tensors of inference mode do not count changes.
    return x.data_ptr(), 0 if x.is_inference() else x._version


class Decision(NamedTuple):
    """A decision of one block of a span, and what it was made by."""

    config: RoutingConfig
    capacity: Fraction
    tokens: TokenMarks | TokenGroups
    routing: Routing


class InSpan(Protocol):
    """What a span reads of a block's state: its place, and whether the next block can take rows."""

    place: int
    passes_rows: bool


class SpanPass(Pass):
    """What the blocks of a span share in one forward pass.

    Attributes:
        score_BN: Scores that all blocks read: importance, or what the first routed block computed; None before.
        trains: The score has a weight that trains.
        decisions: The decisions so far, by place.
        rows: The rows that the previous block passed on instead of all tokens, or None.
    """

    def __init__(self) -> None:
        super().__init__()
        self.score_BN: Tensor | None = None
        self.trains = False
        self.decisions: dict[int, Decision] = {}
        self.rows: Rows | None = None


class Span(Passes[SpanPass]):
    """A run of consecutive routed blocks that share scores, and a dense block in front whose importance they read.

    The dense block, if any, has place 0. Blocks that read the same scores by the same rule decide once.

    Args:
        names: Names of the modules, in order.
        scored_by_first: The first routed block computes the scores; otherwise they are importance.
        training_only: Importance serves a loss only, and is computed in training only.
    """

    def __init__(
        self, calls: PerThread[StackCalls], names: tuple[str, ...], scored_by_first: bool, training_only: bool
    ) -> None:
        super().__init__(calls, SpanPass, len(names) - 1)
        self.names = names
        self.scored_by_first = scored_by_first
        self.training_only = training_only

    def enter(self, x: Tensor, place: int, router: Router, training: bool) -> SpanPass | None:
        """Return the pass of a block's input (B, N, D), which the first block begins; None if nothing is shared.

        Raises:
            ValueError: The first block was not run, without whose scores this block would decide otherwise.
        """
        if self.training_only and not training:
            return None
        found: SpanPass | None
        if place == 0:
            found = self.begin(x)
        else:
            latest = self.calls.value.running.latest
            if isinstance(latest, SpanPass) and latest.unobserved and latest.owner is self and not latest.busy:
                # The host's own code: this block follows the one before.
                found = latest
                found.place = place
            else:
                found = self.find(x, place)
                if found is not None and not torch.compiler.is_compiling() and found.shape != x.shape[:2]:
                    self._refuse_shape(x, found)
        if found is not None:
            found.busy = True
            self.calls.value.entered = found
            if found.score_BN is not None and found.score_BN.device != x.device:
                found.score_BN = found.score_BN.to(x.device)
            return found
        score = router.config.router
        if self.scored_by_first and not score.learns and not score.same_everywhere:
            raise ValueError(
                f"{self.names[place]} decides by the scores that {self.names[0]} computes, and its input comes from no "
                f"pass through that block: run the whole model, or begin at {self.names[0]}"
            )
        return None

    def _refuse_shape(self, x: Tensor, found: SpanPass) -> NoReturn:
        raise ValueError(
            f"a routed block got (images, tokens) = {tuple(x.shape[:2])}, and the pass that it continues has "
            f"{found.shape}: the batch or the sequence changed between two blocks that share scores, so route with a "
            "router that shares none, such as 'linear', or keep all images and tokens between them"
        )

    def decided(
        self, x_BND: Tensor, shared: SpanPass, place: int, router: Router, tokens: TokenMarks | TokenGroups
    ) -> Routing | None:
        """Return a block's decision if the span knows it, or makes it among the tokens kept before; else None.

        Args:
            x_BND: All tokens, or the rows that the previous block passed on.
        """
        joins = router.config.joins
        if shared.rows is not None and not joins:
            return shared.rows.routing
        if shared.trains and recomputing() and not (shared.score_BN is not None and shared.score_BN.requires_grad):
            raise RuntimeError(
                "reentrant gradient checkpointing loses the gradient of a score that blocks share: checkpoint with "
                "use_reentrant=False, or set router.shared=False"
            )
        if not self._reuses(router):
            return None
        known = self._same_rule(shared, place, router, x_BND.device, tokens)
        if known is not None or not joins:
            return known
        earlier = self.before(shared, place, x_BND.device)
        if earlier is None:
            return None
        # Shared scores do not learn, and a recomputed segment decides nothing.
        with torch.no_grad():
            rows_BKD = gather(x_BND, earlier) if shared.rows is None else x_BND
            narrowed: Routing = router(rows_BKD, None, tokens, earlier)
        return narrowed

    def remember(
        self, routing: Routing, shared: SpanPass, place: int, router: Router, tokens: TokenMarks | TokenGroups
    ) -> None:
        """Keep a block's decision, and the scores if it is the first to compute them, for the blocks after it."""
        if shared.score_BN is None and self.scored_by_first:
            shared.score_BN = routing.score_BN
            learns = router.config.router.learns
            shared.trains = learns and any(weight.requires_grad for weight in router.parameters())
        if self._reuses(router):
            rule = router.rule
            shared.decisions[place] = Decision(rule.config, rule.capacity, tokens, routing)

    def before(self, shared: SpanPass, place: int, device: torch.device) -> Routing | None:
        """Return the decision of the block before, if skipped tokens joined others in it; None for all tokens."""
        # A block in between may have been removed from the model.
        number = max((number for number in shared.decisions if number < place), default=-1)
        if number < 0 or shared.decisions[number].routing.joined.slot_BN is None:
            return None
        return shared.decisions[number].routing.to(device)

    def take_rows(self, x: Tensor, shared: SpanPass, router: Router) -> tuple[Tensor, Rows | None]:
        """Return a block's input, and the rows that it is if the block can run on those passed on; else all tokens."""
        rows = shared.rows
        if rows is None or rows.serves(router):
            return x, rows
        shared.rows = None
        return rows.write_back(x), None

    def leave(self, y: Tensor, shared: SpanPass, rows: Rows, router: Router, state: InSpan) -> Tensor:
        """Return all tokens after a block (B, N, D), or its rows if the next block takes them."""
        shared.busy = False
        if state.passes_rows and shared.unobserved and rows.shrinks and router.shares_decisions:
            if rows.router is None:
                rows.router = router
            shared.rows = rows
            return y
        shared.rows = None
        y = rows.write_back(y)
        if state.place < self.last and not shared.unobserved:
            self.hand_on(shared, y)
        return y

    def _reuses(self, router: Router) -> bool:
        # Compilers merge equal calls themselves, and would guard on the identity of tensors. Whom a token joins depends
        # on the block that decides.
        return router.shares_decisions and (router.config.joins or not torch.compiler.is_compiling())

    def _same_rule(
        self, shared: SpanPass, place: int, router: Router, device: torch.device, tokens: TokenMarks | TokenGroups
    ) -> Routing | None:
        """Return the block's earlier decision, or that of a block before it by the same rule on the same tokens."""
        rule = router.rule
        for number in range(place, -1, -1):
            made = shared.decisions.get(number)
            if made is None or made.config is not rule.config or made.capacity != rule.capacity:
                continue
            if rule.config.joins:
                return made.routing.to(device)
            if made.routing.kept.index_BK.device == device and all(a is b for a, b in zip(made.tokens, tokens)):
                return made.routing
        return None
