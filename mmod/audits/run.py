"""The audit of a routed model: the same images, under the learned choice of tokens and under others."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mmod.analysis.evaluations import Evaluate, evaluate_classes
from mmod.analysis.modes import in_mode
from mmod.analysis.table import Table
from mmod.audits.choices import RANDOM, choices
from mmod.audits.contexts import Comparisons, Contexts, LabelledBatch, check_set
from mmod.audits.information import position_counts
from mmod.audits.result import Audit, result_of
from mmod.audits.shifts import ImageShift, changed_images
from mmod.audits.tables import LOSS, BatchRows, add_outcomes
from mmod.config import AuditConfig
from mmod.io.progress import progress_bar
from mmod.io.store import Store, checksum, fingerprint
from mmod.methods.route import routed_blocks
from mmod.values import check_value


@torch.no_grad()
def audit(
    model: nn.Module,
    batches: Iterable[object],
    config: AuditConfig | None = None,
    comparisons: Comparisons | None = None,
    *,
    evaluate: Evaluate = evaluate_classes,
    store: str | Path | None = None,
    progress: bool = False,
) -> Audit:
    """Test whether a routed model's decisions depend on content or position, and whether they beat random choices.

    The model is frozen. Each image is evaluated with the tokens that the routers keep, and with equally many other
    tokens, chosen in the ways that `AuditConfig.conditions` names. For images on a grid, the influence of content and
    position is also measured, on the same images rolled by whole patches.

    Args:
        model: A routed model; its mode is restored at the end.
        batches: The evaluation set, shuffled: a list or a loader, because it is iterated twice. A batch may be an
            `mmod.audits.LabelledBatch`, with labels of its samples and tokens.
        config: Conditions, number of random draws, and precision.
        comparisons: Other models, sets and conditions.
        evaluate: Runs the model on a batch and returns the loss and the accuracy in [0, 1] of each sample, (B,) each.
            The default takes images and classes; `mmod.audits.evaluate_answers` takes batches of a language model.
        store: File for the rows of each batch, from which an interrupted audit resumes. Several audits may share it:
            models and custom conditions are told apart by the losses of the first batch.
        progress: Show a progress bar.

    Raises:
        TypeError: Batches that cannot be iterated twice, or an argument of another type.
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
    check_value("comparisons", comparisons, Comparisons | None)
    config = config or AuditConfig()
    compared = comparisons or Comparisons()
    check_set("batches", batches)
    positions_from = compared.positions_from
    if positions_from is None:
        positions_from = batches
    by_name = choices(config.conditions, compared.custom, has_reference=compared.reference is not None)
    routed = list(routed_blocks(model))
    contexts = Contexts(model, evaluate, config, compared, by_name)
    with in_mode(False, *contexts.models.values()):
        kept = None
        identity = {}
        first = []
        if store is not None:
            kept = Store(store)
            # Models and custom conditions are known by the losses of the first batch.
            first = [_labelled(batch).batch for batch in islice(batches, 1)]
        for batch in first:
            identity = _identity(contexts, batch)

        read = partial(_read, store=kept, identity=identity, shown=progress)
        # The first pass, of which "mean mask" takes the positions that are kept most often.
        decided = read(dataclasses.replace(contexts, choices={}), Contexts.rows, "positions", positions_from)
        contexts = dataclasses.replace(contexts, positions=position_counts(list(decided)))
        for batch in first:
            identity["custom"] = contexts.known_by(batch)
        audited = list(read(contexts, Contexts.audited_rows, "audit", batches))
        table = Table()
        add_outcomes(table, audited)
        drawn = dataclasses.replace(contexts, choices={RANDOM: by_name[RANDOM]})
        shifted = {name: _changed(batches, audited, shift) for name, shift in compared.shifts.items()}
        others = {**shifted, **compared.others}
        for name, dataset in others.items():
            add_outcomes(table, read(drawn, Contexts.rows, f"audit of {name}", dataset), name)
    return result_of(audited, table, list(others), list(compared.baselines), routed, by_name, config)


def _changed(batches: Iterable[object], audited: Sequence[BatchRows], shift: ImageShift) -> Iterator[object]:
    """Yield the batches of the audited set with changed images."""
    for batch, rows in zip(batches, audited):
        inputs = _labelled(batch).batch
        # Also those that torch takes for leaves, as what a processor returns.
        if isinstance(inputs, Mapping):
            inputs = dict(inputs)

        # Bound as a default, because a closure would see the last value of the loop.
        def change(images: Tensor, numbers: range = rows.images) -> Tensor:
            return shift(images, numbers)

        changed = changed_images(inputs, len(rows.images), change)
        if changed is None:
            raise ValueError(
                "shifts change images (B, C, H, W), one for each sample, and this batch has none: leave shifts out"
            )
        yield changed


def _read(
    contexts: Contexts,
    rows_of: Callable[[Contexts, LabelledBatch, BatchRows | None], BatchRows],
    name: str,
    batches: Iterable[object],
    *,
    store: Store | None,
    identity: dict[str, object],
    shown: bool,
) -> Iterator[BatchRows]:
    """Yield the rows of each batch of a set, from the store if it has them; `identity` goes on from set to set."""
    previous = None
    total = len(batches) if isinstance(batches, Sized) else None
    with progress_bar(batches, desc=name, total=total, shown=shown) as bar:
        for number, batch in enumerate(bar):
            # The number is part of the context, so that errors name the batch.
            there = dataclasses.replace(contexts, dataset=name, number=number)
            compute = partial(rows_of, there, _labelled(batch), previous)
            if store is None:
                previous = compute()
            else:
                # All batches so far, since numbers of images and the decision on the last one reach across batches.
                identity |= {"set": name, "batches": checksum(batch, f"{name} {identity.get('batches')}")}
                previous = store.get(identity, BatchRows)
                if previous is None:
                    previous = compute()
                    store.put(identity, previous)
            yield previous
    if previous is None:
        raise ValueError(f"an audit needs two images or more, got 0 for the {name}")


def _identity(contexts: Contexts, batch: object) -> dict[str, object]:
    """Return plain values that identify an audit: options, and the losses of each model on a batch."""
    config = contexts.config
    losses = {name: fingerprint(contexts.outcome(model, batch)[LOSS]) for name, model in contexts.models.items()}
    return {
        "work": "audit",
        "conditions": list(contexts.choices),
        "draws": config.draws,
        "grid": config.grid and list(config.grid),
        "leave_one_out": config.leave_one_out,
        **losses,
    }


def _labelled(batch: object) -> LabelledBatch:
    labelled = batch if isinstance(batch, LabelledBatch) else LabelledBatch(batch)
    for name in ("strata", "token_kinds"):
        check_value(f"{name} of a LabelledBatch", getattr(labelled, name), Mapping[str, object])
    return labelled._replace(strata={group: _labels(group, labels) for group, labels in labelled.strata.items()})


def _labels(group: str, labels: object) -> list[str] | list[float]:
    """Return the labels of samples as plain values, which a store can hold."""
    plain: Any = labels
    if isinstance(plain, (Tensor, np.ndarray)):
        plain = plain.tolist()
    if isinstance(plain, (list, tuple)):
        plain = [label.item() if isinstance(label, (Tensor, np.generic)) else label for label in plain]
    check_value(f"strata of a LabelledBatch: {group}", plain, list[str] | list[float])
    return plain
