"""State dicts in safetensors files."""

from __future__ import annotations

import os
import shutil
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from mmod.io.files import DamagedFileError
from mmod.names import first_names, plural

if TYPE_CHECKING:
    from safetensors import safe_open
    from torch import Tensor

WEIGHTS = "model.safetensors"
"""File of a model's weights in its folder."""


def write_tensors(path: str | Path, state: Mapping[str, Tensor], header: Mapping[str, str] | None = None) -> None:
    """Write tensors and header strings; those that share memory are written in full, as the format has no sharing.

    One process writes to a path at a time, as under the lock of a folder.
    """
    from safetensors.torch import save_file

    path = Path(path)
    stored = unshared({name: value.detach().cpu().contiguous() for name, value in state.items()})
    metadata = None if header is None else dict(header)
    # safetensors writes under a random name beside its target, which would stay where the process is killed: in a
    # folder, the next writer finds it.
    folder = path.with_name(f".{path.name}.folder")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    try:
        save_file(stored, folder / path.name, metadata=metadata)
        # Its files are the user's alone; those of others beside it are not.
        os.chmod(folder / path.name, folder.stat().st_mode & 0o666)
        os.replace(folder / path.name, path)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def raw_bytes(value: Tensor) -> memoryview:
    """Return the bytes of a tensor, by which it is told from others."""
    import torch

    plain = value.detach().cpu().contiguous().flatten()
    return plain.view(torch.uint8).numpy().data


def unshared(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors, or shards of them, with copies of those that share memory."""
    alone: dict[str, Tensor] = {}
    addresses: set[int] = set()
    for name, value in state.items():
        local = value
        if hasattr(value, "to_local"):
            local = value.to_local()
        # Views of one storage share memory even where their own addresses differ.
        address = local.untyped_storage().data_ptr()
        if address in addresses:
            # The first keeps the memory.
            value = value.clone()
        alone[name] = value
        addresses.add(address)
    return alone


def read_tensors(path: str | Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read the tensors of a safetensors file onto the CPU, and its header."""
    with _opened(path) as file:
        header = file.metadata() or {}
        return {name: file.get_tensor(name) for name in file.keys()}, header  # noqa: SIM118  # no mapping


def read_header(path: str | Path) -> dict[str, str]:
    """Read the header of a safetensors file, without its tensors."""
    with _opened(path) as file:
        return dict(file.metadata() or {})


def tensor_names(path: str | Path) -> list[str]:
    """Read the names of the tensors in a safetensors file."""
    with _opened(path) as file:
        return list(file.keys())


@contextmanager
def _opened(path: str | Path) -> Iterator[safe_open]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except OSError as error:
        raise DamagedFileError(f"{str(path)!r} cannot be read: {error}") from error
    except SafetensorError as error:
        raise DamagedFileError(
            f"{str(path)!r} is no complete safetensors file; copy or save it again: {error}"
        ) from error


def check_complete(folder: str | Path) -> None:
    """Raise a DamagedFileError if a checkpoint file in a folder is truncated, without reading tensors."""
    for path in sorted(path for path in Path(folder).rglob("*") if path.is_file()):
        if path.suffix == ".safetensors":
            with _opened(path):
                pass
        # torch writes ZIP files, whose directory is at the end, so a truncated file has none.
        elif path.suffix in (".pt", ".pth") and not zipfile.is_zipfile(path):
            raise DamagedFileError(f"{str(path)!r} is truncated or was not written by torch")


def check_fits(
    state: Mapping[str, Tensor], expected: Mapping[str, Tensor], refusal: str, classes: int | None = None
) -> None:
    """Raise a ValueError unless weights have the names and shapes that a model has.

    Torch's own message lists every key of a model.

    Args:
        expected: The state dict of the model.
        refusal: How the message begins.
        classes: Number of the model's classes, if it has any.
    """
    missing = set(expected) - set(state)
    unknown = set(state) - set(expected)
    if missing or unknown:
        raise ValueError(f"{refusal}: {told_keys(missing, unknown)}")
    for name, value in state.items():
        shape = expected[name].shape
        if value.shape != shape:
            # Another number of classes is the usual mistake, and gets words of its own.
            told = f"{name} has shape {tuple(value.shape)}, the model's is {tuple(shape)}"
            if shape[:1] == (classes,) and value.shape[:1] != shape[:1]:
                has = value.shape[0]
                told = f"it has {has} classes, the model {classes}: {told}; set model.args.num_classes to {has}"
            raise ValueError(f"{refusal}: {told}")


def told_keys(missing: Iterable[str], unknown: Iterable[str]) -> str:
    """Return which keys a state dict misses and which the model does not have: their numbers, and the first few.

    Example:
        >>> told_keys(["norm.weight"], [])
        'missing: 1 key (norm.weight)'
    """
    parts = {"missing": sorted(missing), "not in the model": sorted(unknown)}
    told = []
    for lead, keys in parts.items():
        if keys:
            told.append(f"{lead}: {len(keys)} {plural('key', len(keys))} ({first_names(keys)})")
    return "; ".join(told)
