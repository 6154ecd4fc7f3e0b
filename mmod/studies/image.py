"""Studies of image classifiers: accuracy against FLOPs, latency and memory, with baselines that have no router."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
import yaml
from torch import nn

from mmod.adapters import image_facts
from mmod.analysis.memory import peak_bytes
from mmod.analysis.repeats import redundancy, whole_patches
from mmod.analysis.statistics import Estimate, as_cheap, exceeds
from mmod.analysis.table import DENSE, Measured, Table, evaluated, gain, gaps, mean_of, paired_by_sample
from mmod.analysis.timing import ratios, relative_times
from mmod.analysis.tracing import draw_sample_maps
from mmod.data.loader import evaluation_fields, sample_images
from mmod.io.tables import MarkdownTable
from mmod.io.yaml import merged
from mmod.opening.opened import Preprocessing
from mmod.opening.runs import find_run, is_described
from mmod.planning.candidate import ANY_SIZE, TOLERANCE, Candidate, opening_line, shown_code
from mmod.planning.choice import (
    ON_FRONT,
    SEEDS,
    USE,
    AdviceRow,
    Recommendation,
    batches_of,
)
from mmod.planning.early import shown_front
from mmod.planning.verdict import say_guessing, verdict_of
from mmod.studies.kind import Facts, Lines, Runs, Study, StudyKind, Told
from mmod.studies.measure import BEFORE
from mmod.studies.report import COLUMNS, significance, with_batch_sizes
from mmod.studies.runs import Run, run_config_of
from mmod.training.engine.config import RunConfig, config_as
from mmod.training.engine.kind import cost, create, device_of, evaluation_data
from mmod.training.engine.start import sketch
from mmod.training.image.config import TrainConfig
from mmod.training.image.evaluate import CONFUSION, iou_of
from mmod.training.image.kind import ImageKind, timed_images
from mmod.training.kinds import kind_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Images whose redundancy is measured.
_MEASURED = 256
# What the other command is for, in the words of both.
_UNTRAINED = (
    "Nothing was trained here: `--tune true` fine-tunes all models alike first, after which another may lose least."
)
_TRAINED = (
    "Models were trained here: without training, as `mmod advise MODEL --images FOLDER` compares them, another may pay."
)
# A warning beside it names what may do less harm.
_HARMED = (
    "fine-tuning harmed the dense model ({change} points), and a model that equals it is worse than yours. "
    "`--tune false` compares without training."
)
_RESIZED = (
    "Smaller images are made from the files, before the pass that is timed; advice and `mmod.methods.Resize` make them "
    "in the pass, which takes time."
)
_KEYS_OF_SIZE = (
    "The keys below make smaller images from the files, as this study did; `Resize` in Python makes them from prepared "
    "images."
)
# Of agreement with the dense model, which a study does not measure.
_NO_SCORE = Estimate(math.nan)
_MEASURES = {"top1": "accuracy", "objects": "accuracy of patches of objects", "mean_iou": "mean IoU"}
_COLUMNS = (
    "name",
    "capacity",
    "epochs",
    "mean_iou",
    "objects",
    "top1",
    "top1_std",
    "gflops",
    "speedup",
    "latency_ms",
    "peak_mb",
    "to_dense",
    "to_control",
    "before",
    "kept",
)


def mean_iou(outcomes: Mapping[str, np.ndarray], weight_SN: np.ndarray) -> np.ndarray:
    """Return the mean intersection over union of the classes in percent, over the patches of all images together."""
    return 100 * np.nanmean(iou_of(_weighed_counts(outcomes, weight_SN)), axis=1)


def right_patches(outcomes: Mapping[str, np.ndarray], weight_SN: np.ndarray) -> np.ndarray:
    """Return the share of patches that are classified right in percent."""
    count_SCC = _weighed_counts(outcomes, weight_SN)
    return 100 * np.diagonal(count_SCC, axis1=1, axis2=2).sum(1) / count_SCC.sum((1, 2))


def right_objects(outcomes: Mapping[str, np.ndarray], weight_SN: np.ndarray) -> np.ndarray:
    """Return how many percent of the patches with an object are classified right, for each draw (S,).

    Patches of class 0 are background, and do not count.

    Args:
        outcomes: Confusion counts of each image (N, C, C): labels by predictions.
        weight_SN: How often each draw of a bootstrap has each image.
    """
    # Class 0 is the background; without its row the diagonal begins a column later.
    count_SCC = _weighed_counts(outcomes, weight_SN)[:, 1:]
    return 100 * np.diagonal(count_SCC, offset=1, axis1=1, axis2=2).sum(1) / count_SCC.sum((1, 2))


def _weighed_counts(outcomes: Mapping[str, np.ndarray], weight_SN: np.ndarray) -> np.ndarray:
    count_NCC = np.asarray(outcomes[CONFUSION], np.float64)
    classes = count_NCC.shape[1]
    return (weight_SN @ count_NCC.reshape(len(count_NCC), -1)).reshape(-1, classes, classes)


def _describe(dense: RunConfig, tuned: RunConfig) -> Facts:
    """Return what is known of the images; refuse weights that do not fit, and classes that are not the model's."""
    if dense.model.has_weights:
        kind = ImageKind(config_as(dense, TrainConfig))
        evaluation_data(kind, create(kind))
    return describe_images(dense, tuned)


