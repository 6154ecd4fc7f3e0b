"""Save a routed model, and load model and routing again with one call."""

from __future__ import annotations

import dataclasses
import json
import os
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mmod.config import RoutingConfig
from mmod.convert import capacities, route_, routing_config, set_capacity

FORMAT_VERSION = 1
WEIGHTS = "model.safetensors"
CONFIG = "mmod.json"
_ROUTING_ARGUMENTS = {"preset"} | {field.name for field in dataclasses.fields(RoutingConfig)}
_KEYS = ("format_version", "versions", "library", "model", "routing", "capacities")


def save_pretrained(model: nn.Module, folder: str | Path, overwrite: bool = False) -> None:
    """Save a routed model's weights and everything needed to build and route it again.

    The folder gets `model.safetensors` and `mmod.json`; the JSON also stands in the header of the weights. Each file
    is written under another name and renamed when it is whole.

    Args:
        model: A routed model that `timm.create_model` made, neither wrapped nor compiled.
        folder: Where to save; made when it is not there.
        overwrite: Replace the two files if they are there.

    Raises:
        FileExistsError: The folder holds a saved model and `overwrite` is not set.
        ValueError: Nothing is routed, the router is a function, or the model could not be built again: not made by
            `timm.create_model`, wrapped, compiled, or with parts exchanged since.

    Example:
        >>> import tempfile, timm
        >>> model = route_(timm.create_model("test_vit"), RoutingConfig(capacity=0.25))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_pretrained(model, folder)
        ...     capacities(load_pretrained(folder))["blocks.1"]
        0.25
    """
    from safetensors.torch import save_file

    folder = Path(folder)
    config = _describe(model)
    state = _storable(model.state_dict())
    _check_rebuilds(config, state)
    taken = [name for name in (WEIGHTS, CONFIG) if (folder / name).exists()]
    if taken and not overwrite:
        raise FileExistsError(f"{str(folder)!r} holds {' and '.join(taken)}; pass overwrite=True to replace them")
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(config, indent=2)
    partial = {name: folder / f".{name}.partial" for name in (WEIGHTS, CONFIG)}
    save_file(state, partial[WEIGHTS], metadata={"format": "pt", "mmod": text})
    partial[CONFIG].write_text(text + "\n")
    for name, path in partial.items():
        with open(path, "rb") as file:
            os.fsync(file.fileno())
        os.replace(path, folder / name)


def load_pretrained(folder: str | Path, device: torch.device | str | None = None) -> nn.Module:
    """Build, route and load a model that `save_pretrained` saved.

    Args:
        folder: The folder.
        device: Where the model goes; None means the CPU.

    Returns:
        The model in evaluation mode, of the dtype it was saved in.

    Raises:
        FileNotFoundError: The folder or one of its two files is not there.
        ValueError: A file that `save_pretrained` did not write, of a format this version does not know, that belongs
            to another one, or whose content does not fit: an unknown routing option, a weight that is missing, not
            known or of another shape.
    """
    from safetensors import SafetensorError, safe_open

    folder = Path(folder)
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            raise FileNotFoundError(f"{str(folder)!r} is no folder that mmod.save_pretrained made: it has no {name}")
    config = _read_config(folder / CONFIG)
    try:
        with safe_open(folder / WEIGHTS, framework="pt") as file:
            header = file.metadata() or {}
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no mapping
    except SafetensorError as error:
        raise ValueError(f"{str(folder / WEIGHTS)!r} is no whole safetensors file: {error}") from error
    if "mmod" not in header or json.loads(header["mmod"]) != config:
        raise ValueError(
            f"{WEIGHTS} and {CONFIG} in {str(folder)!r} do not belong together: one was edited or replaced. Load with "
            "what the weights were saved with, then change it with mmod.set_capacity or unroute_ and route_"
        )
    model = _build(config)
    _check_fits(state, model.state_dict(), folder)
    dtypes = {value.dtype for value in state.values() if value.is_floating_point()}
    if len(dtypes) == 1:
        model.to(dtypes.pop())
    model.load_state_dict(state)
    return model.to(device or "cpu").eval()


