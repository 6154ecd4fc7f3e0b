"""The comparison of `mmod.advise`: which way of saving compute pays for a model, measured on images or prompts."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch
from torch import nn

from mmod.adapters import BlockStack, by_first_batch, find_library, find_part, find_stacks
from mmod.analysis.counting import by_data
from mmod.analysis.modes import in_mode
from mmod.analysis.table import DENSE, Look, Measured, Table, evaluated, fill, mean_of
from mmod.analysis.timing import further_rounds, say_kept
from mmod.io.files import make_folder, write_json
from mmod.io.jobs import Callback, Runner
from mmod.io.progress import Stages
from mmod.io.records import QUESTION, FolderTakenError, answered_by, differences
from mmod.io.store import STORE, Store
from mmod.methods.base import methods_of
from mmod.model import copy_of
from mmod.planning.advice import WRITTEN, Advice, Page
from mmod.planning.candidate import TOLERANCE, Candidate, ImageSize, Measure
from mmod.planning.divergence import PromptBatch, check_batches
from mmod.planning.early import BATCH, COSINES, SHARES, for_speed, front_in, look_at, near_front, unclear_at
from mmod.planning.entrants import Entrant, changed_models, evaluate_once, ready_models, row_of, rows_of, time_in_turns
from mmod.planning.prompts import IsRight, same_tokens
from mmod.planning.remarks import as_they_are, attending_twice, drawn_at_random, only_timed, untrained
from mmod.planning.samples import (
    AGREEMENT,
    CORRECT,
    FIRST_LOOK,
    AtSize,
    Images,
    Prompts,
    first_images,
    first_prompts,
    take_off_head_,
)
from mmod.planning.untrained import image_candidates, language_candidates, smaller_images
from mmod.planning.verdict import say_guessing
from mmod.values import check_value

ROUNDS = 5
"""Timed rounds."""
FEW_ROUNDS = 3
"""Those for a wanted speed."""
# Candidates, at most about, and those of a wanted speed that are evaluated: for the work that is left.
_CANDIDATES = 25
_NEAR = 7
# Plans that a search tries for each block, at most.
_PLANS = 8
# Work in passes of the dense model.
_READING = 32.0
_FITTING = 32.0
_REPORT = 32.0


@by_first_batch
def advise(
    model: nn.Module,
    batches: Iterable[object],
    *,
    part: str | None = None,
    images: int = 256,
    batch_size: int = 8,
    tolerance: float = TOLERANCE,
    faster: float | None = None,
    measure: Measure | None = None,
    candidates: Sequence[Candidate] | None = None,
    models: Mapping[str, nn.Module] | None = None,
    is_right: IsRight = same_tokens,
    at_size: AtSize | None = None,
    pixel_limits: Mapping[str, int] | None = None,
    folder: str | Path | None = None,
    page: Page | None = None,
    progress: bool = True,
) -> Advice:
    """Try candidates that need no training and say which one pays on these images or prompts and this machine.

    All candidates run on the first 64 images and are timed in turns. Those that no candidate as fast clearly beats run
    on all images. With labels, the change of accuracy decides. What decides without labels depends on the model:

    - a model with a head: how often its top class is the dense model's;
    - without a head: the cosine of its features, or of its patches where it has an output per patch
      (`global_pool=""`);
    - a language model: how often its next token is the dense model's; with labels, its greedy answers. It is timed by
      the prefill of prompts of equal length.

    What your own model returns is taken for logits if there are labels.

    Args:
        model: A dense image model of timm, of transformers or of your own, a CLIP model, or a language model of
            transformers that reads images; it runs in evaluation mode and is unchanged.
        batches: Images (B, C, H, W), or pairs of images and labels (B,), such as a loader; preprocessed for the model.
            For a language model, what its processor returns, perhaps with `labels` at the answers' tokens (-100
            elsewhere); the last answer of each prompt is then generated. Plans are searched on the first fifth of
            these prompts, in whole batches; all candidates are evaluated on the others.
        part: The part to make cheaper; None takes "language", or else "image".
        images: Number of images or prompts, the first of the batches.
        batch_size: Images of a timed batch; a language model takes the size of the first batch.
        tolerance: Allowed loss of accuracy, agreement or cosine, absolute, in [0, 1): 0.02 are 2 points. The fastest
            candidate whose whole 95 % interval is within it is advised.
        faster: The wanted speed-up of an image model: the usual candidates except random tokens are tried, at sizes of
            about that speed. Of those that reach it, the one that loses least by the worse end of its interval is
            named, and advised if it is within the tolerance.
        measure: The output of an image model to compare, in place of the above: "top1", its top class; "features",
            those that a head would read; or "patches", the features of each patch. The last two remove the head of a
            timm model. Your own model returns what is compared, such as the outputs of a regression head as "features".
        candidates: What to try. None takes
            - for images those of `mmod tradeoff my-model`, at 0.85, 0.7 or 0.55 of the FLOPs: gradual and late merging,
              A-MoD, random tokens, equal patches left out, smaller images, ToMe and pruning;
            - for a language model plans of `search_plan`, the schedules of p-MoD, PyramidDrop and FastV, random tokens,
              evenly spread tokens, and image tokens that late layers do not update.
        models: Your own models by name, unchanged, with the candidates, or alone with `candidates=[]`: such as one with
            fewer blocks, or fine-tuned ones if `model` is fine-tuned alike. The one named "random" is the control of
            the routed ones.
        is_right: Whether a generated answer is right, by its tokens and those of the label; by default, whether they
            are the same.
        at_size: Makes a language model read images of another size, in place, and returns the batches of the same
            prompts at that size; `mmod advise` passes it. The size is a side in pixels, or other `pixel_limits`. None
            tries no smaller images.
        pixel_limits: Fewest and most pixels of an image that the processor makes, `shortest_edge` and `longest_edge`
            in the `size` of Qwen-VL's image processors; None for processors with a side.
        folder: Write `advice.json`, `advice.md`, `advice.png` and `question.json` here, and `store.jsonl`, from which
            an interrupted call resumes. Advice on other samples or with other settings is not replaced. None writes
            nothing. For `models`, call the result's `save` instead.
        page: What a command adds to `advice.md`; None titles it by the model.
        progress: Show a bar.

    Raises:
        TypeError: A batch that holds no images, or no prompts.
        ValueError: The model is changed already or cannot be routed, there are no images, there is one batch only to
            search plans and evaluate them, or the folder is damaged.
        FileExistsError: The folder holds advice on another model, on other samples or with other settings.

    Example:
        >>> import timm, torch
        >>> model = timm.create_model("test_vit", dynamic_img_size=True)
        >>> advice = advise(model, [torch.randn(4, 3, 160, 160)], batch_size=2, progress=False)
        >>> advice.rows[0].speedup.median >= advice.rows[-1].speedup.median
        True
    """
    check_value("images", images, int, "[1, inf)")
    check_value("batch_size", batch_size, int, "[1, inf)")
    check_value("tolerance", tolerance, float, "[0, 1)")
    check_value("faster", faster, float | None, "(1, inf)")
    models = models or {}
    page = page or Page()
    _check_candidates(candidates, models)
    check_batches(batches)
    # Before blocks are looked for, of a class of the user's own by images that it may not read.
    if isinstance(batches, (list, tuple)) and not batches:
        raise ValueError("no images or prompts: batches is empty")
    part, stack, is_only = _part_to_change(model, part)
    _check_options(stack, candidates, faster, measure, at_size, pixel_limits)
    if measure is not None:
        model = _measured_by(model, measure)
        models = {name: _measured_by(one, measure) for name, one in models.items()}
    if models and folder is not None:
        raise ValueError("results of `models` have no code to be known by: leave out folder, and save the advice")
    store = None
    if folder is not None:
        store = Path(folder) / STORE
    depth = len(stack.blocks)
    samples: Images | Prompts
    chosen: Sequence[Candidate]
    unfitted: dict[str, str] = {}
    stages = Stages("advise", progress)
    with stages, in_mode(False, model), torch.no_grad():
        stages.expect(_most_work(images, batch_size, faster))
        results = Store(store)
        if stack.language:
            samples, chosen = _prompts(model, part, depth, batches, images, candidates, is_right, store, stages)
            if at_size is not None:
                samples.batches_at = partial(_batches_at, at_size, images, stages.update)
                smaller, unfitted = smaller_images(model, samples.batches, pixel_limits)
                chosen = [*chosen, *smaller]
        else:
            stages.begin("dense model", images)
            given = first_images(batches, images)
            samples = Images(model, part, stack.prefix, *given, batch_size, measure)
            stages.begin("fitting to FLOPs", _FITTING)
            if candidates is None:
                image = samples.pixels[:1].to(samples.device)
                chosen, unfitted = image_candidates(model, part, depth, image, samples.patches, faster)
            else:
                chosen = candidates
        if samples.note:
            # Before what may take long, such as batches that repeat a few images.
            stages.say(samples.note)
        question = {
            "candidates": {candidate.name: candidate.code(part, is_only) for candidate in chosen},
            "batch_size": samples.batch_size,
            "faster": faster,
            "samples": samples.read,
            "model": samples.identity,
        }
        if folder is not None:
            _check_question(Path(folder), question)

        def begin(name: str) -> None:
            stages.begin(f"making {name}", 1.0)

        entrants, refused = changed_models(model, samples, depth, chosen, begin)
        entrants |= ready_models(models, samples, entrants)
        figure = CORRECT if samples.has_labels else AGREEMENT
        decimals = SHARES if samples.measure == AGREEMENT else COSINES
        table = _compared(entrants, figure, results, decimals, faster, stages, list(models))
        stages.begin("report", _REPORT)
        costs = {}
        for name, runs in table.runs.items():
            _, changed, as_read, _ = entrants[name]
            costs[name] = as_read.costs(changed, runs[0].kept)
        rows = tuple(rows_of(table, figure, entrants, costs, part, is_only, decimals))
    accuracy = None
    if samples.has_labels:
        accuracy = mean_of(table, CORRECT, DENSE)
    told = [samples.note, attending_twice(entrants), drawn_at_random(chosen, depth), as_they_are(models)]
    if chosen:
        # A study makes the usual candidates, of models that its configs can name.
        is_as_in_study = candidates is None and not stack.language and find_library(model) is not None
        told.append(untrained(page.run if is_as_in_study else None))
    told += only_timed(table, faster or 0.0)
    if not page.title:
        page = dataclasses.replace(page, title=f"Advice for {_name_of(model)}")
    caution = table.caution
    if caution and folder is not None:
        caution += f" {say_kept('`--output FOLDER`, in Python `folder=`')}"
    advice = Advice(
        rows=rows,
        refused=refused | unfitted,
        measure=samples.measure,
        accuracy=accuracy,
        milliseconds=samples.batch_size * float(np.median(table.times[BATCH][DENSE])),
        batch_size=samples.batch_size,
        images=len(samples),
        tolerance=tolerance,
        redundancy=samples.redundancy,
        remarks=[remark for remark in told if remark],
        cache=costs[DENSE].cache,
        faster=faster,
        caution=caution,
        classes=samples.classes,
        page=page,
        searched=samples.searched,
    )
    if folder is not None:
        # The question first: without it, what a kill leaves would be advice on another one.
        write_json(make_folder(folder) / QUESTION, question)
        advice.save(folder, overwrite=True)
    return advice


def _most_work(samples: int, batch_size: int, faster: float | None) -> float:
    """Return about the most passes that advice takes, before its candidates are known."""
    timed = 2 * ROUNDS * batch_size
    if faster is None:
        return samples + _CANDIDATES * (samples + timed)
    return samples + _NEAR * (FIRST_LOOK + timed)


def _compared(
    entrants: Mapping[str, Entrant],
    figure: str,
    results: Store,
    decimals: int,
    faster: float | None,
    stages: Stages,
    own: Sequence[str],
) -> Table:
    """Return the rows and times of the models; those that may be advised are evaluated on all samples."""
    _, dense, samples, _ = entrants[DENSE]
    table = Table()
    changed = [name for name in entrants if name != DENSE]
    # On all samples, since every look is compared with it.
    (all_samples,) = look_at([DENSE], 0, len(samples))
    stages.begin("answers of the dense model", len(samples))
    table.add(DENSE, 0, evaluate_once(results, entrants, all_samples, stages.update))
    if samples.has_labels:
        guessing = say_guessing(mean_of(table, CORRECT, DENSE), samples.classes, len(samples))
        if guessing:
            # Said now, since what is measured from here on cannot help.
            stages.say(f"Nothing will be advised: {guessing}")
    rounds: Iterable[list[Look]]
    if faster is None:
        passes = samples.readings(dense)
        times = partial(time_in_turns, results, entrants, stages, passes, changed, range(ROUNDS))
        rounds = near_front(table, changed, figure, samples.first, times, decimals)
        timed = ROUNDS * sum(reading.samples for reading in passes.values())
        later = len(changed) * (timed + len(samples) - samples.first)
    else:
        series: dict[str, list[str]] = {}
        for name in changed:
            candidate = entrants[name].candidate
            # What chooses at random is never advised.
            if not candidate.at_random:
                series.setdefault(candidate.series or name, []).append(name)

        def order(rows: Table, name: str) -> tuple[float, float]:
            return row_of(rows, figure, entrants[name].candidate).order

        varying = [name for name in changed if by_data(entrants[name].model)]
        # The speed that is wanted is that of batches.
        times = partial(time_in_turns, results, entrants, stages, [BATCH])
        table.times, table.waiting = times(changed, range(FEW_ROUNDS))
        budgets = list(series.values())
        unclear = list(unclear_at(table, budgets, varying, faster))
        if unclear:
            further, _ = times(unclear, further_rounds(FEW_ROUNDS))
            table.add_rounds(further)
        rounds = for_speed(table, budgets, own, figure, samples.first, faster, order)
        later = len(samples) - samples.first

    def expected(later: float) -> Iterator[list[Look]]:
        for looks in rounds:
            stages.expect(sum(look.work for look in looks) + later + _REPORT)
            yield looks
            later = 0.0

    def measure(look: Look, callback: Callback) -> Measured:
        stages.begin(f"{look.name} on {len(look.part)} samples", look.work)
        return evaluate_once(results, entrants, look, stages.update)

    fill(table, expected(later), measure, Runner(progress=False))
    if faster is not None:
        return table
    uncertain = _uncertain(table, entrants, figure, decimals)
    if uncertain:
        further, _ = time_in_turns(results, entrants, stages, passes, uncertain, further_rounds(ROUNDS))
        table.add_rounds(further)
    return table


def _uncertain(table: Table, entrants: Mapping[str, Entrant], figure: str, decimals: int) -> list[str]:
    """Return the candidates that need more rounds: those of the front on a busy machine, else what scatters."""
    front = [name for name in front_in(table, figure, decimals=decimals) if name != DENSE]
    if table.caution:
        return front
    # What a pass costs may depend on its images, of which the first rounds read few.
    varying = [name for name in front if by_data(entrants[name].model)]
    advisable = [name for name in entrants if name != DENSE and evaluated(table, name) == evaluated(table, DENSE)]
    return list(dict.fromkeys([*varying, *filter(table.scatters, advisable)]))


def _check_question(folder: Path, question: Mapping[str, object]) -> None:
    """Refuse to replace advice on another model, other samples or with other settings, and a study's question."""
    answered = answered_by(folder) or {}
    taken = [name for name in WRITTEN if (folder / name).exists()]
    if not taken:
        if answered and answered.keys() != question.keys():
            raise FolderTakenError(f"{str(folder)!r} has results of another command: name another folder")
        return
    changed = [name for name, value in question.items() if differences({name: answered.get(name)}, {name: value})]
    if not changed:
        return
    # A model is known by its outputs, which are others for other samples; an earlier version knew it by other ones.
    named = [name for name in changed if name != "model" or "samples" not in changed]
    raise FolderTakenError(
        f"{str(folder / taken[0])!r} is advice on another question or by another version of mmod, which differs in "
        f"{', '.join(named)}: remove it, or name another folder, `folder=...` in Python and --output FOLDER of "
        "`mmod advise`"
    )