def describe_images(dense: RunConfig, tuned: RunConfig) -> Facts:
    """Return the source, redundancy and preprocessing of the images."""
    data = config_as(dense, TrainConfig).data
    images = f"Images: {data.source}, split {data.val_split!r}, {data.image_size} px"
    patch = image_facts(sketch(kind_of(dense))).patch
    if patch is not None:
        # Of those that are evaluated.
        sample = sample_images(data, min(_MEASURED, data.val_limit or _MEASURED))
        images += f"; {redundancy(whole_patches(sample, patch[0]), patch[0])}"
        if len(sample) == _MEASURED:
            # Advice takes images at equal distances.
            images += "; another sample, such as that of advice, differs by a few %"
    preprocessing = Preprocessing(evaluation_fields(data), "of this study")
    return {"images": [f"{images}.", str(preprocessing)]}


def _count(study: Study, run: Run, model: nn.Module, rows: Measured) -> dict[str, float]:
    """Count the FLOPs of one image and the memory of a batch."""
    (images,) = timed_images(
        config_as(run.training, TrainConfig).data, study.config.latency_batch, 1, device_of(run.start)
    )
    with torch.inference_mode():
        peak = peak_bytes(partial(model, images), images.device)
    gflops = cost(run.start, model, rows.kept)["image"] / 1e9
    return {"gflops": gflops, "peak_mb": peak / 1e6}


def _draw(study: Study, run: Run, model: nn.Module) -> Figure:
    """Draw what a routed model keeps of sample images."""
    return draw_sample_maps(model, sample_images(config_as(run.training, TrainConfig).data, study.config.maps))


def _baselines(study: Study, table: Table, runs: Runs) -> dict[str, dict[str, list[str]]]:
    """Return the models without a router that are as fast as each, by batch size."""
    by_size = {}
    for size, ms in _known_times(table, runs, least=2).items():
        by_model = {}
        for name in runs:
            by_model[name] = [other for other in as_cheap(ms, name) if runs[other].candidate.is_baseline]
        by_size[f"_b{size}"] = by_model
    return by_size


