"""The command that says what makes a model cheaper before anything is trained: `mmod advise MODEL --images FOLDER`."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["main"]

OPEN_CLIP = "open_clip:"


def main(arguments: Sequence[str]) -> None:
    """Run the recipes of `mmod.advise` on a folder of images and print what it advises.

    Args:
        arguments: The command line without the program's name.

    Raises:
        SystemExit: The command line asks for help or does not fit.
        ValueError: The model is unknown or cannot be routed, the folder holds no images, or an image is broken.
    """
    options = _parser().parse_args(arguments)
    import torch

    import mmod
    from mmod.training.engine.distributed import choose_device

    if options.threads:
        torch.set_num_threads(options.threads)
    model, transform = load_model(options.model, options.checkpoint, options.pretrained)
    batch, note = read_images(options.images, transform, options.number, options.on_corrupt, model)
    name = options.model.removeprefix("/").replace("/", "-").replace(":", "-")
    folder = Path(options.output or f"runs/advise/{name}")
    advice = mmod.advise(
        model.to(choose_device(options.device)),
        [batch],
        images=options.number,
        batch_size=options.batch_size,
        tolerance=options.tolerance,
        folder=folder,
        note=note,
    )
    print(f"{advice}\n\nTable, figures and picture: {folder}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Try ways to make an image model cheaper without training, on your images and this machine.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="a name of timm, open_clip:ARCHITECTURE or open_clip:ARCHITECTURE:WEIGHTS, or a folder that timm saved",
    )
    parser.add_argument("--images", required=True, metavar="FOLDER", help="images, perhaps in a folder for each class")
    parser.add_argument("--checkpoint", metavar="FILE", help="weights of the model in place of the published ones")
    parser.add_argument(
        "--no_pretrained", dest="pretrained", action="store_false", help="random weights: for tests of the command"
    )
    parser.add_argument("--number", type=int, default=256, help="images to use, spread over the folder (256)")
    parser.add_argument("--batch_size", type=int, default=8, help="images of a timed batch (8)")
    parser.add_argument(
        "--tolerance", type=float, default=0.02, help="share of agreement or accuracy that may be lost (0.02)"
    )
    parser.add_argument("--device", default="auto", help="cpu, cuda ...; the GPU if there is one (auto)")
    parser.add_argument("--threads", type=int, help="threads of the CPU; those of torch unless given")
    parser.add_argument("--on_corrupt", choices=("raise", "skip"), default="raise", help="what to do on a broken image")
    parser.add_argument("--output", metavar="FOLDER", help="folder of the result (runs/advise/MODEL)")
    return parser


def load_model(name: str, checkpoint: str | None, pretrained: bool) -> tuple[nn.Module, Callable[[Any], Tensor]]:
    """Make a dense model and the transform of its images.

    Args:
        name: A name of timm, a folder that timm saved, or an architecture of open_clip, see `--help`.
        checkpoint: File or folder of weights, in place of the published ones.
        pretrained: Whether published weights are loaded without a checkpoint.
    """
    if name.startswith(OPEN_CLIP):
        import open_clip

        architecture, _, weights = name.removeprefix(OPEN_CLIP).partition(":")
        if architecture not in open_clip.list_models():
            raise ValueError(f"open_clip knows no model {architecture!r}; open_clip.list_models() lists the known ones")
        tower, _, transform = open_clip.create_model_and_transforms(
            architecture, pretrained=checkpoint or weights or None, require_pretrained=pretrained
        )
        return tower, transform
    import timm
    from timm.data import create_transform, resolve_data_config

    from mmod.training.engine.checkpoint import read_weights
    from mmod.training.engine.model import load_weights
    from mmod.training.image.config import ModelConfig
    from mmod.training.image.model import create_dense_model

    pretrained = pretrained and checkpoint is None
    if Path(name).is_dir():
        model: nn.Module = timm.create_model(f"local-dir:{name}", pretrained=True)
    else:
        model = create_dense_model(ModelConfig(name=name, pretrained=pretrained))
    if hasattr(model, "dynamic_img_size") and not model.dynamic_img_size:
        # Smaller images are among the recipes; at the full size the outputs are the same.
        model = _with_any_size(model, name)
    if checkpoint is not None:
        load_weights(model, read_weights(checkpoint), checkpoint)
    return model, create_transform(**resolve_data_config({}, model=model), is_training=False)


def _with_any_size(model: nn.Module, name: str) -> nn.Module:
    """Return the same model for images of any size, or the model itself where timm has none."""
    import timm

    source = f"local-dir:{name}" if Path(name).is_dir() else name
    try:
        flexible: nn.Module = timm.create_model(source, pretrained=False, dynamic_img_size=True)
        flexible.load_state_dict(model.state_dict())
    except (TypeError, RuntimeError, AssertionError):
        return model
    return flexible


def read_images(
    folder: str, transform: Callable[[Any], Tensor], number: int, on_corrupt: str, model: nn.Module
) -> tuple[Tensor | tuple[Tensor, Tensor], str]:
    """Read images that are spread evenly over a folder.

    Args:
        folder: The folder; its folders are classes if there are as many as classes of the model.
        transform: Prepares an image for the model.
        number: Images to read, at most.
        on_corrupt: "raise" or "skip" for broken images.
        model: The model.

    Returns:
        Images (N, C, H, W), with labels (N,) where the folders are classes, and a sentence about them.

    Raises:
        FileNotFoundError: The folder does not exist.
        ValueError: It holds no images, or a broken one.
    """
    import torch

    from mmod.data.corrupt import CorruptReport
    from mmod.data.readers.source import UnreadableSampleError
    from mmod.data.readers.timm import TimmSource

    if not Path(folder).is_dir():
        raise FileNotFoundError(f"no folder of images at {folder!r}")
    source = TimmSource("folder", folder, "")
    report = CorruptReport(on_corrupt)  # type: ignore[arg-type]
    pixels, labels = [], []
    step = max(1.0, len(source) / number)
    for place in range(min(number, len(source))):
        try:
            image, label = source.read(int(place * step), "RGB")
        except UnreadableSampleError as error:
            report.add([error.fault])
            continue
        pixels.append(transform(image))
        labels.append(label)
    if not pixels:
        raise ValueError(f"{folder!r} holds no image that can be read: {report}")
    classes, known = len(set(source.labels())), getattr(model, "num_classes", 0)
    notes = [f"{len(report.faults)} broken images were skipped."] if report.faults else []
    if classes > 1 and classes == known:
        return (torch.stack(pixels), torch.tensor(labels)), " ".join(notes)
    if classes > 1:
        notes.append(f"Labels are not used: the images are in {classes} folders, and the model has {known} classes.")
    return torch.stack(pixels), " ".join(notes)
