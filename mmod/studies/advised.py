"""The model that advice is asked for, by name or folder: dense, with the preprocessing of its images."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import timm.data
from torch import Tensor, nn

from mmod.adapters import find_library, image_facts, load_adapter
from mmod.data.loader import evaluation_fields
from mmod.io.files import is_of_transformers
from mmod.methods import methods_of, undo_
from mmod.pretrained import CONFIG, load_pretrained
from mmod.training.engine import folder as transformers_folder
from mmod.training.engine.checkpoint import read_weights
from mmod.training.engine.config import RUN_CONFIG
from mmod.training.engine.model import classifier_names, converted, load_weights
from mmod.training.image.classes import published_classes, run_classes
from mmod.training.image.config import ModelConfig
from mmod.training.image.model import create_dense_model
from mmod.training.kinds import kind_of, parse_kind

OPEN_CLIP = "open_clip:"


@dataclasses.dataclass(frozen=True)
class Preprocessing:
    """How a model's images are prepared.

    Args:
        fields: Arguments of timm's `create_transform`, or with `is_clip` fields of open_clip's `PreprocessCfg`.
        source: Where they are from, as in "of the run".
    """

    fields: Mapping[str, Any]
    source: str
    is_clip: bool = False

    def changed(self, **changes: Any) -> Preprocessing:
        """Return it with other fields; None changes nothing."""
        given = {name: value for name, value in changes.items() if value is not None}
        return dataclasses.replace(self, fields={**self.fields, **given})

    @property
    def mode(self) -> str:
        """The mode of Pillow that images are read in."""
        return "L" if not self.is_clip and self.fields["input_size"][0] == 1 else "RGB"

    def transform(self) -> Callable[[Any], Tensor]:
        """Return the transform of an image to a tensor (C, H, W)."""
        if not self.is_clip:
            return timm.data.create_transform(**self.fields, is_training=False)
        from open_clip.transform import PreprocessCfg, image_transform_v2

        return image_transform_v2(PreprocessCfg(**self.fields), is_train=False)

    def __str__(self) -> str:
        size = self.fields["size"] if self.is_clip else self.fields["input_size"][1:]
        height, width = (size, size) if isinstance(size, int) else size
        parts = [f"{height} x {width} px", *filter(None, [self.fields.get("interpolation")])]
        if "crop_pct" in self.fields:
            parts.append(f"crop_pct {self.fields['crop_pct']:g}")
        for name in ("mean", "std"):
            parts.append(f"{name} ({', '.join(f'{value:.4g}' for value in self.fields[name])})")
        return f"Preprocessing {self.source}: {', '.join(parts)}."


class AdvisedModel(NamedTuple):
    """A dense model.

    Attributes:
        classes: Numbers of its classes by name; None where they are not known.
        is_run: Whether the classes are those of a run, which no folders of other names have.
        note: What was done to make it dense; empty if it was.
    """

    model: nn.Module
    preprocessing: Preprocessing
    classes: Mapping[str, int] | None
    is_run: bool = False
    note: str = ""


def open_model(
    name: str,
    checkpoint: str | None = None,
    pretrained: bool = True,
    image_size: int | None = None,
    measure: str | None = None,
) -> AdvisedModel:
    """Make a dense model, and say how its images are prepared.

    Args:
        name: A name of timm, "open_clip:ARCHITECTURE[:WEIGHTS]", the folder of a run, or one that
            `mmod.save_pretrained`, timm or transformers saved.
        checkpoint: Weights in place of the published ones.
        image_size: Side of images in pixels; None takes the model's.
        measure: "top1", "features" or "patches"; the last two take off the head of a model of timm.
    """
    run = run_folder(name)
    is_saved = (Path(name) / CONFIG).is_file()
    is_transformers = is_of_transformers(name)
    if run is not None or is_saved or is_transformers:
        given = [
            key for key, value in {"checkpoint": checkpoint, "image_size": image_size}.items() if value is not None
        ]
        if given:
            raise ValueError(f"{name!r} has its own weights and size of images: leave out --{given[0]}")
    if name.startswith(OPEN_CLIP):
        _check_clip_measure(measure)
        advised = _open_clip_model(name, checkpoint, pretrained, image_size)
    elif run is not None:
        advised = _run_model(run)
    elif is_saved:
        advised = _saved_model(name)
    elif is_transformers:
        advised = _transformers_model(name)
    else:
        advised = _timm_model(name, checkpoint, pretrained, image_size)
    _take_off_head(advised.model, name, measure)
    return advised


def run_folder(name: str) -> Path | None:
    """Return the folder of a run, also for the `model` inside it; None if a name is no such folder."""
    path = Path(name)
    return next((folder for folder in (path, path.parent) if path.is_dir() and (folder / RUN_CONFIG).is_file()), None)


def _run_model(folder: Path) -> AdvisedModel:
    config: Any = parse_kind([str(folder)])
    if config.kind not in ("image", "pairs"):
        advice = "give its prompts by --prompts FILE" if config.kind == "chat" else "use mmod.search_plan"
        raise ValueError(f"{str(folder)!r} is a run of kind {config.kind!r}, whose model reads text: {advice}")
    model, note = dense(kind_of(config).load(), f"The model of {folder}")
    if config.kind == "pairs":
        return AdvisedModel(model, _clip_preprocessing(model, "of the run"), None, note=note)
    preprocessing = Preprocessing(evaluation_fields(config.data), "of the run")
    classes = run_classes(folder)
    model = _flexible(model) if find_library(model) == "timm" else model
    return AdvisedModel(model, preprocessing, classes, classes is not None, note)


def _saved_model(name: str) -> AdvisedModel:
    model, note = dense(load_pretrained(name), f"The model in {name}")
    if find_library(model) != "timm":
        return AdvisedModel(model, _clip_preprocessing(model, "of the saved model"), None, note=note)
    return AdvisedModel(_flexible(model), _timm_preprocessing(model), published_classes(model), note=note)


def _transformers_model(name: str) -> AdvisedModel:
    model, note = dense(transformers_folder.create_model(name, True, {}), f"The model in {name}")
    preprocessing = Preprocessing(transformers_folder.evaluation_fields(name), "of the folder's processor")
    return AdvisedModel(model, preprocessing, published_classes(model), note=note)


def dense(model: nn.Module, subject: str) -> tuple[nn.Module, str]:
    """Return a model without its methods, and a sentence that says so."""
    methods = methods_of(model)
    if not methods:
        return model, ""
    kinds = ", ".join(method.kind for method in methods)
    if any(method.replaces for method in methods):
        raise ValueError(f"{subject} is changed by {kinds}, which replaced dense weights: advice needs a dense model")
    return undo_(model), f"{subject} is changed by {kinds}: advice undoes that and starts from its dense weights."


def _flexible(model: nn.Module) -> nn.Module:
    """Return a dense model of timm that takes images of any size if it can: smaller images are among the candidates."""
    saving = load_adapter("timm").SAVING
    described = saving.describe(model)
    arguments = {**described["arguments"], "dynamic_img_size": True}
    try:
        flexible: nn.Module = saving.build({**described, "arguments": arguments})
    except TypeError:
        return model
    flexible.load_state_dict(model.state_dict())
    return flexible.to(next(model.parameters()))


def _open_clip_model(name: str, checkpoint: str | None, pretrained: bool, image_size: int | None) -> AdvisedModel:
    import open_clip

    architecture, _, weights = name.removeprefix(OPEN_CLIP).partition(":")
    if architecture not in open_clip.list_models():
        raise ValueError(f"open_clip knows no model {architecture!r}; open_clip.list_models() lists the known ones")
    from mmod.training.pairs.model import load_clip, weights_follow

    with nullcontext() if checkpoint is None else weights_follow():
        tower, _, _ = open_clip.create_model_and_transforms(
            architecture,
            pretrained=None if checkpoint else weights or None,
            require_pretrained=pretrained and checkpoint is None,
            force_image_size=image_size,
        )
    if checkpoint is not None:
        load_clip(tower, checkpoint)
    return AdvisedModel(tower, _clip_preprocessing(tower, "of open_clip"), None)


def _clip_preprocessing(model: Any, source: str) -> Preprocessing:
    fields = getattr(model.visual, "preprocess_cfg", None)
    if fields is None:
        raise ValueError(
            f"the {type(model).__name__} does not say how its images are prepared: make it by open_clip.create_model "
            "before it is saved"
        )
    return Preprocessing(dict(fields), source, is_clip=True)


def _timm_model(name: str, checkpoint: str | None, pretrained: bool, image_size: int | None) -> AdvisedModel:
    pretrained = pretrained and checkpoint is None
    if Path(name).is_dir():
        if not (Path(name) / "config.json").is_file():
            raise FileNotFoundError(
                f"{name!r} holds neither a run ({RUN_CONFIG}) nor a model saved by mmod.save_pretrained ({CONFIG}) or "
                "timm (config.json)"
            )
        name = f"local-dir:{Path(name).resolve()}"
        pretrained = True
    elif "/" in name and ":" not in name:
        raise FileNotFoundError(f"no folder of a model at {name!r}; a model of a hub is hf-hub:OWNER/NAME")
    sizes = {} if image_size is None else {"img_size": image_size}
    try:
        model: Any = create_dense_model(
            ModelConfig(name=name, pretrained=pretrained, args=sizes), "name a file of weights, --checkpoint FILE"
        )
    except TypeError as error:
        raise ValueError(f"{name} takes no {' or '.join(sizes)}: {error}") from error
    if checkpoint is not None:
        state = read_weights(checkpoint)
        weight = next(
            (state[key] for key in state if key.startswith(classifier_names(model)) and state[key].ndim > 1), None
        )
        model.reset_classifier(0 if weight is None else len(weight))
        load_weights(model, converted(state, model), checkpoint)
    known = run_classes(checkpoint)
    classes = published_classes(model) if known is None else known
    return AdvisedModel(_flexible(model), _timm_preprocessing(model), classes, known is not None)


def _timm_preprocessing(model: Any) -> Preprocessing:
    patch_embed = getattr(model, "patch_embed", None)
    side = getattr(patch_embed, "img_size", None)
    if side is not None and any(length % patch for length, patch in zip(side, model.patch_embed.patch_size)):
        raise ValueError(
            f"--image_size must be a multiple of the model's patches, {model.patch_embed.patch_size[0]} px"
        )
    sizes = {} if side is None else {"input_size": (model.patch_embed.proj.in_channels, *side)}
    return Preprocessing(timm.data.resolve_data_config(sizes, model=model), "of timm")


def _take_off_head(model: Any, name: str, measure: str | None) -> None:
    """Let a model return what `--measure` judges, or refuse it."""
    library = find_library(model)
    if library == "open_clip":
        _check_clip_measure(measure)
        return
    classes = image_facts(model).classes
    if library == "transformers" and measure not in (None, "top1" if classes else "features"):
        raise ValueError(
            f"the {type(model).__name__} in {name!r} has {classes} classes: leave out --measure {measure}, or save the "
            f"model {'without' if classes else 'with'} its classifier"
        )
    if measure == "top1" and not classes:
        raise ValueError(f"{name} has no classes: use --measure features or --measure patches")
    if library == "timm" and measure in ("features", "patches"):
        model.reset_classifier(0, *([""] if measure == "patches" else []))


def _check_clip_measure(measure: str | None) -> None:
    if measure not in (None, "features"):
        raise ValueError(f"a model of open_clip is judged by its image features, got --measure {measure}")
