"""Evaluation of a batch in an audit: with the learned decisions, then with every counterfactual choice.

Axes: B images, N tokens, D channels."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from numpy.typing import ArrayLike
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from mmod.analysis.audit.across import Counter
from mmod.analysis.audit.choices import RANDOM, Choice, DecisionContext, FreeDecision
from mmod.analysis.audit.information import InfluenceCounts
from mmod.analysis.audit.oracle import TokenValues
from mmod.analysis.audit.reference import Reference, consult
from mmod.analysis.audit.replace import free_tokens, keep_best, only_free, replaced_decisions
from mmod.analysis.audit.result import LEARNED
from mmod.analysis.audit.strata import OutcomePair, Outcomes, Strata
from mmod.model import routed_blocks
from mmod.routing import Routing

Shift = Callable[[Any, range], Any]
"""Maps a batch and the indices of its images to a changed batch."""

# Used in place of a shift's name: outcomes of another model.
_BESIDE = "beside"

Judge = Callable[[nn.Module, Any], tuple[Tensor, Tensor]]
"""Runs a model on a batch, once, and returns the loss and the accuracy in [0, 1] of each image or sample, (B,) each."""


class _EvaluatedBatch(NamedTuple):
    """A batch evaluated with the learned decisions, and its decisions."""

    batch: Any
    learned: dict[str, Routing]
    free: dict[str, Tensor]
    partners: dict[str, FreeDecision]
    images: range
    reference: Reference | None = None


@dataclass
class Counts:
    """Results of the batches so far; their size does not grow with the images but for losses and accuracies."""

    positions: Counter
    across: Counter
    influence: InfluenceCounts = field(default_factory=InfluenceCounts)
    worth: TokenValues = field(default_factory=TokenValues)
    strata: Strata = field(default_factory=Strata)
    # By name of a set ("" for the audited one): its number of images, and the decisions on its last image.
    images: dict[str, int] = field(default_factory=dict)
    last: dict[str, dict[str, FreeDecision]] = field(default_factory=dict)
    # By names of a shift or set, and of a choice.
    outcomes: dict[str, dict[str, Outcomes]] = field(default_factory=dict)


@dataclass
class Auditor:
    """Evaluates batches of a routed model with all choices of tokens, and models beside it on the same batches."""

    model: nn.Module
    judge: Judge
    made: Mapping[str, Choice]
    draws: int
    fixed_grid: tuple[int, int] | None
    shifts: Mapping[str, Shift]
    beside: Mapping[str, nn.Module]
    reference: nn.Module | None

    def __post_init__(self) -> None:
        self.grid = self.fixed_grid or getattr(getattr(self.model, "patch_embed", None), "grid_size", None)
        # The current batch, in messages.
        self.at = "the first batch"
        self.blocks = routed_blocks(self.model)
        self.counts = Counts(Counter(list(self.blocks)), Counter(list(self.blocks)))

    def learn(self, number: int, batch: Any) -> None:
        """Count kept tokens by position."""
        _, _, learned = self._as_learned(batch)
        self.counts.positions.add({name: routing.keep_BN for name, routing in learned.items()}, self._free(learned))

    def judge_batch(
        self, batch: Any, kinds: Mapping[str, ArrayLike], *, leave_one_out: bool = False
    ) -> tuple[int, Tensor | None]:
        """Evaluate a batch with every choice of tokens."""
        evaluated, loss_B = self._see(batch)
        dense = self.reference
        if dense is not None:
            consulted = consult(dense, lambda: self._outcome(dense, batch)[0], evaluated.learned, self.made)
            evaluated = evaluated._replace(reference=consulted)
        self.counts.across.add(
            {name: routing.keep_BN for name, routing in evaluated.learned.items()}, evaluated.free, kinds
        )
        self._move(evaluated)
        for name, choice in self.made.items():
            self._note(name, "", *self._judge(evaluated, choice))
        if leave_one_out:
            # Tokens that an earlier block of the span dropped cannot be chosen.
            free = {
                name: free_BN & (evaluated.learned[name].score_BN > -torch.inf)
                for name, free_BN in evaluated.free.items()
            }
            self.counts.worth.add(
                lambda choice: self._replaced(evaluated, choice)[0], loss_B, evaluated.learned, free, self.made[RANDOM]
            )
        for name, shift in self.shifts.items():
            shifted, _ = self._see(shift(batch, evaluated.images), name, evaluated.partners)
            self._note(RANDOM, name, *self._judge(shifted, self.made[RANDOM]))
        for name, other in self.beside.items():
            self._note(name, _BESIDE, *self._outcome(other, batch))
        self.counts.images[""] = evaluated.images.stop
        return len(evaluated.images), None if evaluated.reference is None else evaluated.reference.loss_B

    def judge_other(self, name: str, number: int, batch: Any) -> None:
        """Evaluate a batch of another set, with the learned and with the random choice."""
        evaluated, _ = self._see(batch, name, of=name)
        self._note(RANDOM, name, *self._judge(evaluated, self.made[RANDOM]))
        self.counts.images[name] = evaluated.images.stop

    def identity(self, first: Any) -> dict[str, Any]:
        """Return plain values that identify the audit: options, and losses of the first batch."""
        models = {"beside": self.beside, "reference": {} if self.reference is None else {"": self.reference}}
        losses: dict[str, Any] = {"model and data": None}
        if first is not None:
            losses["model and data"] = _mean_loss(self._as_learned(first)[0])
            for part, others in models.items():
                losses[part] = {name: _mean_loss(self._outcome(model, first)[0]) for name, model in others.items()}
        names = {"conditions": list(self.made), "shifts": list(self.shifts)}
        return names | {"draws": self.draws, "grid": self.fixed_grid and list(self.fixed_grid)} | losses

    def outcomes(self, choice: str, shift: str = "") -> Outcomes:
        """Return loss and accuracy of the images with a choice of tokens."""
        images = self.counts.images.get("", 0)
        if images < 2:
            raise ValueError(f"an audit needs two images or more, got {images}")
        return self.counts.outcomes[shift][choice]

    def against_random(self, shift: str = "") -> OutcomePair:
        """Return the outcomes of the learned and the random choice."""
        return self.outcomes(LEARNED, shift), self.outcomes(RANDOM, shift)

    def against(self, other: str) -> OutcomePair:
        """Return the outcomes of the learned choice and of another model."""
        return self.outcomes(LEARNED), self.outcomes(other, _BESIDE)

    def _note(self, choice: str, shift: str, loss_B: Tensor, accuracy_B: Tensor) -> None:
        self.counts.outcomes.setdefault(shift, {}).setdefault(choice, Outcomes()).add(loss_B, accuracy_B)

    def _see(
        self, batch: Any, shift: str = "", partners: dict[str, FreeDecision] | None = None, of: str = ""
    ) -> tuple[_EvaluatedBatch, Tensor]:
        """Evaluate a batch with the learned decisions, store the outcome, and return it with its loss."""
        loss_B, accuracy_B, learned = self._as_learned(batch)
        self._note(LEARNED, shift, loss_B, accuracy_B)
        free = self._free(learned)
        start = self.counts.images.get(of, 0)
        partners = partners or self._partners(learned, free, self.counts.last.setdefault(of, {}))
        return _EvaluatedBatch(batch, learned, free, partners, range(start, start + len(loss_B))), loss_B

    def _move(self, evaluated: _EvaluatedBatch) -> None:
        """Count kept tokens under moved content, for decisions on all patches of a grid."""
        grids = {
            name: grid
            for name, free_BN in evaluated.free.items()
            if (grid := self._grid(free_BN)) is not None and bool((free_BN.sum(1) == grid[0] * grid[1]).all())
        }
        grid = next(iter(grids.values()), None)

        def decide(batch: Any) -> dict[str, Tensor]:
            learned = self._as_learned(batch)[2]
            return {
                name: only_free(learned[name].keep_BN, evaluated.free[name]) for name in grids if grids[name] == grid
            }

        if grid is not None:
            self.counts.influence.add(evaluated.batch, decide, grid, evaluated.images)

    def _judge(self, evaluated: _EvaluatedBatch, choice: Choice) -> list[Tensor]:
        """Return loss and accuracy with a counterfactual choice, averaged over draws if it is random."""
        draws = range(self.draws if choice.family == "random" else 1)
        judged = [self._replaced(evaluated, choice, draw) for draw in draws]
        return [torch.stack(values).double().mean(0) for values in zip(*judged)]

    def _as_learned(self, batch: Any) -> tuple[Tensor, Tensor, dict[str, Routing]]:
        """Evaluate a batch with the learned decisions, and return loss, accuracy and decisions."""
        for leaf in tree_leaves(batch):
            if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.ndim:
                # A sum is not finite if any number is not.
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
                "no router of the model decided: `judge` runs another model, or a compiled one. Pass the model itself"
            )
        for name, routing in learned.items():
            if not len(loss_B) == len(accuracy_B) == len(routing.kept.index_BK):
                raise ValueError(
                    f"`judge` returned losses of {len(loss_B)} and accuracies of {len(accuracy_B)} images, and {name} "
                    f"decided on {len(routing.kept.index_BK)}: return one value per image"
                )
        return loss_B, accuracy_B, learned

    def _outcome(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        """Run the judge, and raise unless all losses and accuracies are finite."""
        loss_B, accuracy_B = self.judge(model, batch)
        self._check_finite("loss", loss_B)
        self._check_finite("accuracy", accuracy_B)
        return loss_B, accuracy_B

    def _check_finite(self, what: str, value_B: Tensor) -> None:
        """Raise a ValueError that names the first sample whose value is not finite."""
        if not bool(value_B.isfinite().all()):
            sample = int(value_B.isfinite().int().argmin())
            raise ValueError(f"{what} of sample {sample} in {self.at} must be finite, got {float(value_B[sample])}")

    def _free(self, learned: Mapping[str, Routing]) -> dict[str, Tensor]:
        """Return which tokens may be skipped, by decision; raise if the user's grid fits no decision."""
        free = {name: free_tokens(routing, self.blocks[name].router.prefix) for name, routing in learned.items()}
        tokens = sorted({int(free_BN.sum(1).max()) for free_BN in free.values()})
        if self.fixed_grid is not None and self.fixed_grid[0] * self.fixed_grid[1] not in tokens:
            raise ValueError(
                f"grid={self.fixed_grid} must have as many places as tokens may be skipped, "
                f"{' or '.join(map(str, tokens))}: pass rows and columns of that many patches"
            )
        return free

    def _replaced(self, evaluated: _EvaluatedBatch, choice: Choice, draw: int = 0) -> tuple[Tensor, Tensor]:
        def replace(name: str, x_BND: Tensor, routing: Routing, left_BN: Tensor | None) -> Routing:
            frequency_F = self.counts.positions.frequency(name, x_BND.shape[1]).to(x_BND.device)
            learned, free_BN = evaluated.learned[name], evaluated.free[name]
            dense = evaluated.reference
            place = DecisionContext(
                name, x_BND, learned, free_BN, evaluated.partners[name], evaluated.images, frequency_F,
                self._grid(free_BN) or (1, int(free_BN.sum(1).max())), dense and dense.attention.get(name),
                dense and dense.entropy_BN, draw,
            )  # fmt: skip
            return keep_best(choice.rank(place), learned, routing, self.blocks[name].router, left_BN)

        with replaced_decisions(self.model, replace):
            return self._outcome(self.model, evaluated.batch)

    def _grid(self, free_BN: Tensor) -> tuple[int, int] | None:
        """Return rows and columns of the tokens that may be skipped: the known grid, else a square, else None."""
        tokens = int(free_BN.sum(1).max())
        if self.grid is not None and self.grid[0] * self.grid[1] == tokens:
            return self.grid
        side = round(tokens**0.5)
        return (side, side) if side * side == tokens else None

    def _partners(
        self, learned: Mapping[str, Routing], free: Mapping[str, Tensor], last: dict[str, FreeDecision]
    ) -> dict[str, FreeDecision]:
        """Return the decisions on the previous image of every image; the first image takes the next one."""
        partners: dict[str, FreeDecision] = {}
        for name, routing in learned.items():
            kept = FreeDecision(only_free(routing.keep_BN, free[name]), only_free(routing.score_BN.float(), free[name]))
            before = last.get(
                name, FreeDecision(*(value_BF[1:2] if len(value_BF) > 1 else value_BF for value_BF in kept))
            )
            last[name] = FreeDecision(*(value_BF[-1:].clone() for value_BF in kept))
            before = FreeDecision(*(value_BF.to(kept.keep_BF.device) for value_BF in before))
            fits = before.keep_BF.shape[1] == kept.keep_BF.shape[1]
            partners[name] = FreeDecision(*(torch.cat([b, k[:-1]]) for b, k in zip(before, kept))) if fits else before
        return partners


def _mean_loss(loss_B: Tensor) -> str:
    return f"{float(loss_B.double().mean()):.6e}"