def _name_of(model: nn.Module) -> str:
    described: Mapping[str, object] = getattr(model, "pretrained_cfg", None) or {}
    return str(described.get("architecture") or type(model).__name__)


def _measured_by(model: nn.Module, measure: Measure) -> nn.Module:
    """Return a copy of a model, with the same weights, that returns what a measure compares."""
    model = copy_of(model)
    take_off_head_(model, measure, f"measure of this {type(model).__name__}")
    return model


def _check_options(
    stack: BlockStack,
    candidates: Sequence[Candidate] | None,
    faster: float | None,
    measure: Measure | None,
    at_size: AtSize | None,
    pixel_limits: Mapping[str, int] | None,
) -> None:
    """Refuse options that the blocks, or further options, leave no room for."""
    if faster is not None and (stack.language or candidates is not None):
        raise ValueError(
            "faster chooses the candidates of an image model: leave it out beside candidates, and for prompts, for "
            'which mmod.search_plan(..., cost="milliseconds") finds a plan'
        )
    if measure is not None and stack.language:
        raise ValueError("measure says what of images is compared: leave it out for prompts")
    if at_size is not None and (candidates is not None or not stack.language):
        raise ValueError(
            "at_size adds smaller images to the candidates of a language model: leave it out for images, or candidates"
        )
    check_value("pixel_limits", pixel_limits, Mapping[str, int] | None)
    if pixel_limits is not None and (at_size is None or pixel_limits.keys() != {"shortest_edge", "longest_edge"}):
        raise ValueError(
            f"pixel_limits are the shortest_edge and longest_edge that at_size changes, got {dict(pixel_limits)} and "
            f"at_size={at_size}"
        )


