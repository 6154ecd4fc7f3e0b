"""Weights: how files of any training script are read, and how they fit a model."""

from __future__ import annotations

import math
import pickle
import re
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException

from mmod.adapters import image_facts
from mmod.io.files import DamagedFileError
from mmod.io.processes import process_rank
from mmod.io.sums import check_sums, check_weights
from mmod.io.tensors import check_fits, read_tensors
from mmod.opening.foreign import STAND_INS, Unread, clean_names, select_weights
from mmod.opening.runs import find_weights, list_checkpoints, told_run


def read_weights(path: str | Path) -> dict[str, Tensor]:
    """Read a state dict onto the CPU, without running code from the file.

    A checkpoint of timm's, DeiT's, torchvision's, open_clip's, Lightning's or DINO's training is read as timm reads its
    own: if it holds a moving average, that is taken, which the first process says on standard error.

    Args:
        path: A `.safetensors` file; a PyTorch file, with a state dict or a checkpoint that holds one; a folder with one
            `model.safetensors`; or a run folder.
    """
    file = find_weights(path)
    if file.is_dir():
        return _read_shards(file)
    _check_undamaged(file)
    if file.suffix == ".safetensors":
        return clean_names(read_tensors(file)[0])
    return _read_checkpoint(file)


def _check_undamaged(file: Path) -> None:
    """Refuse a file that differs from its checksum; the message offers an earlier checkpoint, and the user decides."""
    try:
        check_weights(file.parent, file.name)
    except DamagedFileError as error:
        others = [other for other in list_checkpoints(file.parent.parent) if other != file.parent]
        hint = ""
        if others:
            hint = f". An earlier checkpoint is {str(others[0])!r}"
        raise DamagedFileError(f"{error}{hint}") from error


def _read_checkpoint(file: Path) -> dict[str, Tensor]:
    """Read the weights in a PyTorch file of any training script, the moving average of them if it holds one."""
    content = load_pickle(file, STAND_INS)
    if not isinstance(content, dict):
        raise DamagedFileError(f"{str(file)!r} holds no state dict, but a {type(content).__name__}")
    try:
        state, choice = select_weights(content)
    except ValueError as error:
        raise DamagedFileError(f"{str(file)!r}: {error}") from error
    for name, value in state.items():
        if isinstance(name, str) and isinstance(value, Tensor):
            continue
        kind = "an object that is not read" if isinstance(value, Unread) else f"a {type(value).__name__}"
        raise DamagedFileError(
            f"{str(file)!r} holds no state dict, which maps names to tensors: it maps {name!r} to {kind}"
        )
    if choice and process_rank() == 0:
        print(f"{file}: {choice}, were read", file=sys.stderr)
    return state


def _read_shards(folder: Path) -> dict[str, Tensor]:
    """Read the whole tensors of a sharded state dict onto the CPU."""
    check_sums(folder.parent, folder.name)
    with plain_errors(folder):
        reader = dcp.HuggingFaceStorageReader(str(folder))
        known: Any = reader.read_metadata().state_dict_metadata
        state = {name: torch.empty(of.size, dtype=of.properties.dtype) for name, of in known.items()}
        with warnings.catch_warnings():
            # It warns that this process reads alone.
            warnings.simplefilter("ignore", UserWarning)
            dcp.load(state, storage_reader=reader, no_dist=True)
    return state


@contextmanager
def plain_errors(read: Path | None = None) -> Iterator[None]:
    """Raise the cause of torch's `CheckpointException`, which is no `Exception`; `read` is the state being read."""
    try:
        yield
    except CheckpointException as error:
        cause = next(iter(error.failures.values()))[0]
        if read is None:
            raise cause from None
        raise DamagedFileError(f"{str(read)!r} is no whole sharded state: {cause}") from error


def load_pickle(path: Path, stand_ins: Sequence[tuple[type, str]] = ()) -> object:
    """Read tensors and plain values, and classes by their names as others that stand in for them."""
    try:
        with torch.serialization.safe_globals(list(stand_ins)):
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged pickle may fail in any way
        # Torch's message advises to allow code; this one does not.
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        # Text, or what was cut, is read as codes that pickles do not have.
        if isinstance(error, (pickle.UnpicklingError, LookupError)):
            reason = "it is no checkpoint, or a damaged one"
        code = re.search(r"GLOBAL ([\w.]+)", str(error))
        if code is not None:
            reason = f"it holds {code[1]} besides; save the state dict alone"
        raise DamagedFileError(f"{str(path)!r} is no whole file of tensors and plain values: {reason}") from error


def load_weights(model: nn.Module, state: Mapping[str, Tensor], source: object) -> None:
    """Load a state dict strictly."""
    refusal = f"checkpoint {str(source)!r} does not fit the model"
    try:
        check_fits(state, model.state_dict(), refusal, image_facts(model).classes)
    except ValueError as error:
        raise ValueError(f"{error}{told_run(str(source))}") from error
    model.load_state_dict(state)


def converted(state: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Return weights in the form of a timm model, converted by timm's filter if names or shapes differ."""
    shapes = {name: value.shape for name, value in model.state_dict().items()}
    # timm's filter is a function of the model's module, by convention.
    convert = getattr(sys.modules[type(model).__module__], "checkpoint_filter_fn", None)
    if convert is None or shapes == {name: value.shape for name, value in state.items()}:
        return dict(state)
    return convert(dict(state), model)


def check_size(
    state: Mapping[str, Tensor], model: nn.Module, checkpoint: str | Path, keys: str, given: Mapping[str, object]
) -> None:
    """Refuse weights of patches or images of another size, to which hosts resample them without a word.

    Args:
        model: A dense image model of timm, or an image tower of open_clip.
        keys: What sets the size of images.
        given: Arguments of the model that the caller gave: who names a size means it.
    """
    facts = image_facts(model)
    patch = facts.patch or getattr(model, "patch_size", None)
    size = facts.usual or getattr(model, "image_size", None)
    if patch is None or size is None:
        return
    source = f"checkpoint {str(checkpoint)!r} is of"
    projection = state.get("patch_embed.proj.weight")
    if projection is not None and projection.shape[2:] not in ((), patch) and "patch_size" not in given:
        raise ValueError(
            f"{source} patches of {projection.shape[-1]} px, and the model of {patch[1]}: name its own model"
        )
    if given.get("img_size") is not None:
        return
    for name in ("pos_embed", "positional_embedding"):
        # Of a whole image-text model, the bare name may be that of its texts.
        names = (f"visual.trunk.{name}", f"visual.{name}", name)
        rows = next((state[known].shape[-2] for known in names if known in state), None)
        of_model = getattr(model, name, None)
        if rows is None or of_model is None or rows == of_model.shape[-2]:
            continue
        across, of_model_across = math.isqrt(rows), math.isqrt(of_model.shape[-2])
        is_square = size[0] == size[1]
        # Hosts differ in the few that are of no patch, such as that of the class token of DINOv2 with registers.
        if is_square and across == of_model_across:
            continue
        images, side = f"images with {rows} position embeddings", "the checkpoint's size"
        if is_square and rows - across**2 <= getattr(model, "num_prefix_tokens", 1):
            side = str(size[0] * across // of_model_across)
            images = f"images of {side} px"
        raise ValueError(
            f"{source} {images}, and the model of {size[0]} px: set {keys} to {side}, or to {size[0]} to resample its "
            "position embeddings"
        )
