"""Save a routed model, and load model and routing again with one call."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NoReturn, TypedDict

import torch
from torch import Tensor, nn

from mmod.adapters import ADAPTERS, find_library, load_adapter
from mmod.adapters.saving import FORMAT_VERSION, KEY, Saving
from mmod.adapters.tokens import proofs_of, restore_proofs
from mmod.blocks import host_class, noting_methods
from mmod.io.environment import choose_device
from mmod.io.files import DamagedFileError, make_folder, near_paths, parse_json, replacing, write_atomically
from mmod.io.sums import check_weights, remove_sums, write_sums
from mmod.io.tensors import WEIGHTS, check_fits, read_header, read_tensors, write_tensors
from mmod.methods.base import as_evaluated, check_changed, methods_inside, methods_of, restore_, training_only_models
from mmod.random_state import Unfilled
from mmod.values import brief, check_module, check_value

CONFIG = "mmod.json"
HUB = "hf-hub:"
# Attributes that change with use, and not what the model computes.
_PASSING = ("training", "grad_checkpointing", "drawn", "mod_emptied", "fused_attn", "distilled_training")
_PLAIN = (str, bool, int, float, type(None))
# The library of a model that the user's own code builds.
OWN = "own"


class _Description(TypedDict):
    """What a folder says of its model; keys are checked when it is read, and values when the model is built."""

    format_version: int
    versions: dict[str, str]
    library: str
    model: dict[str, Any]
    methods: list[dict[str, object]]
    proofs: dict[str, object]


_KEYS = tuple(_Description.__annotations__)


def save_pretrained(
    model: nn.Module,
    folder: str | Path,
    overwrite: bool = False,
    architecture: str | Mapping[str, object] | None = None,
) -> None:
    """Save the weights of a model that `mmod` changed, and everything needed to build it again.

    The folder gets `model.safetensors`, its checksum in `sha256.json`, and `mmod.json`; this JSON is also in the header
    of the weights. An interrupted call leaves no file half-written.

    Args:
        model: A model that `mmod.route_` or `mmod.apply_` changed, neither wrapped nor compiled: one that
            `timm.create_model` or open_clip made, or a module of your own, which you build again for
            `load_pretrained(folder, model=dense)`. Models of transformers are refused: they save themselves, by
            `model.save_pretrained(folder)`.
        folder: Where to save; created if missing.
        overwrite: Replace these files if they exist.
        architecture: For open_clip, whose models do not know it: the name they were created by, or their config.

    Raises:
        FileExistsError: The folder holds a saved model and `overwrite` is not set.
        ValueError: No method changed the model, the router is a function, or the model cannot be built again.

    Example:
        >>> import tempfile, timm, mmod
        >>> model = mmod.route_(timm.create_model("test_vit"), mmod.RoutingConfig(capacity=0.25))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_pretrained(model, folder)
        ...     mmod.capacities(load_pretrained(folder))["blocks.1"]
        0.25
    """
    check_value("folder", folder, str | Path)
    if training_only_models(model) and all(method.training_only for method in methods_of(model)):
        raise ValueError(
            f"the methods of this {type(model).__name__} are for training alone: save it as the dense model that it "
            "is, by its library or its state dict"
        )
    with as_evaluated(model):
        config = _describe(model, architecture)
        state = model.state_dict()
        _check_plain(state)
        if config["library"] != OWN:
            _check_rebuilds(config, model, state)
    folder = Path(folder)
    existing = [name for name in (WEIGHTS, CONFIG) if (folder / name).exists()]
    if existing and not overwrite:
        raise FileExistsError(f"{str(folder)!r} holds {' and '.join(existing)}; pass overwrite=True to replace them")
    make_folder(folder)
    text = json.dumps(config, indent=2)
    # Weights first: without its description a folder is not read, whatever stopped the writing.
    with replacing(folder / WEIGHTS) as weights:
        write_tensors(weights, state, {"format": "pt", KEY: text})
        # Those of earlier weights; written again when both files are there.
        remove_sums(folder)
        write_atomically(folder / CONFIG, text + "\n")
    write_sums(folder, WEIGHTS)


def load_pretrained(
    folder: str | Path,
    device: torch.device | str | None = None,
    model: nn.Module | None = None,
    **options: object,
) -> nn.Module:
    """Build, route and load a model that `save_pretrained` saved, or a transformers model that saved itself.

    Args:
        folder: The folder, or "hf-hub:owner/name" of the Hugging Face hub, with "@revision" behind it for another one
            than the latest.
        device: Where the model goes: "auto" is the GPU if there is one, and None means the CPU.
        model: For a class of your own, a dense model as it was built for training; it is changed in place. Its weights
            must have the names and shapes of the saved ones; the class may be imported from another module.
        options: For a transformers model, what its `from_pretrained` takes: `dtype`, `device_map`,
            `quantization_config` ... With `device_map`, leave `device` alone. For a timm model, arguments of
            `create_model` that change no weight, such as `dynamic_img_size=True`.

    Returns:
        The model in evaluation mode, of the dtype it was saved in.

    Raises:
        FileNotFoundError: The folder or one of its two files does not exist.
        ValueError: A file that `save_pretrained` did not write, of another format version, that does not fit the
            other file, or was damaged since.
    """
    chosen = choose_device("cpu" if device is None else device)
    folder = local_folder(folder)
    if (folder / "config.json").is_file() and not (folder / CONFIG).is_file():
        _refuse_model(model, "transformers")
        if options.get("output_loading_info"):
            raise TypeError(
                "load_pretrained returns the model alone: with output_loading_info, call from_pretrained of its Auto "
                f"class in transformers, from_pretrained({str(folder)!r}, trust_remote_code=True, ...)"
            )
        check_weights(folder)
        loaded: nn.Module = load_transformers(folder, **options)
        # Where `device_map` has placed it, nothing moves it.
        if device is not None:
            loaded = loaded.to(chosen)
        return loaded.eval()
    _check_files(folder)
    config, state = _read_saved(folder)
    if options:
        if config["library"] != "timm":
            raise TypeError(
                f"{', '.join(options)} are for models of timm and transformers, not of {config['library']!r}"
            )
        _saving("timm").check_description(config["model"])
        config["model"]["arguments"].update(options)
    if config["library"] == OWN:
        model = _change_own(model, config, state, folder)
    else:
        _refuse_model(model, config["library"])
        model = _build_that_fits(config, state, folder, options)
    _take_dtypes(model, state)
    model.load_state_dict(state)
    return model.to(chosen).eval()


def _check_files(folder: Path) -> None:
    """Raise a FileNotFoundError or NotADirectoryError unless a folder has the two files of `save_pretrained`."""
    missing = [name for name in (CONFIG, WEIGHTS) if not (folder / name).is_file()]
    if not missing:
        return
    if folder.is_file():
        raise NotADirectoryError(
            f"{str(folder)!r} is a file, and no folder that mmod.save_pretrained made: weights alone are loaded by "
            "model.load_state_dict(...)"
        )
    if not folder.is_dir():
        raise FileNotFoundError(
            f"there is no folder {str(folder)!r} here: name one that save_pretrained wrote, or RUN/model of a run"
            f"{near_paths(folder, Path.is_dir)}"
        )
    if missing == [CONFIG] and KEY in _header_of(folder):
        raise FileNotFoundError(f"{str(folder)!r} has lost its {CONFIG}. {_restored(folder)}")
    if missing == [WEIGHTS]:
        raise FileNotFoundError(
            f"{str(folder)!r} has lost its weights, {WEIGHTS}: copy the file back, or save the model again"
        )
    # The model of a run is in a folder inside, also that of a dense one. An audit has a config and no weights.
    files = [file for file in folder.glob("*/*.json") if file.name in (CONFIG, "config.json")]
    inside = sorted({file.parent for file in files if any(file.parent.glob("*model*"))})[:3]
    meant = ""
    if inside:
        meant = f". {', '.join(repr(str(path)) for path in inside)} may be meant"
    raise FileNotFoundError(
        f"{str(folder)!r} is no folder that mmod.save_pretrained made: it has no {missing[0]}{meant}"
    )


def _read_saved(folder: Path) -> tuple[_Description, dict[str, Tensor]]:
    """Return the description and the weights in a folder, which say of each other that they belong together."""
    config = _read_config(folder / CONFIG)
    state, header = read_tensors(folder / WEIGHTS)
    if KEY not in header or parse_json(header[KEY], f"the header of {WEIGHTS}") != config:
        raise ValueError(
            f"{WEIGHTS} and {CONFIG} in {str(folder)!r} do not belong together: one was edited or replaced. Load with "
            "what the weights were saved with, then change it with mmod.set_capacity_ or unroute_ and route_"
        )
    check_weights(folder)
    return config, state


def _change_own(model: nn.Module | None, config: _Description, state: Mapping[str, Tensor], folder: Path) -> nn.Module:
    """Change the dense model of a user's own class as the saved one was; it stays dense if the weights do not fit."""
    _OWN_SAVING.check_description(config["model"])
    if model is None:
        _refuse_to_build(config["model"])
    _check_dense(model, state, config, folder)
    apply_again(model, config)
    try:
        check_fits(state, model.state_dict(), f"the weights in {str(folder)!r} do not fit")
    except ValueError:
        restore_(model)
        raise
    return model