def _check_candidates(candidates: Sequence[Candidate] | None, models: Mapping[str, nn.Module]) -> None:
    check_value("models", models, Mapping[str, nn.Module])
    check_value("candidates", candidates, list[Candidate] | None)
    if candidates is None:
        return
    if not candidates and not models:
        raise ValueError("candidates must name at least one candidate; None tries those of this model")
    for candidate in candidates:
        if candidate.changes or candidate.from_scratch or candidate.search or candidate.image_size is not None:
            raise ValueError(
                f"candidate {candidate.name!r} is one of a study, and advice trains nothing: set only its routing and "
                'methods, such as {"kind": "resize"} for smaller images'
            )
        if candidate.routing is None and not candidate.methods:
            raise ValueError(
                f"candidate {candidate.name!r} is the dense model: give it a routing or methods, such as "
                'Candidate("gradual", routing={"preset": "gradual"})'
            )


def _prompts(
    model: nn.Module,
    part: str,
    depth: int,
    batches: Iterable[object],
    count: int,
    candidates: Sequence[Candidate] | None,
    is_right: IsRight,
    store: Path | None,
    stages: Stages,
) -> tuple[Prompts, Sequence[Candidate]]:
    """Return prompts to evaluate candidates on, and the candidates; plans are searched on the first fifth."""
    stages.begin("reading prompts", _READING)
    prompts = first_prompts(batches, count, next(model.parameters()).device, stages.update)
    if candidates is not None:
        stages.begin("dense model", count)
        return Prompts(model, part, prompts, is_right, stages.update), candidates
    # No plan is evaluated on prompts that chose it.
    ends = list(accumulate(len(batch["input_ids"]) for batch in prompts))
    # Whole batches, which may hold more than a fifth.
    searched = 1 + next(number for number, end in enumerate(ends) if 5 * end >= ends[-1])
    if searched == len(prompts):
        raise ValueError(
            f"plans are found on one batch of prompts and evaluated on others, and there is one alone, of {ends[-1]}: "
            "pass more prompts, or smaller batches (`--batch_size` of the command)"
        )
    search = _PLANS * depth * ends[searched - 1]
    stages.expect(search + _most_work(count, ends[0], None))
    stages.begin("plan search", search)
    candidates = language_candidates(model, part, depth, _told(prompts[:searched], stages.update), store)
    stages.begin("dense model", count)
    evaluated = Prompts(model, part, prompts[searched:], is_right, stages.update)
    evaluated.searched = ends[searched - 1]
    evaluated.note = (
        f"Plans were searched on the first {evaluated.searched} of {ends[-1]} prompts, and all candidates evaluated on "
        f"the other {len(evaluated)}. {evaluated.note}"
    ).rstrip()
    return evaluated, candidates