def tell_of(
    study: Study,
    table: Table,
    runs: Runs,
    rows: Lines,
    facts: Facts,
    *,
    columns: Sequence[str],
    measure: str,
    significance: Callable[[Table, str, Sequence[str]], str],
    note: str = "",
) -> Told:
    """Describe the images, recommend a model for each speed, and state what was not tested.

    Args:
        columns: Names of the table's columns, see `COLUMNS`.
        measure: Title of the score.
        significance: Says before models are timed which of them do not differ, by the score.
        note: The quantity that confidence intervals refer to; empty if another part of the text says so.
    """
    comparison = study.comparison
    score = study.config.score
    names = list(runs)
    suffixes = study.config.size_suffixes
    axes = {"gflops": "GFLOPs per image"}
    axes |= {f"latency_ms{suffix}": f"ms per image, batch {size}" for size, suffix in suffixes.items()}
    shown = {name: COLUMNS[name] for name in ("name", "gflops")}
    shown |= {f"speedup{suffix}": (f"speed-up b{size}", "[.2f") for size, suffix in suffixes.items()}
    figures = [score, "to_dense"]
    if any(BEFORE in row for row in rows):
        figures.insert(0, BEFORE)
    summary = shown | {name: COLUMNS[name] for name in figures}
    # The page has a column of standard deviations.
    title, form = summary[score]
    summary[score] = (title, f"±{form.removeprefix('±')}")
    classes = _classes_of(study)
    began = BEFORE if BEFORE in table.runs[DENSE][0].figures else score
    told = Told(
        rows=rows,
        columns=with_batch_sizes(suffixes, columns),
        measure=measure,
        axes=axes,
        parts=[],
        summary=summary,
        began_by_chance=bool(_guessing_by(table, began, classes)),
    )
    to_dense = [value for value in gaps(table, score, dict.fromkeys(names, DENSE)).values() if value is not None]
    has_intervals = any(difference.has_interval for difference in to_dense)
    is_by_sample = paired_by_sample(table, score, names)
    # What is fastest is not known yet, so that nothing is recommended.
    if not table.times and (comparison.trains or has_intervals):
        return told._replace(parts=[*filter(None, [note, significance(table, score, names)])])
    candidates = {name: run.candidate for name, run in runs.items()}
    guessing = _guessing_by(table, score, classes)
    found = recommendations(table, score, measure, candidates, study.config.tolerance, guessing)
    parts: list[str | MarkdownTable] = []
    if found:
        decided = verdict_of(found)
        code = code_of(study, [runs[name].candidate for name in decided.named])
        printed = code_of(study, [runs[name].candidate for name in _printed(found)])[:1]
        harmed = _better_untuned(study, table, score, [runs[name].candidate for name in _named(found)])
        verdict = decided._replace(sentences=[*decided.sentences, *harmed]).parts
        told = told._replace(verdict=verdict, recommended=decided.named, code=code, printed=printed)
    if found and rows:
        batches = batches_of(study.config.latency_batch)
        # Stars and mark are of the same batches, which need not be the largest.
        used = next(one.used for one in found if one.where == batches)
        at_random = {name for name, run in runs.items() if run.candidate.at_random}
        name_of_used = None if used is None else used.name
        advised = []
        # Where nothing is advised, no model is better.
        if not found[0].invalid:
            advised = [name for name in names if name not in at_random]
            parts.append(f"`*`, for {batches}: {ON_FRONT}")
        rows = _starred(rows, score, advised, name_of_used)
        summary = {"name": summary["name"], "front": COLUMNS["front"], **summary}
        told = told._replace(rows=rows, summary=summary)
    parts += [*filter(None, [note]), *facts["images"]]
    limits = [_UNTRAINED]
    if comparison.trains:
        limits = [_TRAINED]
    if any(run.candidate.image_size is not None for run in runs.values()):
        limits.append(_RESIZED)
    if comparison.train is not None and not comparison.tunes_dense:
        limits.append("The dense model was not fine-tuned as the others were: `--tune true` trains all alike.")
    if not has_intervals or (is_by_sample and not note):
        by_sample = to_dense if is_by_sample else []
        limits.append(_of_chance(table.runs[DENSE][0], score, by_sample))
    if guessing and not found:
        limits.append(guessing[0].upper() + guessing[1:])
    dense = study.dense
    if isinstance(dense, TrainConfig) and dense.precision != "fp32":
        limits.append(f"Scores are of precision {dense.precision}, and times of fp32.")
    if comparison.trains and not has_intervals:
        limits.append("One seed: `--seeds 5` gives confidence intervals over runs.")
    parts.append(" ".join(limits))
    return told._replace(parts=parts)


def _classes_of(study: Study) -> int | None:
    """Return the number of classes that the dense model chooses from; None where it classifies no images."""
    # Patches of an image are no independent draws.
    if study.config.score != "top1":
        return None
    # Of the model: its config need not say how many classes it has.
    return image_facts(sketch(kind_of(study.dense))).classes


def _guessing_by(table: Table, figure: str, classes: int | None) -> str:
    """Say that the dense model guesses, if it does by a figure, see `mmod.planning.verdict.say_guessing`."""
    return say_guessing(mean_of(table, figure, DENSE) / 100, classes, evaluated(table, DENSE))


def code_of(study: Study, candidates: Sequence[Candidate]) -> list[str]:
    """Return a block of the lines of Python, and one of the keys of a training config, that apply models."""
    by_label = {one.label: (_python(study, one), _keys(study, one)) for one in candidates}
    difference = ""
    if any(one.image_size is not None for one in candidates):
        difference = _KEYS_OF_SIZE
    return shown_code(by_label, _opening(study, Candidate(DENSE)), difference)


