"""The one way from a name to a model: what a name may be, and which library makes its model.

Libraries are imported when one of their models is opened. Only entries of hosts' own registries (`mmod/registry/`) are
made by the factory of the host, which calls them.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

from torch import nn

from mmod.adapters import find_library
from mmod.io.files import is_of_transformers, read_json_object
from mmod.lazy import import_path
from mmod.methods.base import methods_of, undo_
from mmod.opening.opened import NAME_A_FILE, Opened, Options
from mmod.opening.runs import FINAL_MODEL, LOCAL, RUN_CONFIG, check_holds_work, find_run, model_folder
from mmod.pretrained import CONFIG, HUB, has_changed, load_pretrained, local_folder
from mmod.values import brief, check_module

OPEN_CLIP = "open_clip:"
TRANSFORMERS = "transformers:"
CLIP_CONFIG = "open_clip_config.json"
# It stands above, and is imported when a run is opened.
_RUNS = "mmod.training.opened"


def open_model(
    spec: str | Path | Mapping[str, object] | nn.Module,
    *,
    checkpoint: str | Path | None = None,
    pretrained: bool = True,
    image_size: int | None = None,
    args: Mapping[str, object] | None = None,
    dense: bool = False,
    advice: str = NAME_A_FILE,
) -> Opened:
    """Open a model by its name or folder, with its preprocessing and the names of its classes.

    Args:
        spec: One of

            - a name of timm;
            - `open_clip:NAME`, `open_clip:NAME:WEIGHTS`, and for NAME also `local-dir:FOLDER` or `hf-hub:REPOSITORY`;
            - a folder that `mmod.save_pretrained`, timm, open_clip or transformers saved;
            - `hf-hub:OWNER/NAME`, a model of the hub that mmod or timm saved;
            - `transformers:OWNER/NAME`, a language model of the hub, with or without images;
            - a run folder, its `model`, `last` or a checkpoint, or a file of weights in these;
            - fields of a transformers config with its `model_type`;
            - a module.
        checkpoint: Weights in place of the published ones, for timm and open_clip: what `model.checkpoint` of a
            training config takes. A timm model gets as many classes as the weights have.
        pretrained: Take published weights, or those of the folder; otherwise they are drawn at random.
        image_size: Side of images in pixels, for timm and open_clip; None takes the model's, which must be the
            checkpoint's.
        args: Further arguments of the host: of `create_model`, fields of an image model's config in a folder of
            transformers, or arguments of a language model's `from_pretrained`.
        dense: Undo the methods that changed a saved model.
        advice: What the error says to do if published weights are not available, in the imperative.

    Returns:
        The model in evaluation mode and what is known of it.

    Raises:
        ValueError: No library knows the name, or the options do not fit the model.
        FileNotFoundError: A folder or file is missing.
        ConnectionError: Published weights are neither cached nor available.

    Example:
        >>> opened = open_model("test_vit", pretrained=False)
        >>> opened.sentence, opened.parts
        ('test_vit of timm with random weights', ('image',))
        >>> opened.preprocessing.transform()  # doctest: +ELLIPSIS
        Compose(...)
    """
    options = Options(checkpoint, pretrained, image_size, dict(args or {}), dense, advice)
    if isinstance(spec, nn.Module):
        check_module(spec)
        options.refuse(f"the {type(spec).__name__}", "checkpoint", "image_size", "args")
        opened = _module(spec)
    elif isinstance(spec, Mapping):
        from mmod.opening.language import open_described

        options.refuse("a config", "checkpoint", "image_size")
        opened = open_described(spec, options.args)
    elif isinstance(spec, (str, Path)):
        opened = _named(str(spec), options)
    else:
        raise TypeError(f"spec must be a name, a path, fields of a config or a module, got {brief(spec)}")
    opened.model.eval()
    return _with_methods(opened, dense)


def _named(name: str, options: Options) -> Opened:
    """Open a model by a name or a path."""
    if name.startswith(OPEN_CLIP):
        from mmod.opening.open_clip import open_clip_model

        return open_clip_model(name.removeprefix(OPEN_CLIP), options)
    if name.startswith(TRANSFORMERS):
        from mmod.opening.language import open_language

        return open_language(name.removeprefix(TRANSFORMERS), options)
    # Other models of the hub are timm's.
    if name.startswith(HUB) and has_changed(name):
        return _folder(local_folder(name), options)._replace(sentence=f"the model that mmod saved in {name}")
    # Before its folder is taken for a model: a run also knows classes and preprocessing.
    run = find_run(name)
    if run is not None:
        options.refuse(repr(name), "checkpoint", "image_size")
        return _run(run, Path(name), options)
    folder = model_folder(name)
    if folder is not None:
        return _folder(folder, options)
    if Path(name).is_dir():
        raise FileNotFoundError(
            f"{name!r} holds neither a run ({RUN_CONFIG}) nor a model saved by mmod.save_pretrained ({CONFIG}), "
            f"timm or transformers (config.json) or open_clip ({CLIP_CONFIG})"
        )
    if Path(name).is_file():
        raise ValueError(
            f"{name!r} is a file, which names no model. Weights are named as the model's checkpoint; of a config, name "
            "the folder of a run that was trained by it; a model of your own code goes to mmod in Python, as in "
            "mmod.advise(model, loader)"
        )
    from mmod.opening.timm import open_timm

    return open_timm(name, options)


def _folder(folder: Path, options: Options) -> Opened:
    """Open the model that a folder describes."""
    if (folder / CONFIG).is_file():
        options.refuse(repr(str(folder)), "checkpoint", "image_size", "pretrained")
        opened = _module(load_pretrained(folder, **options.args))
        # open_clip's preprocessing is saved with the model.
        if find_library(opened.model) == "open_clip":
            opened = opened.prepared("of the saved model")
        return opened._replace(sentence=f"the model that mmod saved in {folder}")
    if (folder / CLIP_CONFIG).is_file():
        from mmod.opening.open_clip import open_clip_model

        opened = open_clip_model(f"{LOCAL}{folder}", options)
        # The scheme is ours; the user named a folder.
        return opened._replace(sentence=opened.sentence.removeprefix(LOCAL))
    if not is_of_transformers(folder):
        from mmod.opening.timm import open_timm

        return open_timm(str(folder), options)
    from mmod.opening.language import open_language, reads_text
    from mmod.opening.transformers import open_images

    is_language = reads_text(read_json_object(folder / "config.json")["model_type"])
    if is_language:
        return open_language(str(folder), options)
    return open_images(folder, options)


def _module(model: nn.Module) -> Opened:
    library = find_library(model)
    sentence = f"a {type(model).__name__}"
    if library:
        sentence += f" of {library}"
    source = getattr(model, "name_or_path", "")
    if library == "timm":
        from mmod.opening import timm

        return Opened(model, sentence, partial(timm.preprocessing_of, model), timm.published_classes(model))
    if library == "open_clip":
        from mmod.opening import open_clip

        return Opened(model, sentence, partial(open_clip.preprocessing_of, model, "of open_clip"))
    if library == "transformers" and is_of_transformers(source):
        return Opened(model, sentence, lambda: open_model(source).preprocessing)
    return Opened(model, sentence)


def _run(run: Path, path: Path, options: Options) -> Opened:
    """Open the model of a run: what it has saved, or a checkpoint with the architecture in its config."""
    check_holds_work(path)
    folder = model_folder(path)
    if folder is not None:
        opened = _folder(folder, options)
    else:
        options.refuse(repr(str(path)), "pretrained")
        opened = import_path(f"{_RUNS}:open_checkpoint")(run, path, options.args)
    is_final = folder == run / FINAL_MODEL
    name = f"the weights {path} of the run {run}"
    if is_final:
        name = f"the final model of the run {run}"
    elif path == run:
        name = f"the last checkpoint of the run {run}, which is not finished"
    return import_path(f"{_RUNS}:of_run")(opened._replace(sentence=name), run)


def _with_methods(opened: Opened, dense: bool) -> Opened:
    """Return a model whose sentence names its methods, which are undone if it is to be dense."""
    methods = methods_of(opened.model)
    if not methods:
        return opened
    kinds = ", ".join(method.kind for method in methods)
    changed = f"{opened.sentence}, changed by {kinds}"
    if not dense:
        return opened._replace(sentence=changed)
    if any(method.replaces for method in methods):
        raise ValueError(f"{changed}, which replaced dense weights: name a dense model")
    return opened._replace(model=undo_(opened.model), sentence=f"{changed}; that is undone, its dense weights remain")
