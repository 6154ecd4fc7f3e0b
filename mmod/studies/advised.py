"""What the command of advice reads: a dense model with a head that returns what is evaluated, and images or prompts."""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset

from mmod.adapters import find_library, image_facts, load_adapter
from mmod.data.corrupt import CorruptReport
from mmod.data.labels import ModelClasses, some_names
from mmod.data.readers.conversations import ConversationsConfig, open_conversations
from mmod.data.readers.folders import FolderSource
from mmod.data.records import plain_answer
from mmod.data.stream import ImageReader
from mmod.opening.open import OPEN_CLIP, open_model
from mmod.opening.opened import Opened
from mmod.opening.runs import find_run
from mmod.planning.candidate import ANY_SIZE, ImageSize, Measure
from mmod.planning.prompts import IsRight
from mmod.planning.samples import AtSize, take_off_head_
from mmod.training.command import parse_run
from mmod.training.engine.kind import calibration, load
from mmod.training.kinds import all_configs
from mmod.values import one_of


def open_advised(
    name: str,
    checkpoint: str | None = None,
    pretrained: bool = True,
    image_size: int | None = None,
    measure: Measure | None = None,
) -> Opened:
    """Open a dense model that reads images, see `mmod.open_model`.

    Args:
        measure: "top1", "features" or "patches"; the last two take off the head of a model of timm.
    """
    if name.startswith(OPEN_CLIP) and measure is not None:
        # Before weights, which may come from a hub.
        one_of("--measure of a model of open_clip", measure, ("features",))
    opened = open_model(
        name,
        checkpoint=checkpoint,
        pretrained=pretrained,
        image_size=image_size,
        dense=True,
        advice="name a file of weights, --checkpoint FILE",
    )
    if "language" in opened.parts:
        advice = "name a file of its prompts by --prompts"
        if "image" not in opened.parts:
            advice = "use mmod.search_plan"
        raise ValueError(f"{name!r} is a language model, which continues text: {advice}")
    # Of the size that the model was made for.
    preprocessing = opened.preprocessing
    opened = opened._replace(prepare=lambda: preprocessing)
    if find_library(opened.model) == "timm":
        opened = opened._replace(model=_flexible(opened.model))
    if measure is not None:
        take_off_head_(opened.model, measure, f"--measure of {name!r}")
    return opened


def _flexible(model: nn.Module) -> nn.Module:
    """Return a dense model of timm that takes images of any size if it can: smaller images are among the candidates."""
    if getattr(model, "dynamic_img_size", False):
        return model
    saving = load_adapter("timm").SAVING
    described = saving.describe(model)
    arguments = {**described["arguments"], **ANY_SIZE}
    try:
        flexible: nn.Module = saving.build({**described, "arguments": arguments})
    # Architectures without position embeddings have no such argument.
    except TypeError:
        return model
    flexible.load_state_dict(model.state_dict())
    return flexible.to(next(model.parameters()))


def added_arguments(model: nn.Module) -> dict[str, bool]:
    """Return the arguments by which a model of `open_advised` takes images of any size, if it would not without."""
    if find_library(model) != "timm":
        return {}
    arguments = load_adapter("timm").SAVING.describe(model)["arguments"]
    return {name: value for name, value in ANY_SIZE.items() if arguments.get(name) == value}


# Samples among which draws are at random.
_NEIGHBOURS = 64


class _PromptsConfig(ConversationsConfig):
    skip_option = "--on_corrupt skip"
    images_option = "--images FOLDER"


class ReadPrompts(NamedTuple):
    """A dense vision-language model and its prompts, with what `mmod.advise` needs of them.

    Attributes:
        pixel_limits: The limits of the processor, by which `at_size` makes images smaller; None takes their side.
        note: What was opened, in a sentence.
        available: Prompts in the file that can be read.
    """

    model: nn.Module
    batches: Iterable[object]
    is_right: IsRight
    at_size: AtSize
    pixel_limits: Mapping[str, int] | None
    note: str
    available: int


