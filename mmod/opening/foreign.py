"""Weights in the checkpoints of other training scripts: which of several are read, and their names in the model."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

# timm's order: the moving average comes first. timm and open_clip save "state_dict", DeiT and torchvision "model", DINO
# a teacher, which is the average, and a student; DeepSpeed saves "module".
_ENTRIES = {
    "state_dict_ema": "EMA",
    "model_ema": "EMA",
    "state_dict": "raw",
    "model": "raw",
    "model_state_dict": "raw",
    "module": "raw",
    "teacher": "EMA",
    "student": "raw",
}
_LIGHTNING = "pytorch-lightning_version"
_DINO = ("teacher", "student")
_BACKBONE = "backbone."
_PARALLEL = "module."
# Names that torch.compile, FSDP and gradient checkpointing insert where they wrap a module.
_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


def select_weights(content: Mapping[object, Any]) -> tuple[dict[Any, Any], str]:
    """Return the weights in a checkpoint; if it has several sets, the moving average, and which of them it is.

    Prefixes of wrappers are removed from the names, also those of Lightning and DINO.

    Example:
        >>> content = {"model": {"module.a": 1}, "model_ema": {"_orig_mod.a": 2}, "epoch": 3}
        >>> select_weights(content)
        ({'a': 2}, 'the EMA weights, model_ema, not model')
    """
    choice = ""
    is_lightning = _LIGHTNING in content
    has_backbone = False
    # Entries may be nested, such as Lightning's "state_dict" in a wrapper of a script.
    while entries := [entry for entry in _ENTRIES if isinstance(content.get(entry), Mapping) and content[entry]]:
        entry, *others = entries
        if others:
            choice = f"the {_ENTRIES[entry]} weights, {entry}, not {' or '.join(others)}"
        has_backbone = entry in _DINO
        content = content[entry]
    state = clean_names(content)
    if is_lightning:
        owners = {str(name).partition(".")[0] for name in state}
        # Lightning stores a whole training module, in which the model has a name; with one owner this is it.
        if len(owners) == 1:
            state = clean_names(_inside(state, f"{owners.pop()}."))
    elif has_backbone and (inner := _inside(state, _BACKBONE)):
        # The rest is the projection head of the self-supervised loss.
        state = inner
    return state, choice


def clean_names(state: Mapping[Any, object]) -> dict[Any, Any]:
    """Return a state dict without the names that wrappers of the model add: DDP, torch.compile, FSDP, EMA.

    Example:
        >>> clean_names({"module._orig_mod.norm.weight": 1, "module._orig_mod.blocks.0._orig_mod.bias": 2})
        {'norm.weight': 1, 'blocks.0.bias': 2}
    """
    # The counter of torch's AveragedModel is no weight.
    # torch's AveragedModel puts `module.` in front of all names.
    averaged = "n_averaged" in state and all(name == "n_averaged" or _starts(name, _PARALLEL) for name in state)
    cleaned: dict[object, object] = {}
    for name, value in state.items():
        if averaged and name == "n_averaged":
            continue
        plain = name
        if isinstance(name, str):
            plain = ".".join(part for part in name.split(".") if part not in _WRAPPERS).removeprefix(_PARALLEL)
        # Two wrappers' names may collapse into one, and which of the weights is meant is unknown.
        if plain in cleaned:
            raise ValueError(f"two weights are named {plain!r} without the names of wrappers, one of them {name!r}")
        cleaned[plain] = value
    return cleaned


def _inside(state: Mapping[Any, object], prefix: str) -> dict[object, object]:
    return {name.removeprefix(prefix): value for name, value in state.items() if _starts(name, prefix)}


def _starts(name: object, prefix: str) -> bool:
    return isinstance(name, str) and name.startswith(prefix)


class Unread:
    """Stands for an object besides the weights, such as a script's arguments; nothing of it is kept or run."""

    def __new__(cls, *_: object) -> Unread:
        """Take any arguments, as the class that it stands for does."""
        return super().__new__(cls)

    def __setstate__(self, state: object) -> None:
        """Forget the state."""


_CORES = ("_core", "core")
_OBJECTS = (
    "argparse.Namespace",
    "_codecs.encode",
    "numpy.dtype",
    "numpy.ndarray",
    *(f"numpy.{core}.multiarray.scalar" for core in _CORES),
    *(f"numpy.{core}.multiarray._reconstruct" for core in _CORES),
)
# Classes of dictionaries: Swin's config, and hyperparameters of Lightning.
_DICTIONARIES = (
    "yacs.config.CfgNode",
    "lightning.fabric.utilities.data.AttributeDict",
    "lightning_fabric.utilities.data.AttributeDict",
    "pytorch_lightning.utilities.parsing.AttributeDict",
)
STAND_INS: list[tuple[type, str]] = [
    *((Unread, name) for name in _OBJECTS),
    *((OrderedDict, name) for name in _DICTIONARIES),
]
"""Replacements for the classes and functions that checkpoints of timm, DeiT and others pickle beside the weights."""
