"""Image models in folders of transformers: a `config.json`, weights, and a `preprocessor_config.json`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mmod.adapters import image_facts
from mmod.adapters.saving import KEY
from mmod.io.files import is_of_transformers, read_json_object
from mmod.io.sums import check_weights
from mmod.io.tensors import check_complete
from mmod.opening.opened import Opened, Options, Preprocessing
from mmod.opening.runs import find_weights
from mmod.opening.timm import published_classes
from mmod.opening.weights import read_weights
from mmod.plain import without
from mmod.pretrained import load_pretrained
from mmod.values import brief

_CONFIG = "config.json"
_CLASSIFIER = "ForImageClassification"
# Arguments by their names in timm, and in configs of transformers.
_NAMES = {
    "num_classes": "num_labels",
    "img_size": "image_size",
    "in_chans": "num_channels",
    "depth": "num_hidden_layers",
    "embed_dim": "hidden_size",
    "num_heads": "num_attention_heads",
}
# Of Pillow, by the number that processors name them by.
INTERPOLATIONS = ("nearest", "lanczos", "bilinear", "bicubic", "box", "hamming")
_LOADING = ("attn_implementation", "dtype")


def open_images(folder: str | Path, options: Options) -> Opened:
    """Open the image model of a folder; see `mmod.open_model`."""
    options.refuse(repr(str(folder)), "checkpoint", "image_size")
    model = create_images(folder, options)
    weights = "its weights" if options.pretrained else "random weights"
    prepare = partial(preprocessing_of, folder)
    return Opened(model, f"the image model in the folder {folder} with {weights}", prepare, published_classes(model))


def preprocessing_of(folder: str | Path) -> Preprocessing:
    """Return how the processor in a folder prepares images."""
    return Preprocessing(processor_fields(folder), "of the folder's processor")


def create_images(folder: str | Path, options: Options) -> nn.Module:
    """Create the image model of a folder, in training mode and float32, as it was changed by methods if it was.

    A model without a classifier gets one if `num_classes` is given.

    Args:
        options: Their `args` are fields of the config, also by timm's names `num_classes`, `img_size`, `in_chans`,
            `depth`, `embed_dim` and `num_heads`; `attn_implementation` and `dtype`. Of a wrapped model of timm, its
            arguments.
    """
    from transformers import AutoConfig

    described = read_json_object(Path(folder) / _CONFIG)
    if KEY in described:
        options.refuse(repr(str(folder)), "args", "pretrained")
        return load_pretrained(folder).float().train()
    named = _by_fields(options.args)
    if described["model_type"] == "timm_wrapper":
        named = _of_wrapper(options.args, described)
    if "num_hidden_layers" in named and "out_features" in described:
        # The last layer of the saved depth, whose features a classifier does not return.
        named |= {"out_features": None, "out_indices": None}
    # Arguments of loading, not of the config.
    loading = {"dtype": torch.float32, **{name: named.pop(name) for name in _LOADING if name in named}}
    config, unknown = AutoConfig.from_pretrained(folder, return_unused_kwargs=True, **named)
    if unknown:
        raise ValueError(
            f"model.args {', '.join(sorted(unknown))} is no field of the {type(config).__name__} in {folder}"
        )
    # A new number of classes means a new classifier.
    made = _class_of(config, fresh="num_labels" in named)
    if not options.pretrained:
        return _with_frozen_mask(made._from_config(config, **loading)).train()
    check_complete(folder)
    check_weights(folder)
    # Loaded at the size of the weights, and resampled to another below.
    fields = without(named, ("image_size",))
    model = _with_frozen_mask(_load(folder, made, loading, fields))
    if "image_size" in named:
        model = _at_size(model, config, folder)
    return model.train()


def _by_fields(args: Mapping[str, object]) -> dict[str, object]:
    """Return arguments by the names of a config's fields; a field that two names give different values is refused."""
    named = dict(args)
    for name, field in _NAMES.items():
        if name not in named:
            continue
        value = named.pop(name)
        if named.setdefault(field, value) != value:
            raise ValueError(f"model.args say {name} {brief(value)} and {field} {brief(named[field])}: leave out one")
    return named


def _with_frozen_mask(model: nn.Module) -> nn.Module:
    """Freeze the token of masked pretraining, whose gradient several processes would wait for in vain."""
    for name, weight in model.named_parameters():
        if name.endswith("mask_token"):
            weight.requires_grad_(False)
    return model


def _of_wrapper(args: Mapping[str, object], described: Mapping[str, Any]) -> dict[str, object]:
    """Return the fields of the config of a wrapped model of timm, whose arguments are one field."""
    further = without(args, (*_LOADING, "num_classes"))
    fields = {name: args[name] for name in _LOADING if name in args}
    if "num_classes" in args:
        fields["num_labels"] = args["num_classes"]
    if further:
        fields["model_args"] = {**(described.get("model_args") or {}), **further}
    return fields


