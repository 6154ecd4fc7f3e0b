"""One model under several contexts: a batch with the learned decisions, and with those of each choice of tokens.

Axes: B images, N tokens, F tokens of an image that may be skipped, D channels."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from mmod.adapters import watch_grid
from mmod.analysis.audit.choices import LEARNED, RANDOM, Choice, DecisionContext, FreeDecision
from mmod.analysis.audit.information import KindCounts, check_shapes, rolled_twice
from mmod.analysis.audit.judges import Judge, LabelledBatch
from mmod.analysis.audit.oracle import worth_of
from mmod.analysis.audit.reference import Reference, consult
from mmod.analysis.audit.replace import free_tokens, keep_best, only_free, replaced_decisions
from mmod.analysis.audit.strata import DIFFICULTY, check_labels
from mmod.analysis.audit.tables import AUDITED, BatchTables, Mask, Moved, Outcomes, TokenKinds, Worth
from mmod.blocks import Grid
from mmod.config import AuditConfig
from mmod.io.store import fingerprint
from mmod.methods.route import routed_blocks
from mmod.routing import Routing
from mmod.values import brief

Shift = Callable[[Any, range], Any]
"""Maps a batch and the indices of its images to a changed batch."""
_Outcome = tuple[Tensor, Tensor]


class _Learned(NamedTuple):
    """A batch evaluated with the learned decisions; `partners` are decisions on the image before each image."""

    batch: Any
    outcome: _Outcome
    routings: dict[str, Routing]
    free: dict[str, Tensor]
    # Of this pass, as the model made it.
    grid: Grid | None
    images: range
    partners: dict[str, FreeDecision]
    last: dict[str, FreeDecision]
    reference: Reference | None = None

    @property
    def masks(self) -> dict[str, dict[str, Mask]]:
        """The rows of the batch in the table of decisions."""
        keep = {name: Mask.of(routing.keep_BN & self.free[name]) for name, routing in self.routings.items()}
        return {"keep": keep, "free": {name: Mask.of(free_BN) for name, free_BN in self.free.items()}}


@dataclass(frozen=True)
class Contexts:
    """What an audit evaluates a batch with: a routed model with every choice of tokens, and models beside it.

    Args:
        positions: How often each decision keeps a token by its position, from a pass of its own.
        at: The current batch, in messages.
    """

    model: nn.Module
    judge: Judge
    choices: Mapping[str, Choice]
    config: AuditConfig
    shifts: Mapping[str, Shift]
    beside: Mapping[str, nn.Module]
    reference: nn.Module | None
    positions: Mapping[str, KindCounts] = field(default_factory=dict)
    at: str = "the first batch"

    def identity(self, batch: Any) -> dict[str, Any]:
        """Return plain values that identify the audit: options, and the losses of each model on a batch."""
        config = self.config
        models = {f"beside.{name}": model for name, model in self.beside.items()}
        models["model and data"] = self.model
        if self.reference is not None:
            models["reference"] = self.reference
        return {
            "work": "audit",
            "conditions": list(self.choices),
            "shifts": list(self.shifts),
            "draws": config.draws,
            "grid": config.grid and list(config.grid),
            "leave_one_out": config.leave_one_out,
            **{name: fingerprint(self._outcome(model, batch)[0]) for name, model in models.items()},
        }

    def decided(self, labelled: LabelledBatch, previous: BatchTables | None) -> BatchTables:
        """Return the learned decisions on a batch alone."""
        learned = self._learned(labelled.batch, previous)
        return _tables(learned, previous, **learned.masks)

    def audited(self, labelled: LabelledBatch, previous: BatchTables | None) -> BatchTables:
        """Evaluate a batch with every choice of tokens and every shift, and with the other models."""
        batch, labels, token_kinds = labelled
        learned = self._learned(batch, previous)
        dense = self.reference
        if dense is not None:
            consulted = consult(dense, lambda: self._outcome(dense, batch)[0], learned.routings, self.choices)
            learned = learned._replace(reference=consulted)
            labels = {**labels, DIFFICULTY: consulted.loss_B.tolist()}
        check_labels(labels, len(learned.images), None if previous is None else previous.labels)
        check_shapes(token_kinds, learned.free)
        moved = self._moved(learned)
        outcomes = {AUDITED: self._outcomes(learned, self.choices)}
        worth = self._worth(learned) if _number(previous) < self.config.leave_one_out else None
        for name, shift in self.shifts.items():
            shifted = self._learned(shift(batch, learned.images), previous)
            outcomes[name] = self._outcomes(shifted, {RANDOM: self.choices[RANDOM]})
        beside = {name: _rows(self._outcome(other, batch)) for name, other in self.beside.items()}
        return _tables(
            learned,
            previous,
            **learned.masks,
            last=learned.last,
            outcomes=outcomes,
            beside=beside,
            labels=labels,
            kinds={fact: TokenKinds.of(names) for fact, names in token_kinds.items()},
            moved=moved,
            worth=worth,
        )

    def compared(self, labelled: LabelledBatch, previous: BatchTables | None) -> BatchTables:
        """Evaluate a batch of another set, with the learned and with the random choice."""
        learned = self._learned(labelled.batch, previous)
        outcomes = {AUDITED: self._outcomes(learned, {RANDOM: self.choices[RANDOM]})}
        return _tables(learned, previous, outcomes=outcomes)

    def _outcomes(self, learned: _Learned, choices: Mapping[str, Choice]) -> dict[str, Outcomes]:
        """Return the outcomes of a batch as learned, and with each choice, averaged over draws if it is random."""
        rows = {LEARNED: _rows(learned.outcome)}
        for name, choice in choices.items():
            draws = range(self.config.draws if choice.family == "random" else 1)
            drawn = zip(*(self._replaced(learned, choice, draw) for draw in draws))
            loss_B, accuracy_B = (torch.stack(values).double().mean(0) for values in drawn)
            rows[name] = _rows((loss_B, accuracy_B))
        return rows

    def _moved(self, learned: _Learned) -> Moved | None:
        """Return what is kept under moved content, of decisions on all patches of a grid; None without one."""
        grids: dict[str, tuple[int, int]] = {}
        for name, free_BN in learned.free.items():
            grid = self._grid(learned, free_BN)
            if grid is not None and bool((free_BN.sum(1) == math.prod(grid)).all()):
                grids[name] = grid
        if not grids:
            return None
        # Images are rolled by patches of one grid: that of the first decision.
        common = next(iter(grids.values()))
        keep = []
        for batch in rolled_twice(learned.batch, common, learned.images):
            _, routings, _ = self._decide(batch)
            names = [name for name, grid in grids.items() if grid == common]
            keep.append({name: Mask.of(only_free(routings[name].keep_BN, learned.free[name])) for name in names})
        return Moved(common, keep) if keep else None

    def _worth(self, learned: _Learned) -> Worth:
        free = {}
        for name, free_BN in learned.free.items():
            # Tokens that an earlier block of the span dropped cannot be chosen.
            free[name] = free_BN & (learned.routings[name].score_BN > -torch.inf)

        def loss_of(choice: Choice) -> Tensor:
            return self._replaced(learned, choice)[0]

        return worth_of(loss_of, learned.outcome[0], learned.routings, free, self.choices[RANDOM])

    def _learned(self, batch: Any, previous: BatchTables | None) -> _Learned:
        """Evaluate a batch with the learned decisions, which the contexts of the batch start from."""
        outcome, routings, grid = self._decide(batch)
        blocks = routed_blocks(self.model)
        free = {name: free_tokens(routing, blocks[name].router.prefix) for name, routing in routings.items()}
        tokens = sorted({int(free_BN.sum(1).max()) for free_BN in free.values()})
        wanted = self.config.grid
        if wanted is not None and math.prod(wanted) not in tokens:
            raise ValueError(
                f"grid={wanted} must have as many places as tokens may be skipped, {' or '.join(map(str, tokens))}: "
                "pass rows and columns of that many patches"
            )
        first = 0 if previous is None else previous.images.stop
        images = range(first, first + len(outcome[0]))
        partners, last = _partners(routings, free, {} if previous is None else previous.last)
        return _Learned(batch, outcome, routings, free, grid, images, partners, last)

    def _decide(self, batch: Any) -> tuple[_Outcome, dict[str, Routing], Grid | None]:
        """Run the model with its routers' decisions, and return outcome, decisions and the grid of patches."""
        for leaf in tree_leaves(batch):
            if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.ndim:
                # A sum is not finite if any number is not.
                sum_B = leaf.flatten(1).double().sum(1) if leaf.ndim > 1 else leaf
                self._check_finite("the sum of the inputs", sum_B)
        routings: dict[str, Routing] = {}

        def record(name: str, x_BND: Tensor, routing: Routing, left_BN: Tensor | None) -> None:
            if name in routings:
                raise ValueError(f"{name} decided twice on a batch: `judge` must run the model once")
            routings[name] = routing

        with replaced_decisions(self.model, record), watch_grid(self.model) as seen:
            loss_B, accuracy_B = self._outcome(self.model, batch)
        if not routings:
            raise ValueError(
                "no router of the model decided: `judge` runs another model, or a compiled one. Pass the model itself"
            )
        for name, routing in routings.items():
            if not len(loss_B) == len(accuracy_B) == len(routing.kept.index_BK):
                raise ValueError(
                    f"`judge` returned losses of {len(loss_B)} and accuracies of {len(accuracy_B)} images, and {name} "
                    f"decided on {len(routing.kept.index_BK)}: return one value per image"
                )
        return (loss_B, accuracy_B), routings, seen.grid

    def _replaced(self, learned: _Learned, choice: Choice, draw: int = 0) -> _Outcome:
        """Run the model with the tokens that a choice ranks highest in place of the learned ones."""
        dense = {} if learned.reference is None else learned.reference.tokens
        blocks = routed_blocks(self.model)

        def replace(name: str, x_BND: Tensor, routing: Routing, left_BN: Tensor | None) -> Routing:
            routings = learned.routings[name]
            free_BN = learned.free[name]
            context = DecisionContext(
                block=name,
                x_BND=x_BND,
                learned=routings,
                free_BN=free_BN,
                partner=learned.partners[name],
                images=learned.images,
                frequency_F=self.positions[name].frequency(x_BND.shape[1]).to(x_BND.device),
                grid=self._grid(learned, free_BN) or (1, int(free_BN.sum(1).max())),
                reference={condition: by_block[name] for condition, by_block in dense.items()},
                draw=draw,
            )
            rank_BN = choice.rank(context)
            if not isinstance(rank_BN, Tensor) or rank_BN.shape != x_BND.shape[:2]:
                got = tuple(rank_BN.shape) if isinstance(rank_BN, Tensor) else brief(rank_BN)
                raise ValueError(f"a condition must return a rank per token, {tuple(x_BND.shape[:2])}, got {got}")
            return keep_best(rank_BN.to(x_BND.device), routings, routing, blocks[name].router, left_BN)

        with replaced_decisions(self.model, replace):
            return self._outcome(self.model, learned.batch)

    def _outcome(self, model: nn.Module, batch: Any) -> _Outcome:
        """Run the judge, and raise unless all losses and accuracies are finite."""
        loss_B, accuracy_B = self.judge(model, batch)
        self._check_finite("loss", loss_B)
        self._check_finite("accuracy", accuracy_B)
        return loss_B, accuracy_B

    def _check_finite(self, name: str, value_B: Tensor) -> None:
        """Raise a ValueError that names the first sample whose value is not finite."""
        if not bool(value_B.isfinite().all()):
            sample = int(value_B.isfinite().int().argmin())
            raise ValueError(f"{name} of sample {sample} in {self.at} must be finite, got {float(value_B[sample])}")

    def _grid(self, learned: _Learned, free_BN: Tensor) -> tuple[int, int] | None:
        """Return rows and columns of the tokens that may be skipped: the user's or the model's grid, else None."""
        grid = self.config.grid or learned.grid
        return grid if grid is not None and math.prod(grid) == int(free_BN.sum(1).max()) else None


