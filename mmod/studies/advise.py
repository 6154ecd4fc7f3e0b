"""The command that says what makes a model cheaper before anything is trained.

`mmod advise MODEL --images FOLDER`, or `mmod advise FOLDER --prompts FILE` for a language model that reads images.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmod.values import check_value

if TYPE_CHECKING:
    from torch import Tensor, nn

OPEN_CLIP = "open_clip:"
MEASURES = ("top1", "features", "patches")


def main(arguments: Sequence[str]) -> None:
    """Try the candidates of `mmod.advise` on a folder of images, or a file of prompts, and print what it advises."""
    options = _parser().parse_args(arguments)
    if options.images is None and options.prompts is None:
        raise ValueError("advice needs --images FOLDER, or --prompts FILE for a language model that reads images")
    if options.prompts is not None and not Path(options.prompts).is_file():
        # Before the model, which may come from a hub.
        raise ValueError(f"--prompts {options.prompts!r} is no file")
    import torch

    import mmod
    from mmod.training.engine.distributed import choose_device

    check_value("--number", options.number, int, "[1, inf)")
    check_value("--image_size", options.image_size, int | None, "[1, inf)")
    if options.threads:
        torch.set_num_threads(options.threads)
    batches: Iterable[Any]
    if options.prompts is None:
        model, transform = load_model(
            options.model, options.checkpoint, options.pretrained, options.image_size, options.measure
        )
        batch, note = read_images(
            options.images, transform, options.number, options.on_corrupt, model, options.checkpoint
        )
        batches = [batch]
    else:
        model, batches = read_prompts(options)
        note = "Plans were searched on a fifth of the prompts, and all candidates judged on the others."
    name = options.model.removeprefix("/").replace("/", "-").replace(":", "-")
    folder = Path(options.output or f"runs/advise/{name}")
    advice = mmod.advise(
        model.to(choose_device(options.device)),
        batches,
        images=options.number,
        batch_size=options.batch_size,
        tolerance=options.tolerance,
        folder=folder,
        note=note,
    )
    print(f"{advice}\n\nTable, figures and picture: {folder}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Try ways to make a model cheaper without training, on your images or prompts and this machine.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="a name of timm, open_clip:ARCHITECTURE or open_clip:ARCHITECTURE:WEIGHTS, or a folder that timm saved; "
        "with --prompts a folder of a LLaVA-style model and its processor",
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
    parser.add_argument(
        "--measure",
        choices=MEASURES,
        help="what must stay equal: the top class, the features that a head reads, or the features of patches",
    )
    parser.add_argument("--number", type=int, default=256, help="images or prompts to use, spread evenly (256)")
    parser.add_argument("--batch_size", type=int, default=8, help="images or prompts of a timed batch (8)")
    parser.add_argument(
        "--tolerance", type=float, default=0.02, help="share of agreement or accuracy that may be lost (0.02)"
    )
    parser.add_argument("--device", default="auto", help="cpu, cuda ...; the GPU if there is one (auto)")
    parser.add_argument("--threads", type=int, help="threads of the CPU; those of torch unless given")
    parser.add_argument("--on_corrupt", choices=("raise", "skip"), default="raise", help="what to do on a broken image")
    parser.add_argument("--output", metavar="FOLDER", help="folder of the result (runs/advise/MODEL)")
    return parser


def read_prompts(options: argparse.Namespace) -> tuple[nn.Module, Iterable[Any]]:
    """Load a vision-language model from a folder, and read prompts for it."""
    from mmod.data.readers.conversations import ConversationsConfig
    from mmod.training.chat.config import ModelConfig, TrainConfig
    from mmod.training.chat.recipe import ChatRecipe

    unusable = [name for name in ("checkpoint", "image_size", "measure") if getattr(options, name) is not None]
    if unusable or not options.pretrained:
        raise ValueError(
            f"with --prompts the model is that of a folder: leave out --{(unusable or ['no_pretrained'])[0]}"
        )
    data = ConversationsConfig(options.prompts, None, options.images, on_corrupt=options.on_corrupt)
    config = TrainConfig(output=options.output or "runs/advise", model=ModelConfig(options.model), data=data)
    recipe = ChatRecipe(config)
    model = recipe.load()
    return model, recipe.calibration(model, -(-options.number // options.batch_size), options.batch_size)


def load_model(
    name: str,
    checkpoint: str | None = None,
    pretrained: bool = True,
    image_size: int | None = None,
    measure: str | None = None,
) -> tuple[nn.Module, Callable[[Any], Tensor]]:
    """Make a dense model and the transform of its images.

    Args:
        name: A name of timm, a folder that timm saved, or an architecture of open_clip, see `--help`.
        image_size: Side of images in pixels; None takes the model's.
        measure: One of `MEASURES`, for models of timm: "features" and "patches" take off the head.
    """
    if name.startswith(OPEN_CLIP):
        import open_clip

        architecture, _, weights = name.removeprefix(OPEN_CLIP).partition(":")
        if architecture not in open_clip.list_models():
            raise ValueError(f"open_clip knows no model {architecture!r}; open_clip.list_models() lists the known ones")
        if measure not in (None, "features"):
            raise ValueError(f"a model of open_clip is judged by its image features, got --measure {measure}")
        tower, _, transform = open_clip.create_model_and_transforms(
            architecture,
            pretrained=None if checkpoint else weights or None,
            require_pretrained=pretrained and checkpoint is None,
            force_image_size=image_size,
        )
        if checkpoint is not None:
            from mmod.training.pairs.model import load_clip

            load_clip(tower, checkpoint)
        return tower, transform
    from timm.data import create_transform, resolve_data_config

    from mmod.training.engine.checkpoint import read_weights
    from mmod.training.engine.model import classifier_names, converted, load_weights

    sizes = {} if image_size is None else {"img_size": image_size}
    host: Any = _create(name, pretrained and checkpoint is None, sizes)
    if checkpoint is not None:
        state = read_weights(checkpoint)
        weight = next(
            (state[key] for key in state if key.startswith(classifier_names(host)) and state[key].ndim > 1), None
        )
        host.reset_classifier(0 if weight is None else len(weight))
        load_weights(host, converted(state, host), checkpoint)
    if measure == "top1" and not host.num_classes:
        raise ValueError(f"{name} has no classes: use --measure features or --measure patches")
    if measure in ("features", "patches"):
        host.reset_classifier(0, *([""] if measure == "patches" else []))
    side = getattr(getattr(host, "patch_embed", None), "img_size", None)
    if side is not None and any(length % patch for length, patch in zip(side, host.patch_embed.patch_size)):
        raise ValueError(f"--image_size must be a multiple of the model's patches, {host.patch_embed.patch_size[0]} px")
    data = resolve_data_config(
        {} if side is None else {"input_size": (host.patch_embed.proj.in_channels, *side)}, model=host
    )
    return host, create_transform(**data, is_training=False)


def _create(name: str, pretrained: bool, arguments: dict[str, Any]) -> nn.Module:
    """Make a model of timm that takes images of any size if it can: smaller images are among the candidates."""
    from mmod.training.image.config import ModelConfig
    from mmod.training.image.model import create_dense_model

    if Path(name).is_dir():
        name = f"local-dir:{Path(name).resolve()}"
        pretrained = True
    elif "/" in name and ":" not in name:
        raise FileNotFoundError(f"no folder of a model at {name!r}; a model of a hub is hf-hub:OWNER/NAME")
    try:
        flexible = {**arguments, "dynamic_img_size": True}
        return create_dense_model(ModelConfig(name=name, pretrained=pretrained, args=flexible))
    except TypeError:
        pass
    try:
        return create_dense_model(ModelConfig(name=name, pretrained=pretrained, args=arguments))
    except TypeError as error:
        raise ValueError(f"{name} takes no {' or '.join(arguments)}: {error}") from error


def read_images(
    folder: str,
    transform: Callable[[Any], Tensor],
    number: int,
    on_corrupt: str,
    model: nn.Module,
    checkpoint: str | None = None,
) -> tuple[Tensor | tuple[Tensor, Tensor], str]:
    """Read up to `number` images (N, C, H, W), spread evenly over a folder, and a sentence about them.

    The images come with labels (N,) where the model knows the folders' names, from the run of its checkpoint or from
    timm, or else where there are as many folders as classes of the model.
    """
    import numpy as np

    from mmod.data.corrupt import CorruptReport
    from mmod.data.labels import ModelClasses
    from mmod.data.readers.timm import TimmSource
    from mmod.data.stream import ImageReader
    from mmod.training.image.classes import published_classes, run_classes

    if not Path(folder).is_dir():
        raise FileNotFoundError(f"no folder of images at {folder!r}")
    own = run_classes(checkpoint)
    named = published_classes(model) if own is None else own
    names = None if named is None else ModelClasses(named, "the model", required=False)
    source = TimmSource("folder", folder, "", train_split="", model=names, labelled=False)
    report = CorruptReport(on_corrupt)  # type: ignore[arg-type]
    places = np.arange(min(number, len(source))) * max(1.0, len(source) / number)
    images, labels, faults = ImageReader(source, "RGB", transform).read(places.astype(int), None)
    report.add(faults)
    if not len(labels):
        raise ValueError(f"{folder!r} holds no image that can be read: {report}")
    classes = len(set(source.labels()))
    known = getattr(model, "num_classes", 0)
    notes = [f"{len(report.faults)} broken images were skipped."] if report.faults else []
    if classes > 1 and known and source.classes is not None and source.classes.given:
        notes.append("" if source.classes.is_plain else f"{source.classes}.")
        return (images, labels), " ".join(filter(None, notes))
    if classes > 1 and classes == known and own is None:
        return (images, labels), " ".join(notes)
    if classes > 1 and known:
        others = "" if own is None else " of other names"
        notes.append(
            f"Labels are not used: the images are in {classes} folders, and the model has {known} classes{others}."
        )
    return images, " ".join(notes)
