"""The audit of a routed model: the same images, under the learned choice of tokens and under others.

Axes: B images, N tokens, F tokens of an image that may be skipped, D channels."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from mmod.adapters import watch_grid
from mmod.analysis.modes import in_mode
from mmod.audits.choices import LEARNED, RANDOM, Choice, DecisionContext, FreeDecision, choices
from mmod.audits.evaluations import Evaluate, LabelledBatch, evaluate_classes
from mmod.audits.information import POSITION, KindCounts, check_shapes, kind_counts, rolled_twice
from mmod.audits.oracle import worth_of
from mmod.audits.reference import Reference, consult
from mmod.audits.replace import free_tokens, keep_best, only_free, replaced_decisions
from mmod.audits.result import Audit, compare
from mmod.audits.strata import DIFFICULTY, check_labels
from mmod.audits.tables import AUDITED, BatchTables, Mask, Moved, Outcomes, TokenKinds
from mmod.config import AuditConfig, Grid
from mmod.io.progress import progress_bar
from mmod.io.store import Store, fingerprint
from mmod.methods.route import routed_blocks
from mmod.routing import Routing
from mmod.values import brief, check_value

Shift = Callable[[Any, range], Any]
"""Maps a batch and the indices of its images to a changed batch."""
_Outcome = tuple[Tensor, Tensor]


@torch.no_grad()
def audit(
    model: nn.Module,
    batches: Iterable[Any],
    config: AuditConfig | None = None,
    *,
    evaluate: Evaluate = evaluate_classes,
    positions_from: Iterable[Any] | None = None,
    custom: Mapping[str, Callable[[DecisionContext], Tensor]] | None = None,
    reference: nn.Module | None = None,
    baselines: Mapping[str, nn.Module] | None = None,
    shifts: Mapping[str, Shift] | None = None,
    others: Mapping[str, Iterable[Any]] | None = None,
    store: str | Path | None = None,
    progress: bool = False,
) -> Audit:
    """Test whether a routed model's decisions depend on content or position, and whether they beat random choices.

    The model is frozen. Each image is evaluated with the tokens that the routers keep, and with equally many other
    tokens, under several conditions:

    - "random": random tokens;
    - "token norm": the tokens of largest norm;
    - "stride", "centre", "border": fixed positions;
    - "mean mask": the positions that the router keeps most often;
    - "inverted": the tokens with the lowest scores;
    - "shuffled": the positions that the router keeps in the previous image;
    - "dense attention", with a `reference`: the tokens with the most attention in the same block of that model;
    - "reference entropy", with a `reference`: the tokens at which that model is least certain.

    The best fixed position is chosen on the audited images. For images on a grid, the influence of content and position
    is also measured, on the same images rolled by full patches (see `Influence`).

    Args:
        model: A routed model; its mode is restored at the end.
        batches: The evaluation set, shuffled: a list or a loader, because it is iterated twice. A batch may be an
            `mmod.audits.LabelledBatch`, with labels of its samples and tokens.
        config: Conditions, number of draws and resamples, and other settings.
        evaluate: Runs the model on a batch and returns the loss and the accuracy in [0, 1] of each sample, (B,) each.
            The default takes images and classes; `mmod.audits.evaluate_answers` takes batches of a language model.
        positions_from: Batches of a training set on which "mean mask" is computed; None for the evaluation set.
        custom: Further conditions by name. Each is a function from an `mmod.audits.DecisionContext` to ranks (B, N);
            the tokens of the highest ranks are kept.
        reference: The dense model. It adds two conditions, and its loss divides images into strata by difficulty.
        baselines: Other models by name, such as early exit at the same budget. They are compared on all images and by
            stratum.
        shifts: Corruptions by name, on which the comparison is repeated, such as those in `mmod.audits.SHIFTS`. Each
            is a function from a batch and the indices of its images to a changed batch.
        others: Further data sets by name, on which the comparison is repeated.
        store: File for the tables of each batch, from which an interrupted audit resumes (see `mmod.io.store.Store`).
            Several audits may share it.
        progress: Show a progress bar.

    Raises:
        TypeError: Batches that cannot be iterated twice, or a config or labels of another type.
        ValueError: The model cannot be audited, or conditions, grid or data sets do not fit it. Inputs or losses are
            not finite, there are fewer than two images, or the store is damaged.

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
    check_value("baselines", baselines, Mapping[str, nn.Module] | None)
    for argument, functions in {"shifts": shifts, "custom": custom}.items():
        check_value(argument, functions, Mapping[str, Callable[..., Any]] | None)
    check_value("others", others, Mapping[str, Any] | None)

    config = config or AuditConfig()
    baselines = baselines or {}
    shifts = shifts or {}
    others = others or {}

    sets = {"batches": batches, "positions_from": batches if positions_from is None else positions_from}
    for name, dataset in {**sets, **{f"others[{name!r}]": dataset for name, dataset in others.items()}}.items():
        # An iterator is empty at the second pass.
        if not isinstance(dataset, Iterable) or (isinstance(dataset, Iterator) and name in sets):
            raise TypeError(f"{name} must be a list or a loader, which can be iterated twice, got {brief(dataset)}")
    both = shifts.keys() & others.keys()
    if both:
        raise ValueError(f"shifts and others both name {', '.join(both)}: choose another name")

    by_name = choices(config.conditions, custom, has_reference=reference is not None)
    routed = list(routed_blocks(model))
    contexts = _Contexts(model, evaluate, by_name, config, shifts, baselines, reference)
    with in_mode(False, model, reference, *baselines.values()):
        identity: dict[str, Any] = {}
        # Known by what the models return on the first batch.
        if store is not None:
            for batch in islice(batches, 1):
                identity = contexts.identity(_labelled(batch).batch)

        tables_of = partial(
            _evaluated, store=None if store is None else Store(store), identity=identity, shown=progress
        )
        # The first pass, of which "mean mask" takes the positions that are kept most often.
        decided = tables_of(contexts, _Contexts.decided, "positions", sets["positions_from"])
        contexts = dataclasses.replace(contexts, positions=kind_counts(decided))
        tables = list(tables_of(contexts, _Contexts.audited, "audit", batches))
        elsewhere = {}
        for name, dataset in others.items():
            elsewhere[name] = list(tables_of(contexts, _Contexts.compared, f"audit of {name}", dataset))
    return compare(tables, elsewhere, routed, by_name, config)