def _take_dtypes(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Convert the weights of a model to the dtypes of saved ones."""
    dtypes = {value.dtype for value in state.values() if value.is_floating_point()}
    if len(dtypes) == 1:
        # One dtype for all, buffers that are not saved among them.
        model.to(dtypes.pop())
        return
    for name, value in model.state_dict(keep_vars=True).items():
        value.data = value.data.to(state[name].dtype)


def _refuse_model(model: nn.Module | None, library: str) -> None:
    if model is not None:
        raise TypeError(f"model is for classes of your own: this folder holds a model of {library}, which mmod builds")


def _check_dense(model: nn.Module, state: Mapping[str, Tensor], config: _Description, folder: Path) -> None:
    """Raise a ValueError if a dense model lacks blocks of the one that was saved, or has weights that it lacked.

    The class is not compared: the same code has another name where it is imported, `__main__.ViT` or `vit.ViT`.
    """
    check_module(model)
    refusal = f"the weights in {str(folder)!r} do not fit: saved from {config['model']['class']} with"
    actual = f"this {type(model).__name__}"
    lists = dict(model.named_modules())
    for name in config["proofs"]:
        numbers = set()
        for key in state:
            if key.startswith(f"{name}."):
                numbers.add(key.removeprefix(f"{name}.").partition(".")[0])
        present = 0
        if name in lists:
            present = len(list(lists[name].children()))
        # It may have more: a method may have put one module in the place of several blocks.
        if present < len(numbers):
            raise ValueError(f"{refusal} {len(numbers)} blocks in {name!r}, {actual} has {present} there")
    inside = tuple(f"{name}." for name in config["proofs"])
    # Inside blocks, methods replace weights; what they make of them is compared with the saved ones later.
    unknown = [key for key in model.state_dict() if key not in state and not key.startswith(inside)]
    if unknown:
        raise ValueError(f"{refusal}out {', '.join(unknown[:3])}, which {actual} has")


def _build_that_fits(
    config: _Description, state: dict[str, Tensor], folder: Path, options: Mapping[str, object]
) -> nn.Module:
    """Return the model of a description, whose weights have the shapes of saved ones.

    Args:
        options: What the caller changed of the description, for messages.
    """
    given = f" with {brief(options)}" if options else ""
    try:
        with torch.device("meta"), Unfilled():
            # Compare shapes first: a model of another size than its weights takes no memory.
            shapes = _build(config).state_dict()
    except (TypeError, ValueError) as error:
        raise ValueError(f"{str(folder / CONFIG)!r}{given} describes no model that can be built: {error}") from error
    check_fits(state, shapes, f"the weights in {str(folder)!r} do not fit{given}")
    # The saved weights take the place of all initial ones, which take most of the time to draw.
    with Unfilled():
        model = _build_dense(config)
        initial = list(model.parameters())
        apply_again(model, config)
    held = {id(parameter) for parameter in model.parameters()}
    if all(id(parameter) in held for parameter in initial):
        return model
    # What a method put aside is not saved, and `undo_` gives it back as it was drawn.
    return _build(config)


def local_folder(folder: str | Path) -> Path:
    """Return a folder on this machine; one of the hub is fetched."""
    check_value("folder", folder, str | Path)
    if not str(folder).startswith(HUB):
        return Path(folder)
    from huggingface_hub import snapshot_download

    repo, _, revision = str(folder).removeprefix(HUB).partition("@")
    return Path(snapshot_download(repo, revision=revision or None, allow_patterns=["*.json", "*.safetensors"]))


def has_changed(repository: str) -> bool:
    """Return whether a repository of the hub, "hf-hub:owner/name", is known to hold what `save_pretrained` saved."""
    from huggingface_hub import hf_hub_download

    repo, _, revision = repository.removeprefix(HUB).partition("@")
    try:
        hf_hub_download(repo, CONFIG, revision=revision or None)
    except (OSError, ValueError):
        # No such file or repository, or no connection.
        return False
    return True


def load_transformers(folder: str | Path, *args: object, **options: object) -> Any:
    """Load a changed model of transformers from what its `save_pretrained` saved, as its `from_pretrained` does."""
    return load_adapter("transformers").load(folder, apply_again, *args, **options)


def make_transformers(config: object, folder: str | Path, make: Callable[[object], Any], dense: bool = False) -> Any:
    """Make a model with random weights from the config of a changed one.

    Args:
        config: A transformers config, which becomes that of the dense model.
        make: Makes the dense model of a config.
        dense: Leave the model dense.
    """
    description = load_adapter("transformers").take_description(config, folder)
    model = make(config)
    # Changed before weights are loaded, whose names are those of the changed model.
    if not dense:
        apply_again(model, description)
    return model


def apply_again(model: nn.Module, description: Mapping[str, object]) -> None:
    """Change a model as the `methods` and `proofs` of a saved one say, plain values of an untrusted file."""
    methods = description["methods"]
    if not isinstance(methods, Sequence) or not all(isinstance(values, Mapping) for values in methods):
        raise ValueError(f"methods must be a list of mappings, got {methods!r}")
    # Reading methods imports timm, whose models some of them change.
    from mmod.methods.read import read_method

    restore_proofs(model, description.get("proofs", {}))
    # The user was warned when the model was changed.
    with noting_methods():
        for values in methods:
            read_method(values).apply_(model)


def _describe(model: nn.Module, architecture: str | Mapping[str, object] | None) -> _Description:
    """Return the JSON description from which `_build` makes the model again."""
    methods = methods_of(model)
    if not methods and methods_inside(model):
        raise ValueError(
            f"this {type(model).__name__} is a part of a changed model: save that model, or change the part itself by "
            "mmod.route_ or mmod.apply_ before the model is built around it"
        )
    check_changed(model)
    library = find_library(model) or OWN
    if library == OWN and "mod_methods" not in vars(model):
        name = next(name for name, module in model.named_modules() if "mod_methods" in vars(module))
        module = re.sub(r"\.(\d+)", r"[\1]", f"model.{name}")
        raise ValueError(
            f"cannot save this {type(model).__name__}: it is not the model that mmod changed, but holds it. Save that "
            f"model, mmod.save_pretrained({module}, folder), and load it into its place, {module} = "
            "mmod.load_pretrained(folder)"
        )
    saving = _saving(library)
    described = {
        "format_version": FORMAT_VERSION,
        "versions": {name: _version(name) for name in ("mmod", saving.package, "torch")},
        "library": library,
        "model": saving.describe(model, architecture),
        "methods": [method.with_settings_of(model).to_dict() for method in methods],
        "proofs": proofs_of(model),
    }
    try:
        plain: _Description = json.loads(json.dumps(described))
    except TypeError as error:
        raise ValueError(
            f"cannot save this {type(model).__name__}: an argument it was made with is no JSON value"
        ) from error
    return plain


def _describe_own(model: nn.Module, architecture: str | Mapping[str, object] | None) -> dict[str, object]:
    """Return the class of a user's own model, which only the user can build."""
    if architecture is not None:
        raise ValueError("architecture is for open_clip: a model of your own class is built by you, leave it out")
    host = host_class(model)
    return {"class": f"{host.__module__}.{host.__qualname__}"}


def _check_own(description: Mapping[str, object]) -> None:
    if not isinstance(description["class"], str):
        raise ValueError(f"class in a saved folder must be a string, got {description['class']!r}")


def refuse_own(folder: str | Path) -> None:
    """Raise a ValueError if a folder holds a model of a user's own class, which nothing can build from its name."""
    config = _read_config(Path(folder) / CONFIG)
    if config["library"] == OWN:
        _refuse_to_build(config["model"])


def _refuse_to_build(description: Mapping[str, object]) -> NoReturn:
    raise ValueError(
        f"the folder holds weights of the class {description['class']}, which mmod cannot build: build the dense model "
        "in Python; advice on it is mmod.advise(dense, loader), and what was saved mmod.load_pretrained(folder, "
        "model=dense)"
    )


_OWN_SAVING = Saving("torch", ("class",), _describe_own, _check_own, _refuse_to_build)


def _saving(library: str) -> Saving:
    if library == OWN:
        return _OWN_SAVING
    saving: Saving | None = load_adapter(library).SAVING
    if saving is None:
        raise ValueError(
            f"models of {library} are saved by their own save_pretrained, which keeps routing and methods too: "
            "model.save_pretrained(FOLDER)"
        )
    return saving


def _build(config: _Description) -> nn.Module:
    model = _build_dense(config)
    apply_again(model, config)
    return model


def _build_dense(config: _Description) -> nn.Module:
    saving = _saving(config["library"])
    saving.check_description(config["model"])
    try:
        return saving.build(config["model"])
    except (ValueError, TypeError, RuntimeError, AssertionError) as error:
        raise ValueError(f"{error}; saved with {config['versions']}") from error


def _check_plain(state: Mapping[str, Tensor]) -> None:
    special = []
    for name, value in state.items():
        if value.is_meta:
            special.append(f"{name} (on the meta device)")
        elif type(value) is not Tensor:
            special.append(f"{name} ({type(value).__name__})")
    if special:
        names = ", ".join(special[:3])
        if len(special) > 3:
            names += f" and {len(special) - 3} more"
        raise ValueError(
            f"cannot save weights that are no plain tensors, as quantized or sharded ones, or have no values: {names}. "
            "Save the model before it is quantized, and quantize what mmod.load_pretrained returns"
        )


def _check_rebuilds(config: _Description, model: nn.Module, state: dict[str, Tensor]) -> None:
    described = brief(config["model"].get("architecture") or config["model"])
    refusal = (
        f"cannot save this {type(model).__name__}: built again from {described} it does not fit, as after a head was "
        "exchanged. Change it by its library (timm's reset_classifier), name its own architecture (open_clip), or save "
        "model.state_dict() for a model that you make and change alike"
    )
    # On the meta device: names, shapes and settings need no memory.
    with torch.device("meta"), Unfilled():
        rebuilt = _build_dense(config)
        try:
            apply_again(rebuilt, config)
        except ValueError as error:
            raise ValueError(f"{refusal}: {error}") from error
    check_fits(rebuilt.state_dict(), state, refusal)
    # The same weights may belong to another architecture than the caller says, or to a model that was changed since.
    present = _settings(rebuilt)
    wanted = _settings(model)
    # Attributes of the user's own change nothing, unless they stand before one of the class.
    names = [name for name in wanted if name in present or _stands_before_its_class(model, name)]
    changed = [name for name in dict.fromkeys([*names, *present]) if wanted.get(name) != present.get(name)]
    if changed:
        name = changed[0]
        raise ValueError(
            f"cannot save this {type(model).__name__}: built again from {described} its {name} is "
            f"{_shown(present.get(name))!r}, the model's is {_shown(wanted.get(name))!r}. Make the model so, or undo "
            "the change before it is saved and repeat it after mmod.load_pretrained"
        )


def _shown(value: object) -> object:
    """Return a class by its name, and other values as they are."""
    if isinstance(value, type):
        return value.__name__
    return value


def _stands_before_its_class(model: nn.Module, name: str) -> bool:
    """Return whether an attribute of a module, by its full name, hides one of the module's class."""
    path, _, key = name.rpartition(".")
    return hasattr(type(model.get_submodule(path)), key)


def _settings(model: nn.Module) -> dict[str, object]:
    """Return class, functions and plain attributes of every module, apart from those that change with use."""
    settings: dict[str, object] = {}
    for name, module in model.named_modules():
        settings[name or "class"] = type(module)
        for key, value in vars(module).items():
            if key[0] == "_" or key in _PASSING:
                continue
            if callable(value) and not isinstance(value, nn.Module):
                # A replaced forward, or an activation.
                value = getattr(value, "__qualname__", type(value).__qualname__)
            if isinstance(value, list):
                value = tuple(value)
            items = value if isinstance(value, tuple) else (value,)
            if all(isinstance(item, _PLAIN) for item in items):
                settings[f"{name}.{key}".lstrip(".")] = value
    return settings


def _header_of(folder: Path) -> dict[str, str]:
    with suppress(DamagedFileError):
        return read_header(folder / WEIGHTS)
    return {}


def _restored(folder: Path) -> str:
    """Return the sentence that says how to write a description again, of which the weights have a copy."""
    return (
        f"{WEIGHTS} has the same text in its header: `import pathlib, safetensors; "
        f"pathlib.Path({str(folder / CONFIG)!r}).write_text(safetensors.safe_open({str(folder / WEIGHTS)!r}, 'pt')"
        f".metadata()[{KEY!r}])` writes it back"
    )


def _read_config(path: Path) -> _Description:
    try:
        config = parse_json(path.read_bytes(), repr(str(path)))
    except ValueError as error:
        if KEY not in _header_of(path.parent):
            raise
        raise ValueError(f"{error}. {_restored(path.parent)}") from error
    format_version = None
    if isinstance(config, dict):
        format_version = config.get("format_version")
    if format_version != FORMAT_VERSION:
        advice = (
            "To go on with the weights, build the dense model in Python, change it by mmod.apply_ as `methods` in that "
            f"file says, and call model.load_state_dict(safetensors.torch.load_file({str(path.parent / WEIGHTS)!r}))"
        )
        if isinstance(format_version, int) and format_version > FORMAT_VERSION:
            advice = "A later mmod wrote it: install that one or a later one"
        raise ValueError(
            f"{str(path)!r} has format version {format_version!r}; this mmod ({_version('mmod')}) reads version "
            f"{FORMAT_VERSION}. {advice}"
        )
    libraries = (*ADAPTERS, OWN)
    if set(config) != set(_KEYS) or config["library"] not in libraries:
        raise ValueError(
            f"{str(path)!r} must hold {', '.join(_KEYS)} with library {' or '.join(libraries)}, got {sorted(config)}"
        )
    return config


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