@contextmanager
def hidden_bars() -> Iterator[None]:
    """Context without the bars of transformers, which a file or pipe shows as raw characters."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _load(folder: str | Path, made: Any, loading: Mapping[str, object], fields: Mapping[str, object]) -> nn.Module:
    """Load a model at its own image size; a new number of classes draws a new classifier, and nothing else is drawn."""
    options = {**loading, "ignore_mismatched_sizes": True, "output_loading_info": True}
    with hidden_bars():
        model, report = made.from_pretrained(folder, **fields, **options)
    mismatched = {key: f"{tuple(saved)}, the model's is {tuple(own)}" for key, saved, own in report["mismatched_keys"]}
    missing = dict.fromkeys(report["missing_keys"], "missing")
    wrong = {**missing, **mismatched}
    if "num_labels" in fields:
        # The new classifier has been drawn.
        head = image_facts(model).head
        wrong = {key: how for key, how in wrong.items() if not key.startswith(head)}
    if wrong:
        key, how = min(wrong.items())
        raise ValueError(f"the weights in {str(folder)!r} do not fit the model and model.args: {key} is {how}")
    return model


def _at_size(model: Any, config: Any, folder: str | Path) -> nn.Module:
    """Return a model for images of the size in a config, whose position embeddings the host resamples."""
    # The attention that was chosen for the loaded model, since transformers would choose anew.
    resized = type(model)._from_config(config, dtype=model.dtype, attn_implementation=model.config._attn_implementation)
    state = model.state_dict()
    expected = resized.state_dict()
    other = [name for name, value in state.items() if value.shape != expected[name].shape]
    resampling = [module for module in model.modules() if hasattr(module, "interpolate_pos_encoding")]
    size = image_facts(resized).size or (config.image_size, config.image_size)
    if len(other) > 1 or not resampling:
        raise ValueError(f"the {type(model).__name__} in {str(folder)!r} takes no other image size: leave out img_size")
    for name in other:
        # Of the tokens, it reads the shape alone.
        tokens_BND = torch.zeros(1, *expected[name].shape[-2:])
        with torch.no_grad():
            state[name] = resampling[0].interpolate_pos_encoding(tokens_BND, *size).reshape(expected[name].shape)
    resized.load_state_dict(state)
    return resized


def _class_of(config: Any, fresh: bool) -> Any:
    """Return the class of the model that a folder holds, or of a classifier on it where a new one is requested."""
    import transformers

    name = next(iter(config.architectures or ()), "")
    saved = getattr(transformers, name, None)
    if saved is None:
        raise ValueError(f"config.json names the architecture {name!r}, which is no model of transformers")
    if fresh and _CLASSIFIER not in name:
        classifiers: Any = transformers.AutoModelForImageClassification._model_mapping
        if type(config) not in classifiers:
            raise ValueError(f"transformers has no image classifier for a {type(config).__name__}")
        mapped = classifiers[type(config)]
        if isinstance(mapped, tuple):
            # DeiT has a second class, with a distilled head.
            mapped = mapped[0]
        return mapped
    return saved


def processor_fields(folder: str | Path) -> dict[str, object]:
    """Return the arguments of timm's `create_transform` that prepare images as a folder's processor does."""
    from transformers import AutoImageProcessor

    try:
        processor = AutoImageProcessor.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{str(folder)!r} does not say how its images are prepared: save the image processor there too, "
            f"`processor.save_pretrained({str(folder)!r})` ({error})"
        ) from error
    if hasattr(processor, "data_config"):
        # The processor of timm's models, which has these arguments.
        return dict(processor.data_config)
    does_all = processor.do_resize and processor.do_rescale and processor.do_normalize
    size = dict(processor.size)
    crop = size
    if getattr(processor, "do_center_crop", None):
        crop = dict(processor.crop_size)
    sides = {"height", "width"}
    one_size = set(crop) == sides and (set(size) == sides or "shortest_edge" in size)
    if not does_all or not one_size:
        raise ValueError(
            f"the {type(processor).__name__} in {str(folder)!r} must resize images to one size, rescale and normalise "
            f"them, got size {size}"
        )
    fields: dict[str, object] = {
        "input_size": (len(processor.image_mean), crop["height"], crop["width"]),
        "mean": tuple(processor.image_mean),
        "std": tuple(processor.image_std),
        "interpolation": INTERPOLATIONS[int(processor.resample)],
    }
    if "shortest_edge" in size:
        return {**fields, "crop_pct": min(crop.values()) / size["shortest_edge"]}
    return {**fields, "crop_pct": crop["height"] / size["height"], "crop_mode": "squash"}


def read_state(checkpoint: str | Path) -> dict[str, Tensor]:
    """Return the weights of a checkpoint by the names that they have in the model, routers among them.

    A file that transformers wrote has other names: those of published weights. Others are read by `read_weights`.
    """
    folder = find_weights(checkpoint).parent
    if not is_of_transformers(folder):
        return read_weights(checkpoint)
    return create_images(folder, Options()).state_dict()
