"""The audit of a routed model: the same images, evaluated with different choices of tokens.

Axes: B images, N tokens, F tokens of an image that may be skipped, D channels."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from mmod.adapters import watch_grid
from mmod.analysis.audit.across import Counter
from mmod.analysis.audit.choices import LEARNED, RANDOM, Choice, DecisionContext, FreeDecision, choices
from mmod.analysis.audit.judges import judge_classes
from mmod.analysis.audit.progress import AUDITED, Counts, Progress
from mmod.analysis.audit.reference import Reference, consult
from mmod.analysis.audit.replace import free_tokens, keep_best, only_free, replaced_decisions
from mmod.analysis.audit.result import Audit, compare
from mmod.analysis.audit.strata import DIFFICULTY, Outcomes
from mmod.analysis.modes import in_mode
from mmod.blocks import Grid
from mmod.config import AuditConfig
from mmod.io.store import Store, fingerprint
from mmod.methods.route import routed_blocks
from mmod.routing import Routing
from mmod.values import brief, check_value

Shift = Callable[[Any, range], Any]
"""Maps a batch and the indices of its images to a changed batch."""

Judge = Callable[[nn.Module, Any], tuple[Tensor, Tensor]]
"""Runs a model on a batch, once, and returns the loss and the accuracy in [0, 1] of each image or sample, (B,) each."""


class LabelledBatch(NamedTuple):
    """A batch with labels of its samples and of its tokens.

    Args:
        batch: What the judge takes.
        strata: Labels of the samples, such as `{"kind": ["a", "b"], "size": [3, 9]}`. The learned choice is compared
            with the random one among samples with the same label, or in terciles of numbers.
        token_kinds: Labels of the tokens, including prefix and padding, such as
            `{"region": [["class token", "object", "background"]]}` (B, N); reported is what they say of the decisions.
    """

    batch: Any
    strata: Mapping[str, Sequence[str] | Sequence[float]] = MappingProxyType({})
    token_kinds: Mapping[str, ArrayLike] = MappingProxyType({})


@torch.no_grad()
def audit(
    model: nn.Module,
    batches: Iterable[Any],
    config: AuditConfig | None = None,
    *,
    judge: Judge = judge_classes,
    positions_from: Iterable[Any] | None = None,
    custom: Mapping[str, Callable[[DecisionContext], Tensor]] | None = None,
    reference: nn.Module | None = None,
    beside: Mapping[str, nn.Module] | None = None,
    shifts: Mapping[str, Shift] | None = None,
    others: Mapping[str, Iterable[Any]] | None = None,
    store: str | Path | None = None,
    progress: bool = False,
) -> Audit:
    """Test whether a routed model's decisions depend on content or position, and whether they beat random choices.

    The model is frozen. Every image is evaluated with the tokens that the routers keep, and with the same number of
    tokens under counterfactual conditions:

    - "random", "token norm", and fixed positions: "stride", "centre", "border", and "mean mask", the positions that the
      router keeps most often;
    - "inverted": dropped tokens before kept ones, the lowest score first;
    - "shuffled": the positions that the router keeps in the previous image;
    - with a `reference`: "dense attention", the tokens with the most attention in the same block of that model, and
      "reference entropy", the tokens at which that model is least certain.

    The best fixed position is chosen on the audited images. Where batches have images on a grid, the influence of
    content and position is measured on the same images rolled by full patches, see `Influence`.

    Args:
        model: A routed model; its mode is restored at the end.
        batches: The evaluation set, shuffled. It is iterated twice, so it must not be a generator. A batch may be an
            `mmod.analysis.LabelledBatch`, with labels of its samples and tokens.
        config: The conditions to compare, and how precisely.
        judge: Runs the model on a batch and returns the loss and the accuracy in [0, 1] of each sample, (B,) each. The
            default takes images and classes; `mmod.analysis.judge_answers` takes batches of a language model.
        positions_from: Batches of a training set on which "mean mask" is computed; None for the evaluation set.
        custom: Further conditions: functions from an `mmod.analysis.DecisionContext` to ranks (B, N), highest kept.
        reference: The dense baseline. Its loss defines strata of difficulty, and it adds two conditions.
        beside: Baselines by name, such as early exit at the same budget, to compare on all images and by strata.
        shifts: Functions by name that return changed batches, from a batch and the indices of its images, such as
            those in `mmod.analysis.SHIFTS`; the comparison is repeated on them.
        others: Further sets by name, on which the comparison is repeated.
        store: File that keeps the counts, see `mmod.io.store.Store`, from which an interrupted audit resumes on the
            same batches. Then `others` are iterated twice too. Other audits may share it.
        progress: Show a progress bar.

    Raises:
        TypeError: Batches are not iterable, or can be iterated only once, or a config or labels of another type.
        ValueError: A model that cannot be audited, conditions, a grid or sets that do not fit, inputs or losses that
            are not finite, fewer than two images, or a store that is damaged.

    Example:
        >>> import timm, torch, mmod
        >>> model = mmod.route_(timm.create_model("test_vit", num_classes=2), mmod.RoutingConfig(router="norm"))
        >>> batches = [(torch.randn(8, 3, 160, 160), torch.arange(8) % 2)]
        >>> report = mmod.audit(model, batches, mmod.AuditConfig(conditions=["random", "stride"], draws=2))
        >>> report.images, [condition.name for condition in report.conditions]
        (8, ['as learned', 'random', 'stride'])
    """
    check_value("config", config, AuditConfig | None)
    check_value("reference", reference, nn.Module | None)
    check_value("beside", beside, Mapping[str, nn.Module] | None)
    for argument, functions in {"shifts": shifts, "custom": custom}.items():
        check_value(argument, functions, Mapping[str, Callable[..., Any]] | None)
    check_value("others", others, Mapping[str, Any] | None)
    config = config or AuditConfig()
    beside = beside or {}
    shifts = shifts or {}
    others = others or {}
    sets = {"batches": batches, "positions_from": batches if positions_from is None else positions_from}
    for name, dataset in {**sets, **{f"others[{name!r}]": dataset for name, dataset in others.items()}}.items():
        if not isinstance(dataset, Iterable) or (isinstance(dataset, Iterator) and (name in sets or store is not None)):
            raise TypeError(f"{name} must be a list or a loader, which can be iterated twice, got {dataset!r}")
    both = shifts.keys() & others.keys()
    if both:
        raise ValueError(f"shifts and others both name {', '.join(both)}: choose another name")
    by_name = choices(config.conditions, custom, has_reference=reference is not None)
    auditor = _Auditor(model, judge, by_name, config, shifts, beside, reference)
    steps: dict[str, tuple[Iterable[Any], Callable[[int, LabelledBatch], None]]] = {
        "positions": (sets["positions_from"], auditor.count_positions),
        "audit": (batches, auditor.judge_batch),
        **{f"audit of {name}": (others[name], partial(auditor.judge_other, name=name)) for name in others},
    }
    with in_mode(False, model, reference, *beside.values()):
        datasets = {name: dataset for name, (dataset, _) in steps.items()}
        identity: dict[str, Any] = {}
        if store is not None:
            totals = {name: len(dataset) if isinstance(dataset, Sized) else None for name, dataset in datasets.items()}
            identity = {"work": "audit", "batches": totals, **auditor.identity(map(_labelled, batches))}
        counted = Progress(Store(store), identity, auditor.counts, datasets)
        auditor.counts = counted.done.counts
        for name, (_, evaluate) in steps.items():
            for number, batch in counted.batches(name, shown=progress):
                auditor.at = f"batch {number} of {name!r}"
                evaluate(number, _labelled(batch))
    return compare(auditor.counts, by_name, config, (*shifts, *others))


def _labelled(batch: Any) -> LabelledBatch:
    labelled = batch if isinstance(batch, LabelledBatch) else LabelledBatch(batch)
    for name in ("strata", "token_kinds"):
        check_value(f"{name} of a LabelledBatch", getattr(labelled, name), Mapping[str, Any])
    return labelled._replace(strata={group: _labels(group, labels) for group, labels in labelled.strata.items()})


def _labels(group: str, labels: Any) -> list[str] | list[float]:
    """Return the labels of samples as plain values, which a store can hold."""
    plain: Any = labels.tolist() if isinstance(labels, (Tensor, np.ndarray)) else labels
    if isinstance(plain, (list, tuple)):
        plain = [label.item() if isinstance(label, (Tensor, np.generic)) else label for label in plain]
    check_value(f"strata of a LabelledBatch: {group}", plain, list[str] | list[float])
    return plain


class _EvaluatedBatch(NamedTuple):
    """A batch evaluated with the learned decisions; `partners` are decisions on other images."""

    batch: Any
    loss_B: Tensor
    learned: dict[str, Routing]
    free: dict[str, Tensor]
    partners: dict[str, FreeDecision]
    images: range
    reference: Reference | None = None


@dataclass
class _Auditor:
    """Evaluates batches of a routed model with all choices of tokens, and models beside it on the same batches."""

    model: nn.Module
    judge: Judge
    choices: Mapping[str, Choice]
    config: AuditConfig
    shifts: Mapping[str, Shift]
    beside: Mapping[str, nn.Module]
    reference: nn.Module | None

    def __post_init__(self) -> None:
        # Of the last pass, as the model made it.
        self.model_grid: Grid | None = None
        # The current batch, in messages.
        self.at = "the first batch"
        self.blocks = routed_blocks(self.model)
        self.counts = Counts(Counter(list(self.blocks)), Counter(list(self.blocks)))

    def identity(self, batches: Iterable[LabelledBatch]) -> dict[str, Any]:
        """Return plain values that identify the audit: options, and the losses of each model on the first batch."""
        config = self.config
        identity: dict[str, Any] = {
            "conditions": list(self.choices),
            "shifts": list(self.shifts),
            "draws": config.draws,
            "grid": config.grid and list(config.grid),
            "leave_one_out": config.leave_one_out,
        }
        models = {f"beside.{name}": model for name, model in self.beside.items()}
        models["model and data"] = self.model
        if self.reference is not None:
            models["reference"] = self.reference
        for labelled in islice(batches, 1):
            for name, model in models.items():
                loss_B, _ = self._outcome(model, labelled.batch)
                identity[name] = fingerprint(loss_B)
        return identity

    def count_positions(self, number: int, labelled: LabelledBatch) -> None:
        """Count kept tokens by position."""
        _, _, learned = self._as_learned(labelled.batch)
        self.counts.positions.add({name: routing.keep_BN for name, routing in learned.items()}, self._free(learned))

    def judge_batch(self, number: int, labelled: LabelledBatch) -> None:
        """Evaluate a batch with every choice of tokens, and with the other models."""
        batch, strata, token_kinds = labelled
        evaluated = self._evaluate(batch)
        dense = self.reference
        if dense is not None:
            consulted = consult(dense, lambda: self._outcome(dense, batch)[0], evaluated.learned, self.choices)
            evaluated = evaluated._replace(reference=consulted)
            strata = {**strata, DIFFICULTY: consulted.loss_B.tolist()}
        kept = {name: routing.keep_BN for name, routing in evaluated.learned.items()}
        self.counts.across.add(kept, evaluated.free, token_kinds)
        self._move(evaluated)
        for name in self.choices:
            self._judge(evaluated, name)
        if number < self.config.leave_one_out:
            free = {}
            for name, free_BN in evaluated.free.items():
                # Tokens that an earlier block of the span dropped cannot be chosen.
                free[name] = free_BN & (evaluated.learned[name].score_BN > -torch.inf)
            self.counts.worth.add(
                lambda choice: self._replaced(evaluated, choice)[0],
                evaluated.loss_B,
                evaluated.learned,
                free,
                self.choices[RANDOM],
            )
        for name, shift in self.shifts.items():
            shifted = self._evaluate(shift(batch, evaluated.images), name, evaluated.partners)
            self._judge(shifted, RANDOM, name)
        for name, other in self.beside.items():
            self.counts.beside.setdefault(name, Outcomes()).add(*self._outcome(other, batch))
        self.counts.images[AUDITED] = evaluated.images.stop
        self.counts.strata.add(strata, len(evaluated.images))

    def judge_other(self, number: int, labelled: LabelledBatch, *, name: str) -> None:
        """Evaluate a batch of another set, with the learned and with the random choice."""
        evaluated = self._evaluate(labelled.batch, name, of=name)
        self._judge(evaluated, RANDOM, name)
        self.counts.images[name] = evaluated.images.stop

    def _note(self, dataset: str, choice: str, loss_B: Tensor, accuracy_B: Tensor) -> None:
        self.counts.outcomes.setdefault(dataset, {}).setdefault(choice, Outcomes()).add(loss_B, accuracy_B)

    def _evaluate(
        self, batch: Any, dataset: str = AUDITED, partners: dict[str, FreeDecision] | None = None, of: str = AUDITED
    ) -> _EvaluatedBatch:
        """Evaluate a batch with the learned decisions and store the outcome; its images are numbered as those `of`."""
        loss_B, accuracy_B, learned = self._as_learned(batch)
        self._note(dataset, LEARNED, loss_B, accuracy_B)
        free = self._free(learned)
        start = self.counts.images.get(of, 0)
        partners = partners or _partners(learned, free, self.counts.last.setdefault(of, {}))
        return _EvaluatedBatch(batch, loss_B, learned, free, partners, range(start, start + len(loss_B)))

    def _move(self, evaluated: _EvaluatedBatch) -> None:
        """Count kept tokens under moved content, for decisions on all patches of a grid."""
        grids: dict[str, tuple[int, int]] = {}
        for name, free_BN in evaluated.free.items():
            grid = self._grid(free_BN)
            if grid is not None and bool((free_BN.sum(1) == grid[0] * grid[1]).all()):
                grids[name] = grid
        if not grids:
            return
        # Images are rolled by patches of one grid: that of the first decision.
        common = next(iter(grids.values()))
        names = [name for name, grid in grids.items() if grid == common]

        def decide(batch: Any) -> dict[str, Tensor]:
            _, _, learned = self._as_learned(batch)
            return {name: only_free(learned[name].keep_BN, evaluated.free[name]) for name in names}

        self.counts.influence.add(evaluated.batch, decide, common, evaluated.images)

    def _judge(self, evaluated: _EvaluatedBatch, name: str, dataset: str = AUDITED) -> None:
        """Evaluate a batch with a counterfactual choice, averaged over draws if it is random."""
        choice = self.choices[name]
        draws = range(self.config.draws if choice.family == "random" else 1)
        outcomes = zip(*(self._replaced(evaluated, choice, draw) for draw in draws))
        self._note(dataset, name, *(torch.stack(values).double().mean(0) for values in outcomes))

    def _as_learned(self, batch: Any) -> tuple[Tensor, Tensor, dict[str, Routing]]:
        """Evaluate a batch with the learned decisions, and return loss, accuracy and decisions."""
        for leaf in tree_leaves(batch):
            if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.ndim:
                # A sum is not finite if any number is not.
                sum_B = leaf.flatten(1).double().sum(1) if leaf.ndim > 1 else leaf
                self._check_finite("the sum of the inputs", sum_B)
        learned: dict[str, Routing] = {}

        def record(name: str, x_BND: Tensor, routing: Routing, left_BN: Tensor | None) -> None:
            if name in learned:
                raise ValueError(f"{name} decided twice on a batch: `judge` must run the model once")
            learned[name] = routing

        with replaced_decisions(self.model, record), watch_grid(self.model) as seen:
            loss_B, accuracy_B = self._outcome(self.model, batch)
        self.model_grid = seen.grid
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

    def _check_finite(self, name: str, value_B: Tensor) -> None:
        """Raise a ValueError that names the first sample whose value is not finite."""
        if not bool(value_B.isfinite().all()):
            sample = int(value_B.isfinite().int().argmin())
            raise ValueError(f"{name} of sample {sample} in {self.at} must be finite, got {float(value_B[sample])}")

    def _free(self, learned: Mapping[str, Routing]) -> dict[str, Tensor]:
        """Return which tokens may be skipped, by decision; raise if the user's grid fits no decision."""
        free = {name: free_tokens(routing, self.blocks[name].router.prefix) for name, routing in learned.items()}
        tokens = sorted({int(free_BN.sum(1).max()) for free_BN in free.values()})
        grid = self.config.grid
        if grid is not None and grid[0] * grid[1] not in tokens:
            raise ValueError(
                f"grid={grid} must have as many places as tokens may be skipped, {' or '.join(map(str, tokens))}: pass "
                "rows and columns of that many patches"
            )
        return free

    def _replaced(self, evaluated: _EvaluatedBatch, choice: Choice, draw: int = 0) -> tuple[Tensor, Tensor]:
        def replace(name: str, x_BND: Tensor, routing: Routing, left_BN: Tensor | None) -> Routing:
            learned = evaluated.learned[name]
            free_BN = evaluated.free[name]
            dense = {} if evaluated.reference is None else evaluated.reference.tokens
            context = DecisionContext(
                block=name,
                x_BND=x_BND,
                learned=learned,
                free_BN=free_BN,
                partner=evaluated.partners[name],
                images=evaluated.images,
                frequency_F=self.counts.positions.frequency(name, x_BND.shape[1]).to(x_BND.device),
                grid=self._grid(free_BN) or (1, int(free_BN.sum(1).max())),
                reference={condition: by_block[name] for condition, by_block in dense.items()},
                draw=draw,
            )
            rank_BN = choice.rank(context)
            if not isinstance(rank_BN, Tensor) or rank_BN.shape != x_BND.shape[:2]:
                got = tuple(rank_BN.shape) if isinstance(rank_BN, Tensor) else brief(rank_BN)
                raise ValueError(f"a condition must return a rank per token, {tuple(x_BND.shape[:2])}, got {got}")
            return keep_best(rank_BN.to(x_BND.device), learned, routing, self.blocks[name].router, left_BN)

        with replaced_decisions(self.model, replace):
            return self._outcome(self.model, evaluated.batch)

    def _grid(self, free_BN: Tensor) -> tuple[int, int] | None:
        """Return rows and columns of the tokens that may be skipped: the user's or the model's grid, else None."""
        tokens = int(free_BN.sum(1).max())
        grid = self.config.grid or self.model_grid
        return grid if grid is not None and math.prod(grid) == tokens else None


def _partners(
    learned: Mapping[str, Routing], free: Mapping[str, Tensor], last: dict[str, FreeDecision]
) -> dict[str, FreeDecision]:
    """Return the decisions on the previous image of every image, and note those on the last image of the batch.

    The very first image has no previous one, and takes the decision on the second.
    """
    partners = {}
    for name, routing in learned.items():
        keep_BF = only_free(routing.keep_BN, free[name])
        score_BF = only_free(routing.score_BN.float(), free[name])
        decided = FreeDecision(keep_BF, score_BF)
        images, tokens = keep_BF.shape
        previous = last.get(name)
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
    return partners
