"""Checksums of files beside them, of checkpoints and of saved models."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from pathlib import Path

from mmod.io.files import SUMS, DamagedFileError, read_json_object, sha256, write_json
from mmod.io.processes import gathered, process_count, process_rank


def write_sums(folder: Path, *names: str, together: bool = False) -> None:
    """Write the checksums of files next to them: of those with some names, or of all in a folder and below.

    Args:
        together: Processes share the work.
    """
    if not names:
        paths = sorted(folder.rglob("*"))
        names = tuple(str(path.relative_to(folder)) for path in paths if path.is_file() and path.name != SUMS)
    sums = _sums_of(folder, names, together)
    if not together or process_rank() == 0:
        write_json(folder / SUMS, sums)


def check_sums(folder: Path, *names: str, together: bool = False) -> None:
    """Refuse files, all or those of some names or folders, that differ from their checksums; see `write_sums`."""
    if not (folder / SUMS).is_file():
        return
    try:
        sums = read_json_object(folder / SUMS)
    except ValueError as error:
        raise DamagedFileError(str(error)) from error
    chosen = [name for name in sorted(sums) if not names or name in names or Path(name).parts[0] in names]
    for name, digest in _sums_of(folder, chosen, together).items():
        if digest == sums[name]:
            continue
        state = "is missing"
        if digest is not None:
            state = f"differs from its checksum in {SUMS}, which may be removed if the file was changed on purpose"
        raise DamagedFileError(f"{str(folder / name)!r} is damaged: it {state}")


def check_weights(folder: str | Path) -> None:
    """Refuse weights of a saved model that differ from their checksums; its other files may be edited."""
    names = [file.name for file in Path(folder).glob("*.safetensors")]
    if names:
        check_sums(Path(folder), *names)


def _sums_of(folder: Path, names: Sequence[str], together: bool) -> dict[str, str | None]:
    """Return the checksum of each file, None if it is missing."""
    if together:
        # Every n-th file: hashing takes as long as reading, and processes share it.
        names = names[process_rank() :: process_count()]
    sums: dict[str, str | None] = {}
    for name in names:
        file = folder / name
        sums[name] = sha256(file) if file.is_file() else None
    if not together:
        return sums
    return dict(chain.from_iterable(part.items() for part in gathered(sums)))
