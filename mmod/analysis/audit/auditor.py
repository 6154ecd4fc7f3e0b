"""What an audit does with a batch: judge it as it was learned, then with every other choice of tokens.

Axes: B images, N tokens, D channels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from mmod.analysis.audit.across import Counter
from mmod.analysis.audit.choices import RANDOM, Choice, Kept, Place
from mmod.analysis.audit.influence import InfluenceCounts
from mmod.analysis.audit.oracle import TokenValues
from mmod.analysis.audit.reference import Reference, consult
from mmod.analysis.audit.replace import free_tokens, keep_best, only_free, replaced_decisions
from mmod.analysis.audit.result import LEARNED
from mmod.analysis.audit.strata import Outcomes
from mmod.analysis.statistics import Values
from mmod.model import routed_blocks
from mmod.routing import Routing

__all__ = ["Auditor", "Judge", "Shift"]

Shift = Callable[[Any, range], Any]
"""From a batch and the numbers of its images to one of other images of the same kind."""

# In the place of a shift: what another model made of the images.
_BESIDE = "beside"
# Attributes that count for themselves.
_PARTS = ("positions", "across", "influence", "worth")

Judge = Callable[[nn.Module, Any], tuple[Tensor, Tensor]]
"""Runs a model on a batch, once, and returns the loss and the accuracy in [0, 1] of each image or sample, (B,) each."""


class _Seen(NamedTuple):
    """A batch that was judged as learned, and what is known of it."""

    batch: Any
    learned: dict[str, Routing]
    free: dict[str, Tensor]
    partners: dict[str, Kept]
    images: range
    reference: Reference | None = None


class Auditor:
    """Judges batches with one choice of tokens after another.

    Args:
        model: A routed model in evaluation.
        judge: Runs it on a batch.
        made: The choices by name.
        draws: Random choices for each image.
        grid: Rows and columns of the tokens that may be skipped, None to ask the model.
        shifts: Names to functions that return a batch changed, given it and the numbers of its images.
        beside: Other models that are judged on the same batches, by name.
        reference: A dense model that is judged first.

    Attributes:
        at: Which batch is judged, for messages.
        positions: What the model keeps at each position.
        across: How the decisions that were judged hang together.
        influence: What is kept where content is moved.
        worth: What single tokens were worth.
    """

    def __init__(
        self, model: nn.Module, judge: Judge, made: Mapping[str, Choice], draws: int, grid: tuple[int, int] | None,
        shifts: Mapping[str, Shift], beside: Mapping[str, nn.Module], reference: nn.Module | None,
    ) -> None:  # fmt: skip
        self.model = model
        self.judge = judge
        self.made = made
        self.draws = draws
        self.shifts = shifts
        self.beside = beside
        self.reference = reference
        self.given_grid = grid
        self.grid = grid or getattr(getattr(model, "patch_embed", None), "grid_size", None)
        self.at = "the first batch"
        self.blocks = routed_blocks(model)
        self.positions, self.across = Counter(list(self.blocks)), Counter(list(self.blocks))
        self.influence, self.worth = InfluenceCounts(), TokenValues()
        # By the name of a set, "" for the audited one: what was decided on its last image, and how many there were.
        self._last: dict[str, dict[str, Kept]] = {}
        self._images: dict[str, int] = {}
        # Loss and accuracy by the names of choice and of shift or set, batch by batch.
        self._outcomes: dict[tuple[str, str], list[tuple[Values, Values]]] = {}

    def learn(self, batch: Any) -> None:
        """Count what the model keeps at each position.

        Args:
            batch: A batch.
        """
        _, _, learned = self._as_learned(batch)
        self.positions.add({name: routing.keep_BN for name, routing in learned.items()}, self._free(learned))

    def judge_batch(
        self, batch: Any, kinds: Mapping[str, ArrayLike], *, leave_one_out: bool = False
    ) -> tuple[int, Tensor | None]:
        """Judge a batch with every choice of tokens.

        Args:
            batch: A batch.
            kinds: What is known of its tokens.
            leave_one_out: Whether to find out what each of its tokens is worth.

        Returns:
            Number of its images, and the loss (B,) of the dense model on each, None without one.
        """
        seen, loss_B = self._see(batch)
        dense = self.reference
        if dense is not None:
            consulted = consult(dense, lambda: self._outcome(dense, batch)[0], seen.learned, self.made)
            seen = seen._replace(reference=consulted)
        self.across.add({name: routing.keep_BN for name, routing in seen.learned.items()}, seen.free, kinds)
        self._move(seen)
        for name, choice in self.made.items():
            self._note((name, ""), *self._judge(seen, choice))
        if leave_one_out:
            judged = partial(self._loss_of, seen)
            # What a block of the span before has dropped is not there to choose.
            free = {name: own & (seen.learned[name].score_BN > -torch.inf) for name, own in seen.free.items()}
            self.worth.add(judged, loss_B, seen.learned, free, self.made[RANDOM])
        for name, shift in self.shifts.items():
            shifted, _ = self._see(shift(batch, seen.images), name, seen.partners)
            self._note((RANDOM, name), *self._judge(shifted, self.made[RANDOM]))
        for name, other in self.beside.items():
            self._note((name, _BESIDE), *self._outcome(other, batch))
        self._images[""] = seen.images.stop
        return len(seen.images), None if seen.reference is None else seen.reference.loss_B

    def judge_other(self, name: str, batch: Any) -> None:
        """Judge a batch of another set, as learned and with the random choice.

        Args:
            name: Name of the set.
            batch: A batch.
        """
        seen, _ = self._see(batch, name, of=name)
        self._note((RANDOM, name), *self._judge(seen, self.made[RANDOM]))
        self._images[name] = seen.images.stop

    def state(self) -> dict[str, Any]:
        """Return what was found so far as plain values and arrays."""
        last = {
            of: {
                name: [own.cpu().numpy() for own in (kept.keep_BF, kept.score_BF.float())]
                for name, kept in seen.items()
            }
            for of, seen in self._last.items()
        }
        outcomes = [[*names, *map(np.concatenate, zip(*own))] for names, own in self._outcomes.items()]
        parts = {name: getattr(self, name).state() for name in _PARTS}
        return {"images": self._images, "last": last, "outcomes": outcomes, **parts}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what was found.

        Args:
            state: As `state` returns it.
        """
        self._images = state["images"]
        self._last = {
            of: {name: Kept(*map(torch.from_numpy, own)) for name, own in seen.items()}
            for of, seen in state["last"].items()
        }
        self._outcomes = {(choice, shift): [(loss, right)] for choice, shift, loss, right in state["outcomes"]}
        for name in _PARTS:
            getattr(self, name).restore(state[name])

    def identity(self, first: Any) -> dict[str, Any]:
        """Return what decides what is found, as plain values.

        Args:
            first: The first batch, by whose loss model and data are known; None where there is none.
        """
        models = {"beside": self.beside, "reference": {} if self.reference is None else {"": self.reference}}
        losses: dict[str, Any] = {"model and data": None}
        if first is not None:
            losses["model and data"] = _mean_loss(self._as_learned(first)[0])
            for part, own in models.items():
                losses[part] = {name: _mean_loss(self._outcome(model, first)[0]) for name, model in own.items()}
        names = {"conditions": list(self.made), "shifts": list(self.shifts)}
        return names | {"draws": self.draws, "grid": self.given_grid and list(self.given_grid)} | losses

    def outcomes(self, choice: str, shift: str = "") -> tuple[Values, Values]:
        """Return accuracy and loss of each image with a choice of tokens.

        Args:
            choice: `LEARNED`, or the name of another one.
            shift: Name of a shift or of another set, for which there are the learned and the random choice; "" for the
                images as they are.

        Raises:
            ValueError: If there were fewer than two images.
        """
        images = self._images.get("", 0)
        if images < 2:
            raise ValueError(f"an audit needs two images or more, got {images}")
        loss_I, accuracy_I = (np.concatenate(own) for own in zip(*self._outcomes[choice, shift]))
        return accuracy_I, loss_I

    def against_random(self, shift: str = "") -> Outcomes:
        """Return the outcomes of the learned and the random choice.

        Args:
            shift: As for `outcomes`.
        """
        return Outcomes(*self.outcomes(LEARNED, shift), *self.outcomes(RANDOM, shift))

    def against(self, other: str) -> Outcomes:
        """Return the outcomes of the learned choice and of another model.

        Args:
            other: Its name.
        """
        return Outcomes(*self.outcomes(LEARNED), *self.outcomes(other, _BESIDE))

    def _note(self, name: tuple[str, str], loss_B: Tensor, accuracy_B: Tensor) -> None:
        both = (loss_B.double().cpu().numpy(), accuracy_B.double().cpu().numpy())
        self._outcomes.setdefault(name, []).append(both)

    def _see(
        self, batch: Any, shift: str = "", partners: dict[str, Kept] | None = None, of: str = ""
    ) -> tuple[_Seen, Tensor]:
        """Judge a batch of a set as it was learned, note what came out, and return what is known of it and its loss."""
        loss_B, accuracy_B, learned = self._as_learned(batch)
        self._note((LEARNED, shift), loss_B, accuracy_B)
        free = self._free(learned)
        start = self._images.get(of, 0)
        partners = partners or self._partners(learned, free, self._last.setdefault(of, {}))
        return _Seen(batch, learned, free, partners, range(start, start + len(loss_B))), loss_B

    def _move(self, seen: _Seen) -> None:
        """Count what is kept of a batch whose content is moved, in decisions on all patches of a grid."""
        grids = {
            name: grid
            for name, free_BN in seen.free.items()
            if (grid := self._grid(free_BN)) is not None and bool((free_BN.sum(1) == grid[0] * grid[1]).all())
        }
        grid = next(iter(grids.values()), None)

        def decide(batch: Any) -> dict[str, Tensor]:
            learned = self._as_learned(batch)[2]
            return {name: only_free(learned[name].keep_BN, seen.free[name]) for name in grids if grids[name] == grid}

        if grid is not None:
            self.influence.add(seen.batch, decide, grid, seen.images)

    def _judge(self, seen: _Seen, choice: Choice) -> list[Tensor]:
        """Return loss and accuracy with another choice of tokens, the mean over draws where it is random."""
        draws = range(self.draws if choice.family == "random" else 1)
        judged = [self._replaced(seen, choice, draw) for draw in draws]
        return [torch.stack(own).double().mean(0) for own in zip(*judged)]

    def _loss_of(self, seen: _Seen, choice: Choice) -> Tensor:
        return self._replaced(seen, choice)[0]

    def _as_learned(self, batch: Any) -> tuple[Tensor, Tensor, dict[str, Routing]]:
        """Judge a batch as it was learned, and return the decision of each router that was asked."""
        for leaf in tree_leaves(batch):
            if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.ndim:
                # A sum is finite where all numbers are.
                self._check_finite("the sum of the inputs", leaf.flatten(1).double().sum(1) if leaf.ndim > 1 else leaf)
        learned: dict[str, Routing] = {}

        def record(name: str, x_BND: Tensor, routing: Routing, left_BN: Tensor | None) -> None:
            if name in learned:
                raise ValueError(f"{name} decided twice on a batch: `judge` must run the model once")
            learned[name] = routing

        with replaced_decisions(self.model, record):
            loss_B, accuracy_B = self._outcome(self.model, batch)
        if not learned:
            raise ValueError(
                "no router of the model decided: `judge` runs another model, or a compiled one. Give the model itself"
            )
        for name, routing in learned.items():
            if not len(loss_B) == len(accuracy_B) == len(routing.index_BK):
                raise ValueError(
                    f"`judge` returned losses of {len(loss_B)} and accuracies of {len(accuracy_B)} images, and {name} "
                    f"decided on {len(routing.index_BK)}: each must have its own"
                )
        return loss_B, accuracy_B, learned

    def _outcome(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        """Judge a batch, and raise unless all losses and accuracies are finite."""
        loss_B, accuracy_B = self.judge(model, batch)
        self._check_finite("loss", loss_B)
        self._check_finite("accuracy", accuracy_B)
        return loss_B, accuracy_B

    def _check_finite(self, what: str, value_B: Tensor) -> None:
        """Raise where the value of a sample is not finite, naming the first such one."""
        if not bool(value_B.isfinite().all()):
            sample = int(value_B.isfinite().int().argmin())
            raise ValueError(f"{what} of sample {sample} in {self.at} must be finite, got {float(value_B[sample])}")

    def _free(self, learned: Mapping[str, Routing]) -> dict[str, Tensor]:
        """Return where a token may be skipped in each decision; raise where a grid of the user's fits none."""
        free = {name: free_tokens(routing, self.blocks[name].router.prefix) for name, routing in learned.items()}
        tokens = sorted({int(free_BN.sum(1).max()) for free_BN in free.values()})
        if self.given_grid is not None and self.given_grid[0] * self.given_grid[1] not in tokens:
            raise ValueError(
                f"grid={self.given_grid} must have as many places as tokens may be skipped, "
                f"{' or '.join(map(str, tokens))}: give rows and columns of that many patches"
            )
        return free

    def _replaced(self, seen: _Seen, choice: Choice, draw: int = 0) -> tuple[Tensor, Tensor]:
        """Judge a batch with another choice of tokens."""

        def replace(name: str, x_BND: Tensor, routing: Routing, left_BN: Tensor | None) -> Routing:
            frequency_F = self.positions.frequency(name, x_BND.shape[1]).to(x_BND.device)
            learned, free_BN = seen.learned[name], seen.free[name]
            dense = seen.reference
            place = Place(
                name, x_BND, learned, free_BN, seen.partners[name], seen.images, frequency_F,
                self._grid(free_BN) or (1, int(free_BN.sum(1).max())), dense and dense.attention.get(name),
                dense and dense.entropy_BN, draw,
            )  # fmt: skip
            return keep_best(choice.rank(place), learned, routing, self.blocks[name].router, left_BN)

        with replaced_decisions(self.model, replace):
            return self._outcome(self.model, seen.batch)

    def _grid(self, free_BN: Tensor) -> tuple[int, int] | None:
        """Return rows and columns of the tokens that may be skipped, a square if nobody says; None where none fit."""
        tokens = int(free_BN.sum(1).max())
        if self.grid is not None and self.grid[0] * self.grid[1] == tokens:
            return self.grid
        side = round(tokens**0.5)
        return (side, side) if side * side == tokens else None

    def _partners(
        self, learned: Mapping[str, Routing], free: Mapping[str, Tensor], last: dict[str, Kept]
    ) -> dict[str, Kept]:
        """Return what was decided on the image before each; the first image takes the one after it."""
        partners: dict[str, Kept] = {}
        for name, routing in learned.items():
            kept = Kept(only_free(routing.keep_BN, free[name]), only_free(routing.score_BN, free[name]))
            before = last.get(name, Kept(*(own[1:2] if len(own) > 1 else own for own in kept)))
            last[name] = Kept(*(own[-1:].clone() for own in kept))
            before = Kept(*(own.to(kept.keep_BF.device) for own in before))
            fits = before.keep_BF.shape[1] == kept.keep_BF.shape[1]
            partners[name] = Kept(*(torch.cat([b, k[:-1]]) for b, k in zip(before, kept))) if fits else before
        return partners


def _mean_loss(loss_B: Tensor) -> str:
    return f"{float(loss_B.double().mean()):.6e}"
