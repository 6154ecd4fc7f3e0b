"""The audit of a routed model: the same images again and again, each time with other tokens kept.

Axes: B images, N tokens, D channels.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mmod.analysis.audit.auditor import Auditor, Judge, Shift
from mmod.analysis.audit.choices import Place, choices
from mmod.analysis.audit.information import KindsOf
from mmod.analysis.audit.judges import judge_classes
from mmod.analysis.audit.partial import Partial
from mmod.analysis.audit.result import LEARNED, Audit, compare
from mmod.analysis.audit.strata import ALL, DIFFICULTY, SHIFT, Outcomes, Strata, StratumOf, compare_strata
from mmod.analysis.modes import in_mode
from mmod.io.progress import progress_bar
from mmod.values import check_value

__all__ = ["audit"]

_AUDIT = "audit"
# Batches, and what is done with each.
_Step = tuple[Iterable[Any], Callable[[Any], None]]


@torch.no_grad()
def audit(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    judge: Judge = judge_classes,
    positions_from: Iterable[Any] | None = None,
    conditions: Sequence[str] | None = None,
    own: Mapping[str, Callable[[Place], Tensor]] | None = None,
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
    """Find out whether a routed model's decisions follow content or position, or are no better than chance.

    The model is frozen. Each image is judged with the tokens that the routers keep and with as many others, chosen by
    each condition: at "random"; by position alone ("stride", "centre", "border", and "mean mask", the positions that
    the router keeps most often); by "token norm"; "inverted", what the router dropped, lowest score first, and then,
    where fewer were dropped than kept, of the rest those of lowest score; "shuffled", what it keeps of the image
    before; with a `reference`, "dense attention", what receives most attention in the same block of that model, and
    "reference entropy", where that model is least sure of its answer. The best fixed position is picked on the audited
    images. What the router uses is found on the same images rolled by whole patches, see `Influence`, where batches
    have images on a grid.

    Memory holds two numbers for each image and condition, whatever the size of images.

    Args:
        model: A routed model; its mode is restored at the end.
        batches: The evaluation set, in an order that does not follow the classes. It is passed twice, so it must be no
            generator.
        judge: Runs the model on a batch and returns the loss and the accuracy in [0, 1] of each sample, (B,) each; the
            default takes images and classes, and `mmod.analysis.judge_answers` batches of a language model.
        positions_from: Batches of a training set, from which positions are counted; None for the evaluation set.
        conditions: Names of the conditions, None for all.
        own: Further conditions, as functions from an `mmod.analysis.Place` to ranks (B, N), of which the highest are
            kept.
        draws: Random choices for each image, which are averaged.
        grid: Rows and columns of the tokens that may be skipped, as many as there are; None asks the model, and takes a
            square where it does not say.
        margin: Points of accuracy: a choice without a clear gain over chance, the interval of which ends below the
            margin, is worth no more than random tokens.
        resamples: How often images are resampled, and signs drawn.
        strata: Returns for a batch what its images are sorted by, such as `{"kind": ["a", "b"], "size": [3, 9]}`.
            The learned choice is compared with the random one among images of one name, or of one third of the numbers.
        token_kinds: Returns for a batch what is known of its tokens, prefix and padding included, such as
            `{"region": [["class token", "object", "background"]]}` (B, N): the mutual information of that and of each
            decision on as many tokens is found, as it is of their positions.
        reference: The dense model that the routed one was made from, or one with the same blocks: images are sorted by
            its loss too, as `judge` finds it, and the tokens that it attends to and those of which it is unsure are
            conditions.
        shifts: The comparison is made once more on changed images: names to functions that return a batch changed,
            given it and the numbers of its images. `mmod.analysis.audit.SHIFTS` has some for images.
        others: The comparison is made on other sets, too: names to their batches.
        leave_one_out: On how many of the batches, from the first, each token is left out once from each decision, to
            compare its worth with its score. Takes as many passes as tokens may be skipped.
        beside: Other models by name, such as one of early exit at the same budget, which `judge` runs on the same
            images: the audited one is compared with each of them, on all images and in each stratum.
        progress_file: File that keeps what was found of the batches so far. An audit that was cut goes on where it
            stopped and finds what it would have found, on the same batches. It is left there at the end.
        progress: Show a bar.

    Returns:
        The conditions with intervals and tests, the verdict, how the decisions of the blocks hang together, and what
        was found in strata and about single tokens.

    Raises:
        TypeError: No batches, or some that can be passed once only.
        ValueError: Nothing in the model is routed, tokens join groups that a score has formed ("cells"), routers do not
            run in it, an unknown condition or one named twice, a grid that fits no decision, inputs or losses that are
            not finite, a set of fewer than two images, a shift and another set of one name, or a progress file that is
            damaged or belongs to another audit.

    Example:
        >>> import timm, torch, mmod
        >>> model = mmod.route_(timm.create_model("test_vit", num_classes=2), mmod.RoutingConfig(router="norm"))
        >>> batches = [(torch.randn(8, 3, 160, 160), torch.arange(8) % 2)]
        >>> found = mmod.audit(model, batches, conditions=["random", "stride"], draws=2)
        >>> found.images, [condition.name for condition in found.conditions]
        (8, ['as learned', 'random', 'stride'])
    """
    _check_options(draws=draws, resamples=resamples, leave_one_out=leave_one_out, margin=margin, grid=grid)
    _check_sets(
        {"batches": batches} | ({} if positions_from is None else {"positions_from": positions_from}), twice=True
    )
    _check_sets({f"others[{name!r}]": own for name, own in (others or {}).items()}, twice=False)
    made = choices(None if conditions is None else tuple(conditions), own, has_reference=reference is not None)
    beside, shifts, others = beside or {}, shifts or {}, others or {}
    if shifts.keys() & others.keys():
        raise ValueError(f"shifts and others both name {', '.join(shifts.keys() & others.keys())}: choose another name")
    auditor, sorted_by = Auditor(model, judge, made, draws, grid, shifts, beside, reference), Strata()
    kept = Partial(progress_file)

    def judge_batch(batch: Any) -> None:
        kinds, is_early = token_kinds(batch) if token_kinds else {}, kept.done.get(_AUDIT, 0) < leave_one_out
        images, dense_loss_B = auditor.judge_batch(batch, kinds, leave_one_out=is_early)
        values = dict(strata(batch)) if strata is not None else {}
        sorted_by.add(values if dense_loss_B is None else {**values, DIFFICULTY: dense_loss_B}, images)

    steps: dict[str, _Step] = {
        "positions": (batches if positions_from is None else positions_from, auditor.learn),
        _AUDIT: (batches, judge_batch),
        **{f"audit of {name}": (own, partial(auditor.judge_other, name)) for name, own in others.items()},
    }
    with in_mode(False, model, reference, *beside.values()):
        _go_on(auditor, sorted_by, steps, leave_one_out, kept, progress=progress)
    outcomes = {name: auditor.outcomes(name) for name in (LEARNED, *made)}
    found = compare(
        outcomes, made, resamples=resamples, margin=margin, draws=draws, across=auditor.across.result(),
        influence=auditor.influence.result(),
    )  # fmt: skip
    parts, models = _strata_of(auditor, sorted_by, (*shifts, *others), beside)
    return dataclasses.replace(
        found,
        strata=compare_strata(parts, resamples),
        leave_one_out=auditor.worth.result(),
        beside=compare_strata(models, resamples),
    )


_OPTIONS: Mapping[str, tuple[Any, str]] = {
    "draws": (int, "[1, inf)"),
    "resamples": (int, "[100, inf)"),
    "leave_one_out": (int, "[0, inf)"),
    "margin": (float, "[0, inf)"),
    "grid": (tuple[int, int] | None, "[1, inf)"),
}


def _check_options(**options: Any) -> None:
    for name, value in options.items():
        check_value(name, value, *_OPTIONS[name])


def _check_sets(sets: Mapping[str, Any], *, twice: bool) -> None:
    """Raise unless all sets are batches that can be passed, or passed twice."""
    for name, batches in sets.items():
        if not isinstance(batches, Iterable) or (twice and isinstance(batches, Iterator)):
            raise TypeError(f"{name} must be a list or a loader, which can be passed twice, got {batches!r}")


def _go_on(
    auditor: Auditor,
    sorted_by: Strata,
    steps: Mapping[str, _Step],
    leave_one_out: int,
    kept: Partial,
    *,
    progress: bool,
) -> None:
    """Take the batches of each step that were not taken before."""

    def state() -> dict[str, Any]:
        return {"auditor": auditor.state(), "strata": sorted_by.state()}

    counts = {name: len(own) if isinstance(own, Sized) else None for name, (own, _) in steps.items()}
    if kept.path is not None:
        first = next(iter(steps[_AUDIT][0]), None)
        found = kept.read({**auditor.identity(first), "leave_one_out": leave_one_out, "batches": counts})
        if found is not None:
            auditor.restore(found["auditor"])
            sorted_by.restore(found["strata"])
    for name, (batches, take) in steps.items():
        done = kept.done.get(name, 0)
        bar = progress_bar(kept.left(name, batches), desc=name, total=counts[name], initial=done, shown=progress)
        for number, batch in enumerate(bar, done):
            auditor.at = f"batch {number} of {name!r}"
            take(batch)
            kept.add(name, state)
        if kept.done.get(name, 0) > done:
            kept.write(state)


def _strata_of(
    auditor: Auditor, sorted_by: Strata, elsewhere: Sequence[str], beside: Iterable[str]
) -> tuple[dict[tuple[str, str], Outcomes], dict[tuple[str, str], Outcomes]]:
    """Return outcomes by group and name: those against random tokens, and those against other models.

    Args:
        auditor: Has judged all batches.
        sorted_by: What the images are sorted by.
        elsewhere: Names of shifts and other sets.
        beside: Names of other models.
    """
    whole, members = auditor.against_random(), sorted_by.members()
    parts = {names: whole.of(chosen) for names, chosen in members.items()}
    if elsewhere:
        parts |= {(SHIFT, name or "none"): auditor.against_random(name) for name in ("", *elsewhere)}
    models = {}
    for name in beside:
        both = auditor.against(name)
        models[name, ALL] = both
        models |= {(name, f"{group}: {part}"): both.of(chosen) for (group, part), chosen in members.items()}
    return parts, models
