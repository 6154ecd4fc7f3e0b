"""Spans of routed blocks: runs of consecutive ones that share scores, decisions and rows.

The dense block in front belongs to a span whose blocks read its importance. A span of blocks is not
`language.tokens="span"`, which is about runs of image tokens.

State belongs to the tensors of a forward pass. What modules of a run share is found by the tensor that one module
returned and the next one got. A thread may therefore have several batches between two modules: a pipeline, or a user's
own loop. In a call in which nothing reads the tokens between modules, their order tells it.

Axes: B images or samples, N tokens.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, NoReturn, Protocol, TypeVar

import torch
from torch import Tensor

from mmod.blocks.passes import UNFINISHED, Pass, StackCall, StackCalls, recomputing
from mmod.blocks.rows import Rows, gather
from mmod.routing import Router, Routing, Rule, TokenGroups, TokenMarks
from mmod.threads import PerThread

AnyPass = TypeVar("AnyPass", bound=Pass)


class _Remembered(NamedTuple):
    """A tensor between two modules, and the pass that it belongs to.

    Args:
        tensor: The tensor, or what it is a view of.
        address: Where the values of `tensor` lie.
        look: See `_look`.
    """

    tensor: weakref.ref[Tensor]
    address: int
    look: tuple[int, ...]
    found: Any


class Passes(Generic[AnyPass]):
    """Finds the forward pass that an input of one of several consecutive modules belongs to.

    - The first module begins a pass. A later one finds it by its input: the tensor that the module before returned.
    - Code between two modules may make a new tensor (a hook, a move to another device), and compilers cannot compare
      tensors. The input then belongs to the only unfinished pass of the running call, or outside calls to the only
      one of the thread. If there are several, the module raises instead of guessing.
    - A pass is unfinished until its last module is entered, or the call of the model in which it runs ends. After a
      failure in a module, it goes on only if that module gets the same tensor again.
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
        # As a fact of its own: compilers guard on numbers that they read, and runs of other lengths share a graph.
        self.goes_on = last > 0
        self._by_address: dict[int, _Remembered] = {}
        # The pass that a backward pass recomputes in a thread, with the number of that backward pass.
        self._recomputed: PerThread[list[tuple[int, AnyPass]]] = PerThread(list)

    def __getstate__(self) -> dict[str, Any]:
        """Leave the passes out of copies and pickles."""
        # A copy's tensors lie elsewhere, and a weak reference cannot be pickled.
        return {**vars(self), "_by_address": {}}

    def begin(self, x: Tensor) -> AnyPass:
        """Begin a pass with the input of the first module."""
        started = self.make()
        started.owner = self
        started.shape = tuple(x.shape[:2])
        calls = self.calls.value
        started.grid = calls.take_grid()
        call, host_alone = calls.current()
        if not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != call.task:
            # A part of the model is recomputed.
            self._recomputed.value[:] = [(torch._C._current_graph_task_id(), started)]
            look = _look(x)
            match = self._by_address.get(look[0])
            if match is not None and match.look == look:
                started.grid = match.found.grid
            return started
        started.by_host = host_alone and call.outer is not None
        started.unobserved = host_alone and call.unobserved
        if started.unobserved and call.read_blocks is not None:
            # Known only now: hosts decide what to collect inside their forward.
            read = call.read_blocks()
            started.unobserved = read is not None
            started.read_blocks = () if read is None else read
        if started.unobserved:
            call.latest = started
            return started
        if call.outer is None:
            # Outside calls nothing says when a pass was given up, so the oldest are forgotten.
            del call.passes[: 1 - UNFINISHED]
        if self.goes_on:
            call.passes.append(started)
        if started.grid is not None:
            # A recomputed first block finds the grid by its input.
            self.hand_on(started, x)
        return started

    def find(self, x: Tensor, place: int | None) -> AnyPass | None:
        """Return the pass that the input of a later module belongs to; None if no pass reached it.

        Args:
            place: The module's place; None in a compiled call of the model, whose modules run in order: a graph that
                reads no place serves several modules.

        Raises:
            RuntimeError: The input may belong to several passes, or is recomputed and was never seen.
        """
        call = self.calls.value.running
        latest: Any = call.latest
        if latest is not None and latest.owner is self and _can_reach(latest, place):
            # Nothing reads the tokens between modules: their order tells the pass, and no tensor is remembered.
            if place is not None:
                latest.place = place
            following: AnyPass = latest
            return following
        found = None
        if not torch.compiler.is_compiling():
            found = self._pass_of(x)
            if torch._C._current_graph_task_id() != call.task:
                return self._find_recomputed(found)
        if found is None:
            call, _ = self.calls.value.current()
            found = self._only_unfinished(x, place, call)
            if found is None:
                return None
            if torch.compiler.is_compiling() or not x.is_inference():
                # To be found again where it is recomputed. A buffer of inference mode may hold another batch later.
                self.hand_on(found, x)
        if place is not None:
            found.place = place
            if place >= self.last and call.outer is None:
                call.passes = [other for other in call.passes if other is not found]
        return found

    def hand_on(self, current: AnyPass, y: Tensor) -> None:
        """Remember that a tensor between two modules belongs to a pass."""
        if torch.compiler.is_compiling():
            return
        look = _look(y)
        address = look[0]
        # Wrapped tensors and those on meta have no address to be told by.
        if not address:
            return
        remembered = self._by_address

        def forget(tensor: weakref.ref[Tensor]) -> None:
            # Another tensor may lie there by now.
            if address in remembered and remembered[address].tensor is tensor:
                del remembered[address]

        # FSDP2 gives a block a view of the tensor that checkpointing keeps.
        kept = y if y._base is None else y._base
        remembered[address] = _Remembered(weakref.ref(kept, forget), kept.data_ptr(), look, current)

    def follow(self, x: Tensor, y: Tensor) -> None:
        """Remember that a tensor belongs to the pass of another one, if that is known, whose values it rearranges."""
        found = None if torch.compiler.is_compiling() else self._pass_of(x)
        if found is not None:
            self.hand_on(found, y)

    def _pass_of(self, x: Tensor) -> Any:
        """Return the pass that a tensor is remembered to belong to, or None."""
        look = _look(x)
        match = self._by_address.get(look[0])
        tensor = None if match is None or match.look != look else match.tensor()
        # Memory may be given to another tensor while the first one lives.
        if match is None or tensor is None or tensor.data_ptr() != match.address:
            return None
        return match.found

    def _only_unfinished(self, x: Tensor, place: int | None, call: StackCall) -> Any:
        """Return the only unfinished pass that can go on at a place: of the running call, or of one around it."""
        level: StackCall | None = call
        while level is not None:
            reachable = [other for other in level.passes if other.owner is self and _can_reach(other, place)]
            if len(reachable) > 1:
                # Batches of another size cannot be meant.
                reachable = [other for other in reachable if other.shape == x.shape[:2]]
            if len(reachable) > 1:
                # Passes that were given up should raise this error only once.
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
        """Return the pass that the running backward pass recomputes: the one found by the input, or the last such."""
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