def _rows(outcome: _Outcome) -> Outcomes:
    loss_B, accuracy_B = outcome
    return Outcomes(loss_B.double().cpu(), accuracy_B.double().cpu())


def _number(previous: BatchTables | None) -> int:
    return 0 if previous is None else previous.number + 1


def _tables(learned: _Learned, previous: BatchTables | None, **tables: Any) -> BatchTables:
    return BatchTables(_number(previous), learned.images.start, len(learned.images), **tables)


def _partners(
    routings: Mapping[str, Routing], free: Mapping[str, Tensor], before: Mapping[str, FreeDecision]
) -> tuple[dict[str, FreeDecision], dict[str, FreeDecision]]:
    """Return the decisions on the image before each image, and those on the last image of the batch.

    The very first image has none before it, and takes the decision on the second.
    """
    partners = {}
    last = {}
    for name, routing in routings.items():
        keep_BF = only_free(routing.keep_BN, free[name])
        score_BF = only_free(routing.score_BN.float(), free[name])
        decided = FreeDecision(keep_BF, score_BF)
        images, tokens = keep_BF.shape
        previous = before.get(name)
        if previous is None:
            previous = decided.of(slice(1, 2) if images > 1 else slice(images))
        last[name] = decided.of(slice(images - 1, images))
        before_keep_BF = previous.keep_BF.to(keep_BF.device)
        before_score_BF = previous.score_BF.to(score_BF.device)
        if before_keep_BF.shape[1] == tokens:
            before_keep_BF = torch.cat([before_keep_BF, keep_BF[:-1]])
            before_score_BF = torch.cat([before_score_BF, score_BF[:-1]])
        # Otherwise images differ in size, which the choice that reads the partner refuses.
        partners[name] = FreeDecision(before_keep_BF, before_score_BF)
    return partners, last
