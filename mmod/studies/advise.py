"""The command that says what makes a model cheaper before anything is trained.

`mmod advise MODEL --images FOLDER`, or `mmod advise FOLDER --prompts FILE` for a language model that reads images.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mmod.io.files import check_folder, check_place, folder_name, near_paths
from mmod.io.refusals import OneLineParser
from mmod.io.yaml import parse_option
from mmod.opening.runs import (
    check_at_rest,
    check_holds_work,
    check_source,
    find_run,
    find_weights,
    read_run_config,
)
from mmod.planning.candidate import MEASURES, TOLERANCE
from mmod.values import Mistakes, check_value

if TYPE_CHECKING:
    from mmod.opening.opened import Preprocessing
    from mmod.planning.prompts import IsRight
    from mmod.planning.samples import AtSize


def main(arguments: Sequence[str]) -> None:
    """Try the candidates of `mmod.advise` on a folder of images, or a file of prompts, and print what it advises."""
    options = _parser().parse_args(arguments)
    if options.images is None and options.prompts is None:
        raise ValueError("advice needs --images FOLDER, or --prompts FILE for a language model that reads images")
    _check(options)
    import torch

    from mmod.io.environment import choose_device
    from mmod.planning.advice import Page
    from mmod.planning.candidate import opening_line
    from mmod.planning.prompts import same_tokens
    from mmod.planning.trials import advise
    from mmod.studies.advised import added_arguments, open_advised, read_images, read_prompts

    device = choose_device(options.device)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    batches: Iterable[object]
    is_right: IsRight = same_tokens
    at_size: AtSize | None = None
    pixel_limits: Mapping[str, int] | None = None
    if options.prompts is None:
        found = open_advised(options.model, options.checkpoint, options.pretrained, options.image_size, options.measure)
        preprocessing = _checked(found.preprocessing, options)
        opened = found._replace(prepare=lambda: preprocessing)
        batch, facts, available = read_images(options.images, opened, options.number, options.on_corrupt)
        note = "\n\n".join(filter(None, [facts, f"{preprocessing} The model is {opened.sentence}."]))
        model = opened.model
        batches = [batch]
    else:
        model, batches, is_right, at_size, pixel_limits, note, available = read_prompts(options)
    # Before the model runs: labels that do not fit, or another mean than that of training, explain a low score.
    print(note, end="\n\n")
    folder = options.output or _folder_of(options)
    spec = options.model
    opening: dict[str, object] = {"checkpoint": options.checkpoint, "image_size": options.image_size}
    if not options.pretrained:
        opening["pretrained"] = False
    if Path(spec).is_dir():
        # Advice undoes the methods of a saved model.
        opening["dense"] = True
    elif options.prompts is not None:
        # Of the hub; `open_model` would take it for a name of timm.
        spec = f"transformers:{spec}"
    if options.prompts is None:
        # As it was opened here, so that lines of smaller images run.
        opening["args"] = added_arguments(model)
    advice = advise(
        model.to(device),
        batches,
        images=options.number,
        batch_size=options.batch_size,
        tolerance=options.tolerance,
        faster=options.faster,
        is_right=is_right,
        at_size=at_size,
        pixel_limits=pixel_limits,
        folder=folder,
        page=Page(f"Advice for {options.model}", note, opening_line(spec, **opening), _run_of(options), available),
    )
    print(f"{advice}\n\nTable, figures and picture: {folder}")


# Types of options that are numbers, with their limits, and examples of units.
_NUMBERS = {
    "faster": (float, "(1, inf)", "; 30 % less time is a speed-up of 1.43"),
    "tolerance": (float, "[0, 1)", "; 0.02 are 2 points"),
    "number": (int, "[1, inf)", ""),
    "batch_size": (int, "[1, inf)", ""),
    "image_size": (int, "[1, inf)", ""),
    "threads": (int, "[1, inf)", ""),
}


def _check(options: argparse.Namespace) -> None:
    """Raise for all that is missing or out of range, before the model, which may come from a hub."""
    path = Path(options.model)
    # "OWNER/NAME" may be a name of a hub.
    has_parent = len(path.parts) == 2 and path.parent.is_dir()
    is_path = has_parent or len(path.parts) > 2 or path.parts[:1] == ("runs",)
    mistakes = Mistakes()
    with mistakes.collected():
        if ":" in options.model and options.prompts is None:
            pass
        elif is_path and not path.exists():
            raise FileNotFoundError(f"no run or model at {options.model!r}{near_paths(path)}")
        elif options.prompts is not None:
            try:
                check_source(options.model)
            except FileNotFoundError as error:
                hint = "leave out --prompts for a model of timm or open_clip, which reads none"
                raise FileNotFoundError(f"{error}; {hint}") from error
        check_at_rest(options.model)
        check_holds_work(options.model)
    with mistakes.collected():
        unusable = [name for name in (*_OF_IMAGES, "faster") if getattr(options, name) is not None]
        if not options.pretrained:
            unusable.append("no_pretrained")
        if unusable and options.prompts is not None:
            named = ", ".join(f"--{name}" for name in unusable)
            reason = "of image models alone"
            if options.faster is not None:
                reason += "; with --prompts, the table has the speed of all candidates"
            raise ValueError(f"{named}: {reason}")
    with mistakes.collected():
        if options.checkpoint is not None:
            check_at_rest(options.checkpoint)
            find_weights(options.checkpoint)
    with mistakes.collected():
        if options.prompts is not None and not Path(options.prompts).is_file():
            raise FileNotFoundError(f"--prompts {options.prompts!r} is no file{near_paths(options.prompts)}")
    with mistakes.collected():
        if options.images is not None:
            check_folder(options.images, "--images")
    with mistakes.collected():
        output = options.output or _folder_of(options)
        check_place(output)
        if options.prompts is None and Path(output).resolve().is_relative_to(Path(options.images).resolve()):
            raise ValueError(f"{output!r} is in --images, which its picture would join: name another folder, --output")
    for name, (kind, limit, example) in _NUMBERS.items():
        value = getattr(options, name)
        # What has no default may be left out.
        if value is None:
            continue
        with mistakes.collected():
            try:
                check_value(f"--{name}", value, kind, limit)
            except (TypeError, ValueError) as error:
                raise type(error)(f"{error}{example}") from error
    mistakes.tell()


def _run_of(options: argparse.Namespace) -> str:
    """Return the run that a study would take for its dense model; "RUN" where the model is no such run."""
    run = find_run(options.model)
    if run is None or options.checkpoint is not None:
        return "RUN"
    config = read_run_config(run)
    if config.get("routing") is not None or config.get("methods"):
        return "RUN"
    return str(run)


# Options that `--prompts` leave no room for.
_OF_IMAGES = ("checkpoint", "image_size", "mean", "std", "measure")
# Options besides the samples that another question of the same model differs in.
_ASKED = (*_OF_IMAGES, "number", "batch_size", "faster")


def _folder_of(options: argparse.Namespace) -> str:
    """Return the folder of a question: by the model, the samples, and the options that are not the usual ones."""
    words = [options.prompts or options.images]
    usual = _parser()
    for name in _ASKED:
        value = getattr(options, name)
        if value == usual.get_default(name):
            continue
        if isinstance(value, list):
            value = "-".join(map(str, value))
        words.append(f"{name}-{value}")
    question = "-".join(map(folder_name, words))
    return f"runs/advise/{folder_name(options.model)}/{question}"


def _parser() -> OneLineParser:
    parser = OneLineParser(
        description="Try ways to make a model cheaper without training, on your images or prompts and this machine.",
    )
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="a name of timm, open_clip:ARCHITECTURE or open_clip:ARCHITECTURE:WEIGHTS, the folder of a run (its last "
        "checkpoint if it was stopped), or one that mmod.save_pretrained, timm or transformers saved; with "
        "--prompts a run, or a LLaVA-style model with its processor",
    )
    parser.add_argument("--images", metavar="FOLDER", help="images, perhaps in a folder for each class")
    parser.add_argument(
        "--prompts", metavar="FILE", help="conversations in LLaVA's format, whose images are in --images or beside FILE"
    )
    parser.add_argument("--checkpoint", metavar="FILE", help="weights of the model in place of the published ones")
    parser.add_argument(
        "--no_pretrained", dest="pretrained", action="store_false", help="random weights: for tests of the command"
    )
    parser.add_argument("--image_size", type=int, metavar="PIXELS", help="side of images; the model's unless given")
    for name in ("mean", "std"):
        parser.add_argument(
            f"--{name}",
            type=float,
            nargs="+",
            metavar="VALUE",
            help=f"{name} by which each channel is normalised; the model's unless given",
        )
    parser.add_argument(
        "--measure",
        choices=MEASURES,
        help="what must stay equal: the top class, the features that a head reads, or the features of patches",
    )
    parser.add_argument(
        "--number",
        type=int,
        default=256,
        help="images or prompts to use, spread evenly; of prompts, a plan search takes a fifth (256)",
    )
    parser.add_argument("--batch_size", type=int, default=8, help="images or prompts of a timed batch (8)")
    parser.add_argument(
        "--tolerance",
        type=parse_option,
        default=TOLERANCE,
        help=f"what may be lost of accuracy, agreement or cosine: 0.02 are 2 points ({TOLERANCE:g})",
    )
    parser.add_argument(
        "--faster",
        type=parse_option,
        metavar="TIMES",
        help="a wanted speed-up: what loses least at it, from few passes",
    )
    parser.add_argument("--device", default="auto", help="cpu, cuda ...; the GPU if there is one (auto)")
    parser.add_argument(
        "--threads",
        type=int,
        help="threads of the CPU for evaluation; times are taken on one unless OMP_NUM_THREADS is set",
    )
    parser.add_argument("--on_corrupt", choices=("raise", "skip"), default="raise", help="what to do on a broken image")
    parser.add_argument(
        "--output",
        metavar="FOLDER",
        help="folder of the result (runs/advise/MODEL/SAMPLES, with options such as --number 100 in its name)",
    )
    return parser


def _checked(preprocessing: Preprocessing, options: argparse.Namespace) -> Preprocessing:
    """Return the preprocessing with mean and standard deviation of the command line."""
    channels = len(preprocessing.fields["mean"])
    for name in ("mean", "std"):
        values = getattr(options, name)
        if values is not None and len(values) != channels:
            raise ValueError(f"--{name} needs {channels} values, one for each channel, got {len(values)}")
    return preprocessing.changed(mean=options.mean, std=options.std)
