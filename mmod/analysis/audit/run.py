"""The audit of a routed model: the same images, evaluated with different choices of tokens.

Axes: B images, N tokens, F tokens of an image that may be skipped, D channels."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from mmod.analysis.audit.choices import DecisionContext, choices
from mmod.analysis.audit.contexts import Contexts, Shift
from mmod.analysis.audit.information import position_counts
from mmod.analysis.audit.judges import Judge, LabelledBatch, judge_classes
from mmod.analysis.audit.result import Audit, compare
from mmod.analysis.audit.tables import BatchTables
from mmod.analysis.modes import in_mode
from mmod.config import AuditConfig
from mmod.io.progress import progress_bar
from mmod.io.store import Store
from mmod.methods.route import routed_blocks
from mmod.values import check_value

Evaluate = Callable[[Contexts, LabelledBatch, "BatchTables | None"], BatchTables]
"""Evaluates a batch in some contexts, given the tables of the batch before."""


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
        store: File that keeps the tables of each batch, see `mmod.io.store.Store`, from which an interrupted audit
            resumes. Other audits may share it.
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
        if not isinstance(dataset, Iterable) or (isinstance(dataset, Iterator) and name in sets):
            raise TypeError(f"{name} must be a list or a loader, which can be iterated twice, got {dataset!r}")
    both = shifts.keys() & others.keys()
    if both:
        raise ValueError(f"shifts and others both name {', '.join(both)}: choose another name")
    by_name = choices(config.conditions, custom, has_reference=reference is not None)
    routed = list(routed_blocks(model))
    contexts = Contexts(model, judge, by_name, config, shifts, beside, reference)
    with in_mode(False, model, reference, *beside.values()):
        kept = None if store is None else _Kept(Store(store), contexts, batches)
        evaluate = partial(_evaluated, kept=kept, shown=progress)
        # The first pass, of which "mean mask" takes the positions that are kept most often.
        positions = position_counts(evaluate(contexts, Contexts.decided, "positions", sets["positions_from"]))
        contexts = dataclasses.replace(contexts, positions=positions)
        tables = list(evaluate(contexts, Contexts.audited, "audit", batches))
        elsewhere = {}
        for name, dataset in others.items():
            elsewhere[name] = list(evaluate(contexts, Contexts.compared, f"audit of {name}", dataset))
    return compare(tables, elsewhere, routed, by_name, config)


class _Kept:
    """Tables of batches in a store, by the audit and by the batches that they depend on."""

    def __init__(self, store: Store, contexts: Contexts, batches: Iterable[Any]) -> None:
        self.store = store
        self.identity: dict[str, Any] = {}
        for batch in islice(batches, 1):
            self.identity = contexts.identity(_labelled(batch).batch)
        self.digest = hashlib.sha256()

    def once(self, name: str, batch: Any, compute: Callable[[], BatchTables]) -> BatchTables:
        """Return the tables of the next batch of a set, and compute them if the store has none."""
        # Of all batches so far, because numbers of images and decisions on the last one reach across batches.
        self.digest.update(name.encode())
        for content in _contents(batch):
            self.digest.update(content)
        identity = {**self.identity, "set": name, "batches": self.digest.hexdigest()}
        tables: BatchTables | None = self.store.get(identity, BatchTables)
        if tables is None:
            tables = compute()
            self.store.put(identity, tables)
        return tables


def _evaluated(
    contexts: Contexts, evaluate: Evaluate, name: str, batches: Iterable[Any], *, kept: _Kept | None, shown: bool
) -> Iterator[BatchTables]:
    """Yield the tables of each batch of a set, from the store where it has them."""
    previous = None
    total = len(batches) if isinstance(batches, Sized) else None
    with progress_bar(batches, desc=name, total=total, shown=shown) as bar:
        for number, batch in enumerate(bar):
            there = dataclasses.replace(contexts, at=f"batch {number} of {name!r}")
            compute = partial(evaluate, there, _labelled(batch), previous)
            previous = compute() if kept is None else kept.once(name, batch, compute)
            # No more than the next batch needs the decision on the last image.
            yield dataclasses.replace(previous, last={})


def _contents(batch: Any) -> Iterator[Any]:
    """Yield the tensors and labels of a batch as bytes."""
    for leaf in tree_leaves(batch):
        if isinstance(leaf, Mapping):
            # What a processor returns, and other mappings that torch takes for leaves.
            yield from _contents(dict(leaf))
        elif isinstance(leaf, Tensor):
            yield repr((leaf.dtype, leaf.shape)).encode()
            yield leaf.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data
        elif isinstance(leaf, (str, int, float, np.ndarray)):
            yield repr(leaf.tolist() if isinstance(leaf, np.ndarray) else leaf).encode()


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