def _describe(model: nn.Module) -> dict[str, Any]:
    """Return as JSON values what it takes to build the model again."""
    routing = routing_config(model).to_dict()
    # Wrappers pass attribute look-ups on, so the attribute must be the model's own.
    if "pretrained_cfg" not in vars(model) or "_model_args" not in vars(model):
        raise ValueError(
            f"cannot save this {type(model).__name__}: only a model that timm.create_model returned says how to build "
            "it again. Save the model itself, not what wraps, compiles or extracts features from it"
        )
    from timm.models import filter_pretrained_cfg, get_model_args

    cfg = filter_pretrained_cfg(dict(vars(model)["pretrained_cfg"]), remove_source=True, remove_null=True)
    cfg.pop("state_dict", None)
    arguments = {**vars(model)["_model_args"], **get_model_args(model)}
    architecture = cfg.pop("architecture")
    if hasattr(model, "dense_entry"):
        # An entry of timm's registry that routes: its routing is saved as such, the model as the dense one.
        architecture = model.dense_entry
        arguments = {name: value for name, value in arguments.items() if name not in _ROUTING_ARGUMENTS}
    described = {
        "format_version": FORMAT_VERSION,
        "versions": {name: _version(name) for name in ("mmod", "timm", "torch")},
        "library": "timm",
        "model": {
            "architecture": architecture,
            "arguments": arguments,
            "pretrained_cfg": cfg,
        },
        "routing": routing,
        "capacities": capacities(model),
    }
    try:
        plain: dict[str, Any] = json.loads(json.dumps(described))
    except TypeError as error:
        raise ValueError(f"cannot save this {architecture}: an argument it was made with is no JSON value") from error
    return plain


def _build(config: dict[str, Any]) -> nn.Module:
    """Build and route the model that a config describes, with fresh weights."""
    import timm

    description = config["model"]
    architecture = description["architecture"]
    if not timm.is_model(architecture):
        raise ValueError(
            f"timm {timm.__version__} knows no model {architecture!r}; it was saved with {config['versions']}"
        )
    cfg = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in description["pretrained_cfg"].items()
    }
    cfg["architecture"] = architecture
    model: nn.Module = timm.create_model(architecture, pretrained_cfg=cfg, **description["arguments"])
    route_(model, RoutingConfig.from_dict(config["routing"]))
    if capacities(model) != config["capacities"]:
        set_capacity(model, config["capacities"])
    return model


def _check_rebuilds(config: dict[str, Any], state: dict[str, Tensor]) -> None:
    with torch.device("meta"):
        rebuilt = _build(config).state_dict()
    if {name: value.shape for name, value in rebuilt.items()} != {name: value.shape for name, value in state.items()}:
        raise ValueError(
            f"cannot save this {config['model']['architecture']}: built again from its arguments it has other weights, "
            "so parts of it were exchanged or removed since timm.create_model"
        )


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{str(path)!r} is no JSON: {error}") from error
    found = config.get("format_version") if isinstance(config, dict) else None
    if found != FORMAT_VERSION:
        raise ValueError(
            f"{str(path)!r} has format version {found!r}; this mmod ({_version('mmod')}) reads {FORMAT_VERSION}"
        )
    if set(config) != set(_KEYS) or config["library"] != "timm":
        raise ValueError(f"{str(path)!r} must hold {', '.join(_KEYS)} with library 'timm', got {sorted(config)}")
    return dict(config)


def _check_fits(state: dict[str, Tensor], own: dict[str, Tensor], folder: Path) -> None:
    missing, unknown = sorted(set(own) - set(state)), sorted(set(state) - set(own))
    if missing or unknown:
        raise ValueError(f"the weights in {str(folder)!r} do not fit: missing {missing}, not known {unknown}")
    for name, value in state.items():
        if value.shape != own[name].shape:
            raise ValueError(
                f"the weights in {str(folder)!r} do not fit: {name} has shape {tuple(value.shape)}, "
                f"the model's is {tuple(own[name].shape)}"
            )


def _storable(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return contiguous tensors that share no memory, as safetensors wants them; tied ones are stored twice."""
    stored: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, value in state.items():
        value = value.detach().cpu().contiguous()
        address = value.untyped_storage().data_ptr()
        stored[name] = value.clone() if address in seen else value
        seen.add(address)
    return stored


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