def _evaluated(
    contexts: _Contexts,
    compute_tables: Callable[[_Contexts, LabelledBatch, BatchTables | None], BatchTables],
    name: str,
    batches: Iterable[Any],
    *,
    store: Store | None,
    identity: dict[str, Any],
    shown: bool,
) -> Iterator[BatchTables]:
    """Yield the tables of each batch of a set, from the store if it has them; `identity` goes on from set to set."""
    previous = None
    total = len(batches) if isinstance(batches, Sized) else None
    with progress_bar(batches, desc=name, total=total, shown=shown) as bar:
        for number, batch in enumerate(bar):
            # The number is part of the context, so that errors name the batch.
            there = dataclasses.replace(contexts, dataset=name, number=number)
            compute = partial(compute_tables, there, _labelled(batch), previous)
            if store is None:
                previous = compute()
            else:
                # All batches so far, since numbers of images and the decision on the last one reach across batches.
                identity |= {"set": name, "batches": _checksum(batch, f"{name} {identity.get('batches')}")}
                previous = store.get(identity, BatchTables)
                if previous is None:
                    previous = compute()
                    store.put(identity, previous)
            # No more than the next batch needs the decision on the last image.
            yield dataclasses.replace(previous, last={})


def _checksum(batch: Any, before: str) -> str:
    """Return a checksum of the tensors and labels of a batch, continued from that of the batches before."""
    digest = hashlib.sha256(before.encode())
    for leaf in tree_leaves(batch):
        if isinstance(leaf, Mapping):
            # What a processor returns, and other mappings that torch takes for leaves.
            digest.update(_checksum(dict(leaf), "").encode())
        elif isinstance(leaf, Tensor):
            digest.update(repr((leaf.dtype, leaf.shape)).encode())
            digest.update(leaf.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
        elif isinstance(leaf, (str, int, float, np.ndarray)):
            digest.update(repr(leaf.tolist() if isinstance(leaf, np.ndarray) else leaf).encode())
    return digest.hexdigest()


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


class _Learned(NamedTuple):
    """A batch evaluated with the learned decisions, of which all contexts are made; `partners` are on other images."""

    batch: Any
    outcome: _Outcome
    routings: dict[str, Routing]
    free: dict[str, Tensor]
    # Rows and columns of patches: the user's, or those of this pass.
    grid: Grid | None
    images: range
    decided: dict[str, FreeDecision]
    partners: dict[str, FreeDecision]
    reference: Reference | None = None

    def tables(self, **tables: Any) -> BatchTables:
        """Return tables of the batch."""
        return BatchTables(self.images.start, len(self.images), **tables)

    @property
    def masks(self) -> dict[str, dict[str, Mask]]:
        """The rows of the batch in the table of decisions."""
        keep = {name: Mask.of(routing.keep_BN & self.free[name]) for name, routing in self.routings.items()}
        return {"keep": keep, "free": {name: Mask.of(free_BN) for name, free_BN in self.free.items()}}


@dataclass(frozen=True)
class _Contexts:
    """What an audit evaluates a batch with: a routed model with every choice of tokens, and its baselines.

    Args:
        positions: What each decision keeps by position, from a pass of its own.
        dataset, number: The current batch.
    """

    model: nn.Module
    evaluate: Evaluate
    choices: Mapping[str, Choice]
    config: AuditConfig
    shifts: Mapping[str, Shift]
    baselines: Mapping[str, nn.Module]
    reference: nn.Module | None
    positions: Mapping[str, Mapping[str, KindCounts]] = field(default_factory=dict)
    dataset: str = "batches"
    number: int = 0

    def identity(self, batch: Any) -> dict[str, Any]:
        """Return plain values that identify the audit: options, and the losses of each model on a batch."""
        config = self.config
        models = {f"baselines.{name}": model for name, model in self.baselines.items()}
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
        return learned.tables(**learned.masks)

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
        worth = {}
        if self.number < self.config.leave_one_out:
            loss_of = partial(self._loss, learned)
            worth = worth_of(loss_of, learned.outcome[0], learned.routings, learned.free, self.choices[RANDOM])
        for name, shift in self.shifts.items():
            shifted = self._learned(shift(batch, learned.images), previous)
            outcomes[name] = self._outcomes(shifted, {RANDOM: self.choices[RANDOM]})
        baselines = {name: _rows(self._outcome(other, batch)) for name, other in self.baselines.items()}
        return learned.tables(
            **learned.masks,
            last={name: decided.of(slice(-1, None)) for name, decided in learned.decided.items()},
            outcomes=outcomes,
            baselines=baselines,
            labels=labels,
            kinds={fact: TokenKinds.of(names) for fact, names in token_kinds.items()},
            moved=moved,
            worth=worth,
        )

    def compared(self, labelled: LabelledBatch, previous: BatchTables | None) -> BatchTables:
        """Evaluate a batch of another set, with the learned and with the random choice."""
        learned = self._learned(labelled.batch, previous)
        outcomes = {AUDITED: self._outcomes(learned, {RANDOM: self.choices[RANDOM]})}
        return learned.tables(outcomes=outcomes)

    def _outcomes(self, learned: _Learned, choices: Mapping[str, Choice]) -> dict[str, Outcomes]:
        """Return the outcomes of a batch as learned, and with each choice, averaged over draws if it is random."""
        rows = {LEARNED: _rows(learned.outcome)}
        for name, choice in choices.items():
            draws = range(self.config.draws if choice.family == "random" else 1)
            # Random choices are means over draws; all others are drawn once.
            drawn = zip(*(self._replaced(learned, choice, draw) for draw in draws))
            loss_B, accuracy_B = (torch.stack(values).double().mean(0) for values in drawn)
            rows[name] = _rows((loss_B, accuracy_B))
        return rows

    def _moved(self, learned: _Learned) -> Moved | None:
        """Return what is kept under moved content, of decisions on all patches of a grid; None without one."""
        grid = learned.grid
        if grid is None:
            return None
        names = [name for name, free_BN in learned.free.items() if bool((free_BN.sum(1) == math.prod(grid)).all())]
        keep = []
        # The patches of two shifted passes are compared, so decisions must be on patches alone.
        for batch in rolled_twice(learned.batch, grid, learned.images) if names else []:
            _, routings, _ = self._decide(batch)
            keep.append({name: Mask.of(only_free(routings[name].keep_BN, learned.free[name])) for name in names})
        return Moved(grid, keep) if keep else None

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
        decided = {}
        partners = {}
        for name, routing in routings.items():
            keep_BF = only_free(routing.keep_BN, free[name])
            decided[name] = FreeDecision(keep_BF, only_free(routing.score_BN.float(), free[name]))
            partners[name] = _partner(decided[name], None if previous is None else previous.last.get(name))
        return _Learned(batch, outcome, routings, free, wanted or grid, images, decided, partners)

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
                raise ValueError(f"{name} decided twice on a batch: `evaluate` must run the model once")
            routings[name] = routing

        with replaced_decisions(self.model, record), watch_grid(self.model) as seen:
            loss_B, accuracy_B = self._outcome(self.model, batch)
        if not routings:
            raise ValueError(
                "no router of the model decided: `evaluate` runs another or a compiled model. Pass the model itself"
            )
        for name, routing in routings.items():
            if not len(loss_B) == len(accuracy_B) == len(routing.kept.index_BK):
                raise ValueError(
                    f"`evaluate` returned losses of {len(loss_B)}, accuracies of {len(accuracy_B)} images, and {name} "
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
            # Tokens that are no grid count as one row.
            grid = (1, int(free_BN.sum(1).max()))
            if learned.grid and math.prod(learned.grid) == math.prod(grid):
                grid = learned.grid
            context = DecisionContext(
                block=name,
                x_BND=x_BND,
                learned=routings,
                free_BN=free_BN,
                partner=learned.partners[name],
                images=learned.images,
                frequency_F=self.positions[name][POSITION].frequency(x_BND.shape[1]).to(x_BND.device),
                grid=grid,
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

    def _loss(self, learned: _Learned, choice: Choice) -> Tensor:
        return self._replaced(learned, choice)[0]

    def _outcome(self, model: nn.Module, batch: Any) -> _Outcome:
        """Run the evaluation, and raise unless all losses and accuracies are finite."""
        loss_B, accuracy_B = self.evaluate(model, batch)
        self._check_finite("loss", loss_B)
        self._check_finite("accuracy", accuracy_B)
        return loss_B, accuracy_B

    def _check_finite(self, name: str, value_B: Tensor) -> None:
        """Raise a ValueError that names the first sample whose value is not finite."""
        if not bool(value_B.isfinite().all()):
            sample = int(value_B.isfinite().int().argmin())
            where = f"sample {sample} in batch {self.number} of {self.dataset!r}"
            raise ValueError(f"{name} of {where} must be finite, got {float(value_B[sample])}")


def _rows(outcome: _Outcome) -> Outcomes:
    loss_B, accuracy_B = outcome
    return Outcomes(loss_B.double().cpu(), accuracy_B.double().cpu())


def _partner(decided: FreeDecision, before: FreeDecision | None) -> FreeDecision:
    """Return the decision on the image before each image; the very first image takes that on the second."""
    if before is None:
        before = decided.of(slice(1, 2) if len(decided.keep_BF) > 1 else slice(None))
    keep_BF = before.keep_BF.to(decided.keep_BF.device)
    score_BF = before.score_BF.to(decided.score_BF.device)
    # Images of another size are refused by the choice that reads the partner.
    if keep_BF.shape[1] == decided.keep_BF.shape[1]:
        keep_BF = torch.cat([keep_BF, decided.keep_BF[:-1]])
        score_BF = torch.cat([score_BF, decided.score_BF[:-1]])
    return FreeDecision(keep_BF, score_BF)