def _can_reach(unfinished: Pass, place: int | None) -> bool:
    """Return whether a pass may enter a module at a place next."""
    return not unfinished.busy and (place is None or unfinished.place < place)


def _look(x: Tensor) -> tuple[int, ...]:
    """Return what a tensor is told by: where its values lie, how often they were changed in place, and their layout.

    The first number is 0 for a tensor without values of its own.
    """
    if type(x) is not Tensor or x.is_meta or torch._C._functorch.is_functorch_wrapped_tensor(x):
        return (0,)
    # Tensors of inference mode do not count changes.
    version = 0 if x.is_inference() else x._version
    return (x.data_ptr(), version, *x.shape[:2], *x.stride())


class Decision(NamedTuple):
    """A decision of one block of a span, and what it was made by."""

    rule: Rule
    tokens: TokenMarks | TokenGroups
    routing: Routing


class InSpan(Protocol):
    """What a span reads of a block's state.

    Compilers guard on every number that they read. A graph that reads `place`, or the `number` in the stack, serves one
    block; one that reads only `begins` and `ends` serves all blocks between the first and the last.
    """

    place: int
    number: int
    begins: bool
    ends: bool
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

    def enter(self, x: Tensor, state: InSpan, router: Router, training: bool) -> SpanPass | None:
        """Return the pass of a block's input (B, N, D), or of rows that were passed on (B, K, D); None without one.

        The first block begins it.

        Raises:
            ValueError: The first block, whose scores this block reads, was not run; or the shape changed since.
            RuntimeError: See `Passes.find`.
        """
        if self.training_only and not training:
            return None
        found: SpanPass | None
        compiling = torch.compiler.is_compiling()
        if state.begins:
            found = self.begin(x)
        else:
            # Outside calls of the model, where batches may be in flight in stages, places tell them apart.
            in_order = compiling and self.calls.value.running.outer is not None
            found = self.find(x, None if in_order else state.place)
            # An unobserved pass may hand on rows instead of all tokens.
            watched = found is not None and not found.unobserved and not compiling
            if found is not None and watched and found.shape != x.shape[:2]:
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
                f"{self.names[state.place]} decides by the scores that {self.names[0]} computes, and its input comes "
                f"from no pass through that block: run the whole model, or begin at {self.names[0]}"
            )
        return None

    def _refuse_shape(self, x: Tensor, found: SpanPass) -> NoReturn:
        raise ValueError(
            f"a routed block got (images, tokens) = {tuple(x.shape[:2])}, and the pass that it continues has "
            f"{found.shape}: the batch or the sequence changed between the two blocks, which share scores. Keep all "
            "images and tokens between them, or route with a router that shares none, such as 'linear'"
        )

    def decided(
        self, x_BND: Tensor, shared: SpanPass, state: InSpan, router: Router, tokens: TokenMarks | TokenGroups
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
        known = self._same_rule(shared, state.place, router, x_BND.device, tokens)
        if known is not None or not joins:
            return known
        earlier = self.before(shared, state.place, x_BND.device)
        if earlier is None:
            return None
        # Scores that are shared where tokens join never learn.
        with torch.no_grad():
            rows_BKD = gather(x_BND, earlier) if shared.rows is None else x_BND
            narrowed: Routing = router(rows_BKD, None, tokens, earlier)
        return narrowed

    def remember(
        self, routing: Routing, shared: SpanPass, state: InSpan, router: Router, tokens: TokenMarks | TokenGroups
    ) -> None:
        """Keep a block's decision, and the scores if it is the first to compute them, for the blocks after it."""
        if shared.score_BN is None and self.scored_by_first:
            shared.score_BN = routing.score_BN
            learns = router.config.router.learns
            shared.trains = learns and any(weight.requires_grad for weight in router.parameters())
        if self._reuses(router):
            shared.decisions[state.place] = Decision(router.rule, tokens, routing)

    def before(self, shared: SpanPass, place: int, device: torch.device) -> Routing | None:
        """Return the decision of the block before, if skipped tokens joined others in it; None for all tokens."""
        # A block in between may have been removed from the model.
        for number in range(place - 1, -1, -1):
            if number in shared.decisions:
                routing = shared.decisions[number].routing
                return None if routing.joined.slot_BN is None else routing.to(device)
        return None

    def take_rows(self, x: Tensor, shared: SpanPass, router: Router) -> tuple[Tensor, Rows | None]:
        """Return x and the rows passed on, if the block can run on them; else all tokens and None."""
        rows = shared.rows
        if rows is None or rows.serves(router.rule):
            return x, rows
        shared.rows = None
        return rows.write_back(x), None

    def leave(self, y: Tensor, shared: SpanPass, rows: Rows, router: Router, state: InSpan) -> Tensor:
        """Return all tokens after a block (B, N, D), or its rows if the next block takes them."""
        shared.busy = False
        # The block's number is read only where there are some to compare, see `InSpan`.
        is_read = bool(shared.read_blocks) and state.number in shared.read_blocks
        passes_on = state.passes_rows and shared.unobserved and not is_read
        if passes_on and rows.shrinks and router.shares_decisions:
            if rows.rule is None:
                rows.rule = router.rule
            shared.rows = rows
            return y
        shared.rows = None
        y = rows.write_back(y)
        if not state.ends and not shared.unobserved:
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
            if made is None or not made.rule.matches(rule):
                continue
            if rule.config.joins:
                return made.routing.to(device)
            if made.routing.kept.index_BK.device == device and all(a is b for a, b in zip(made.tokens, tokens)):
                return made.routing
        return None