def _opening(study: Study, candidate: Candidate) -> str:
    """Return the line of Python that opens the model which a candidate's methods are applied to."""
    dense = study.comparison.dense_run(seed=0)
    changes = Candidate(candidate.name, changes=candidate.changes)
    start = config_as(study.dense, TrainConfig)
    any_size = {}
    if candidate.image_size is not None:
        # Of another library, it takes any size or says no such thing.
        is_fixed = not getattr(sketch(kind_of(run_config_of(changes, start))), "dynamic_img_size", True)
        any_size = ANY_SIZE if is_fixed else {}
    if dense is not None and dense.is_trained:
        if "model" not in candidate.changes:
            return opening_line(dense.training.output, args=any_size)
        start = start.started_from(dense.training.output)
    model = run_config_of(changes, start).model
    named = model.checkpoint
    is_same = (model.name, model.args) == (start.model.name, start.model.args)
    if is_same and named is not None and (find_run(named) is not None or is_described(named)):
        # Such a folder says which model it holds. Methods of a saved model were undone.
        return opening_line(named, dense=True, args=any_size)
    return opening_line(model.name, checkpoint=named, args={**model.args, **any_size})


def _python(study: Study, candidate: Candidate) -> str:
    if study.comparison.is_trained(candidate):
        folder = study.comparison.folder_of(candidate.name, seed=0)
        # Its weights are no longer the dense ones, so that no line on these makes it.
        return opening_line(str(folder))
    return _untuned(study, candidate)


def _untuned(study: Study, candidate: Candidate) -> str:
    """Return the lines of Python that make a candidate without training: of the dense model, or of what they open."""
    methods = candidate.methods
    if candidate.image_size is not None:
        methods = ({"kind": "resize", "size": candidate.image_size}, *methods)
    resized = dataclasses.replace(candidate, image_size=None, methods=methods)
    opening = _opening(study, candidate)
    own = "" if opening == _opening(study, Candidate(DENSE)) else opening
    return f"{own}\n{resized.code(TrainConfig.part, is_only=True)}".strip()


def _keys(study: Study, candidate: Candidate) -> str:
    size = {}
    if candidate.image_size is not None:
        size = study.dense.keys_of_size(cast(int, candidate.image_size))
    changes = merged(candidate.changes, size)
    keys = ""
    if changes:
        keys = yaml.safe_dump(changes, default_flow_style=None, sort_keys=False).rstrip()
    methods = dataclasses.replace(candidate, image_size=None).config(TrainConfig.part, is_only=True)
    return "\n".join(filter(None, [keys, methods]))


def recommendations(
    table: Table,
    score: str,
    measure: str,
    candidates: Mapping[str, Candidate],
    tolerance: float = TOLERANCE,
    guessing: str = "",
) -> list[Recommendation]:
    """Return what to use for each size of batches, the largest first; none before models are timed.

    Args:
        measure: Title of the score.
        guessing: That the dense model guesses, see `mmod.planning.verdict.say_guessing`.
    """
    # More images would not narrow intervals over seeds.
    is_by_sample = paired_by_sample(table, score, list(candidates))
    samples = "images" if is_by_sample else SEEDS
    trained = gain(table, score, BEFORE, DENSE)
    harm, invalid = "", guessing
    # What equals a dense model that fell may be worse than the user's, though chance lets every second one fall.
    if trained is not None and trained.high < 0:
        invalid = guessing or _HARMED.format(change=f"{trained:+.1f}")
    elif trained is not None and trained.value < -100 * tolerance:
        harm = f"; the dense model changed by {trained:+.1f} points in fine-tuning"
    changes = gaps(table, score, dict.fromkeys(candidates, DENSE))
    found = []
    for (_, size), ms in sorted(table.times.items(), key=lambda timed: -timed[0][1]):
        models = []
        for name, change in changes.items():
            if change is None:
                continue
            share = Estimate(change.value / 100, change.low / 100, change.high / 100)
            number = len(table.runs[name])
            if is_by_sample:
                number = evaluated(table, name)
            one = candidates[name]
            speedup = ratios(ms[DENSE], ms[name])
            models.append(AdviceRow(name, one.label, speedup, _NO_SCORE, share, number, at_random=one.at_random))
        found.append(
            Recommendation(
                models,
                tolerance,
                measure,
                samples,
                batches_of(size),
                harm=harm,
                is_unsteady=bool(table.caution),
                invalid=invalid,
            )
        )
    return found


