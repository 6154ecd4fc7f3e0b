"""A batch in its contexts: the learned choice of tokens, others in its place, rolled images, and other models.

Axes: B images, N tokens, F tokens of an image that may be skipped, D channels."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from numpy.typing import ArrayLike
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from mmod.adapters import watch_grid
from mmod.analysis.evaluations import Evaluate
from mmod.audits.choices import LEARNED, ORACLE, Choice, DecisionContext, FreeDecision
from mmod.audits.information import check_shapes, kept_shares, rolled_twice
from mmod.audits.oracle import worth_of
from mmod.audits.reference import Reference, consult
from mmod.audits.replace import keep_best, replaced_decisions
from mmod.audits.shifts import ImageShift
from mmod.audits.strata import DIFFICULTY, check_labels
from mmod.audits.tables import ACCURACY, LOSS, BatchRows, DecisionRows, Mask, Outcomes, TokenKinds, baseline_row
from mmod.config import AuditConfig, Grid
from mmod.io.store import fingerprint
from mmod.methods.route import routed_blocks
from mmod.routing import Routing, only_free
from mmod.values import Checked, brief


class LabelledBatch(NamedTuple):
    """A batch with labels of its samples and of its tokens.

    Args:
        batch: What the evaluation takes.
        strata: Labels of the samples, such as `{"kind": ["a", "b"], "size": [3, 9]}`. The learned choice is compared
            with the random one among samples with the same label, or in terciles of numbers.
        token_kinds: Labels of the tokens (B, N), including prefix and padding, such as
            `{"region": [["class token", "object", "background"]]}`; the audit reports what they say of the decisions.
    """

    batch: Any
    strata: Mapping[str, Sequence[str] | Sequence[float]] = MappingProxyType({})
    token_kinds: Mapping[str, ArrayLike] = MappingProxyType({})


@dataclass(frozen=True, kw_only=True)
class Comparisons(Checked):
    """What a routed model is compared with in an audit, in addition to other tokens of the same samples.

    Args:
        reference: The dense model. Its attention and its entropy are two more conditions, and its loss divides samples
            into strata by difficulty.
        baselines: Other models by name, such as early exit at the same budget, on all samples and by stratum.
        others: Further sets of batches by name, on which the learned choice is compared with the random one.
        shifts: Corruptions by name; each makes a further set of the audited one. It is a function from images
            (B, C, H, W) and their numbers in the set to images of the same size. `mmod.audits.SHIFTS` is a mapping of
            four: "noise", "blur", "low resolution" and "clutter".
        positions_from: Batches of a training set on which "mean mask" is computed; None for the audited ones.
        custom: Further conditions by name. Each is a function from an `mmod.audits.DecisionContext` to ranks (B, N);
            the tokens of the highest ranks are kept.
    """

    reference: nn.Module | None = None
    baselines: Mapping[str, nn.Module] = field(default_factory=dict)
    others: Mapping[str, Any] = field(default_factory=dict)
    shifts: Mapping[str, ImageShift] = field(default_factory=dict)
    positions_from: Any = None
    custom: Mapping[str, Callable[[DecisionContext], Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.positions_from is not None:
            check_set("positions_from", self.positions_from)
        for name, dataset in self.others.items():
            check_set(f"others[{name!r}]", dataset)
        both = self.shifts.keys() & self.others.keys()
        if both:
            raise ValueError(f"shifts and others both name {', '.join(both)}: choose another name")


def check_set(name: str, batches: object) -> None:
    """Raise a TypeError unless batches can be iterated several times."""
    if not isinstance(batches, Iterable) or isinstance(batches, Iterator):
        raise TypeError(f"{name} must be a list or a loader, which can be iterated twice, got {brief(batches)}")


@dataclass(frozen=True)
class _Learned:
    """A batch with the learned decisions, from which all its contexts are made.

    Args:
        free: By decision, which tokens may be skipped.
        grid: Rows and columns of patches: the user's, or those of this pass.
        partners: By decision, that on another image for each image.
        reference: What the dense model says of the batch; None without one.
    """

    batch: object
    images: range
    outcome: Outcomes
    routings: dict[str, Routing]
    free: dict[str, Tensor]
    grid: Grid | None
    decided: dict[str, FreeDecision]
    partners: dict[str, FreeDecision]
    reference: Reference | None = None

    def decisions(
        self, moved: Mapping[str, list[Mask]], worth: Mapping[str, dict[str, Tensor]]
    ) -> dict[str, DecisionRows]:
        """Return the rows of the batch in the table of decisions."""
        rows = {}
        for name, routing in self.routings.items():
            keep = Mask.of(routing.keep_BN & self.free[name])
            last = self.decided[name].of(slice(-1, None))
            free = Mask.of(self.free[name])
            rows[name] = DecisionRows(keep, free, last, moved.get(name, []), worth.get(name, {}))
        return rows


@dataclass(frozen=True)
class Contexts:
    """What evaluates a batch: a routed model with some choices of tokens, and the models that it is compared with.

    Args:
        positions: What each decision keeps by position, from a pass before; see `position_counts`.
        dataset, number: The current batch, which errors name.
    """

    model: nn.Module
    evaluate: Evaluate
    config: AuditConfig
    compared: Comparisons
    choices: Mapping[str, Choice]
    positions: Mapping[str, Tensor] = field(default_factory=dict)
    dataset: str = "batches"
    number: int = 0

    @property
    def models(self) -> dict[str, nn.Module]:
        """All models by name."""
        models = {baseline_row(name): model for name, model in self.compared.baselines.items()}
        models["model and data"] = self.model
        if self.compared.reference is not None:
            models["reference"] = self.compared.reference
        return models

    def rows(self, labelled: LabelledBatch, previous: BatchRows | None) -> BatchRows:
        """Evaluate a batch with the learned decisions and with every choice of tokens."""
        learned = self._learned(labelled.batch, previous)
        return BatchRows(learned.images.start, self._outcomes(learned), learned.decisions({}, {}))

    def audited_rows(self, labelled: LabelledBatch, previous: BatchRows | None) -> BatchRows:
        """Evaluate a batch in all contexts, and keep what is known of its samples and tokens."""
        batch, strata, token_kinds = labelled
        labels: dict[str, Sequence[str] | Sequence[float]] = dict(strata)
        learned = self._consulted(self._learned(batch, previous))
        if learned.reference is not None:
            labels[DIFFICULTY] = learned.reference.loss_B.tolist()
        labels_before = None if previous is None else previous.labels
        check_labels(labels, len(learned.images), labels_before)
        check_shapes(token_kinds, learned.free)
        moved = self._moved(learned)
        outcomes = self._outcomes(learned)
        worth: dict[str, dict[str, Tensor]] = {}
        if self.number < self.config.leave_one_out:
            worth_BN, worth = worth_of(partial(self._change, learned), learned.routings, learned.free)
            most = Choice("other", lambda context: worth_BN[context.block])
            outcomes[ORACLE] = [self._replaced(learned, most)]
        for name, other in self.compared.baselines.items():
            outcomes[baseline_row(name)] = [self.outcome(other, batch)]
        kinds = {fact: TokenKinds.of(names) for fact, names in token_kinds.items()}
        decisions = learned.decisions(moved, worth)
        return BatchRows(learned.images.start, outcomes, decisions, labels, kinds, learned.grid)

    def known_by(self, batch: object) -> dict[str, str]:
        """Return the fingerprint of each custom condition's losses on a batch, by which a store knows the condition."""
        if not self.compared.custom:
            return {}
        learned = self._consulted(self._learned(batch, None))
        return {name: fingerprint(self._replaced(learned, self.choices[name])[LOSS]) for name in self.compared.custom}

    def _consulted(self, learned: _Learned) -> _Learned:
        """Return a batch with what the dense model says of it, if there is one."""
        dense = self.compared.reference
        if dense is None:
            return learned
        reference = consult(dense, lambda: self.outcome(dense, learned.batch)[LOSS], learned.routings, self.choices)
        return dataclasses.replace(learned, reference=reference)

    def _outcomes(self, learned: _Learned) -> dict[str, list[Outcomes]]:
        """Return the outcomes of a batch as learned and with each choice, of which random ones are drawn anew."""
        outcomes = {LEARNED: [learned.outcome]}
        for name, choice in self.choices.items():
            draws = self.config.draws if choice.family == "random" else 1
            outcomes[name] = [self._replaced(learned, choice, draw) for draw in range(draws)]
        return outcomes

    def _change(self, learned: _Learned, choice: Choice) -> Tensor:
        """Return how much larger the loss is with a choice of tokens than with the learned one."""
        return self._replaced(learned, choice)[LOSS] - learned.outcome[LOSS]

    def _moved(self, learned: _Learned) -> dict[str, list[Mask]]:
        """Return what is kept under moved content, of decisions on all patches of a grid; nothing without one."""
        grid = learned.grid
        if grid is None:
            return {}
        # The patches of two rolled passes are compared, so decisions must be on patches alone.
        patches = math.prod(grid)
        names = [name for name, free_BN in learned.free.items() if bool((free_BN.sum(1) == patches).all())]
        if not names:
            return {}
        moved: dict[str, list[Mask]] = {}
        for batch in rolled_twice(learned.batch, grid, learned.images):
            _, routings, _ = self._decide(batch)
            for name in names:
                kept = Mask.of(only_free(routings[name].keep_BN, learned.free[name]))
                moved.setdefault(name, []).append(kept)
        return moved

    def _learned(self, batch: object, previous: BatchRows | None) -> _Learned:
        """Evaluate a batch with the learned decisions, which the contexts of the batch start from."""
        outcome, routings, grid = self._decide(batch)
        known: Collection[str] = routings.keys()
        if self.positions:
            # By the pass before the audit, whose positions every context reads.
            known = self.positions.keys()
        elif previous is not None:
            known = previous.decisions.keys()
        if routings.keys() != known:
            raise ValueError(
                f"batch {self.number} of {self.dataset!r} was decided by {', '.join(routings)}, and batches before by "
                f"{', '.join(known)}: pass batches that run the same parts of the model"
            )
        blocks = routed_blocks(self.model)
        free = {name: routing.free(blocks[name].router.prefix) for name, routing in routings.items()}
        tokens = sorted({int(free_BN.sum(1).max()) for free_BN in free.values()})
        wanted = self.config.grid
        if wanted is not None and math.prod(wanted) not in tokens:
            listed = " or ".join(map(str, tokens))
            raise ValueError(
                f"grid={wanted} must have as many positions as tokens may be skipped, {listed}: pass rows and columns "
                "of that many patches"
            )
        first = 0 if previous is None else previous.images.stop
        images = range(first, first + len(outcome[LOSS]))
        decided = {}
        partners = {}
        for name, routing in routings.items():
            keep_BF = only_free(routing.keep_BN, free[name])
            decided[name] = FreeDecision(keep_BF, only_free(routing.score_BN.float(), free[name]))
            before = None if previous is None else previous.decisions[name].last
            partners[name] = _partner(decided[name], before)
        return _Learned(batch, images, outcome, routings, free, wanted or grid, decided, partners)

    def _decide(self, batch: object) -> tuple[Outcomes, dict[str, Routing], Grid | None]:
        """Run the model with its routers' decisions, and return outcome, decisions and the grid of patches."""
        for leaf in tree_leaves(batch):
            if not isinstance(leaf, Tensor) or not leaf.is_floating_point() or not leaf.ndim:
                continue
            sum_B = leaf
            # A sum is not finite if any number is not.
            if leaf.ndim > 1:
                sum_B = leaf.flatten(1).double().sum(1)
            self._check_finite("the sum of the inputs", sum_B)
        routings: dict[str, Routing] = {}

        def record(name: str, x_BND: Tensor, routing: Routing, left_BN: Tensor | None) -> None:
            if name in routings:
                raise ValueError(f"{name} decided twice on a batch: `evaluate` must run the model once")
            routings[name] = routing

        with replaced_decisions(self.model, record), watch_grid(self.model) as seen:
            outcome = self.outcome(self.model, batch)
        if not routings:
            raise ValueError(
                "no router of the model decided: `evaluate` runs another or a compiled model. Pass the model itself"
            )
        losses = len(outcome[LOSS])
        accuracies = len(outcome[ACCURACY])
        for name, routing in routings.items():
            images = len(routing.kept.index_BK)
            if not losses == accuracies == images:
                raise ValueError(
                    f"`evaluate` returned losses of {losses}, accuracies of {accuracies} images, and {name} decided on "
                    f"{images}: return one value per image"
                )
        return outcome, routings, seen.grid

    def _replaced(self, learned: _Learned, choice: Choice, draw: int = 0) -> Outcomes:
        """Run the model with the tokens that a choice ranks highest in place of the learned ones."""
        blocks = routed_blocks(self.model)
        reference: Mapping[str, Mapping[str, Tensor]] = {}
        if learned.reference is not None:
            reference = learned.reference.tokens

        def replace(name: str, x_BND: Tensor, routing: Routing, left_BN: Tensor | None) -> Routing:
            learned_routing = learned.routings[name]
            free_BN = learned.free[name]
            # Tokens that are no grid count as one row.
            grid = (1, int(free_BN.sum(1).max()))
            if learned.grid and math.prod(learned.grid) == math.prod(grid):
                grid = learned.grid
            context = DecisionContext(
                block=name,
                x_BND=x_BND,
                learned=learned_routing,
                free_BN=free_BN,
                partner=learned.partners[name],
                images=learned.images,
                frequency_F=kept_shares(self.positions[name], x_BND.shape[1]).to(x_BND.device),
                grid=grid,
                reference={condition: by_block[name] for condition, by_block in reference.items()},
                draw=draw,
            )
            rank_BN = choice.rank(context)
            if not isinstance(rank_BN, Tensor) or rank_BN.shape != x_BND.shape[:2]:
                got = brief(rank_BN)
                if isinstance(rank_BN, Tensor):
                    got = str(tuple(rank_BN.shape))
                raise ValueError(f"a condition must return a rank per token, {tuple(x_BND.shape[:2])}, got {got}")
            return keep_best(rank_BN.to(x_BND.device), learned_routing, routing, blocks[name].router, left_BN)

        with replaced_decisions(self.model, replace):
            return self.outcome(self.model, learned.batch)

    def outcome(self, model: nn.Module, batch: object) -> Outcomes:
        """Run the evaluation, and raise unless all losses and accuracies are finite."""
        loss_B, accuracy_B = self.evaluate(model, batch)
        self._check_finite(LOSS, loss_B)
        self._check_finite(ACCURACY, accuracy_B)
        return {ACCURACY: accuracy_B.double().cpu(), LOSS: loss_B.double().cpu()}

    def _check_finite(self, name: str, value_B: Tensor) -> None:
        """Raise a ValueError that names the first sample whose value is not finite."""
        if not bool(value_B.isfinite().all()):
            sample = int(value_B.isfinite().int().argmin())
            where = f"sample {sample} in batch {self.number} of {self.dataset!r}"
            raise ValueError(f"{name} of {where} must be finite, got {float(value_B[sample])}")


def _partner(decided: FreeDecision, before: FreeDecision | None) -> FreeDecision:
    """Return the decision on the image before each image; the very first image takes that on the second."""
    if before is None:
        # A single image has but itself.
        second = slice(1, 2) if len(decided.keep_BF) > 1 else slice(None)
        before = decided.of(second)
    keep_BF = before.keep_BF.to(decided.keep_BF.device)
    score_BF = before.score_BF.to(decided.score_BF.device)
    # Images of another size are refused by the choice that reads the partner.
    if keep_BF.shape[1] == decided.keep_BF.shape[1]:
        keep_BF = torch.cat([keep_BF, decided.keep_BF[:-1]])
        score_BF = torch.cat([score_BF, decided.score_BF[:-1]])
    return FreeDecision(keep_BF, score_BF)
