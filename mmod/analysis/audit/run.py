"""The audit of a routed model: the same images, evaluated with different choices of tokens.

Axes: B images, N tokens, D channels."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mmod.analysis.audit.auditor import Auditor, Judge, Shift
from mmod.analysis.audit.choices import DecisionContext, choices
from mmod.analysis.audit.information import KindsOf
from mmod.analysis.audit.judges import judge_classes
from mmod.analysis.audit.progress import Progress
from mmod.analysis.audit.result import LEARNED, Audit, compare
from mmod.analysis.audit.strata import ALL, DIFFICULTY, SHIFT, OutcomePair, StratumOf, compare_strata
from mmod.analysis.modes import in_mode
from mmod.io.progress import progress_bar
from mmod.values import check_value

_AUDIT = "audit"
# Batches, and the function that processes the batch with a number.
_Step = tuple[Iterable[Any], Callable[[int, Any], object]]


@torch.no_grad()
def audit(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    judge: Judge = judge_classes,
    positions_from: Iterable[Any] | None = None,
    conditions: Sequence[str] | None = None,
    custom: Mapping[str, Callable[[DecisionContext], Tensor]] | None = None,
    draws: int = 5,
    grid: tuple[int, int] | None = None,
    margin: float = 5.0,
    resamples: int = 2000,
    strata: StratumOf | None = None,
    token_kinds: KindsOf | None = None,
    reference: nn.Module | None = None,
    shifts: Mapping[str, Shift] | None = None,
    others: Mapping[str, Iterable[Any]] | None = None,
    leave_one_out: int = 0,
    beside: Mapping[str, nn.Module] | None = None,
    progress_file: str | Path | None = None,
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
        batches: The evaluation set, shuffled. It is iterated twice, so it must not be a generator.
        judge: Runs the model on a batch and returns the loss and the accuracy in [0, 1] of each sample, (B,) each. The
            default takes images and classes; `mmod.analysis.judge_answers` takes batches of a language model.
        positions_from: Batches of a training set on which "mean mask" is computed; None for the evaluation set.
        conditions: Names of the conditions, None for all.
        custom: Further conditions: functions from an `mmod.analysis.DecisionContext` to ranks (B, N), highest kept.
        draws: Random choices per image, over which results are averaged.
        grid: Rows and columns of the tokens that may be skipped; None takes the model's grid, or else a square.
        margin: A gain over random tokens that is not significant, and whose interval ends below so many points of
            accuracy, is no better than random.
        resamples: Number of bootstrap resamples and of sign draws.
        strata: Returns labels of a batch's images, such as `{"kind": ["a", "b"], "size": [3, 9]}`. The learned choice
            is compared with the random one among images with the same label, or in terciles of numbers.
        token_kinds: Returns labels of a batch's tokens, including prefix and padding, such as
            `{"region": [["class token", "object", "background"]]}` (B, N); reported is what they say of the decisions.
        reference: The dense baseline. Its loss defines strata of difficulty, and it adds two conditions.
        shifts: Functions by name that return changed batches, from a batch and the indices of its images, such as
            those in `mmod.analysis.audit.SHIFTS`; the comparison is repeated on them.
        others: Further sets by name, on which the comparison is repeated.
        leave_one_out: Number of batches on which every token is left out of every decision once, one forward pass per
            token, to compare its effect with its score.
        beside: Baselines by name, such as early exit at the same budget, to compare on all images and by strata.
        progress_file: Journal of counts, from which an interrupted audit resumes on the same batches.
        progress: Show a progress bar.

    Raises:
        TypeError: Batches are not iterable, or can be iterated only once.
        ValueError: A model that cannot be audited, conditions, a grid or sets that do not fit, inputs or losses that
            are not finite, fewer than two images, or a progress file that is damaged or of another audit.

    Example:
        >>> import timm, torch, mmod
        >>> model = mmod.route_(timm.create_model("test_vit", num_classes=2), mmod.RoutingConfig(router="norm"))
        >>> batches = [(torch.randn(8, 3, 160, 160), torch.arange(8) % 2)]
        >>> report = mmod.audit(model, batches, conditions=["random", "stride"], draws=2)
        >>> report.images, [condition.name for condition in report.conditions]
        (8, ['as learned', 'random', 'stride'])
    """
    for name, count, least in ("draws", draws, 1), ("resamples", resamples, 100), ("leave_one_out", leave_one_out, 0):
        check_value(name, count, int, f"[{least}, inf)")
    check_value("margin", margin, float, "[0, inf)")
    check_value("grid", grid, tuple[int, int] | None, "[1, inf)")
    twice_read = {"batches": batches} | ({} if positions_from is None else {"positions_from": positions_from})
    _check_sets(twice_read, twice=True)
    _check_sets({f"others[{name!r}]": dataset for name, dataset in (others or {}).items()}, twice=False)
    by_name = choices(None if conditions is None else tuple(conditions), custom, has_reference=reference is not None)
    beside, shifts, others = beside or {}, shifts or {}, others or {}
    if shifts.keys() & others.keys():
        raise ValueError(f"shifts and others both name {', '.join(shifts.keys() & others.keys())}: choose another name")
    auditor = Auditor(model, judge, by_name, draws, grid, shifts, beside, reference)

    def judge_batch(number: int, batch: Any) -> None:
        kinds = token_kinds(batch) if token_kinds else {}
        images, dense_loss_B = auditor.judge_batch(batch, kinds, leave_one_out=number < leave_one_out)
        values = dict(strata(batch)) if strata is not None else {}
        labels = values if dense_loss_B is None else {**values, DIFFICULTY: dense_loss_B}
        auditor.counts.strata.add(labels, images)

    steps: dict[str, _Step] = {
        "positions": (batches if positions_from is None else positions_from, auditor.learn),
        _AUDIT: (batches, judge_batch),
        **{f"audit of {name}": (dataset, partial(auditor.judge_other, name)) for name, dataset in others.items()},
    }
    with in_mode(False, model, reference, *beside.values()):
        _process(auditor, steps, leave_one_out, progress_file, progress=progress)
    outcomes = {name: auditor.outcomes(name) for name in (LEARNED, *by_name)}
    report = compare(
        outcomes, by_name, resamples=resamples, margin=margin, draws=draws, across=auditor.counts.across.result(),
        influence=auditor.counts.influence.result(),
    )  # fmt: skip
    parts, models = _strata_of(auditor, (*shifts, *others), beside)
    return dataclasses.replace(
        report,
        strata=compare_strata(parts, resamples),
        leave_one_out=auditor.counts.worth.result(),
        beside=compare_strata(models, resamples),
    )