def _printed(found: Sequence[Recommendation]) -> list[str]:
    """Return the models whose lines are printed; the page has those of all that the table names.

    They are those of the sentences, or where these are about none, those that may be within the tolerance.
    """
    names = dict.fromkeys(_named(found))
    if names:
        return list(names)
    for one in found:
        names |= {model.name: None for model, _ in one.roles if not exceeds(model.loss, one.tolerance)}
    return list(names)


def _named(found: Sequence[Recommendation]) -> list[str]:
    """Return the models that the sentences are about, each once."""
    return list(dict.fromkeys(one.named.name for one in found if one.named is not None))


def _better_untuned(study: Study, table: Table, score: str, candidates: Sequence[Candidate]) -> list[str]:
    """Say of each model that scored higher before it was fine-tuned how the untuned one is made."""
    told = []
    for one in candidates:
        if BEFORE not in table.runs[one.name][0].figures:
            continue
        before, after = mean_of(table, BEFORE, one.name), mean_of(table, score, one.name)
        # As the table shows both.
        if round(before, 2) > round(after, 2):
            lines = "; ".join(_untuned(study, one).splitlines())
            untuned = ""
            if lines and not one.from_scratch:
                of_dense = "" if lines.startswith("model =") else "your dense model with "
                untuned = f": untuned, it is {of_dense}`{lines}`"
            told.append(f"{one.label} scored higher before fine-tuning, {before:.2f} % against {after:.2f} %{untuned}.")
    return told


def _known_times(table: Table, names: Iterable[str], least: int) -> dict[int, dict[str, float]]:
    """Return the time of every model by batch size, from the least size on; nothing before it is measured."""
    known = {}
    for (_, size), ms in sorted(table.times.items()):
        if size >= least:
            times = relative_times(ms, DENSE)
            known[size] = {name: times[name][0] for name in names}
    return known


def _starred(rows: Lines, score: str, advised: Container[str], used: str | None) -> Lines:
    """Return rows with a star for each model on the Pareto front of those that may be advised.

    Args:
        used: The model that the text says to use, which is marked too.
    """
    speedups = {row["name"]: row["speedup"] for row in rows if row["name"] in advised}
    scores = {row["name"]: row[score] for row in rows if row["name"] in advised}
    front = shown_front(speedups, scores)
    starred = []
    for row in rows:
        marks = []
        if row["name"] in front:
            marks.append("*")
        if row["name"] == used:
            marks.append(USE)
        starred.append({**row, "front": " ".join(marks)})
    return starred


def _of_chance(dense: Measured, score: str, to_dense: Sequence[Estimate]) -> str:
    """Say how wide intervals of so few test images are, and how many images would tell one point.

    Args:
        to_dense: Differences to the dense model that are paired by sample; none for models that are not.
    """
    images = dense.samples
    if to_dense:
        points = max((value.high - value.low) / 2 for value in to_dense)
        text = f"{images:,} test images: the widest interval is {points:.1f} points to each side."
        if points > 1:
            needed = _rounded(images * points**2)
            text += f" About {needed} would make it one point."
        return text
    if score != "top1":
        # Classes, and patches of one image, are no independent draws.
        return f"{images:,} test images: intervals come with further seeds."
    # Where all or none are right, as if two of some more were not.
    least = 2 / (images + 4)
    right = min(max(dense.figures[score] / 100, least), 1 - least)
    # The 95 % interval of a difference between two models on other images, which pairing could only narrow.
    points = 196 * math.sqrt(2 * right * (1 - right) / images)
    text = f"{images:,} test images: differences below {points:.1f} points may be chance."
    if points > 1:
        needed = _rounded(images * points**2)
        text += f" About {needed} are needed to tell one point from chance."
    return text


def _rounded(number: float) -> str:
    """Return a number rounded up to two digits."""
    digits = len(str(round(number))) - 2
    scale = 10**digits
    rounded = math.ceil(number / scale) * scale
    return f"{rounded:,}"


def _tell(study: Study, table: Table, runs: Runs, rows: Lines, facts: Facts) -> Told:
    """Tell of classifiers, of images or of patches."""
    measure = _MEASURES[study.config.score]
    return tell_of(study, table, runs, rows, facts, columns=_COLUMNS, measure=measure, significance=significance)


STUDY = StudyKind(
    times={"image": ("latency_ms", "speedup")},
    count=_count,
    tell=_tell,
    weigh={"mean_iou": mean_iou, "objects": right_objects, "top1": right_patches},
    describe=_describe,
    draw=_draw,
    baselines=_baselines,
)
"""A study of classifiers of images or of patches."""