def read_prompts(options: argparse.Namespace) -> ReadPrompts:
    """Load a vision-language model and read prompts for it, also with smaller images.

    Answers are right by their texts, as in an evaluation of chats: but for case and spacing.
    """
    # Imported late: importing them needs transformers.
    from mmod.training.chat.config import ModelConfig, TrainConfig
    from mmod.training.chat.kind import ChatKind
    from mmod.training.chat.processor import pixel_limits_of
    from mmod.training.chat.start import resize_images

    data = _PromptsConfig(options.prompts, None, options.images, on_corrupt=options.on_corrupt)
    run = find_run(options.model)
    if run is None:
        config = TrainConfig(output=options.output or "runs/advise", model=ModelConfig(options.model), data=data)
    else:
        parsed = parse_run([options.model], all_configs())
        if not isinstance(parsed, TrainConfig):
            raise ValueError(f"--prompts are for runs of kind 'chat', and {str(run)!r} is one of kind {parsed.kind!r}")
        config = dataclasses.replace(parsed, data=data)
    # What is wrong in a file of prompts is told before the weights are loaded.
    chats = open_conversations(options.prompts, data)
    broken = chats.report.faults
    kind = ChatKind(config)
    opened = open_model(load(kind), dense=True)
    every = math.ceil(len(chats) / options.batch_size)
    # Batches are whole: the last may go beyond the number.
    number = math.ceil(options.number / options.batch_size) * options.batch_size
    prompts = _drawn(calibration(kind, opened.model, every, options.batch_size), number)
    processor = kind.collator.processor
    tokenizer = processor.tokenizer

    def is_right(given_A: Tensor, answer_A: Tensor) -> bool:
        texts = tokenizer.batch_decode([given_A, answer_A], skip_special_tokens=True)
        given, answer = map(plain_answer, texts)
        return given == answer

    def at_size(model: nn.Module, size: ImageSize) -> Iterable[Any]:
        if isinstance(size, int):
            resize_images(model, size)
            resized = config.at_size(size)
        else:
            resized = config.with_pixels(size)
        return _drawn(calibration(ChatKind(resized), model, every, options.batch_size), number)

    note = f"The model is {opened.sentence}."
    if broken:
        note = f"Prompts that were skipped: {len(broken)}, such as {next(iter(broken))}. {note}"
    return ReadPrompts(opened.model, prompts, is_right, at_size, pixel_limits_of(processor), note, len(chats))


def drawn_evenly(total: int, count: int) -> list[int]:
    """Return up to `count` of `total` positions, spread over them, and at random among neighbours.

    Every k-th one would leave out whole kinds of samples where these take turns.

    Example:
        >>> drawn_evenly(6, 9)
        [0, 1, 2, 3, 4, 5]
    """
    count = min(count, total)
    draw = np.random.default_rng(0)
    mixed: list[int] = []
    for start in range(0, total, _NEIGHBOURS):
        mixed += draw.permutation(range(start, min(start + _NEIGHBOURS, total))).tolist()
    return sorted(mixed[number * total // count] for number in range(count))


def _drawn(loader: Any, number: int) -> Iterable[object]:
    """Return batches of so many prompts in random order; of few, the first holds a fifth, where plans are searched."""
    drawn = drawn_evenly(len(loader.dataset), number)
    prompts = Subset(loader.dataset, np.random.default_rng(0).permutation(drawn).tolist())
    fifth = math.ceil(len(prompts) / 5)
    if fifth >= loader.batch_size:
        # An explicit generator: the loader would otherwise draw from the global one.
        return DataLoader(prompts, loader.batch_size, collate_fn=loader.collate_fn, generator=torch.Generator())
    ends = [0, *range(fifth, len(prompts), loader.batch_size), len(prompts)]
    batches = []
    for start, end in pairwise(ends):
        batches.append(loader.collate_fn([prompts[number] for number in range(start, end)]))
    return batches


def read_images(
    folder: str, opened: Opened, number: int, on_corrupt: str
) -> tuple[Tensor | tuple[Tensor, Tensor], str, int]:
    """Read up to `number` images (N, C, H, W), spread evenly over a folder; what is said of them; how many it holds.

    The images come with labels (N,) where the model knows the folders' names, or else where there are as many folders
    as classes of the model.
    """
    names = None
    if opened.classes is not None:
        names = ModelClasses(opened.classes, "the model", required=False)
    source = FolderSource(folder, "", train_split="", model=names, labelled=False)
    report = CorruptReport(on_corrupt, skip="--on_corrupt skip")  # type: ignore[arg-type]
    # Folders stand in order of their classes, so that the first images would be those of one.
    positions = np.array(drawn_evenly(len(source), number))
    preprocessing = opened.preprocessing
    reader = ImageReader(source, preprocessing.mode, preprocessing.transform())
    images, labels, faults = reader.read(positions, None)
    report.add(faults)
    if not len(labels):
        raise ValueError(f"{folder!r} holds no image that can be read: {report}")
    classes = len(source.names)
    known = image_facts(opened.model).classes or 0
    notes = []
    if source.left_out:
        notes.append(f"{source.left_out}.")
    if report.faults:
        notes.append(f"{len(report.faults)} broken images were skipped.")
    if source.classes is None and classes and known:
        unused = f"Labels are not used: some images are in no class folder, beside {some_names(source.names)}."
        return images, " ".join([unused, *notes]), len(source)
    if classes < 2 or not known:
        return images, " ".join(notes), len(source)
    if source.classes is not None and source.classes.given:
        if not source.classes.is_plain:
            notes.append(f"{source.classes}.")
    elif classes != known or opened.is_run:
        others = " of other names" if opened.is_run else ""
        # First, since it decides what is measured.
        unused = (
            f"Labels are not used: the images are in {classes} folders ({some_names(source.names)}), and the model has "
            f"{known} classes{others}."
        )
        return images, " ".join([unused, *notes]), len(source)
    return (images, labels), " ".join(notes), len(source)