def _check_sets(sets: Mapping[str, Any], *, twice: bool) -> None:
    """Raise a TypeError unless all sets can be iterated, or iterated twice."""
    for name, batches in sets.items():
        if not isinstance(batches, Iterable) or (twice and isinstance(batches, Iterator)):
            raise TypeError(f"{name} must be a list or a loader, which can be iterated twice, got {batches!r}")


def _process(
    auditor: Auditor, steps: Mapping[str, _Step], leave_one_out: int, path: str | Path | None, *, progress: bool
) -> None:
    totals = {name: len(dataset) if isinstance(dataset, Sized) else None for name, (dataset, _) in steps.items()}
    identity: dict[str, Any] = {"leave_one_out": leave_one_out, "batches": totals}
    if path is not None:
        identity |= auditor.identity(next(iter(steps[_AUDIT][0]), None))
    done = Progress(path, identity, auditor.counts)
    auditor.counts = done.counts
    for name, (dataset, take) in steps.items():
        first = done.done.get(name, 0)
        bar = progress_bar(done.left(name, dataset), desc=name, total=totals[name], initial=first, shown=progress)
        for number, batch in enumerate(bar, first):
            auditor.at = f"batch {number} of {name!r}"
            take(number, batch)
            done.add(name)
        if done.done.get(name, 0) > first:
            done.write()


def _strata_of(
    auditor: Auditor, elsewhere: Sequence[str], beside: Iterable[str]
) -> tuple[dict[tuple[str, str], OutcomePair], dict[tuple[str, str], OutcomePair]]:
    """Return outcomes by group and name, against random tokens and against other models."""

    def split(pair: OutcomePair) -> dict[tuple[str, str], OutcomePair]:
        return {names: (pair[0].of(chosen), pair[1].of(chosen)) for names, chosen in members.items()}

    members = auditor.counts.strata.members()
    parts = split(auditor.against_random())
    if elsewhere:
        parts |= {(SHIFT, name or "none"): auditor.against_random(name) for name in ("", *elsewhere)}
    models = {}
    for name in beside:
        models[name, ALL] = auditor.against(name)
        models |= {(name, f"{group}: {part}"): pair for (group, part), pair in split(models[name, ALL]).items()}
    return parts, models