def _part_to_change(model: nn.Module, part: str | None) -> tuple[str, BlockStack, bool]:
    """Return the part of a dense model that is made cheaper, and whether it has no other; refuse what has no advice."""
    if methods_of(model):
        raise ValueError(
            f"this {type(model).__name__} is changed already: call mmod.undo_ first, or pass it in `models` beside its "
            "dense model"
        )
    stacks = find_stacks(model)
    if part is None:
        part = next((name for name in ("language", "image") if name in stacks), None)
    part, stack = find_part(model, part)
    if part == "text" or (stack.language and not stack.reads_images):
        raise ValueError(
            f"advice is for models that read images, and {stack.names[0]} reads text: use mmod.search_plan"
        )
    if part == "image" and "language" in stacks:
        raise ValueError("the time of a vision tower alone is not compared: ask for advice on the part 'language'")
    return part, stack, len(stacks) == 1 and part == "image"


def _told(batches: Sequence[PromptBatch], callback: Callback) -> Iterator[PromptBatch]:
    for number, batch in enumerate(batches):
        callback(number / len(batches))
        yield batch


def _batches_at(
    at_size: AtSize, count: int, callback: Callback, model: nn.Module, size: ImageSize
) -> list[PromptBatch]:
    return first_prompts(at_size(model, size), count, next(model.parameters()).device, callback)
