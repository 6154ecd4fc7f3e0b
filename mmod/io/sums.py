"""Checksums of files beside them, of checkpoints and of saved models."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

from mmod.io.files import SUMS, DamagedFileError, read_json_object, sha256, write_json
from mmod.io.processes import gathered, process_count, process_rank

_DIGEST = re.compile(r"[0-9a-f]{64}")


def write_sums(folder: Path, *names: str, together: bool = False) -> None:
    """Write the checksums of files next to them: of those with some names, or of all in a folder and below.

    Args:
        together: Processes share the work.
    """
    if not names:
        files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != SUMS]
        names = tuple(str(file.relative_to(folder)) for file in files)
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


def check_weights(folder: str | Path, *names: str) -> None:
    """Refuse weights of a saved model that differ from their checksums; its other files may be edited.

    A library that saves a model anew leaves the checksums of the earlier weights, which say nothing of its own.
    """
    folder = Path(folder)
    files = [folder / name for name in names] or list(folder.glob("*.safetensors"))
    earlier = [file.name for file in files if not _is_saved_anew(file)]
    if earlier and _holds_sums(folder):
        check_sums(folder, *earlier)


def remove_sums(folder: str | Path) -> None:
    """Remove the checksums of earlier files, before others are written in their place."""
    if _holds_sums(Path(folder)):
        (Path(folder) / SUMS).unlink()


def _holds_sums(folder: Path) -> bool:
    """Return whether a folder has checksums as `write_sums` writes them; other software has files of that name."""
    try:
        sums = read_json_object(folder / SUMS)
    except (ValueError, FileNotFoundError):
        return False
    return all(isinstance(digest, str) and _DIGEST.fullmatch(digest) for digest in sums.values())


def _is_saved_anew(weights: Path) -> bool:
    """Return whether weights, and the config that a host writes with them, are newer than the checksums beside them."""
    sums = weights.with_name(SUMS)
    config = weights.with_name("config.json")
    if not (sums.is_file() and config.is_file()):
        return False
    return sums.stat().st_mtime_ns < min(file.stat().st_mtime_ns for file in (weights, config))


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
