"""State dicts in safetensors files."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from mmod.io.files import DamagedFileError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["check_whole", "read_tensors", "write_tensors"]


def write_tensors(path: str | Path, state: Mapping[str, Tensor], header: Mapping[str, str] | None = None) -> None:
    """Write tensors into a safetensors file.

    Args:
        path: The file. To have it whole or not at all, write it inside `mmod.io.files.replacing`.
        state: Names to tensors on any device. Those that share memory are each written in full, because the format
            knows no sharing.
        header: Texts that go into the file's header.
    """
    from safetensors.torch import save_file

    stored: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, value in state.items():
        value = value.detach().cpu().contiguous()
        address = value.untyped_storage().data_ptr()
        stored[name] = value.clone() if address in seen else value
        seen.add(address)
    save_file(stored, path, metadata=None if header is None else dict(header))


def read_tensors(path: str | Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read a safetensors file onto the CPU.

    Args:
        path: The file.

    Returns:
        Names to tensors, and the texts of the header.

    Raises:
        DamagedFileError: If it is not there, or no whole safetensors file.

    Example:
        >>> import tempfile, torch
        >>> path = Path(tempfile.mkdtemp()) / "model.safetensors"
        >>> write_tensors(path, {"bias": torch.zeros(2)}, {"made_by": "hand"})
        >>> read_tensors(path)
        ({'bias': tensor([0., 0.])}, {'made_by': 'hand'})
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            return {name: file.get_tensor(name) for name in file.keys()}, header  # noqa: SIM118  # no mapping
    except (SafetensorError, OSError) as error:
        raise DamagedFileError(f"{str(path)!r} is no whole safetensors file: {error}") from error


def check_whole(folder: str | Path) -> None:
    """Refuse a folder with a file of weights or of a training state that is cut short; no tensor is read.

    Args:
        folder: The folder; what lies in folders below it is looked at, too.

    Raises:
        DamagedFileError: If a `.safetensors` file, or a file that torch wrote, is not whole.
    """
    from safetensors import SafetensorError, safe_open

    for path in sorted(path for path in Path(folder).rglob("*") if path.is_file()):
        if path.suffix == ".safetensors":
            try:
                with safe_open(path, framework="pt"):
                    pass
            except (SafetensorError, OSError) as error:
                raise DamagedFileError(f"{str(path)!r} is no whole safetensors file: {error}") from error
        # What torch writes is a ZIP file, whose directory stands at its end.
        elif path.suffix in (".pt", ".pth") and not zipfile.is_zipfile(path):
            raise DamagedFileError(f"{str(path)!r} is cut short or was not written by torch")
