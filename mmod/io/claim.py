"""Folders that belong to one config: a record in the folder says which, and another one is refused."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mmod.io.files import read_json_object, write_atomically

__all__ = ["FolderTakenError", "check_same", "claim_folder", "differences", "flatten", "read_claim"]


class FolderTakenError(FileExistsError, ValueError):
    """A folder holds results of another config, or files of other origin."""


def claim_folder(
    folder: str | Path,
    record: Mapping[str, Any],
    *,
    file: str,
    kind: str,
    free_keys: Collection[str] = (),
    defaults: Mapping[str, Any] = MappingProxyType({}),
    write: bool = True,
) -> bool:
    """Mark a folder as that of a config, or find that it is already.

    Args:
        folder: The folder; made if it is not there.
        record: The config as plain values, nested or not.
        file: Name of the file in the folder that keeps the record, JSON or YAML by its ending.
        kind: What the folder holds, with its article, as in "a run".
        free_keys: Dotted keys in which the records may differ.
        defaults: Values of keys that a record written by an earlier version lacks.
        write: Keep the record in a folder that is free; otherwise only check.

    Returns:
        Whether the folder held the record before.

    Raises:
        FolderTakenError: If the folder holds another record (the keys that differ are named), or files without one.

    Example:
        >>> import tempfile
        >>> folder = tempfile.mkdtemp()
        >>> claim_folder(folder, {"optim": {"lr": 0.1}}, file="config.json", kind="a run")
        False
        >>> claim_folder(folder, {"optim": {"lr": 0.1}}, file="config.json", kind="a run")
        True
        >>> try:
        ...     claim_folder(folder, {"optim": {"lr": 0.2}}, file="config.json", kind="a run")
        ... except ValueError as error:
        ...     print(str(error).split("; ")[1])
        choose another folder. Differing keys: optim.lr: 0.1 there, 0.2 now
    """
    found = read_claim(folder, file)
    if found is not None:
        check_same(folder, {**defaults, **found}, record, kind=kind, free_keys=free_keys)
        return True
    if write:
        Path(folder).mkdir(parents=True, exist_ok=True)
        write_atomically(Path(folder) / file, _dump(file, record))
    return False


def read_claim(folder: str | Path, file: str) -> dict[str, Any] | None:
    """Read the record of a folder; None when the folder is free.

    Args:
        folder: The folder. Hidden files and empty folders, which a start that failed may leave, do not occupy it.
        file: See `claim_folder`.

    Raises:
        FolderTakenError: If the folder holds files and no record.
        ValueError: If the record cannot be read.
    """
    folder = Path(folder)
    if (folder / file).is_file():
        return _load(folder / file)
    entries = [folder] if folder.is_file() else folder.iterdir() if folder.exists() else ()
    if any(_holds_file(path) for path in entries if not path.name.startswith(".")):
        raise FolderTakenError(f"{str(folder)!r} holds files but no {file}: choose a new or empty folder")
    return None


def check_same(
    place: str | Path,
    found: Mapping[str, Any],
    record: Mapping[str, Any],
    *,
    kind: str,
    free_keys: Collection[str] = (),
) -> None:
    """Raise unless two records agree.

    Args:
        place: The file or folder of the first.
        found: The record that is there.
        record: The record asked for.
        kind: What is there, see `claim_folder`.
        free_keys: Dotted keys in which they may differ.

    Raises:
        FolderTakenError: If they differ. The message names the keys and both values.
    """
    differing = differences(found, record, free_keys)
    if differing:
        changes = "; ".join(f"{key}: {old!r} there, {new!r} now" for key, (old, new) in differing.items())
        raise FolderTakenError(
            f"{str(place)!r} holds {kind} with another config; choose another folder. Differing keys: {changes}"
        )


def differences(
    found: Mapping[str, Any], record: Mapping[str, Any], free_keys: Collection[str] = ()
) -> dict[str, tuple[Any, Any]]:
    """Return the dotted keys in which two records differ, with both values; a key that one lacks is null there.

    Args:
        found: The record that is there.
        record: The record asked for.
        free_keys: Dotted keys in which they may differ.

    Example:
        >>> differences({"optim": {"lr": 0.1}}, {"optim": {"lr": 0.2}, "limit": None})
        {'optim.lr': (0.1, 0.2)}
    """
    old, new = flatten(_plain(found)), flatten(_plain(record))
    keys = sorted({*old, *new} - set(free_keys))
    return {key: (old.get(key), new.get(key)) for key in keys if old.get(key) != new.get(key)}


def flatten(tree: Mapping[str, Any], separator: str = ".") -> dict[str, Any]:
    """Return the leaves of nested mappings under the keys that lead to them.

    Args:
        tree: The mappings.
        separator: What stands between the keys.

    Example:
        >>> flatten({"optim": {"lr": 0.1, "betas": [0.9, 0.99]}, "args": {}})
        {'optim.lr': 0.1, 'optim.betas': [0.9, 0.99], 'args': {}}
    """
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            leaves |= {f"{key}{separator}{below}": leaf for below, leaf in flatten(value, separator).items()}
        else:
            leaves[str(key)] = value
    return leaves


def _plain(record: Mapping[str, Any]) -> dict[str, Any]:
    # Through JSON, so that tuples compare equal to the lists that a file holds.
    plain: dict[str, Any] = json.loads(json.dumps(dict(record), default=str))
    return plain


def _load(path: Path) -> dict[str, Any]:
    if path.suffix == ".yaml":
        from mmod.io.yaml import read_yaml

        return read_yaml(path)
    return read_json_object(path)


def _dump(file: str, record: Mapping[str, Any]) -> str:
    if file.endswith(".yaml"):
        import yaml

        return yaml.safe_dump(dict(record), sort_keys=False)
    return json.dumps(dict(record), indent=2) + "\n"


def _holds_file(path: Path) -> bool:
    """Return whether a path is a file or has one below it."""
    return not path.is_dir() or any(not below.is_dir() for below in path.rglob("*"))
